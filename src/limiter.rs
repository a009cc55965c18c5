//! The limiter: all checks of one request to one decision, whatever the store does.

mod upkeep;

use std::hash::{BuildHasher as _, RandomState};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use smallvec::{SmallVec, smallvec};

use crate::breaker::{Breaker, Call, State};
use crate::clock::{Clock, Timestamp};
use crate::decision::{Basis, Decision};
use crate::denials::Denials;
use crate::fallback::Fallback;
use crate::hot_keys::{Heat, HotKeys};
use crate::key::Key;
use crate::leases::Leases;
use crate::metrics::Metrics;
use crate::permits::{Guard, Permits};
use crate::rule::{Check, Checks};
use crate::store::{Store, StoreFault};

/// How often an open breaker and the leases are looked after.
const LOOK_EVERY: Duration = Duration::from_millis(50);

/// Debits in one call.
const DEBITS_PER_CALL: usize = 64;

/// Decides requests.
#[derive(Debug)]
pub struct Limiter {
    store: Arc<dyn Store>,
    hot_keys: HotKeys,
    permits: Arc<Permits>,
    remote: Option<Remote>,
    clock: Arc<dyn Clock>,
    metrics: Metrics,
    /// Whose turn it is among shards.
    turn: AtomicUsize,
    /// When the last store fault was logged; one a second says as much as a thousand.
    logged_at: AtomicU64,
}

/// What a limiter needs on a store that is elsewhere: not to ask it too often, and to go on without it.
#[derive(Debug)]
pub struct Remote {
    /// What need not be asked: it cannot fit.
    pub denials: Denials,
    /// What need not be asked: it was taken in advance.
    pub leases: Leases,
    /// The circuit in front of the store.
    pub breaker: Breaker,
    /// What decides meanwhile.
    pub fallback: Fallback,
    /// A check that no request has: the way back begins with it.
    pub probe: Check,
}

impl Limiter {
    /// A limiter on `store`; without `remote` the store is one that cannot fail.
    pub fn new(
        store: Arc<dyn Store>,
        hot_keys: HotKeys,
        remote: Option<Remote>,
        clock: Arc<dyn Clock>,
        metrics: Metrics,
    ) -> Self {
        let permits = Permits::new(RandomState::new().hash_one(0u8) >> 1);
        Self {
            store,
            hot_keys,
            permits: Arc::new(permits),
            remote,
            clock,
            metrics,
            turn: AtomicUsize::new(0),
            logged_at: AtomicU64::new(0),
        }
    }

    /// Decides all checks of one request: all of them take, or none does. Never an error.
    pub async fn decide(&self, checks: &Checks) -> Decision {
        let shards = checks.iter().map(|check| check.shards).max().unwrap_or(1);
        if shards <= 1 { self.decide_whole(checks).await } else { self.decide_on(shards, checks).await }
    }

    /// On one shard after the other, each request beginning at the next one, until one has what is asked for: so
    /// nothing is refused that fits into any of them. What has taken on one shard is not asked again on the next.
    async fn decide_on(&self, shards: u16, checks: &Checks) -> Decision {
        let first = self.turn.fetch_add(1, Ordering::Relaxed);
        let mut asked: SmallVec<[usize; 4]> = (0..checks.len()).collect();
        let mut whole: Option<Decision> = None;
        for turn in (0..usize::from(shards)).map(|turn| first.wrapping_add(turn)) {
            let part: Checks = asked.iter().map(|index| checks[*index].on_shard(turn)).collect();
            let decision = self.decide_whole(&part).await;
            let merged = match whole.take() {
                None => Decision { turn, ..decision },
                Some(known) => known.after(&decision, &asked, turn),
            };
            asked = merged.short_of_a_shard(checks);
            whole = Some(merged);
            if asked.is_empty() {
                break;
            }
        }
        whole.unwrap_or_else(Decision::unavailable).of_all_shards(checks)
    }

    async fn decide_whole(&self, checks: &Checks) -> Decision {
        if checks.is_empty() {
            return Decision::no_rule();
        }
        let asked = self.clock.now();
        let heat = alone(checks).and_then(|check| self.hot_keys.see(&check.key, check.cost, asked));
        let Some(Remote { denials, leases, breaker, fallback, .. }) = &self.remote else {
            return match self.store.acquire(checks).await {
                Ok(verdicts) => Decision::from_verdicts(Basis::Store, checks, verdicts),
                Err(_) => Decision::unavailable(),
            };
        };
        if let Some(refusal) = denials.refuse(checks, asked) {
            return refusal;
        }
        if let Some(verdict) = heat.and_then(|heat| leases.take(alone(checks)?, heat.tokens, asked)) {
            return Decision::from_verdicts(Basis::Lease, checks, smallvec![verdict]);
        }
        let Some(call) = breaker.admit() else { return fallback.decide_and_owe(checks, asked) };
        let answer = self.store.acquire(checks).await;
        let now = self.clock.now();
        match answer {
            Ok(verdicts) => {
                call.answered(now);
                // An answer that comes when others have been decided here already is no news.
                if breaker.state() == State::Closed {
                    fallback.learn(checks, &verdicts, now);
                }
                let decision = Decision::from_verdicts(Basis::Store, checks, verdicts);
                denials.note(checks, &decision, asked, now);
                decision
            }
            Err(fault) => {
                self.failed(call, &fault, now);
                // What the store may have taken already is not owed once more.
                if fault.may_have_run() {
                    fallback.decide(checks, now)
                } else {
                    fallback.decide_and_owe(checks, now)
                }
            }
        }
    }

    /// Holds the permits that `checks` ask for, before they are decided on; `None` where none is asked for.
    pub fn hold(&self, checks: &mut Checks) -> Option<Guard> {
        if !checks.iter().any(|check| check.limit.counts_permits()) {
            return None;
        }
        self.permits.hold(checks, self.clock.now())
    }

    /// Charges what was not taken before the request was answered, or gives back what was taken too much.
    pub async fn charge(&self, charges: &Checks) {
        if charges.is_empty() {
            return;
        }
        let Some(Remote { breaker, fallback, .. }) = &self.remote else {
            // The memory of this process does not fail.
            let _ = self.store.acquire(charges).await;
            return;
        };
        let Some(call) = breaker.admit() else { return fallback.charge(charges, self.clock.now()) };
        match self.store.acquire(charges).await {
            Ok(_) => call.answered(self.clock.now()),
            Err(fault) => {
                let now = self.clock.now();
                self.failed(call, &fault, now);
                if !fault.may_have_run() {
                    fallback.charge(charges, now);
                }
            }
        }
    }

    /// Permits that requests hold now.
    pub fn permits_held(&self) -> usize {
        self.permits.len()
    }

    /// The hottest keys of this gateway, the hottest first, and what of them is held in advance.
    pub fn hot_keys(&self, most: usize) -> Vec<(Key, Heat, u64)> {
        let held = |key: &Key| self.remote.as_ref().map_or(0, |remote| remote.leases.held(key));
        self.hot_keys.top(most).into_iter().map(|(key, heat)| (key.clone(), heat, held(&key))).collect()
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
        let Some(Remote { breaker, fallback, probe: check, .. }) = &self.remote else { return };
        // Without a connection a probe could only fail, and make the next pause longer.
        if !self.store.is_up() {
            breaker.note_down(self.clock.now());
            return;
        }
        if breaker.state() == State::Closed && fallback.in_debt() {
            // From single calls that failed, or from the last moments of an outage.
            let _ = self.settle(fallback, breaker.down_at()).await;
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
        if let Err(fault) = self.settle(fallback, breaker.down_at()).await {
            drop(probe);
            self.tell(State::Open, &fault.to_string());
            return;
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
        self.remote.as_ref().map_or(State::Closed, |remote| remote.breaker.state())
    }

    /// Keys on which something is owed to the store.
    pub fn debt_count(&self) -> usize {
        self.remote.as_ref().map_or(0, |remote| remote.fallback.debt_count())
    }

    /// Gateways that share the limits, as far as is known; 1 where there is no store to share.
    pub fn gateways(&self) -> u32 {
        self.remote.as_ref().map_or(1, |remote| remote.fallback.gateways())
    }

    /// Debits in the store what was spent without it until `down_at` and since, each debit at most once: one
    /// whose outcome is unknown is dropped and counted, never repeated. Those that were not made wait for
    /// the next time.
    async fn settle(&self, fallback: &Fallback, down_at: Timestamp) -> Result<(), StoreFault> {
        let debts = fallback.take_debts();
        let mut unsent = debts.chunks(DEBITS_PER_CALL);
        while let Some(debts) = unsent.next() {
            let now = self.clock.now();
            let due: Vec<Check> =
                debts.iter().filter_map(|debt| fallback.debit(debt, down_at, now)).collect();
            if due.is_empty() {
                continue;
            }
            let result = match self.debit(&due).await {
                // One key holds something else, and so none was debited: each for itself then.
                Err(fault) if !fault.is_of_the_node() => self.debit_one_by_one(&due).await,
                result => result,
            };
            if let Err(fault) = result {
                let lost = if fault.may_have_run() { debts } else { &[] };
                self.metrics.dropped_debits.inc_by(lost.len() as u64);
                let kept = if fault.may_have_run() { &[] } else { debts };
                kept.iter().chain(unsent.flatten()).cloned().for_each(|debt| fallback.add(debt));
                return Err(fault);
            }
        }
        fallback.settled();
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

    /// Counts a call that gave no decision.
    fn failed(&self, call: Call<'_>, fault: &StoreFault, now: Timestamp) {
        if fault.is_of_the_node() && call.failed(now) {
            self.tell(State::Open, &fault.to_string());
        }
        self.note(fault, now);
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

/// The check of a request that has only one, which takes.
fn alone(checks: &Checks) -> Option<&Check> {
    match &checks[..] {
        [check] if check.cost > 0 => Some(check),
        _ => None,
    }
}

#[cfg(test)]
mod tests;
