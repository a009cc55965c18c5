//! The limiter: all checks of one request to one decision, whatever the store does.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::breaker::{Breaker, State};
use crate::clock::{Clock, Timestamp};
use crate::decision::{Basis, Decision};
use crate::fallback::Fallback;
use crate::metrics::Metrics;
use crate::rule::{Check, Checks};
use crate::store::{Store, StoreFault};

/// How often an open breaker is looked after.
const LOOK_EVERY: Duration = Duration::from_millis(50);

/// Debits in one call.
const DEBITS_PER_CALL: usize = 64;

/// Decides requests.
#[derive(Debug)]
pub struct Limiter {
    store: Arc<dyn Store>,
    outage: Option<Outage>,
    clock: Arc<dyn Clock>,
    metrics: Metrics,
    /// When the last store fault was logged; one a second says as much as a thousand.
    logged_at: AtomicU64,
}

/// What a limiter needs on a store that can fail.
#[derive(Debug)]
pub struct Outage {
    /// The circuit in front of the store.
    pub breaker: Breaker,
    /// What decides meanwhile.
    pub fallback: Fallback,
    /// A check that no request has: the way back begins with it.
    pub probe: Check,
}

impl Limiter {
    /// A limiter on `store`; without `outage` the store is one that cannot fail.
    pub fn new(
        store: Arc<dyn Store>,
        outage: Option<Outage>,
        clock: Arc<dyn Clock>,
        metrics: Metrics,
    ) -> Self {
        Self { store, outage, clock, metrics, logged_at: AtomicU64::new(0) }
    }

    /// Decides all checks of one request: all of them take, or none does. Never an error.
    pub async fn decide(&self, checks: &Checks) -> Decision {
        if checks.is_empty() {
            return Decision::no_rule();
        }
        let Some(Outage { breaker, fallback, .. }) = &self.outage else {
            return match self.store.acquire(checks).await {
                Ok(verdicts) => Decision::from_verdicts(Basis::Store, verdicts),
                Err(_) => Decision::unavailable(),
            };
        };
        let Some(call) = breaker.admit() else { return fallback.decide(checks, self.clock.now()) };
        let answer = self.store.acquire(checks).await;
        let now = self.clock.now();
        match answer {
            Ok(verdicts) => {
                call.answered(now);
                fallback.learn(checks, &verdicts, now);
                Decision::from_verdicts(Basis::Store, verdicts)
            }
            Err(fault) => {
                if fault.is_of_the_node() && call.failed(now) {
                    self.tell(State::Open, &fault.to_string());
                }
                self.note(&fault, now);
                fallback.decide(checks, now)
            }
        }
    }

    /// Looks after the breaker until the process ends.
    pub async fn keep_recovering(&self) {
        loop {
            tokio::time::sleep(LOOK_EVERY).await;
            self.recover().await;
        }
    }

    /// One step of the way back, if one is due: a probe, then what was spent meanwhile is debited,
    /// then requests are decided by the store again. In this order, so that recovery is no free burst.
    pub async fn recover(&self) {
        let Some(Outage { breaker, fallback, probe: check }) = &self.outage else { return };
        // Without a connection a probe could only fail, and make the next pause longer.
        if !self.store.is_up() {
            return;
        }
        let Some(probe) = breaker.probe(self.clock.now()) else { return };
        self.tell(State::HalfOpen, "the pause is over");
        let ask: Checks = std::iter::once(check.clone()).collect();
        if let Err(fault) = self.store.acquire(&ask).await {
            drop(probe);
            self.tell(State::Open, &fault.to_string());
            return;
        }
        // Requests go on spending here while the first debits are on their way; the second round takes
        // what they spent.
        for _ in 0..2 {
            if let Err(fault) = self.settle(fallback.take_debts(self.clock.now())).await {
                drop(probe);
                self.tell(State::Open, &fault.to_string());
                return;
            }
        }
        probe.close();
        self.tell(State::Closed, "the store answers");
    }

    /// Whether the store answers, as far as is known.
    pub fn store_is_up(&self) -> bool {
        self.store.is_up() && self.breaker_state() == State::Closed
    }

    /// The circuit in front of the store.
    pub fn breaker_state(&self) -> State {
        self.outage.as_ref().map_or(State::Closed, |outage| outage.breaker.state())
    }

    /// Gateways that share the limits, as far as is known; 1 where there is no store to share.
    pub fn gateways(&self) -> u32 {
        self.outage.as_ref().map_or(1, |outage| outage.fallback.gateways())
    }

    /// Debits in the store what was spent without it, each debit at most once: one whose outcome is
    /// unknown, and those behind it, are dropped and counted, never repeated.
    async fn settle(&self, debits: Vec<Check>) -> Result<(), StoreFault> {
        let mut left = debits.len();
        for debits in debits.chunks(DEBITS_PER_CALL) {
            let result = match self.debit(debits).await {
                // One key holds something else, and so none was debited: each for itself then.
                Err(fault) if !fault.is_of_the_node() => self.debit_one_by_one(debits).await,
                result => result,
            };
            if let Err(fault) = result {
                self.metrics.dropped_debits.inc_by(left as u64);
                return Err(fault);
            }
            left -= debits.len();
        }
        Ok(())
    }

    async fn debit_one_by_one(&self, debits: &[Check]) -> Result<(), StoreFault> {
        for debit in debits.chunks(1) {
            match self.debit(debit).await {
                Err(fault) if !fault.is_of_the_node() => self.metrics.dropped_debits.inc(),
                result => result?,
            }
        }
        Ok(())
    }

    async fn debit(&self, debits: &[Check]) -> Result<(), StoreFault> {
        self.store.acquire(&debits.into()).await?;
        self.metrics.debited_tokens.inc_by(debits.iter().map(|debit| debit.cost).sum());
        Ok(())
    }

    /// A line and a count for each transition of the breaker.
    fn tell(&self, to: State, cause: &str) {
        self.metrics.breaker_transitions.with_label_values(&[to.label()]).inc();
        self.metrics.breaker_state.set(to as i64);
        match to {
            State::Closed => tracing::info!(to = to.label(), cause, "store breaker"),
            State::Open | State::HalfOpen => tracing::warn!(to = to.label(), cause, "store breaker"),
        }
    }

    fn note(&self, fault: &StoreFault, now: Timestamp) {
        self.metrics.store_errors.with_label_values(&[fault.kind()]).inc();
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
