//! What is decided without the store: each rule's `on_store_failure`.
//!
//! `local` decides on a bucket in memory with this gateway's share of the limit: capacity and rate
//! divided by the number of gateways, at least one token. All gateways together then admit no more
//! than the limit (plus one token a gateway where the capacity is below their number).

use std::sync::Arc;

use crate::config::OnStoreFailure;
use crate::decision::{Basis, Decision};
use crate::limit::{Outcome, Verdict};
use crate::metrics::Metrics;
use crate::rule::{Check, Checks, Verdicts};
use crate::store::memory::MemoryStore;

/// Decides while the store does not.
#[derive(Debug)]
pub struct Fallback {
    memory: Arc<MemoryStore>,
    gateways: u32,
    metrics: Metrics,
}

impl Fallback {
    /// A fallback on buckets in `memory`, for one of `gateways`.
    pub fn new(memory: Arc<MemoryStore>, gateways: u32, metrics: Metrics) -> Self {
        Self { memory, gateways, metrics }
    }

    /// Decides all checks of one request: all of them take, or none does.
    pub fn decide(&self, checks: &Checks) -> Decision {
        let decision = if checks.iter().any(|check| check.on_store_failure == OnStoreFailure::Deny) {
            Decision::unavailable()
        } else {
            Decision::from_verdicts(Basis::Fallback, self.verdicts(checks))
        };
        for check in checks {
            let labels = [check.rule.name(), mode(check), decision.admission.label()];
            self.metrics.fallback_decisions.with_label_values(&labels).inc();
        }
        decision
    }

    fn verdicts(&self, checks: &Checks) -> Verdicts {
        let local: Checks = checks
            .iter()
            .filter(|check| check.on_store_failure == OnStoreFailure::Local)
            .map(|check| Check { limit: check.limit.share(self.gateways, check.cost), ..check.clone() })
            .collect();
        let mut decided = self.memory.take(&local).into_iter();
        let verdict = |check: &Check| match check.on_store_failure {
            OnStoreFailure::Local => decided.next().unwrap_or(open(check)),
            OnStoreFailure::Allow | OnStoreFailure::Deny => open(check),
        };
        checks.iter().map(verdict).collect()
    }
}

/// What a rule on `allow` says: everything fits, nothing is counted.
fn open(check: &Check) -> Verdict {
    Verdict { outcome: Outcome::Allowed, remaining: check.limit.capacity(), retry_after_ms: 0, reset_ms: 0 }
}

fn mode(check: &Check) -> &'static str {
    match check.on_store_failure {
        OnStoreFailure::Local => "local",
        OnStoreFailure::Allow => "allow",
        OnStoreFailure::Deny => "deny",
    }
}
