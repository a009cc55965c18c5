//! The limiter: all checks of one request to one decision, whatever the store does.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::clock::{Clock, Timestamp};
use crate::decision::{Basis, Decision};
use crate::fallback::Fallback;
use crate::metrics::Metrics;
use crate::rule::Checks;
use crate::store::{Store, StoreFault};

/// Decides requests.
#[derive(Debug)]
pub struct Limiter {
    store: Arc<dyn Store>,
    fallback: Fallback,
    clock: Arc<dyn Clock>,
    metrics: Metrics,
    /// When the last store fault was logged; one a second says as much as a thousand.
    logged_at: AtomicU64,
}

impl Limiter {
    /// A limiter on `store`, with `fallback` for when it fails.
    pub fn new(store: Arc<dyn Store>, fallback: Fallback, clock: Arc<dyn Clock>, metrics: Metrics) -> Self {
        Self { store, fallback, clock, metrics, logged_at: AtomicU64::new(0) }
    }

    /// Decides all checks of one request: all of them take, or none does. Never an error.
    pub async fn decide(&self, checks: &Checks) -> Decision {
        if checks.is_empty() {
            return Decision::no_rule();
        }
        match self.store.acquire(checks).await {
            Ok(verdicts) => Decision::from_verdicts(Basis::Store, verdicts),
            Err(fault) => {
                self.note(&fault);
                self.fallback.decide(checks)
            }
        }
    }

    /// Whether the store answers, as far as is known.
    pub fn store_is_up(&self) -> bool {
        self.store.is_up()
    }

    fn note(&self, fault: &StoreFault) {
        self.metrics.store_errors.with_label_values(&[fault.kind()]).inc();
        let now = self.clock.now();
        let logged_at = self.logged_at.load(Ordering::Relaxed);
        let quiet_for = now.micros_since(Timestamp::from_micros(logged_at));
        let mine = quiet_for >= 1_000_000
            && self
                .logged_at
                .compare_exchange(logged_at, now.as_micros(), Ordering::Relaxed, Ordering::Relaxed)
                .is_ok();
        if mine {
            tracing::warn!(kind = fault.kind(), %fault, "no decision from the store: rules fall back");
        }
    }
}

#[cfg(test)]
mod tests;
