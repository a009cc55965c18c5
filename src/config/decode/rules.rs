//! Rules: the default, rows, the database, and what is not available yet.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use super::ON_STORE_FAILURE;
use super::named::named_of;
use super::network;
use crate::config::fault::Placed;
use crate::config::fields::{Reading, join, placed};
use crate::config::yaml::{Kind, Node, Text};
use crate::config::{Database, Exempt, Mode, OnStoreFailure, Row, Rules, Secret, Terms};
use crate::limit::rate::Rate;
use crate::limit::token_bucket::{TokenBucket, TokenBucketError};

pub(super) const MODES: [(&str, Mode); 3] =
    [("enforce", Mode::Enforce), ("shadow", Mode::Shadow), ("off", Mode::Off)];

/// The rules; `rows` have been read on the way. The names of rules that could not be read are noted in `unread`.
pub(super) fn rules_of(
    root: &Node<'_>,
    node: Option<&Node<'_>>,
    rows: Vec<Row>,
    unread: &mut Vec<Box<str>>,
    r: &mut Reading<'_>,
) -> Rules {
    let mut rules = Rules {
        default: Placed { value: built_in_default(), place: root.place },
        on_store_failure: OnStoreFailure::Local,
        rows,
        exempt: Exempt::default(),
        named: Vec::new(),
        database: None,
    };
    let Some(node) = node else { return rules };
    let [default, on_store_failure, kept, exempt, named, database] =
        r.fields(node, "rules", ["default", "on_store_failure", "rows", "exempt", "named", "database"]);
    if let Some(node) = exempt {
        rules.exempt = exempt_of(node, r);
    }
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
    rules.named = named.map(|node| named_of(node, unread, r)).unwrap_or_default();
    if let Some(node) = database {
        rules.database = database_of(node, r);
    }
    // Rows with an anchor are not read on the way.
    for (index, item) in kept.map(|node| r.list(node, "rules.rows")).unwrap_or_default().iter().enumerate() {
        rules.rows.extend(row(item, index, r));
    }
    rules
}

/// DESIGN's default: capacity 20, refill 10 per second.
pub(in crate::config) fn built_in_default() -> TokenBucket {
    match Rate::per_second(10).map(|rate| TokenBucket::new(20, rate)) {
        Ok(Ok(bucket)) => bucket,
        _ => unreachable!("20 tokens at 10 per second make a bucket"),
    }
}

fn exempt_of(node: &Node<'_>, r: &mut Reading<'_>) -> Exempt {
    let [networks, tenants, paths, preflight] =
        r.fields(node, "rules.exempt", ["networks", "tenants", "paths", "preflight"]);
    let mut exempt = Exempt::default();
    let field = "rules.exempt.networks";
    for (index, item) in networks.map(|node| r.list(node, field)).unwrap_or_default().iter().enumerate() {
        exempt.networks.extend(network(item, &format!("{field}[{index}]"), r));
    }
    let field = "rules.exempt.tenants";
    for (index, item) in tenants.map(|node| r.list(node, field)).unwrap_or_default().iter().enumerate() {
        exempt.tenants.extend(r.tenant(item, &format!("{field}[{index}]")));
    }
    let field = "rules.exempt.paths";
    for (index, item) in paths.map(|node| r.list(node, field)).unwrap_or_default().iter().enumerate() {
        let field = format!("{field}[{index}]");
        match r.name(item, &field) {
            Some(path) if path.starts_with('/') && !path.contains(['*', '{']) => {
                exempt.paths.push(placed(item, path));
            }
            Some(_) => {
                let message = format!("expected a whole path such as /healthz, got {}", item.describe());
                r.fault(item.place, &field, message);
            }
            None => {}
        }
    }
    let words = [("true", true), ("false", false)];
    exempt.preflight =
        preflight.and_then(|node| r.one_of(node, "rules.exempt.preflight", &words)).unwrap_or(false);
    exempt
}

fn database_of(node: &Node<'_>, r: &mut Reading<'_>) -> Option<Database> {
    let [url, refresh, listen, cache] =
        r.fields(node, "rules.database", ["url", "refresh", "listen", "cache"]);
    let listen = listen
        .and_then(|node| r.one_of(node, "rules.database.listen", &[("true", true), ("false", false)]))
        .unwrap_or(true);
    let refresh = refresh.and_then(|node| r.some_time(node, "rules.database.refresh"));
    let cache = cache.and_then(|node| r.name(node, "rules.database.cache"));
    let node = url?;
    // An empty one is no database, so that the environment may name one or none.
    let url = r.text(node, "rules.database.url").filter(|url| !url.is_empty())?;
    if !(url.starts_with("postgres://") || url.starts_with("postgresql://")) {
        let message = "expected postgres://user:password@host:port/database";
        r.fault(node.place, "rules.database.url", message);
        return None;
    }
    Some(Database {
        url: placed(node, Secret(url.into_owned())),
        refresh: refresh.unwrap_or(Duration::from_secs(30)),
        listen,
        cache: PathBuf::from(cache.as_deref().unwrap_or("rules.cache")),
    })
}

/// Rows that stand alone: one, a list, or a mapping with `rows`.
pub(in crate::config) fn rows_alone(root: &Node<'_>, r: &mut Reading<'_>) -> Vec<Row> {
    let list = match &root.kind {
        Kind::Mapping(entries) if entries.iter().any(|(key, _)| key.text == "rows") => {
            let [rows] = r.fields(root, "", ["rows"]);
            rows.map(|node| r.list(node, "rows")).unwrap_or_default()
        }
        Kind::Mapping(_) => std::slice::from_ref(root),
        _ => r.list(root, "rows"),
    };
    let mut rows = Vec::new();
    for (index, item) in list.iter().enumerate() {
        let says_whose = |fields: &[(Text<'_>, Node<'_>)]| {
            fields.iter().any(|(key, _)| matches!(&*key.text, "tenant" | "plan" | "route"))
        };
        // `*` has to be written: a forgotten name must not change everybody's limit.
        if matches!(&item.kind, Kind::Mapping(fields) if !says_whose(fields)) {
            let message = "expected a tenant, a plan or a route; * is any";
            r.fault(item.place, &format!("rules.rows[{index}]"), message);
        }
        rows.extend(row_alone(item, index, r));
    }
    rows
}

/// One of `rules.rows`.
pub(in crate::config) fn row(item: &Node<'_>, index: usize, r: &mut Reading<'_>) -> Option<Row> {
    let row = row_alone(item, index, r)?;
    if row.tenant.is_none() && row.plan.is_none() && row.route.is_none() {
        let message = "names neither a tenant nor a route; for all of both set rules.default";
        r.fault(item.place, &format!("rules.rows[{index}]"), message);
        return None;
    }
    Some(row)
}

/// A row; for any tenant on any route as well, which is the default of a database.
fn row_alone(item: &Node<'_>, index: usize, r: &mut Reading<'_>) -> Option<Row> {
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
    let [
        tenant,
        plan,
        route,
        capacity,
        rate,
        on_store_failure,
        mode,
        enforce_percent,
        shards,
        candidate,
        valid_from,
        valid_until,
    ] = r.fields(
        item,
        field,
        [
            "tenant",
            "plan",
            "route",
            "capacity",
            "refill_per_second",
            "on_store_failure",
            "mode",
            "enforce_percent",
            "shards",
            "candidate",
            "valid_from",
            "valid_until",
        ],
    );
    let tenant = tenant.filter(|node| !r.is_word(node, "*")).map(|node| r.tenant(node, "tenant"));
    let route = route
        .filter(|node| !r.is_word(node, "*"))
        .map(|node| Some(placed(node, Arc::from(r.name(node, "route")?))));
    let limit = limit_of(item, capacity, rate, field, r);
    let plan_place = plan.map(|node| node.place);
    let plan = plan.map(|node| r.name(node, "plan"));
    if let (Some(place), Some(_)) = (plan_place, &tenant) {
        r.fault(place, "plan", "a row is for a tenant or for a plan, not for both");
    }
    let on_store_failure =
        on_store_failure.and_then(|node| r.one_of(node, "on_store_failure", &ON_STORE_FAILURE));
    let mode = mode.and_then(|node| r.one_of(node, "mode", &MODES)).unwrap_or_default();
    let enforce_percent = enforce_percent.map_or(100, |node| percent_of(node, "enforce_percent", r));
    let candidate = candidate.and_then(|node| {
        let [capacity, rate] = r.fields(node, "candidate", ["capacity", "refill_per_second"]);
        limit_of(node, capacity, rate, "candidate", r)
    });
    let valid_from = valid_from.and_then(|node| r.moment(node, "valid_from"));
    let valid_until = valid_until.and_then(|node| Some(placed(node, r.moment(node, "valid_until")?)));
    if let Some(until) = valid_until.filter(|until| valid_from.is_some_and(|from| from >= until.value)) {
        r.fault(until.place, "valid_until", "expected a time after valid_from");
    }
    // `Some(None)` is a name that was written but could not be read: such a row must not widen.
    if tenant == Some(None) || plan == Some(None) || route == Some(None) {
        return None;
    }
    let limit = limit?;
    let shards = shards.map_or(1, |node| shards_of(node, limit.value.capacity(), candidate.is_some(), r));
    let terms = Terms {
        limit: limit.value,
        on_store_failure,
        mode,
        enforce_percent,
        shards,
        candidate: candidate.map(|candidate| candidate.value),
        valid_from,
        valid_until: valid_until.map(|until| until.value),
    };
    Some(Row {
        place: item.place,
        tenant: tenant.flatten().map(Arc::from),
        plan: plan.flatten().map(Arc::from),
        route: route.flatten(),
        terms: Placed { value: Arc::new(terms), place: limit.place },
    })
}

/// The most buckets that one may be split over.
const MOST_SHARDS: u16 = 64;

fn shards_of(node: &Node<'_>, capacity: u64, has_candidate: bool, r: &mut Reading<'_>) -> u16 {
    let Some(number) = r.whole(node, "shards") else { return 1 };
    match u16::try_from(number) {
        Ok(shards @ 1..=MOST_SHARDS) if u64::from(shards) > capacity => {
            r.fault(node.place, "shards", format!("{shards} are more than the capacity {capacity}"));
        }
        Ok(2..) if has_candidate => {
            r.fault(node.place, "shards", "a rule with a candidate cannot have shards");
        }
        Ok(shards @ 1..=MOST_SHARDS) => return shards,
        _ => {
            let message = format!("expected a whole number from 1 to {MOST_SHARDS}, got {}", node.describe());
            r.fault(node.place, "shards", message);
        }
    }
    1
}

pub(super) fn percent_of(node: &Node<'_>, field: &str, r: &mut Reading<'_>) -> u8 {
    let percent = r.whole(node, field);
    match percent.map(u8::try_from) {
        Some(Ok(percent @ 0..=100)) => return percent,
        Some(_) => {
            let message = format!("expected a whole number from 0 to 100, got {}", node.describe());
            r.fault(node.place, field, message);
        }
        None => {}
    }
    100
}

pub(super) fn limit_of(
    parent: &Node<'_>,
    capacity: Option<&Node<'_>>,
    rate: Option<&Node<'_>>,
    field: &str,
    r: &mut Reading<'_>,
) -> Option<Placed<TokenBucket>> {
    let capacity_node = r.required(parent, &join(field, "capacity"), capacity);
    let rate_node = r.required(parent, &join(field, "refill_per_second"), rate);
    let capacity = capacity_node.and_then(|node| r.whole(node, &join(field, "capacity")));
    let rate = rate_node.and_then(|node| r.parsed::<Rate>(node, &join(field, "refill_per_second")));
    let (capacity_node, rate_node) = (capacity_node?, rate_node?);
    match TokenBucket::new(capacity?, rate?) {
        Ok(bucket) => Some(placed(capacity_node, bucket)),
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
