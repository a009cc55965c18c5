//! What the commands on the database share: its address, a runtime, who it is.

use std::path::Path;

use anyhow::Context as _;

use crate::config::{self, Config, Database, env};
use crate::source;

/// The configuration, of which only the sections about the database need be right.
pub(super) fn config(path: &Path) -> anyhow::Result<Config> {
    let text = source::file::read(path).map_err(|error| anyhow::anyhow!("{error}"))?;
    config::read(&text, &env::process).map_err(|faults| {
        let faults: Vec<String> = faults.iter().map(|fault| format!("{}:{fault}", path.display())).collect();
        anyhow::anyhow!("{}", faults.join("\n"))
    })
}

/// The database that the configuration names.
pub(super) fn of(config: &Config, path: &Path) -> anyhow::Result<Database> {
    let missing = || format!("{}: rules.database.url is not set", path.display());
    config.rules.database.clone().with_context(missing)
}

/// Runs `work` to its end.
pub(super) fn block_on<T>(work: impl Future<Output = T>) -> anyhow::Result<T> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    Ok(runtime.block_on(work))
}

/// Who makes a change, as the versions tell it.
pub(super) fn who() -> String {
    let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    let user = env::process("USER").or_else(|| env::process("LOGNAME")).unwrap_or_else(|| "somebody".into());
    format!("{user}@{} (command line)", host.trim())
}
