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

/// A rule cannot tell by which value to count a request, and refuses it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ValueFault {
    /// This is missing.
    Missing(String),
    /// This was sent more than once, with different values.
    Several(String),
}

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
    for route in &config.routes {
        let mut here = Vec::new();
        for (position, written) in route.rules.iter().enumerate() {
            let field = format!("routes[{}].rules[{position}]", route.position);
            let mut fault = |message: String| faults.push(Fault::new(written.place, field.clone(), message));
            let Some(rule) = config.rules.named.iter().find(|rule| *rule.name.value == *written.value) else {
                if !config.unread.contains(&written.value) {
                    fault(format!("there is no rule named `{}` in rules.named", written.value));
                }
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
    ) -> Result<Option<Check>, ValueFault> {
        let rule = &self.rule;
        if rule.mode == Mode::Off {
            return Ok(None);
        }
        let mut segments = self.segments.iter();
        let mut parts = Vec::with_capacity(rule.key.len());
        let mut unclear = None;
        for source in &rule.key {
            parts.push(match source {
                KeySource::Tenant => hands.tenant.clone(),
                KeySource::ApiKey => hands.hasher.part(&subject.claimed),
                KeySource::ClientAddress => hands.hasher.part(&hands.client_address.subject(asked.client)),
                KeySource::Route => hands.route.clone(),
                KeySource::Global => Part::known(b"global", hands.hasher),
                KeySource::Header(_) | KeySource::Cookie(_) => {
                    let value = sent(source, asked.headers);
                    if !matches!(value, Sent::One(_)) {
                        unclear = unclear.or(Some((source, value)));
                    }
                    hands.hasher.part(value.bytes())
                }
                KeySource::Path(_) => {
                    let segment = segments.next().and_then(|index| asked.path.split('/').nth(*index));
                    hands.hasher.part(segment.unwrap_or_default().as_bytes())
                }
            });
        }
        let limit = rule.limit.value.on(now);
        let key = Key::named(hands.prefix, &parts, &rule.name.value, limit.algorithm());
        let enforced = rule.mode == Mode::Enforce && is_among(key.as_str().as_bytes(), rule.enforce_percent);
        if let Some((source, value)) = unclear {
            let is_missing = value == Sent::Nothing;
            if is_missing {
                (hands.note_missing)(&self.id);
            }
            match rule.missing {
                MissingValue::Share => {}
                // Else a second value would be a way around it.
                MissingValue::Skip if !is_missing => {}
                MissingValue::Reject if enforced && is_missing => {
                    return Err(ValueFault::Missing(name_of(source)));
                }
                MissingValue::Reject if enforced => return Err(ValueFault::Several(name_of(source))),
                MissingValue::Skip | MissingValue::Reject => return Ok(None),
            }
        }
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

/// What a request has sent in a header or cookie.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Sent<'r> {
    Nothing,
    One(&'r [u8]),
    /// Different values. Which of them an upstream reads is not known here, and each could be a new bucket for the
    /// same account.
    Several,
}

impl<'r> Sent<'r> {
    /// What stands for it in a key: all without a value share one bucket, and all with several another.
    const fn bytes(self) -> &'r [u8] {
        match self {
            Self::Nothing => b"",
            Self::One(value) => value,
            // No value has such a byte.
            Self::Several => b"\0",
        }
    }

    /// The same after one more value.
    fn and(self, value: &'r [u8]) -> Self {
        match (value.trim_ascii(), self) {
            (b"", _) | (_, Self::Several) => self,
            (value, Self::Nothing) => Self::One(value),
            (value, Self::One(known)) if known == value => self,
            (_, Self::One(_)) => Self::Several,
        }
    }
}

fn sent<'r>(source: &KeySource, headers: &'r http::HeaderMap) -> Sent<'r> {
    match source {
        KeySource::Header(name) => {
            let lines = headers.get_all(name).iter();
            lines.fold(Sent::Nothing, |sent, line| sent.and(line.as_bytes()))
        }
        KeySource::Cookie(name) => {
            let lines = headers.get_all(http::header::COOKIE).iter();
            let pairs = lines.flat_map(|line| line.as_bytes().split(|byte| *byte == b';'));
            let value_of =
                |pair: &'r [u8]| pair.trim_ascii().strip_prefix(name.as_bytes())?.strip_prefix(b"=");
            pairs.filter_map(value_of).fold(Sent::Nothing, Sent::and)
        }
        _ => Sent::Nothing,
    }
}

/// What it is, for the answer.
fn name_of(source: &KeySource) -> String {
    match source {
        KeySource::Header(name) => format!("the header {name}"),
        KeySource::Cookie(name) => format!("the cookie {name}"),
        other => format!("{other:?}"),
    }
}
