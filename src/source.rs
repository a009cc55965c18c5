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
    let (config, mut faults) = config::read_all(text, lookup);
    if let Some(config) = &config {
        if let Some(redis) = &config.store.redis
            && let Err(error) = RedisStore::check_url(&redis.url.value.0)
        {
            faults.push(Fault::new(redis.url.place, "store.redis.url", error.to_string()));
        }
        match Snapshot::build(config, revision) {
            Err(more) => faults.extend(more),
            Ok(snapshot) if faults.is_empty() => return Ok((config.clone(), snapshot)),
            Ok(_) => {}
        }
    }
    faults.sort();
    faults.dedup();
    Err(faults)
}
