//! What a request takes, where it is told. Pure.

use http::{HeaderMap, HeaderName};

use crate::config::Priced;

/// Why a cost cannot be read: where it was told.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CostError(pub String);

/// The cost of a request of a route that costs `fixed`, as far as the request tells it.
///
/// # Errors
/// When what it tells is no number: to take it for something else would be a guess.
pub fn asked(
    priced: &Priced,
    fixed: u64,
    headers: &HeaderMap,
    query: Option<&str>,
) -> Result<u64, CostError> {
    let told = match told_by_header(priced.header.as_ref(), headers)? {
        Some(told) => Some(told),
        None => told_by_query(priced.query.as_deref(), query)?,
    };
    // Who is not trusted may say that it costs more, but not that it costs less.
    let cost = match told {
        None => fixed,
        Some(told) if priced.trusted => told,
        Some(told) => told.max(fixed),
    };
    Ok(cost.min(priced.max))
}

/// The true cost that a response tells, if it does.
pub fn settled(priced: &Priced, headers: &HeaderMap) -> Option<u64> {
    let told = told_by_header(priced.response_header.as_ref(), headers);
    if let Err(CostError(place)) = &told {
        tracing::warn!(%place, "the upstream tells a cost that is no whole number: the reserved one holds");
    }
    told.ok()?.map(|told| told.min(priced.max))
}

fn told_by_header(name: Option<&HeaderName>, headers: &HeaderMap) -> Result<Option<u64>, CostError> {
    let Some(name) = name else { return Ok(None) };
    let mut lines = headers.get_all(name).iter();
    let (first, second) = (lines.next(), lines.next());
    match (first.map(http::HeaderValue::as_bytes), second) {
        (None, _) => Ok(None),
        (Some(value), None) => {
            number(value.trim_ascii()).map(Some).ok_or_else(|| CostError(format!("the header {name}")))
        }
        (Some(_), Some(_)) => Err(CostError(format!("the header {name}, which was sent more than once,"))),
    }
}

fn told_by_query(name: Option<&str>, query: Option<&str>) -> Result<Option<u64>, CostError> {
    let (Some(name), Some(query)) = (name, query) else { return Ok(None) };
    let mut told = form_urlencoded::parse(query.as_bytes()).filter(|(field, _)| field == name);
    match (told.next(), told.next()) {
        (None, _) => Ok(None),
        (Some((_, value)), None) => {
            number(value.as_bytes()).map(Some).ok_or_else(|| CostError(format!("the query field {name}")))
        }
        (Some(_), Some(_)) => {
            Err(CostError(format!("the query field {name}, which was sent more than once,")))
        }
    }
}

/// A whole number; one that is too large to be counted is the largest there is.
fn number(text: &[u8]) -> Option<u64> {
    if text.is_empty() || text.len() > 64 || !text.iter().all(u8::is_ascii_digit) {
        return None;
    }
    Some(std::str::from_utf8(text).ok()?.parse().unwrap_or(u64::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn priced(trusted: bool) -> Priced {
        Priced {
            header: Some(HeaderName::from_static("x-cost")),
            query: Some("units".into()),
            max: 100,
            trusted,
            response_header: Some(HeaderName::from_static("x-ratelimit-cost")),
        }
    }

    fn headers(values: &[&str]) -> HeaderMap {
        let mut headers = HeaderMap::new();
        for value in values {
            headers.append("x-cost", value.parse().unwrap());
            headers.append("x-ratelimit-cost", value.parse().unwrap());
        }
        headers
    }

    #[test]
    fn a_cost_is_bounded_and_a_client_cannot_lower_it() {
        for (trusted, header, query, expect) in [
            (false, &[][..], None, 5),
            (false, &["20"], None, 20),
            (false, &["1"], None, 5),
            (true, &["1"], None, 1),
            (true, &["0"], None, 0),
            (false, &["100000"], None, 100),
            (false, &["99999999999999999999999"], None, 100),
            (false, &[], Some("a=1&units=30"), 30),
            (false, &[" 7 "], Some("units=30"), 7),
        ] {
            assert_eq!(
                asked(&priced(trusted), 5, &headers(header), query),
                Ok(expect),
                "{header:?} {query:?}"
            );
        }
        for (header, query) in [
            (&["x"][..], None),
            (&["-1"], None),
            (&["1.5"], None),
            (&["1", "2"], None),
            (&[""], None),
            (&[], Some("units=")),
        ] {
            assert!(asked(&priced(false), 5, &headers(header), query).is_err(), "{header:?} {query:?}");
        }
        assert!(asked(&priced(false), 5, &headers(&[]), Some("units=1&units=2")).is_err());
    }

    #[test]
    fn a_response_settles_within_the_bound() {
        for (header, expect) in
            [(&[][..], None), (&["7"], Some(7)), (&["5000"], Some(100)), (&["x"], None), (&["1", "2"], None)]
        {
            assert_eq!(settled(&priced(false), &headers(header)), expect, "{header:?}");
        }
    }
}
