//! Rows as the database writes them, and what they mean.

use std::sync::Arc;

use sqlx::postgres::PgRow;
use sqlx::{Row as _, ValueRef as _};

use super::DatabaseError;
use crate::book::{BookRow, Change, Holder, KeyRecord, RowId, TenantRecord};
use crate::clock::Timestamp;
use crate::config::{Mode, OnStoreFailure, Terms};
use crate::key::hex;
use crate::limit::rate::Rate;
use crate::limit::token_bucket::TokenBucket;

/// The tables.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Table {
    /// `rate_limit_rule`.
    Rules,
    /// `plan_rules`.
    PlanRules,
    /// `tenants`.
    Tenants,
    /// `api_keys`.
    Keys,
}

impl Table {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::Rules, Self::PlanRules, Self::Tenants, Self::Keys];

    /// Its name.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Rules => "rate_limit_rule",
            Self::PlanRules => "plan_rules",
            Self::Tenants => "tenants",
            Self::Keys => "api_keys",
        }
    }

    /// What is selected of it. Named one by one: a newer schema may have more.
    pub(super) fn select(self) -> String {
        let rule = |holder: &str| {
            format!(
                "SELECT id, {holder}, route_id, capacity, refill_per_second, per_seconds, mode, enforce_percent,
                 on_store_failure, candidate_capacity, candidate_refill_per_second, candidate_per_seconds,
                 {}, {}, shards FROM {}",
                micros("valid_from"),
                micros("valid_until"),
                self.name()
            )
        };
        match self {
            Self::Rules => rule("tenant_id"),
            Self::PlanRules => rule("plan"),
            Self::Tenants => "SELECT id, plan, status FROM tenants".into(),
            // A revoked key is no key.
            Self::Keys => {
                "SELECT id, encode(key_hash, 'hex'), tenant FROM (SELECT * FROM api_keys WHERE revoked_at IS NULL) api_keys".into()
            }
        }
    }
}

/// A time as microseconds since 1970, whatever can be written into the column: `infinity` is later than
/// all, and what lies before 1970 is 0.
fn micros(column: &str) -> String {
    format!(
        "CASE WHEN {column} IS NULL THEN NULL WHEN {column} < '1970-01-01' THEN 0
              WHEN {column} < '9999-12-31' THEN floor(extract(epoch FROM {column}) * 1000000)::bigint
              ELSE 9223372036854775807 END"
    )
}

/// The columns of one row as text.
pub type RawRow = Vec<Option<String>>;

pub(super) fn raw(row: &PgRow) -> Result<RawRow, DatabaseError> {
    let text = |index| {
        let value = row.try_get_raw(index).map_err(|error| DatabaseError::Failed(error.to_string()))?;
        if value.is_null() {
            return Ok(None);
        }
        let text = value.as_str().map_err(|error| DatabaseError::Failed(error.to_string()))?;
        Ok(Some(text.to_owned()))
    };
    (0..row.len()).map(text).collect()
}

/// What a row says. An error is a row that is nobody's: one without an id, or a key that is none.
pub fn change(table: Table, raw: &RawRow) -> Result<Change, String> {
    let column = |index: usize| raw.get(index).and_then(Option::as_deref);
    let id = || column(0).and_then(|id| id.parse().ok());
    let change = match table {
        Table::Rules | Table::PlanRules => id().map(|id| {
            let who = column(1).filter(|who| !who.is_empty());
            let (id, holder) = match (table, who) {
                (Table::PlanRules, plan) => (RowId::Plan(id), Holder::Plan(plan.unwrap_or_default().into())),
                (_, Some("*")) => (RowId::Rule(id), Holder::Anyone),
                (_, tenant) => (RowId::Rule(id), Holder::Tenant(tenant.unwrap_or_default().into())),
            };
            let route = column(2).filter(|route| *route != "*").map(Arc::from);
            let terms = match (who, column(2)) {
                (Some(_), Some(_)) => terms(&column),
                _ => Err("expected a tenant or plan, and a route; * is any".into()),
            };
            Change::Row(id, Some(BookRow { holder, route, terms: terms.map(Arc::new).map_err(Arc::from) }))
        }),
        Table::Tenants => column(0).map(|name| {
            let record =
                TenantRecord { plan: column(1).map(Arc::from), suspended: column(2) == Some("suspended") };
            Change::Tenant(name.into(), Some(record))
        }),
        Table::Keys => id().and_then(|id| {
            let hash = unhex(column(1)?)?;
            Some(Change::Key(id, Some(KeyRecord { hash, tenant: column(2)?.into() })))
        }),
    };
    change.ok_or_else(|| {
        format!("row {} of {} makes no sense", column(0).unwrap_or("without id"), table.name())
    })
}

/// What is gone with the row `id` of a table.
pub(super) fn gone(table: Table, id: &str) -> Option<Change> {
    let number = || id.parse().ok();
    match table {
        Table::Rules => Some(Change::Row(RowId::Rule(number()?), None)),
        Table::PlanRules => Some(Change::Row(RowId::Plan(number()?), None)),
        Table::Tenants => Some(Change::Tenant(id.into(), None)),
        Table::Keys => Some(Change::Key(number()?, None)),
    }
}

fn terms<'r>(column: &impl Fn(usize) -> Option<&'r str>) -> Result<Terms, String> {
    let limit = limit(column, [3, 4, 5], "")?;
    let candidate =
        column(9).is_some().then(|| self::limit(column, [9, 10, 11], "candidate_")).transpose()?;
    let mode = match column(6) {
        Some("enforce") => Mode::Enforce,
        Some("shadow") => Mode::Shadow,
        Some("off") => Mode::Off,
        other => return Err(format!("mode: expected enforce, shadow or off, got {}", shown(other))),
    };
    let percent = column(7).and_then(|percent| percent.parse().ok()).filter(|percent| *percent <= 100);
    let enforce_percent = percent.ok_or_else(|| {
        format!("enforce_percent: expected a whole number from 0 to 100, got {}", shown(column(7)))
    })?;
    let on_store_failure = match column(8) {
        None => None,
        Some("local") => Some(OnStoreFailure::Local),
        Some("allow") => Some(OnStoreFailure::Allow),
        Some("deny") => Some(OnStoreFailure::Deny),
        other => {
            return Err(format!("on_store_failure: expected local, allow or deny, got {}", shown(other)));
        }
    };
    // What was kept on disk by a version without shards does not have them.
    let shards = column(14).map_or(Some(1), |shards| shards.parse().ok());
    let shards = shards.filter(|shards| (1..=64).contains(shards) && u64::from(*shards) <= limit.capacity());
    let shards = shards.ok_or_else(|| {
        format!("shards: expected a whole number from 1 to 64 and to the capacity, got {}", shown(column(14)))
    })?;
    if shards > 1 && candidate.is_some() {
        return Err("shards: a rule with a candidate cannot have shards".into());
    }
    let moment = |index| column(index).and_then(|micros| micros.parse().ok()).map(Timestamp::from_micros);
    Ok(Terms {
        limit,
        on_store_failure,
        mode,
        enforce_percent,
        shards,
        candidate,
        valid_from: moment(12),
        valid_until: moment(13),
    })
}

fn limit<'r>(
    column: &impl Fn(usize) -> Option<&'r str>,
    [capacity, tokens, seconds]: [usize; 3],
    prefix: &str,
) -> Result<TokenBucket, String> {
    let whole = |index: usize, name: &str| -> Result<i64, String> {
        let number = column(index).and_then(|text| text.parse().ok()).filter(|number| *number > 0);
        number.ok_or_else(|| {
            format!("{prefix}{name}: expected a whole number above 0, got {}", shown(column(index)))
        })
    };
    let capacity = whole(capacity, "capacity")?.cast_unsigned();
    let rate = Rate::in_seconds(whole(tokens, "refill_per_second")?, whole(seconds, "per_seconds")?)
        .map_err(|error| format!("{prefix}refill_per_second: {error}"))?;
    let bucket =
        TokenBucket::new(capacity, rate).map_err(|error| format!("{prefix}capacity or rate: {error}"))?;
    Ok(bucket)
}

fn shown(value: Option<&str>) -> String {
    value.map_or("nothing".into(), |value| format!("`{}`", value.chars().take(40).collect::<String>()))
}

fn unhex(text: &str) -> Option<[u8; 32]> {
    let mut bytes = [0; 32];
    if text.len() != 64 || !text.is_ascii() {
        return None;
    }
    for (index, byte) in bytes.iter_mut().enumerate() {
        *byte = u8::from_str_radix(text.get(index * 2..index * 2 + 2)?, 16).ok()?;
    }
    Some(bytes)
}

/// A row as [`change`] reads it: what is kept on disk.
pub(in crate::source) fn columns(change: &Change) -> Option<(Table, RawRow)> {
    let some = |text: &str| Some(text.to_owned());
    match change {
        Change::Row(id, Some(row)) => {
            let terms = row.terms.as_ref().ok()?;
            let (table, id) = match id {
                RowId::Rule(id) => (Table::Rules, id),
                RowId::Plan(id) => (Table::PlanRules, id),
            };
            let who = match &row.holder {
                Holder::Tenant(name) | Holder::Plan(name) => name,
                Holder::Anyone => "*",
            };
            let limit = &terms.limit;
            let (tokens, seconds) = limit.rate().per_seconds()?;
            let mut columns = vec![
                Some(id.to_string()),
                some(who),
                some(row.route.as_deref().unwrap_or("*")),
                Some(limit.capacity().to_string()),
                Some(tokens.to_string()),
                Some(seconds.to_string()),
                some(terms.mode.label()),
                Some(terms.enforce_percent.to_string()),
                terms.on_store_failure.map(|word| word.label().to_owned()),
                None,
                None,
                some("1"),
                terms.valid_from.map(|moment| moment.as_micros().to_string()),
                terms.valid_until.map(|moment| moment.as_micros().to_string()),
                Some(terms.shards.to_string()),
            ];
            if let Some(candidate) = &terms.candidate {
                let (tokens, seconds) = candidate.rate().per_seconds()?;
                columns[9] = Some(candidate.capacity().to_string());
                columns[10] = Some(tokens.to_string());
                columns[11] = Some(seconds.to_string());
            }
            Some((table, columns))
        }
        Change::Tenant(name, Some(record)) => {
            let status = if record.suspended { "suspended" } else { "active" };
            Some((Table::Tenants, vec![some(name), record.plan.as_deref().map(str::to_owned), some(status)]))
        }
        Change::Key(id, Some(key)) => {
            Some((Table::Keys, vec![Some(id.to_string()), Some(hex(&key.hash)), some(&key.tenant)]))
        }
        Change::Row(_, None) | Change::Tenant(_, None) | Change::Key(_, None) => None,
    }
}
