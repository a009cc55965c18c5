//! Named rules: what they are keyed by, and to which limit they hold it.

use std::sync::Arc;
use std::time::Duration;

use super::ON_STORE_FAILURE;
use super::rules::{MODES, limit_of, percent_of};
use crate::config::fault::Placed;
use crate::config::fields::{Reading, join, placed};
use crate::config::yaml::{Kind, Node};
use crate::config::{KeySource, MissingValue, NamedRule};
use crate::limit::concurrency::Concurrency;
use crate::limit::fixed_window::FixedWindow;
use crate::limit::quota::{Period, Quota, Zone};
use crate::limit::sliding_log::{MOST_ENTRIES, SlidingLog};
use crate::limit::sliding_window::SlidingWindow;
use crate::limit::{Limit, MAX_EXACT};

/// Names that rules have by themselves.
const TAKEN: [&str; 2] = ["default", "candidate"];

pub(super) fn named_of(node: &Node<'_>, unread: &mut Vec<Box<str>>, r: &mut Reading<'_>) -> Vec<NamedRule> {
    let mut rules: Vec<NamedRule> = Vec::new();
    for (index, item) in r.list(node, "rules.named").iter().enumerate() {
        let field = format!("rules.named[{index}]");
        let Some(rule) = rule_of(item, &field, r) else {
            unread.extend(item.text_of("name"));
            continue;
        };
        if let Some(first) = rules.iter().find(|known| known.name.value == rule.name.value) {
            let message =
                format!("`{}` is already the name of the rule at {}", rule.name.value, first.name.place);
            r.fault(rule.name.place, &join(&field, "name"), message);
        }
        rules.push(rule);
    }
    rules
}

fn rule_of(item: &Node<'_>, field: &str, r: &mut Reading<'_>) -> Option<NamedRule> {
    let [name, key, missing, limit, mode, enforce_percent, on_store_failure, cost, hidden, statuses] = r
        .fields(
            item,
            field,
            [
                "name",
                "key",
                "missing",
                "limit",
                "mode",
                "enforce_percent",
                "on_store_failure",
                "cost",
                "hidden",
                "count_statuses",
            ],
        );
    let name = r.required(item, &join(field, "name"), name);
    let name = name.and_then(|node| name_of(node, &join(field, "name"), r));
    let key_field = join(field, "key");
    let key = r.required(item, &key_field, key).map(|node| key_of(node, &key_field, r));
    let limit_field = join(field, "limit");
    let limit_node = r.required(item, &limit_field, limit);
    let limit = limit_node.and_then(|node| Some(placed(node, any_limit_of(node, &limit_field, r)?)));
    let words =
        [("share", MissingValue::Share), ("skip", MissingValue::Skip), ("reject", MissingValue::Reject)];
    let missing =
        missing.and_then(|node| r.one_of(node, &join(field, "missing"), &words)).unwrap_or_default();
    let mode = mode.and_then(|node| r.one_of(node, &join(field, "mode"), &MODES)).unwrap_or_default();
    let enforce_percent =
        enforce_percent.map_or(100, |node| percent_of(node, &join(field, "enforce_percent"), r));
    let on_store_failure =
        on_store_failure.and_then(|node| r.one_of(node, &join(field, "on_store_failure"), &ON_STORE_FAILURE));
    let cost = cost.and_then(|node| Some(placed(node, r.whole(node, &join(field, "cost"))?)));
    if let (Some(cost), Some(limit)) = (cost, &limit)
        && cost.value > limit.value.capacity()
    {
        let message =
            format!("{} is above the limit {}: it could never pass", cost.value, limit.value.capacity());
        r.fault(cost.place, &join(field, "cost"), message);
    }
    let yes_or_no = [("true", true), ("false", false)];
    let hidden = hidden.and_then(|node| r.one_of(node, &join(field, "hidden"), &yes_or_no)).unwrap_or(false);
    let statuses_node = statuses;
    let statuses =
        statuses.map(|node| statuses_of(node, &join(field, "count_statuses"), r)).unwrap_or_default();
    if let (Some(node), Some(Limit::Concurrency(_))) =
        (statuses_node, limit.as_ref().map(|limit| limit.value))
    {
        r.fault(node.place, &join(field, "count_statuses"), "a concurrency limit counts every request");
    }
    Some(NamedRule {
        name: name?,
        key: key?,
        missing,
        limit: limit?,
        mode,
        enforce_percent,
        on_store_failure,
        cost,
        hidden,
        statuses,
    })
}

fn name_of(node: &Node<'_>, field: &str, r: &mut Reading<'_>) -> Option<Placed<Arc<str>>> {
    let name = r.name(node, field)?;
    let plain = name.bytes().all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.'));
    if !plain || name.len() > 64 {
        r.fault(node.place, field, "expected at most 64 letters, digits and . _ -");
        return None;
    }
    if TAKEN.contains(&&*name) {
        r.fault(node.place, field, format!("`{name}` is taken; choose another name"));
        return None;
    }
    Some(placed(node, Arc::from(name)))
}

fn key_of(node: &Node<'_>, field: &str, r: &mut Reading<'_>) -> Vec<KeySource> {
    let items = r.list(node, field);
    if items.is_empty() && matches!(node.kind, Kind::Sequence(_)) {
        r.fault(node.place, field, "expected at least one of tenant, api_key, client_address, route, global, header:NAME, cookie:NAME, path:NAME");
    }
    let mut sources = Vec::new();
    for (index, item) in items.iter().enumerate() {
        let field = format!("{field}[{index}]");
        let Some(text) = r.name(item, &field) else { continue };
        let source = match text.split_once(':') {
            None => match &*text {
                "tenant" => Some(KeySource::Tenant),
                "api_key" => Some(KeySource::ApiKey),
                "client_address" => Some(KeySource::ClientAddress),
                "route" => Some(KeySource::Route),
                "global" => Some(KeySource::Global),
                _ => None,
            },
            Some(("header", name)) => {
                http::HeaderName::from_bytes(name.as_bytes()).ok().map(KeySource::Header)
            }
            Some(("cookie", name)) if !name.is_empty() => Some(KeySource::Cookie(name.into())),
            Some(("path", name)) if !name.is_empty() => Some(KeySource::Path(name.into())),
            Some(_) => None,
        };
        match source {
            // Over HTTP/2 it is not there, and one host has many spellings.
            Some(KeySource::Header(name)) if name == http::header::HOST => {
                let message =
                    "hosts are told apart by routes: give each its own, with match.host, and key by route";
                r.fault(item.place, &field, message);
            }
            Some(source) if sources.contains(&source) => {
                r.fault(item.place, &field, format!("`{text}` is there already"));
            }
            Some(source) => sources.push(source),
            None => {
                let message = format!(
                    "expected tenant, api_key, client_address, route, global, header:NAME, cookie:NAME or path:NAME; got {}",
                    item.describe()
                );
                r.fault(item.place, &field, message);
            }
        }
    }
    if sources.len() > 1 && sources.contains(&KeySource::Global) {
        r.fault(node.place, field, "`global` is one bucket for all, so it stands alone");
    }
    sources
}

fn statuses_of(node: &Node<'_>, field: &str, r: &mut Reading<'_>) -> Vec<u16> {
    let items = r.list(node, field);
    if items.is_empty() && matches!(node.kind, Kind::Sequence(_)) {
        r.fault(
            node.place,
            field,
            "expected at least one status such as 401; leave it out to count every request",
        );
    }
    let mut statuses = Vec::new();
    for (index, item) in items.iter().enumerate() {
        let field = format!("{field}[{index}]");
        match r.whole(item, &field) {
            Some(status @ 200..=599) => statuses.push(status as u16),
            Some(_) => r.fault(
                item.place,
                &field,
                format!("expected a status from 200 to 599, got {}", item.describe()),
            ),
            None => {}
        }
    }
    statuses
}

/// Any limit, under the name of its algorithm.
fn any_limit_of(node: &Node<'_>, field: &str, r: &mut Reading<'_>) -> Option<Limit> {
    const ALGORITHMS: [&str; 6] =
        ["token_bucket", "fixed_window", "sliding_window", "sliding_log", "quota", "concurrency"];
    let found = r.fields(node, field, ALGORITHMS);
    let mut found = ALGORITHMS.into_iter().zip(found).filter_map(|(name, node)| Some((name, node?)));
    let first = found.next();
    let (Some((algorithm, numbers)), None) = (first, found.next()) else {
        if matches!(node.kind, Kind::Mapping(_)) {
            r.fault(node.place, field, format!("expected one of {}", ALGORITHMS.join(", ")));
        }
        return None;
    };
    let field = join(field, algorithm);
    match algorithm {
        "token_bucket" => {
            let [capacity, rate] = r.fields(numbers, &field, ["capacity", "refill_per_second"]);
            limit_of(numbers, capacity, rate, &field, r).map(|limit| Limit::TokenBucket(limit.value))
        }
        "quota" => quota_of(numbers, &field, r),
        "concurrency" => {
            let [limit, hold] = r.fields(numbers, &field, ["limit", "max_hold"]);
            let limit = number_of(numbers, limit, &join(&field, "limit"), 1_000_000, r);
            let hold_node = hold;
            let hold = length_of(numbers, hold, &join(&field, "max_hold"), r);
            if hold.is_some_and(|hold| hold < 1_000_000) {
                let place = hold_node.unwrap_or(numbers).place;
                r.fault(
                    place,
                    &join(&field, "max_hold"),
                    "expected at least 1s: permits are renewed each third of it",
                );
            }
            Some(Limit::Concurrency(Concurrency { limit: limit?, hold: hold? }))
        }
        _ => {
            let [limit, window] = r.fields(numbers, &field, ["limit", "window"]);
            let most = if algorithm == "sliding_log" { MOST_ENTRIES } else { MAX_EXACT };
            let limit_node = limit;
            let limit = number_of(numbers, limit, &join(&field, "limit"), most, r);
            let window = length_of(numbers, window, &join(&field, "window"), r);
            let (limit, window) = (limit?, window?);
            match algorithm {
                "fixed_window" => Some(Limit::FixedWindow(FixedWindow { limit, window })),
                "sliding_log" => Some(Limit::SlidingLog(SlidingLog { limit, window })),
                _ if SlidingWindow::is_exact(limit, window) => {
                    Some(Limit::SlidingWindow(SlidingWindow { limit, window }))
                }
                _ => {
                    let message = "is too large to be counted exactly over so long a window";
                    r.fault(limit_node.unwrap_or(numbers).place, &join(&field, "limit"), message);
                    None
                }
            }
        }
    }
}

fn quota_of(node: &Node<'_>, field: &str, r: &mut Reading<'_>) -> Option<Limit> {
    let [limit, period, zone] = r.fields(node, field, ["limit", "period", "time_zone"]);
    let limit = number_of(node, limit, &join(field, "limit"), MAX_EXACT, r);
    let period_field = join(field, "period");
    let periods = [("day", Period::Day), ("week", Period::Week), ("month", Period::Month)];
    let period =
        r.required(node, &period_field, period).and_then(|node| r.one_of(node, &period_field, &periods));
    let zone = match zone {
        None => Some(Zone::UTC),
        Some(node) => {
            let name = r.name(node, &join(field, "time_zone"));
            let zone = name.as_deref().and_then(Zone::named);
            if name.is_some() && zone.is_none() {
                let message = format!("expected a time zone such as Europe/Berlin, got {}", node.describe());
                r.fault(node.place, &join(field, "time_zone"), message);
            }
            zone
        }
    };
    Some(Limit::Quota(Quota::new(limit?, period?, zone?)))
}

/// A whole number from 1 to `most`.
fn number_of(
    parent: &Node<'_>,
    node: Option<&Node<'_>>,
    field: &str,
    most: u64,
    r: &mut Reading<'_>,
) -> Option<u64> {
    let node = r.required(parent, field, node)?;
    let number = r.whole(node, field)?;
    if number == 0 || number > most {
        r.fault(node.place, field, format!("expected a whole number from 1 to {most}, got {number}"));
        return None;
    }
    Some(number)
}

/// A length of time in microseconds: 10 ms to 31 days.
fn length_of(parent: &Node<'_>, node: Option<&Node<'_>>, field: &str, r: &mut Reading<'_>) -> Option<u64> {
    let node = r.required(parent, field, node)?;
    let length = r.duration(node, field)?;
    if length < Duration::from_millis(10) || length > Duration::from_secs(31 * 86_400) {
        r.fault(node.place, field, format!("expected 10ms to 31d, got {}", node.describe()));
        return None;
    }
    u64::try_from(length.as_micros()).ok()
}
