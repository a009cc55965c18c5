//! A decision as response headers. Pure: a decision in, header lines out.
//!
//! All families speak of the rule that is nearest to refusing, in whole seconds from now. The time
//! is the same in all of them: on a refusal when it is worth asking again (as `Retry-After`), else
//! when the bucket is full.

use bytes::BytesMut;
use http::HeaderValue;
use pingora::http::ResponseHeader;
use pingora::prelude::{ErrorType, OrErr as _, Result};

use crate::config::{Cors, Headers};
use crate::decision::{Admission, Decision};
use crate::limit::Outcome;
use crate::rule::Checks;

/// Writes the headers of `decided`; of a request that was refused before a decision, that nothing is
/// left.
pub fn write(
    response: &mut ResponseHeader,
    families: &Headers,
    decided: Option<&(Checks, Decision)>,
) -> Result<()> {
    let Some((checks, decision)) = decided else {
        return response.insert_header("X-RateLimit-Remaining", NONE_LEFT);
    };
    let Some(index) = decision.nearest(checks) else {
        // 503: nothing is known. No rule: nothing is limited, so there is nothing to tell.
        return if checks.is_empty() {
            Ok(())
        } else {
            response.insert_header("X-RateLimit-Remaining", NONE_LEFT)
        };
    };
    let mut values = Values::default();
    let mut put = |name: &'static str, number| response.insert_header(name, values.number(number)?);
    let (check, verdict) = (&checks[index], &decision.verdicts[index]);
    let limit = check.limit.capacity();
    let is_refused = decision.admission == Admission::Refused;
    let wait = is_refused.then(|| decision.retry_after_ms(checks)).flatten();
    let seconds = match (wait, verdict.outcome) {
        (Some(wait), _) => retry_after(wait),
        (None, Outcome::Refused) => retry_after(verdict.retry_after_ms),
        (None, _) => seconds(verdict.reset_ms),
    };
    // Refused by a rule of which clients do not know: they are told how it is, not by whom.
    let remaining = if wait.is_some() && verdict.is_allowed() { 0 } else { verdict.remaining };
    put("X-RateLimit-Remaining", remaining)?;
    if check.rule.is_hidden() {
        return Ok(());
    }
    if families.x_ratelimit {
        put("X-RateLimit-Limit", limit)?;
        put("X-RateLimit-Reset", seconds)?;
    }
    if families.ratelimit_legacy {
        put("RateLimit-Limit", limit)?;
        put("RateLimit-Remaining", remaining)?;
        put("RateLimit-Reset", seconds)?;
    }
    if families.ratelimit_draft {
        let told = |position: &usize| {
            let check = &checks[*position];
            !check.rule.is_hidden() && (check.votes() || *position == index)
        };
        for check in (0..checks.len()).filter(told).map(|position| &checks[position]) {
            let (quota, window) = (check.limit.capacity(), check.limit.window_seconds().max(1));
            values.item(check.rule.name(), [(";q=", quota), (";w=", window)]);
        }
        response.insert_header("RateLimit-Policy", values.value()?)?;
        values.item(check.rule.name(), [(";r=", remaining), (";t=", seconds)]);
        response.insert_header("RateLimit", values.value()?)?;
    }
    Ok(())
}

/// What a page in a browser may read of an answer of the gateway.
const EXPOSED: &str = "Retry-After, X-RateLimit-Limit, X-RateLimit-Remaining, X-RateLimit-Reset, RateLimit-Limit, \
                       RateLimit-Remaining, RateLimit-Reset, RateLimit, RateLimit-Policy";

/// Lets a page of an allowed origin read an answer of the gateway itself: without this a browser hides a 429.
pub fn allow_origin(response: &mut ResponseHeader, cors: &Cors, request: &http::HeaderMap) -> Result<()> {
    let Some(origin) = request.get(http::header::ORIGIN).filter(|_| !cors.origins.is_empty()) else {
        return Ok(());
    };
    response.append_header(http::header::VARY, "Origin")?;
    if cors.origins.iter().any(|allowed| **allowed == *"*" || allowed.as_bytes() == origin.as_bytes()) {
        response.insert_header(http::header::ACCESS_CONTROL_ALLOW_ORIGIN, origin.clone())?;
        response.insert_header(http::header::ACCESS_CONTROL_EXPOSE_HEADERS, EXPOSED)?;
    }
    Ok(())
}

/// Milliseconds as whole seconds, rounded up.
pub fn seconds(ms: u64) -> u64 {
    ms.div_ceil(1_000)
}

/// `Retry-After`: whole seconds, rounded up, at least 1.
pub fn retry_after(ms: u64) -> u64 {
    seconds(ms).max(1)
}

/// The largest integer of RFC 9651.
const MOST: u64 = 999_999_999_999_999;

/// `X-RateLimit-Remaining` where nothing is left, or nothing is known.
const NONE_LEFT: HeaderValue = HeaderValue::from_static("0");

/// Values of headers, put together by hand in one buffer that they share: each response pays for them, and dearest is
/// to allocate each by itself.
pub struct Values(BytesMut);

impl Default for Values {
    fn default() -> Self {
        Self(BytesMut::with_capacity(128))
    }
}

impl Values {
    /// A whole number.
    pub fn number(&mut self, number: u64) -> Result<HeaderValue> {
        self.digits(number);
        self.value()
    }

    /// One more item of a list of RFC 9651: a string with whole numbers as parameters.
    fn item(&mut self, name: &str, parameters: [(&str, u64); 2]) {
        if !self.0.is_empty() {
            self.0.extend_from_slice(b", ");
        }
        self.0.extend_from_slice(b"\"");
        self.0.extend_from_slice(name.as_bytes());
        self.0.extend_from_slice(b"\"");
        for (parameter, number) in parameters {
            self.0.extend_from_slice(parameter.as_bytes());
            self.digits(number.min(MOST));
        }
    }

    fn digits(&mut self, number: u64) {
        self.0.extend_from_slice(itoa::Buffer::new().format(number).as_bytes());
    }

    /// What has been written since the last value.
    fn value(&mut self) -> Result<HeaderValue> {
        HeaderValue::from_maybe_shared(self.0.split().freeze())
            .or_err(ErrorType::InvalidHTTPHeader, "a value with control bytes")
    }
}

#[cfg(test)]
mod tests {
    use smallvec::smallvec;

    use super::*;
    use crate::config::OnStoreFailure;
    use crate::decision::Basis;
    use crate::key::{Hasher, Key, Part};
    use crate::limit::token_bucket::TokenBucket;
    use crate::limit::{Limit, Verdict};
    use crate::rule::{Check, Demand, RuleId};

    fn decided(verdict: Verdict) -> (Checks, Decision) {
        let part = Part::known(b"a", &Hasher::new(b""));
        let check = Check {
            rule: RuleId::TENANT,
            key: Key::tenant_route("rl", &part, &part),
            limit: Limit::TokenBucket(TokenBucket::new(100, "100/m".parse().unwrap()).unwrap()),
            shards: 1,
            permit: 0,
            cost: 1,
            demand: Demand::Take,
            on_store_failure: OnStoreFailure::Local,
        };
        let checks = smallvec![check];
        let decision = Decision::from_verdicts(Basis::Store, &checks, smallvec![verdict]);
        (checks, decision)
    }

    fn lines(families: Headers, decided: Option<&(Checks, Decision)>) -> Vec<String> {
        let mut response = ResponseHeader::build(200, None).unwrap();
        write(&mut response, &families, decided).unwrap();
        let mut lines: Vec<String> = response
            .headers
            .iter()
            .map(|(name, value)| format!("{name}: {}", value.to_str().unwrap()))
            .collect();
        lines.sort();
        lines
    }

    const ALL: Headers = Headers { x_ratelimit: true, ratelimit_legacy: true, ratelimit_draft: true };

    #[test]
    fn all_families_of_an_admitted_request() {
        let verdict =
            Verdict { outcome: Outcome::Allowed, remaining: 50, retry_after_ms: 0, reset_ms: 29_001 };
        assert_eq!(
            lines(ALL, Some(&decided(verdict))),
            [
                "ratelimit-limit: 100",
                "ratelimit-policy: \"default\";q=100;w=60",
                "ratelimit-remaining: 50",
                "ratelimit-reset: 30",
                "ratelimit: \"default\";r=50;t=30",
                "x-ratelimit-limit: 100",
                "x-ratelimit-remaining: 50",
                "x-ratelimit-reset: 30",
            ]
        );
    }

    /// B131: two headers of one refusal told different times in different units.
    #[test]
    fn a_refusal_tells_one_time_in_seconds() {
        let verdict =
            Verdict { outcome: Outcome::Refused, remaining: 0, retry_after_ms: 401, reset_ms: 60_000 };
        let lines = lines(ALL, Some(&decided(verdict)));
        assert!(lines.contains(&"ratelimit: \"default\";r=0;t=1".to_owned()), "{lines:?}");
        assert!(lines.contains(&"x-ratelimit-reset: 1".to_owned()));
        assert_eq!(retry_after(401), 1);
        assert_eq!(retry_after(1_001), 2);
        assert_eq!(retry_after(0), 1);
    }

    #[test]
    fn before_a_decision_nothing_is_left() {
        assert_eq!(lines(ALL, None), ["x-ratelimit-remaining: 0"]);
    }

    #[test]
    fn one_family_at_a_time() {
        let verdict = Verdict { outcome: Outcome::Allowed, remaining: 5, retry_after_ms: 0, reset_ms: 0 };
        let none = Headers { x_ratelimit: false, ratelimit_legacy: false, ratelimit_draft: false };
        assert_eq!(lines(none, Some(&decided(verdict))), ["x-ratelimit-remaining: 5"]);
    }
}
