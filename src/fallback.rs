//! What is decided without the store: each rule's `on_store_failure`.
//!
//! `local` decides on a bucket in memory with this gateway's share of the limit: capacity and rate
//! divided by the number of live gateways, room for at least one token. It begins at this gateway's
//! share of the level that the store told last. All gateways together so admit no more than the limit
//! (plus one token a gateway where the capacity is below their number).
//!
//! What is spent here is owed to the store. On the way back each gateway has it debited there once:
//! as much as it spent, but not more than is missing in its own bucket by then, for what has been
//! refilled meanwhile would have been refilled in the store as well.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use indexmap::IndexMap;

use crate::clock::Timestamp;
use crate::config::OnStoreFailure;
use crate::decision::{Admission, Basis, Decision};
use crate::key::Key;
use crate::limit::{Outcome, Verdict};
use crate::metrics::Metrics;
use crate::rule::{Check, Checks, Demand, Verdicts};
use crate::store::memory::MemoryStore;

/// Decides while the store does not.
#[derive(Debug)]
pub struct Fallback {
    memory: Arc<MemoryStore>,
    gateways: Arc<AtomicU32>,
    most_debts: usize,
    debts: Mutex<IndexMap<Key, Check>>,
    metrics: Metrics,
}

impl Fallback {
    /// A fallback on buckets in `memory`, for one of `gateways`, that remembers at most `most_debts`
    /// keys on which it owes.
    pub fn new(
        memory: Arc<MemoryStore>,
        gateways: Arc<AtomicU32>,
        most_debts: usize,
        metrics: Metrics,
    ) -> Self {
        Self { memory, gateways, most_debts, debts: Mutex::default(), metrics }
    }

    /// Decides all checks of one request: all of them take, or none does.
    pub fn decide(&self, checks: &Checks, now: Timestamp) -> Decision {
        let decision = if checks.iter().any(|check| check.on_store_failure == OnStoreFailure::Deny) {
            Decision::unavailable()
        } else {
            Decision::from_verdicts(Basis::Fallback, self.verdicts(checks, now))
        };
        if decision.admission == Admission::Admitted {
            self.owe(checks);
        }
        for check in checks {
            let labels = [check.rule.name(), mode(check), decision.admission.label()];
            self.metrics.fallback_decisions.with_label_values(&labels).inc();
        }
        decision
    }

    /// Notes the levels that the store has told, to begin at if it fails.
    pub fn learn(&self, checks: &Checks, verdicts: &Verdicts, now: Timestamp) {
        let gateways = self.gateways();
        for (check, verdict) in checks.iter().zip(verdicts) {
            let share = check.limit.share(gateways, check.cost);
            self.memory.set_level(&check.key, &share, verdict.remaining / u64::from(gateways), now);
        }
    }

    /// Takes what is owed out of the books, as debits for the store.
    pub fn take_debts(&self, now: Timestamp) -> Vec<Check> {
        let debts = std::mem::take(&mut *self.debts());
        let gateways = self.gateways();
        let debit = |owed: Check| {
            let share = owed.limit.share(gateways, 1);
            let ask = Check { limit: share, cost: 0, demand: Demand::Take, ..owed.clone() };
            let left = self.memory.take_at(&[ask], now).first().map_or(0, |verdict| verdict.remaining);
            let cost = owed.cost.min(share.capacity().saturating_sub(left));
            (cost > 0).then_some(Check { cost, ..owed })
        };
        debts.into_values().filter_map(debit).collect()
    }

    /// Gateways that share the limits now, as far as is known.
    pub fn gateways(&self) -> u32 {
        self.gateways.load(Ordering::Relaxed).max(1)
    }

    fn verdicts(&self, checks: &Checks, now: Timestamp) -> Verdicts {
        let gateways = self.gateways();
        let local: Checks = checks
            .iter()
            .filter(|check| check.on_store_failure == OnStoreFailure::Local)
            .map(|check| Check { limit: check.limit.share(gateways, check.cost), ..check.clone() })
            .collect();
        let mut decided = self.memory.take_at(&local, now).into_iter();
        let verdict = |check: &Check| match check.on_store_failure {
            OnStoreFailure::Local => decided.next().unwrap_or(open(check)),
            OnStoreFailure::Allow | OnStoreFailure::Deny => open(check),
        };
        checks.iter().map(verdict).collect()
    }

    fn owe(&self, checks: &Checks) {
        let mut debts = self.debts();
        for check in checks {
            if check.on_store_failure != OnStoreFailure::Local || check.cost == 0 {
                continue;
            }
            if let Some(owed) = debts.get_mut(&check.key) {
                owed.cost = owed.cost.saturating_add(check.cost);
                owed.limit = check.limit;
            } else if debts.len() < self.most_debts {
                debts.insert(check.key.clone(), Check { demand: Demand::Debit, ..check.clone() });
            } else {
                self.metrics.dropped_debits.inc();
            }
        }
    }

    fn debts(&self) -> MutexGuard<'_, IndexMap<Key, Check>> {
        self.debts.lock().unwrap_or_else(PoisonError::into_inner)
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
