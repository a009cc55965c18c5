//! Where routes and rules come from. For now a file.

pub mod file;

pub use file::ReadError;

use crate::config::fault::Fault;
use crate::config::{self, Config, env};
use crate::snapshot::Snapshot;
use crate::store::redis::RedisStore;

/// From the text of a configuration to what is served; the same for `check`, the start and a reload.
///
/// # Errors
/// Every fault, in the order of the file.
pub fn load(text: &str, lookup: env::Lookup<'_>, revision: u64) -> Result<(Config, Snapshot), Vec<Fault>> {
    let (config, faults) = config::read_all(text, lookup);
    build(config, faults, revision)
}

/// [`load`] while a gateway runs that was started with `running`. What the names of buckets are made
/// of stays as it was: another prefix or secret would refill every bucket.
///
/// # Errors
/// Every fault, in the order of the file.
pub fn load_again(
    text: &str,
    lookup: env::Lookup<'_>,
    revision: u64,
    running: &Config,
) -> Result<(Config, Snapshot), Vec<Fault>> {
    let (config, faults) = config::read_all(text, lookup);
    let mut served = config.clone();
    if let Some(served) = &mut served {
        served.store.key_prefix = running.store.key_prefix.clone();
        served.identity.hash_secret = running.identity.hash_secret.clone();
    }
    let (_, snapshot) = build(served, faults, revision)?;
    config.map(|config| (config, snapshot)).ok_or_else(Vec::new)
}

fn build(
    config: Option<Config>,
    mut faults: Vec<Fault>,
    revision: u64,
) -> Result<(Config, Snapshot), Vec<Fault>> {
    if let Some(config) = config {
        if let Some(redis) = &config.store.redis
            && let Err(error) = RedisStore::check_url(&redis.url.value.0)
        {
            faults.push(Fault::new(redis.url.place, "store.redis.url", error.to_string()));
        }
        match Snapshot::build(&config, revision) {
            Err(more) => faults.extend(more),
            Ok(snapshot) if faults.is_empty() => return Ok((config, snapshot)),
            Ok(_) => {}
        }
    }
    faults.sort();
    faults.dedup();
    Err(faults)
}
