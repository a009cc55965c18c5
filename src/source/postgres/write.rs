//! Changes of rules, each in one transaction that tells who makes it and what it is.

mod history;
mod keys;

use serde_json::{Value, json};
use sqlx::postgres::{PgConnection, PgListener};
use sqlx::{Acquire as _, Executor as _, PgPool, Postgres, Row as _, Transaction};

use super::read::{self, Table};
use super::{DatabaseError, pool, quoted};
use crate::book::{Change, Holder};
use crate::config::{Row, Secret};
use crate::limit::token_bucket::TokenBucket;

/// Rows in one INSERT.
const ROWS_PER_INSERT: usize = 1_000;

/// Reads and changes the rules of one database.
#[derive(Clone, Debug)]
pub struct Writer {
    pool: PgPool,
}

/// Who changes something, and what it is; kept with the version.
#[derive(Clone, Debug)]
pub struct Author<'a> {
    /// Who.
    pub who: &'a str,
    /// What.
    pub what: &'a str,
}

/// The place of one rule: a tenant or a plan, and a route; `*` is any.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Address<'a> {
    /// The table.
    pub table: Table,
    /// The tenant or the plan.
    pub holder: &'a str,
    /// The route.
    pub route: &'a str,
}

/// What must be so for a change to be made.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Condition {
    /// The rule has one of these `ETag`s; `*` is any, but one.
    pub one_of: Option<Vec<String>>,
    /// There is no such rule yet.
    pub is_new: bool,
}

/// One rule as the database has it.
#[derive(Clone, Debug)]
pub struct Stored {
    /// What it says.
    pub rule: Value,
    /// Its `ETag`, in quotes.
    pub etag: String,
}

impl Address<'_> {
    fn column(&self) -> &'static str {
        if self.table == Table::PlanRules { "plan" } else { "tenant_id" }
    }

    fn condition(&self) -> String {
        format!("{} = {} AND route_id = {}", self.column(), quoted(self.holder), quoted(self.route))
    }
}

impl Writer {
    /// A writer to the database at `url`, which is not connected before it is needed.
    pub fn new(url: &Secret) -> Result<Self, DatabaseError> {
        Ok(Self { pool: pool(url, 2)? })
    }

    /// One rule.
    pub async fn get(&self, address: &Address<'_>) -> Result<Stored, DatabaseError> {
        let mut connection = self.connection().await?;
        let mut transaction = connection.begin().await?;
        let stored = stored(&mut transaction, address, "").await?;
        stored.ok_or_else(|| nothing_at(address))
    }

    /// All rules of the database, those of tenants before those of plans.
    pub async fn list(&self) -> Result<Vec<Value>, DatabaseError> {
        let mut connection = self.connection().await?;
        let mut transaction = connection.begin().await?;
        let mut rules = Vec::new();
        for (table, order) in [(Table::Rules, "tenant_id, route_id"), (Table::PlanRules, "plan, route_id")] {
            let sql = format!("{} ORDER BY {order}", table.select());
            for row in super::all(&mut transaction, &sql).await? {
                rules.push(rule_json(&read::change(table, &read::raw(&row)?)));
            }
        }
        Ok(rules)
    }

    /// Adds rules, or puts them in the place of those that are there. The version that this makes; none
    /// if nothing changes.
    pub async fn put(&self, rows: &[Row], author: &Author<'_>) -> Result<Option<i64>, DatabaseError> {
        let mut connection = self.connection().await?;
        let mut transaction = begin(&mut connection, author).await?;
        let mut rows: Vec<&Row> = rows.iter().collect();
        rows.sort_by_key(|row| key_of(row));
        if let Some(twice) = rows.windows(2).find(|pair| key_of(pair[0]) == key_of(pair[1])) {
            let message = format!(
                "{}: a second row for the same; the first one is at {}",
                twice[1].place, twice[0].place
            );
            return Err(DatabaseError::Invalid(message));
        }
        // One import at a time, and no other change between its parts.
        let lock = "LOCK TABLE rate_limit_rule, plan_rules IN SHARE ROW EXCLUSIVE MODE";
        super::run(&mut transaction, lock).await?;
        let (of_plans, of_tenants): (Vec<&Row>, Vec<&Row>) = rows.iter().partition(|row| row.plan.is_some());
        for (table, rows) in [(Table::Rules, of_tenants), (Table::PlanRules, of_plans)] {
            for rows in rows.chunks(ROWS_PER_INSERT) {
                keep_lasting(&mut transaction, table, rows).await?;
                super::run(&mut transaction, &insert(table, rows, false)?).await?;
            }
        }
        finish(transaction).await
    }

    /// [`Writer::put`] for one rule, on a condition; gives what is stored then.
    pub async fn put_if(
        &self,
        row: &Row,
        condition: &Condition,
        author: &Author<'_>,
    ) -> Result<Stored, DatabaseError> {
        let mut connection = self.connection().await?;
        let mut transaction = begin(&mut connection, author).await?;
        let address = address_of(row);
        expect(&mut transaction, &address, condition).await?;
        keep_lasting(&mut transaction, address.table, &[row]).await?;
        let sql = insert(address.table, &[row], condition.is_new)?;
        if super::run(&mut transaction, &sql).await? == 0 {
            return Err(DatabaseError::Changed("it is there already".into()));
        }
        let stored = stored(&mut transaction, &address, "").await?;
        transaction.commit().await?;
        stored.ok_or_else(|| nothing_at(&address))
    }

    /// Deletes a rule. The version that this makes.
    pub async fn delete(
        &self,
        address: &Address<'_>,
        condition: &Condition,
        author: &Author<'_>,
    ) -> Result<Option<i64>, DatabaseError> {
        let mut connection = self.connection().await?;
        let mut transaction = begin(&mut connection, author).await?;
        if condition.is_new {
            return Err(DatabaseError::Changed("a rule that is not there cannot be deleted".into()));
        }
        expect(&mut transaction, address, condition).await?;
        let sql = format!("DELETE FROM {} WHERE {}", address.table.name(), address.condition());
        let deleted = super::run(&mut transaction, &sql).await?;
        if deleted == 0 {
            return Err(nothing_at(address));
        }
        finish(transaction).await
    }

    /// A connection that bears notifications: behind a pooler it may be one on which somebody listens.
    async fn connection(&self) -> Result<PgListener, DatabaseError> {
        if self.pool.num_idle() == 0 {
            super::reach(&self.pool.connect_options()).await?;
        }
        let mut connection = PgListener::connect_with(&self.pool).await?;
        connection.ignore_pool_close_event(true);
        Ok(connection)
    }
}

/// Begins a change.
async fn begin<'c>(
    connection: &'c mut PgListener,
    author: &Author<'_>,
) -> Result<Transaction<'c, Postgres>, DatabaseError> {
    let mut transaction = connection.begin().await?;
    let sql = format!(
        "SET LOCAL statement_timeout = '60s';
         SELECT set_config('tollgate.who', {}, true), set_config('tollgate.what', {}, true)",
        quoted(author.who),
        quoted(author.what)
    );
    super::run(&mut transaction, &sql).await?;
    Ok(transaction)
}

/// Ends a change; the version that it has made.
async fn finish(mut transaction: Transaction<'_, Postgres>) -> Result<Option<i64>, DatabaseError> {
    let sql = "SELECT version FROM rule_versions WHERE xid = pg_current_xact_id_if_assigned() AND at = now()";
    let version = super::all(&mut transaction, sql).await?.pop();
    let version = version.map(|row| row.try_get(0)).transpose()?;
    transaction.commit().await?;
    Ok(version)
}

async fn stored(
    connection: &mut PgConnection,
    address: &Address<'_>,
    lock: &str,
) -> Result<Option<Stored>, DatabaseError> {
    let sql = format!(
        "SELECT left(md5((to_jsonb(r) - 'updated_at')::text), 16) FROM {} r WHERE {} {lock}",
        address.table.name(),
        address.condition()
    );
    let Some(row) = super::all(connection, &sql).await?.pop() else { return Ok(None) };
    let etag: String = row.try_get(0)?;
    let sql = format!("{} WHERE {}", address.table.select(), address.condition());
    let row = connection.fetch_one(&*sql).await?;
    let rule = rule_json(&read::change(address.table, &read::raw(&row)?));
    Ok(Some(Stored { rule, etag: format!("\"{etag}\"") }))
}

/// Fails if the rule is not as the condition says.
async fn expect(
    connection: &mut PgConnection,
    address: &Address<'_>,
    condition: &Condition,
) -> Result<(), DatabaseError> {
    let Some(one_of) = &condition.one_of else { return Ok(()) };
    match stored(connection, address, "FOR UPDATE").await? {
        Some(stored) if one_of.iter().any(|etag| *etag == "*" || *etag == stored.etag) => Ok(()),
        Some(stored) => Err(DatabaseError::Changed(format!("its ETag is now {}", stored.etag))),
        None => Err(DatabaseError::Changed("it is not there".into())),
    }
}

/// Fails where a rule for a time would take the place of one that lasts: at its end there would be none.
async fn keep_lasting(
    connection: &mut PgConnection,
    table: Table,
    rows: &[&Row],
) -> Result<(), DatabaseError> {
    for row in rows.iter().filter(|row| row.terms.value.valid_from.or(row.terms.value.valid_until).is_some())
    {
        let address = address_of(row);
        let sql = format!(
            "SELECT FROM {} WHERE {} AND valid_from IS NULL AND valid_until IS NULL",
            table.name(),
            address.condition()
        );
        if !super::all(connection, &sql).await?.is_empty() {
            return Err(DatabaseError::Invalid(format!(
                "valid_from, valid_until: the rule for {} on {} lasts, and would be lost; give it to the tenant on \
                 any route (*) or to its plan first, and delete it here",
                address.holder, address.route
            )));
        }
    }
    Ok(())
}

fn key_of(row: &Row) -> (bool, &str, &str) {
    let address = address_of(row);
    (address.table == Table::PlanRules, address.holder, address.route)
}

fn nothing_at(address: &Address<'_>) -> DatabaseError {
    DatabaseError::NotFound(format!(
        "there is no rule for {} on {} in the database",
        address.holder, address.route
    ))
}

/// Where a row belongs.
fn address_of(row: &Row) -> Address<'_> {
    let (table, holder) = match (&row.plan, &row.tenant) {
        (Some(plan), _) => (Table::PlanRules, &**plan),
        (None, tenant) => (Table::Rules, tenant.as_deref().unwrap_or("*")),
    };
    Address { table, holder, route: row.route.as_ref().map_or("*", |route| &route.value) }
}

/// The statement that adds rows; those that are there are changed, or left if `only_new`.
fn insert(table: Table, rows: &[&Row], only_new: bool) -> Result<String, DatabaseError> {
    const COLUMNS: [&str; 12] = [
        "capacity",
        "refill_per_second",
        "per_seconds",
        "mode",
        "enforce_percent",
        "on_store_failure",
        "candidate_capacity",
        "candidate_refill_per_second",
        "candidate_per_seconds",
        "valid_from",
        "valid_until",
        "shards",
    ];
    let holder = if table == Table::PlanRules { "plan" } else { "tenant_id" };
    let values = rows.iter().map(|row| values(row)).collect::<Result<Vec<_>, _>>()?;
    let updates: Vec<String> = COLUMNS.iter().map(|name| format!("{name} = EXCLUDED.{name}")).collect();
    Ok(format!(
        "INSERT INTO {} ({holder}, route_id, {}) VALUES {} ON CONFLICT ({holder}, route_id) {}",
        table.name(),
        COLUMNS.join(", "),
        values.join(", "),
        if only_new { "DO NOTHING".into() } else { format!("DO UPDATE SET {}", updates.join(", ")) }
    ))
}

fn values(row: &Row) -> Result<String, DatabaseError> {
    let terms = &row.terms.value;
    let address = address_of(row);
    let numbers = |limit: &TokenBucket| {
        let (tokens, seconds) = limit.rate().per_seconds().ok_or_else(|| {
            DatabaseError::Invalid(format!(
                "the rate of {} cannot be written in whole seconds",
                address.holder
            ))
        })?;
        Ok::<_, DatabaseError>(format!("{}, {tokens}, {seconds}", limit.capacity()))
    };
    let moment = |moment: Option<crate::clock::Timestamp>| {
        moment.map_or("NULL".into(), |moment| quoted(&moment.to_rfc3339()))
    };
    Ok(format!(
        "({}, {}, {}, {}, {}, {}, {}, {}, {}, {})",
        quoted(address.holder),
        quoted(address.route),
        numbers(&terms.limit)?,
        quoted(terms.mode.label()),
        terms.enforce_percent,
        terms.on_store_failure.map_or("NULL".into(), |word| quoted(word.label())),
        terms.candidate.as_ref().map_or(Ok("NULL, NULL, 1".into()), numbers)?,
        moment(terms.valid_from),
        moment(terms.valid_until),
        terms.shards,
    ))
}

/// A rule as the API and the command line show it: as a row of the configuration is written.
fn rule_json(change: &Result<Change, String>) -> Value {
    let Ok(Change::Row(_, Some(row))) = change else { return json!({ "fault": "makes no sense" }) };
    let mut rule = match &row.holder {
        Holder::Plan(plan) => json!({ "plan": plan }),
        Holder::Tenant(tenant) => json!({ "tenant": tenant }),
        Holder::Anyone => json!({ "tenant": "*" }),
    };
    rule["route"] = row.route.as_deref().unwrap_or("*").into();
    match &row.terms {
        Ok(terms) => crate::source::describe(terms, &mut rule),
        Err(reason) => rule["fault"] = (**reason).into(),
    }
    rule
}
