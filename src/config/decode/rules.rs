//! Rules: the default, rows, and what is not available yet.

use super::ON_STORE_FAILURE;
use crate::config::fault::Placed;
use crate::config::fields::{Reading, join, placed};
use crate::config::yaml::{Kind, Node};
use crate::config::{OnStoreFailure, Row, Rules};
use crate::limit::Limit;
use crate::limit::rate::Rate;
use crate::limit::token_bucket::{TokenBucket, TokenBucketError};

/// The rules; `rows` have been read on the way.
pub(super) fn rules_of(
    root: &Node<'_>,
    node: Option<&Node<'_>>,
    rows: Vec<Row>,
    r: &mut Reading<'_>,
) -> Rules {
    let mut rules = Rules {
        default: Placed { value: built_in_default(), place: root.place },
        on_store_failure: OnStoreFailure::Local,
        rows,
    };
    let Some(node) = node else { return rules };
    let [default, on_store_failure, kept, named, database] =
        r.fields(node, "rules", ["default", "on_store_failure", "rows", "named", "database"]);
    if let Some(node) = default {
        let [capacity, rate] = r.fields(node, "rules.default", ["capacity", "refill_per_second"]);
        if let Some(limit) = limit_of(node, capacity, rate, "rules.default", r) {
            rules.default = limit;
        }
    }
    if let Some(word) =
        on_store_failure.and_then(|node| r.one_of(node, "rules.on_store_failure", &ON_STORE_FAILURE))
    {
        rules.on_store_failure = word;
    }
    for (index, item) in named.map(|node| r.list(node, "rules.named")).unwrap_or_default().iter().enumerate()
    {
        r.fault(
            item.place,
            &format!("rules.named[{index}]"),
            "named rules are not available in this version",
        );
    }
    if let Some(node) = database {
        database_of(node, r);
    }
    // Rows with an anchor are not read on the way.
    for (index, item) in kept.map(|node| r.list(node, "rules.rows")).unwrap_or_default().iter().enumerate() {
        rules.rows.extend(row(item, index, r));
    }
    rules
}

/// DESIGN's default: capacity 20, refill 10 per second.
pub(in crate::config) fn built_in_default() -> Limit {
    match Rate::per_second(10).map(|rate| TokenBucket::new(20, rate)) {
        Ok(Ok(bucket)) => Limit::TokenBucket(bucket),
        _ => unreachable!("20 tokens at 10 per second make a bucket"),
    }
}

fn database_of(node: &Node<'_>, r: &mut Reading<'_>) {
    let [url, refresh] = r.fields(node, "rules.database", ["url", "refresh"]);
    refresh.map(|node| r.duration(node, "rules.database.refresh"));
    let Some(node) = url else { return };
    if r.text(node, "rules.database.url").is_some_and(|url| !url.is_empty()) {
        r.fault(node.place, "rules.database.url", "rules from a database are not available in this version");
    }
}

/// One of `rules.rows`.
pub(in crate::config) fn row(item: &Node<'_>, index: usize, r: &mut Reading<'_>) -> Option<Row> {
    // The path of a row is only needed for a fault; with 500,000 rows its text would cost more than
    // the row itself, so a row without faults is read with a short one.
    let before = r.faults.len();
    let row = row_fields(item, "", r);
    for fault in &mut r.faults[before..] {
        let row = format!("rules.rows[{index}]");
        fault.field = if fault.field.is_empty() { row } else { join(&row, &fault.field) };
    }
    row
}

fn row_fields(item: &Node<'_>, field: &str, r: &mut Reading<'_>) -> Option<Row> {
    let [tenant, route, capacity, rate, on_store_failure] =
        r.fields(item, field, ["tenant", "route", "capacity", "refill_per_second", "on_store_failure"]);
    let any = |node: &&Node<'_>| !matches!(&node.kind, Kind::Scalar { text, .. } if text == "*");
    let tenant = tenant.filter(any).map(|node| r.name(node, "tenant"));
    let route = route.filter(any).map(|node| Some(placed(node, r.name(node, "route")?)));
    let limit = limit_of(item, capacity, rate, field, r);
    if tenant.is_none() && route.is_none() {
        r.fault(item.place, field, "names neither a tenant nor a route; for all of both set rules.default");
    }
    let on_store_failure =
        on_store_failure.and_then(|node| r.one_of(node, "on_store_failure", &ON_STORE_FAILURE));
    // `Some(None)` is a name that was written but could not be read: such a row must not widen.
    if tenant == Some(None) || route == Some(None) {
        return None;
    }
    Some(Row {
        place: item.place,
        tenant: tenant.flatten(),
        route: route.flatten(),
        limit: limit?,
        on_store_failure,
    })
}

fn limit_of(
    parent: &Node<'_>,
    capacity: Option<&Node<'_>>,
    rate: Option<&Node<'_>>,
    field: &str,
    r: &mut Reading<'_>,
) -> Option<Placed<Limit>> {
    let capacity_node = r.required(parent, &join(field, "capacity"), capacity);
    let rate_node = r.required(parent, &join(field, "refill_per_second"), rate);
    let capacity = capacity_node.and_then(|node| r.whole(node, &join(field, "capacity")));
    let rate = rate_node.and_then(|node| r.parsed::<Rate>(node, &join(field, "refill_per_second")));
    let (capacity_node, rate_node) = (capacity_node?, rate_node?);
    match TokenBucket::new(capacity?, rate?) {
        Ok(bucket) => Some(placed(capacity_node, Limit::TokenBucket(bucket))),
        Err(error @ TokenBucketError::RateTooFine) => {
            r.fault(rate_node.place, &join(field, "refill_per_second"), error.to_string());
            None
        }
        Err(error) => {
            let message = format!("{error}, got {}", capacity_node.describe());
            r.fault(capacity_node.place, &join(field, "capacity"), message);
            None
        }
    }
}
