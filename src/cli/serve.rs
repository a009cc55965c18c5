//! `tollgate serve`.

use std::path::Path;
use std::process::ExitCode;

use anyhow::Context as _;

use super::{EXIT_FAULTS, check};
use crate::config::env;
use crate::server::{self, Setup, StartError};
use crate::{logging, source};

pub(super) fn run(path: &Path) -> anyhow::Result<ExitCode> {
    // First of all: from here on SIGHUP does not kill, however long the rest takes.
    server::catch_hangups().context("cannot catch SIGHUP")?;
    if let Some(file) = env::process("SSL_CERT_FILE").filter(|file| !Path::new(file).is_file()) {
        anyhow::bail!("the environment variable SSL_CERT_FILE names {file}, which is no file");
    }
    let text = match source::file::read(path) {
        Ok(text) => text,
        Err(error) => {
            eprintln!("{error}");
            return Ok(EXIT_FAULTS.into());
        }
    };
    let loaded = match source::load(&text, &env::process) {
        Ok(loaded) => loaded,
        Err(faults) => {
            check::print_faults(path, &faults);
            return Ok(EXIT_FAULTS.into());
        }
    };
    drop(text);
    let config = &loaded.config;
    let log_level = logging::start(config.log.level, config.log.format);
    let addresses: Vec<String> =
        config.listeners.iter().map(|listener| listener.address.value.to_string()).collect();
    tracing::info!(
        traffic = addresses.join(", "),
        admin = %config.admin.address.value,
        routes = config.routes.len(),
        rows = loaded.snapshot.rows(),
        "starting"
    );
    match server::run(Setup { loaded, path: Some(path), log_level }) {
        Err(error @ (StartError::Bind { .. } | StartError::Resolve(_))) => {
            eprintln!("{}:{error}", path.display());
            Ok(ExitCode::FAILURE)
        }
        other => other.context("the gateway did not start").map(|()| ExitCode::SUCCESS),
    }
}
