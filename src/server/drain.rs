//! Signals: SIGHUP reloads, SIGTERM ends the process as soon as nothing is in flight.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::time::Duration;

use async_trait::async_trait;
use pingora::server::ShutdownWatch;
use pingora::services::background::BackgroundService;
use prometheus::IntGauge;
use tokio::signal::unix::{SignalKind, signal};

use crate::limiter::Limiter;
use crate::reload::Reloader;

/// How often the requests in flight are counted during a drain.
const LOOK_EVERY: Duration = Duration::from_millis(20);

/// How often in a row there must be none: a request whose head is just being read is not counted yet.
const QUIET_LOOKS: u32 = 5;

/// How often is looked whether what was served before can be let go.
const SWEEP_EVERY: Duration = Duration::from_secs(1);

/// Reloads on SIGHUP; whose default would be to kill the process.
pub(super) struct Hangup {
    pub(super) reloader: Arc<Reloader>,
}

#[async_trait]
impl BackgroundService for Hangup {
    async fn start(&self, _shutdown: ShutdownWatch) {
        let mut hangups = match signal(SignalKind::hangup()) {
            Ok(hangups) => hangups,
            Err(error) => {
                tracing::error!(%error, "SIGHUP cannot be caught: there are no reloads by signal");
                return;
            }
        };
        loop {
            let reloader = Arc::clone(&self.reloader);
            let work = tokio::select! {
                told = hangups.recv() => match told {
                    // The result is logged and counted where it arises.
                    Some(()) => tokio::task::spawn_blocking(move || drop(reloader.reload())),
                    None => return,
                },
                () = tokio::time::sleep(SWEEP_EVERY) => tokio::task::spawn_blocking(move || reloader.sweep()),
            };
            let _ = work.await;
        }
    }
}

/// Tells the end once a shutdown has begun and nothing is in flight.
pub(super) struct Drain {
    pub(super) draining: Arc<AtomicBool>,
    pub(super) in_flight: IntGauge,
    pub(super) limiter: Arc<Limiter>,
    pub(super) ended: mpsc::Sender<Result<(), String>>,
}

#[async_trait]
impl BackgroundService for Drain {
    async fn start(&self, mut shutdown: ShutdownWatch) {
        while !*shutdown.borrow() {
            if shutdown.changed().await.is_err() {
                return;
            }
        }
        self.draining.store(true, Ordering::Relaxed);
        tracing::info!(in_flight = self.in_flight.get(), "shutting down when these requests have ended");
        let mut quiet = 0;
        while quiet < QUIET_LOOKS {
            quiet = if self.in_flight.get() == 0 { quiet + 1 } else { 0 };
            tokio::time::sleep(LOOK_EVERY).await;
        }
        self.limiter.carry_permits().await;
        self.limiter.give_back().await;
        if self.limiter.debt_count() > 0 {
            // One last try: what a gateway owes dies with it.
            self.limiter.recover().await;
            let keys = self.limiter.debt_count();
            if keys > 0 {
                tracing::warn!(keys, "ending with debts that the store was not told of");
            }
        }
        let _ = self.ended.send(Ok(()));
    }
}
