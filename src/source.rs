//! Where routes and rules come from: a file, and a PostgreSQL whose last good rules are kept on disk.

pub mod cache;
pub mod certificates;
pub mod file;
pub mod postgres;

use certificates::Certificates;
pub use file::ReadError;
use serde_json::{Value, json};

use crate::book::Book;
use crate::config::fault::Fault;
use crate::config::{self, Config, Mode, Row, Terms, env};
use crate::limit::token_bucket::TokenBucket;
use crate::snapshot::Snapshot;
use crate::store::redis::RedisStore;

/// What a configuration says, ready to be served.
#[derive(Debug)]
pub struct Loaded {
    /// The configuration.
    pub config: Config,
    /// Its routes and rules, with those of the database.
    pub snapshot: Snapshot,
    /// The certificates of its listeners.
    pub certificates: Certificates,
}

/// From the text of a configuration to what is served; the same for `check`, the start and a reload.
///
/// # Errors
/// Every fault, in the order of the file.
pub fn load(text: &str, lookup: env::Lookup<'_>) -> Result<Loaded, Vec<Fault>> {
    let (config, faults) = config::read_all(text, lookup);
    build(config, faults, &Book::default(), 1)
}

/// [`load`] while a gateway runs that was started with `running` and has `book` from its database. What the names of buckets are made
/// of stays as it was: another prefix or secret would refill every bucket.
///
/// # Errors
/// Every fault, in the order of the file.
pub fn load_again(
    text: &str,
    lookup: env::Lookup<'_>,
    book: &Book,
    revision: u64,
    running: &Config,
) -> Result<Loaded, Vec<Fault>> {
    let (mut config, faults) = config::read_all(text, lookup);
    let names_of = |config: &Config| (config.store.key_prefix.clone(), config.identity.hash_secret.clone());
    let mut written = None;
    if let Some(config) = &mut config {
        written = Some((names_of(config), config.identity.keys));
        (config.store.key_prefix, config.identity.hash_secret) = names_of(running);
        // Without a database behind it nobody's key would be known.
        if running.rules.database.is_none() {
            config.identity.keys = running.identity.keys;
        }
    }
    let mut loaded = build(config, faults, book, revision)?;
    if let Some((names, keys)) = written {
        (loaded.config.store.key_prefix, loaded.config.identity.hash_secret) = names;
        loaded.config.identity.keys = keys;
    }
    Ok(loaded)
}

/// The row that a JSON object says, read like one of a configuration, so that the same is right here and
/// there.
///
/// # Errors
/// Every fault, as one text.
pub fn row_from_json(row: &Value) -> Result<Row, String> {
    match config::read_rows(&row.to_string(), &|_| None) {
        Ok(rows) => rows.into_iter().next().ok_or_else(|| "expected one row".into()),
        Err(faults) => {
            let faults = faults.iter().map(|fault| format!("{}: {}", fault.field, fault.message));
            Err(faults.collect::<Vec<_>>().join("; ").replace("rules.rows[0].", ""))
        }
    }
}

/// Writes terms into the fields of a row, as they are written in a configuration: what is as it is by
/// default is left out.
pub fn describe(terms: &Terms, row: &mut Value) {
    let numbers = |limit: &TokenBucket| {
        let rate = match limit.rate().per_seconds() {
            Some((tokens, 1)) => json!(tokens),
            Some((tokens, seconds)) => json!(format!("{tokens}/{seconds}s")),
            None => json!(limit.rate().to_string()),
        };
        (json!(limit.capacity()), rate)
    };
    (row["capacity"], row["refill_per_second"]) = numbers(&terms.limit);
    if terms.mode != Mode::Enforce {
        row["mode"] = terms.mode.label().into();
    }
    if terms.enforce_percent != 100 {
        row["enforce_percent"] = terms.enforce_percent.into();
    }
    if let Some(word) = terms.on_store_failure {
        row["on_store_failure"] = word.label().into();
    }
    if terms.shards != 1 {
        row["shards"] = terms.shards.into();
    }
    if let Some(candidate) = &terms.candidate {
        let (capacity, rate) = numbers(candidate);
        row["candidate"] = json!({ "capacity": capacity, "refill_per_second": rate });
    }
    for (name, moment) in [("valid_from", terms.valid_from), ("valid_until", terms.valid_until)] {
        if let Some(moment) = moment {
            row[name] = moment.to_rfc3339().into();
        }
    }
}

fn build(
    config: Option<Config>,
    mut faults: Vec<Fault>,
    book: &Book,
    revision: u64,
) -> Result<Loaded, Vec<Fault>> {
    if let Some(config) = config {
        if let Some(redis) = &config.store.redis
            && let Err(error) = RedisStore::check(redis)
        {
            faults.push(error.into());
        }
        if let Some(database) = &config.rules.database
            && let Err(error) = postgres::check_url(&database.url.value)
        {
            faults.push(Fault::new(database.url.place, "rules.database.url", error.to_string()));
        }
        let certificates = Certificates::load(&config.listeners).map_err(|more| faults.extend(more));
        let snapshot = Snapshot::build(&config, book, revision).map_err(|more| faults.extend(more));
        if let (Ok(certificates), Ok(snapshot), true) = (certificates, snapshot, faults.is_empty()) {
            return Ok(Loaded { config, snapshot, certificates });
        }
    }
    faults.sort();
    faults.dedup();
    Err(faults)
}
