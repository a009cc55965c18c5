//! The log: one line per event on standard output, JSON or text. The level can change while running;
//! lines of the access log pass at every level, for their share is set by itself.

use std::io;

use tracing::level_filters::LevelFilter;
use tracing_subscriber::Registry;
use tracing_subscriber::filter::Targets;
use tracing_subscriber::prelude::*;
use tracing_subscriber::reload;

use crate::config::{Level, LogFormat};

/// Changes the level while running.
#[derive(Clone)]
pub struct LogLevel(reload::Handle<Targets, Registry>);

impl LogLevel {
    /// From now on this level.
    pub fn set(&self, level: Level) {
        // Fails only when the process has no subscriber any more, and then nobody reads.
        let _ = self.0.reload(targets(level));
    }
}

/// Starts the log of this process. A second start, as in tests, is no error: the first one stays.
pub fn start(level: Level, format: LogFormat) -> LogLevel {
    let (filter, handle) = reload::Layer::new(targets(level));
    let lines = tracing_subscriber::fmt::layer().with_writer(io::stdout);
    let lines = match format {
        LogFormat::Json => lines.json().flatten_event(true).boxed(),
        LogFormat::Text => lines.with_ansi(false).boxed(),
    };
    let _ = tracing_subscriber::registry().with(filter).with(lines).try_init();
    LogLevel(handle)
}

fn targets(level: Level) -> Targets {
    let (own, frame) = match level {
        Level::Error => (LevelFilter::ERROR, LevelFilter::OFF),
        // Pingora logs what clients do (a reset, a bad head) as errors and warnings: the metrics
        // count those, the log need not.
        Level::Warn | Level::Info => {
            (if level == Level::Warn { LevelFilter::WARN } else { LevelFilter::INFO }, LevelFilter::OFF)
        }
        Level::Debug => (LevelFilter::DEBUG, LevelFilter::INFO),
    };
    Targets::new()
        .with_default(LevelFilter::WARN.min(own))
        .with_target("tollgate", own)
        .with_target("access", LevelFilter::INFO)
        .with_target("audit", LevelFilter::INFO)
        .with_target("pingora_core", frame)
        .with_target("pingora_proxy", frame)
}
