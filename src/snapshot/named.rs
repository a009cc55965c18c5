//! Named rules: which of them apply to a request, and on which buckets.

use std::net::IpAddr;
use std::sync::Arc;

use super::{Subject, is_among};
use crate::clock::Timestamp;
use crate::config::fault::Fault;
use crate::config::{ClientAddress, Config, KeySource, MissingValue, Mode, NamedRule, OnStoreFailure};
use crate::key::{Hasher, Key, Part};
use crate::rule::{Check, Demand, RuleId};

/// What the rules want to know of a request beside its tenant and route.
#[derive(Clone, Copy, Debug)]
pub struct Asked<'r> {
    /// Its headers.
    pub headers: &'r http::HeaderMap,
    /// Its path in normal form.
    pub path: &'r str,
    /// The address of its client.
    pub client: IpAddr,
    /// What it takes.
    pub cost: u64,
}

/// A rule that rejects requests without a value has found none: what is missing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Missing(pub String);

/// A named rule on one route.
#[derive(Debug)]
pub(super) struct Named {
    rule: NamedRule,
    id: RuleId,
    on_store_failure: OnStoreFailure,
    /// Where the segments of the path are that it is keyed by, in the order of its key.
    segments: Vec<usize>,
}

/// The named rules of each route, by its number; notes what does not fit.
pub(super) fn rules(config: &Config, faults: &mut Vec<Fault>) -> Vec<Vec<Arc<Named>>> {
    // Requests that match no route have none.
    let mut all = vec![Vec::new()];
    for (index, route) in config.routes.iter().enumerate() {
        let mut here = Vec::new();
        for (position, written) in route.rules.iter().enumerate() {
            let field = format!("routes[{index}].rules[{position}]");
            let mut fault = |message: String| faults.push(Fault::new(written.place, field.clone(), message));
            let Some(rule) = config.rules.named.iter().find(|rule| *rule.name.value == *written.value) else {
                fault(format!("there is no rule named `{}` in rules.named", written.value));
                continue;
            };
            let mut segments = Vec::new();
            for source in &rule.key {
                let KeySource::Path(name) = source else { continue };
                match segment(&route.path.value, name) {
                    Some(segment) => segments.push(segment),
                    None => fault(format!(
                        "the rule is keyed by path:{name}, and there is no {{{name}}} in `{}`",
                        route.path.value
                    )),
                }
            }
            let cost = rule.cost.map_or(route.cost.value, |cost| cost.value);
            if rule.limit.value.capacity() < cost && !rule.limit.value.counts_permits() {
                let limit = rule.limit.value.capacity();
                fault(format!(
                    "the limit {limit} is below the cost {cost} of the route: it could never pass"
                ));
            }
            here.push(Arc::new(Named {
                id: RuleId::named(&rule.name.value, rule.hidden),
                on_store_failure: rule
                    .on_store_failure
                    .or(route.on_store_failure)
                    .unwrap_or(config.rules.on_store_failure),
                rule: rule.clone(),
                segments,
            }));
        }
        all.push(here);
    }
    all
}

/// Which segment of paths of `pattern` is `{name}`.
fn segment(pattern: &str, name: &str) -> Option<usize> {
    pattern
        .split('/')
        .position(|segment| segment.strip_prefix('{').and_then(|rest| rest.strip_suffix('}')) == Some(name))
}

impl Named {
    /// Its check of a request; `None` if it is off.
    pub(super) fn check(
        &self,
        hands: &mut Hands<'_>,
        subject: &Subject<'_>,
        asked: &Asked<'_>,
        now: Timestamp,
    ) -> Result<Option<Check>, Missing> {
        let rule = &self.rule;
        if rule.mode == Mode::Off {
            return Ok(None);
        }
        if let Some(name) = rule.key.iter().find_map(|source| missing(source, asked.headers)) {
            (hands.note_missing)(&self.id);
            match rule.missing {
                MissingValue::Share => {}
                MissingValue::Skip => return Ok(None),
                MissingValue::Reject => return Err(Missing(name)),
            }
        }
        let mut segments = self.segments.iter();
        let parts: Vec<Part> = rule
            .key
            .iter()
            .map(|source| match source {
                KeySource::Tenant => hands.tenant.clone(),
                KeySource::ApiKey => hands.hasher.part(&subject.claimed),
                KeySource::ClientAddress => hands.hasher.part(&hands.client_address.subject(asked.client)),
                KeySource::Route => hands.route.clone(),
                KeySource::Global => Part::known(b"global", hands.hasher),
                KeySource::Header(name) => hands.hasher.part(&joined(asked.headers, name)),
                KeySource::Cookie(name) => hands.hasher.part(&cookie(asked.headers, name)),
                KeySource::Path(_) => {
                    let segment = segments.next().and_then(|index| asked.path.split('/').nth(*index));
                    hands.hasher.part(segment.unwrap_or_default().as_bytes())
                }
            })
            .collect();
        let limit = rule.limit.value.on(now);
        let key = Key::named(hands.prefix, &parts, &rule.name.value, limit.algorithm());
        let enforced = rule.mode == Mode::Enforce && is_among(key.as_str().as_bytes(), rule.enforce_percent);
        let cost = rule.cost.map_or(asked.cost, |cost| cost.value);
        Ok(Some(Check {
            rule: self.id.clone(),
            key,
            limit,
            shards: 1,
            permit: 0,
            cost: if limit.counts_permits() { 1 } else { cost },
            demand: match (enforced, rule.statuses.is_empty()) {
                (true, true) => Demand::Take,
                (true, false) => Demand::Peek,
                (false, true) => Demand::Shadow,
                (false, false) => Demand::Watch,
            },
            on_store_failure: self.on_store_failure,
        }))
    }

    /// Whether it is the rule of that id.
    pub(super) fn is(&self, id: &RuleId) -> bool {
        self.id == *id
    }

    /// Whether a response with this status is charged.
    pub(super) fn counts(&self, status: u16) -> bool {
        self.rule.statuses.contains(&status)
    }

    /// Whether it takes what the request costs.
    pub(super) fn takes_the_cost(&self) -> bool {
        self.rule.cost.is_none() && !self.rule.limit.value.counts_permits()
    }
}

/// What keys are made with.
pub(super) struct Hands<'s> {
    pub(super) prefix: &'s str,
    pub(super) hasher: &'s Hasher,
    pub(super) client_address: &'s ClientAddress,
    pub(super) tenant: Part,
    pub(super) route: Part,
    /// Is told of each rule that a request has no value for.
    pub(super) note_missing: &'s mut dyn FnMut(&RuleId),
}

/// What of a key a request does not have: for a header or cookie that is not there or empty, its name.
fn missing(source: &KeySource, headers: &http::HeaderMap) -> Option<String> {
    match source {
        KeySource::Header(name) => {
            let is_there = headers.get_all(name).iter().any(|line| !line.as_bytes().trim_ascii().is_empty());
            (!is_there).then(|| format!("the header {name}"))
        }
        KeySource::Cookie(name) => cookie(headers, name).is_empty().then(|| format!("the cookie {name}")),
        _ => None,
    }
}

/// All lines of a header, each behind its length, so that two lines are not one with a comma in it. None is the
/// empty value: whoever leaves the header away shares one bucket with all who do.
fn joined(headers: &http::HeaderMap, name: &http::HeaderName) -> Vec<u8> {
    let mut all = Vec::new();
    for line in headers.get_all(name).iter().filter(|line| !line.as_bytes().trim_ascii().is_empty()) {
        all.extend_from_slice(&(line.len() as u64).to_be_bytes());
        all.extend_from_slice(line.as_bytes());
    }
    all
}

/// All values of a cookie, each behind its length: which one an upstream reads is not known here. Empty if there is
/// none.
fn cookie(headers: &http::HeaderMap, name: &str) -> Vec<u8> {
    let lines = headers.get_all(http::header::COOKIE).iter();
    let pairs = lines.flat_map(|line| line.as_bytes().split(|byte| *byte == b';'));
    let values = pairs.filter_map(|pair| {
        let pair = pair.trim_ascii();
        let equals = pair.iter().position(|byte| *byte == b'=')?;
        (&pair[..equals] == name.as_bytes()).then(|| pair[equals + 1..].trim_ascii())
    });
    let mut all = Vec::new();
    for value in values.filter(|value| !value.is_empty()) {
        all.extend_from_slice(&(value.len() as u64).to_be_bytes());
        all.extend_from_slice(value);
    }
    all
}
