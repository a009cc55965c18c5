//! `tollgate doctor`.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Context as _;
use clap::Args;

use super::{EXIT_FAULTS, check, say};
use crate::config::env;
use crate::source;
use crate::store::redis::examine::{Level, examine};

/// Looks a deployment over: what could make limits untrue, or slow. Exit code 1 with faults, 2 without a valid
/// configuration.
#[derive(Debug, Args)]
pub(super) struct Doctor {
    /// The configuration file.
    #[arg(long, value_name = "FILE", default_value = "conf/tollgate.yaml")]
    config: PathBuf,
    /// Writes nothing: leaves out the script, its latency and the memory of a bucket. Else some thousand buckets
    /// are made, which expire within seconds.
    #[arg(long)]
    read_only: bool,
}

impl Doctor {
    pub(super) fn run(&self) -> anyhow::Result<ExitCode> {
        let text = source::file::read(&self.config)?;
        let config = match source::load(&text, &env::process) {
            Ok(loaded) => loaded.config,
            Err(faults) => {
                check::print_faults(&self.config, &faults);
                return Ok(EXIT_FAULTS.into());
            }
        };
        for warning in &config.warnings {
            say!(
                "warning  {}:{}: {}: {}",
                self.config.display(),
                warning.place,
                warning.field,
                warning.message
            );
        }
        let Some(redis) = &config.store.redis else {
            say!("good     store: the memory of this process; nothing is shared with other gateways");
            return Ok(ExitCode::SUCCESS);
        };
        pingora::tls::install_default_crypto_provider();
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .context("cannot start a runtime")?;
        let findings = runtime.block_on(examine(redis, &config.store.key_prefix, !self.read_only));
        for finding in &findings {
            let level = match finding.level {
                Level::Good => "good   ",
                Level::Warning => "warning",
                Level::Fault => "fault  ",
            };
            say!("{level}  {}: {}", finding.node, finding.text);
        }
        let count = |level| findings.iter().filter(|finding| finding.level == level).count();
        let (warnings, faults) = (count(Level::Warning) + config.warnings.len(), count(Level::Fault));
        say!("{warnings} warnings, {faults} faults");
        Ok(if faults == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
    }
}
