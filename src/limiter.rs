//! The limiter: all checks of one request to one decision, whatever the store does.

mod apart;
mod recovery;
mod upkeep;

use std::hash::{BuildHasher as _, RandomState};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use futures_util::future::join_all;
use smallvec::{SmallVec, smallvec};

use crate::breaker::{Breakers, Call, State};
use crate::clock::{Clock, Timestamp};
use crate::decision::{Admission, Basis, Decision};
use crate::denials::Denials;
use crate::fallback::Fallback;
use crate::hot_keys::{Heat, HotKeys};
use crate::key::Key;
use crate::leases::Leases;
use crate::limit::Verdict;
use crate::metrics::Metrics;
use crate::permits::{Guard, Permits};
use crate::rule::{Check, Checks, Verdicts};
use crate::store::{Node, NodeId, Store, StoreFault};

/// How often an open breaker and the leases are looked after.
const LOOK_EVERY: Duration = Duration::from_millis(50);

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
    /// The circuits in front of its nodes.
    pub breakers: Breakers,
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
        let Some(remote) = &self.remote else {
            return match self.store.acquire(checks).await {
                Ok(verdicts) => Decision::from_verdicts(Basis::Store, checks, verdicts),
                Err(_) => Decision::unavailable(),
            };
        };
        if let Some(refusal) = remote.denials.refuse(checks, asked) {
            return refusal;
        }
        if let Some(verdict) = heat.and_then(|heat| remote.leases.take(alone(checks)?, heat.tokens, asked)) {
            return Decision::from_verdicts(Basis::Lease, checks, smallvec![verdict]);
        }
        match self.shared_slot(checks) {
            Some(slot) => match self.ask(remote, self.store.node_of(slot), checks, asked).await {
                Ok(part) => part.paid_for(remote, checks),
                Err(Apart) => self.decide_apart(remote, checks, apart::each_alone(checks), asked).await,
            },
            None => self.decide_apart(remote, checks, self.by_slot(checks), asked).await,
        }
    }

    /// The slot of all checks, if they share one.
    fn shared_slot(&self, checks: &Checks) -> Option<u16> {
        let mut slots = checks.iter().map(|check| self.store.slot_of(&check.key));
        let first = slots.next()?;
        slots.all(|slot| slot == first).then_some(first)
    }

    /// Decides checks that share a slot: by its node, or without it.
    async fn ask(
        &self,
        remote: &Remote,
        node: NodeId,
        checks: &Checks,
        asked: Timestamp,
    ) -> Result<Part, Apart> {
        let Remote { denials, breakers, fallback, .. } = remote;
        let by_fallback = |now, owes| Part { decision: fallback.decide(checks, now), owes, node };
        let breaker = breakers.of(node);
        if node == NodeId::NOBODY {
            // A slot that nobody has is nobody's fault, but it is known when that was so.
            breaker.note_cut_off(asked);
            return Ok(by_fallback(asked, true));
        }
        let Some(call) = breaker.admit() else { return Ok(by_fallback(asked, true)) };
        let answer = self.store.acquire(checks).await;
        let now = self.clock.now();
        match answer {
            Ok(verdicts) => {
                call.answered(now);
                // An answer that comes when others have been decided here already is no news.
                if breaker.state() == State::Closed {
                    fallback.learn(node, checks, &verdicts, now);
                }
                let decision = Decision::from_verdicts(Basis::Store, checks, verdicts);
                denials.note(checks, &decision, asked, now);
                Ok(Part { decision, owes: false, node })
            }
            Err(StoreFault::Apart) if checks.len() > 1 => {
                call.answered(now);
                Err(Apart)
            }
            Err(fault) => {
                self.failed(node, call, &fault, now);
                // What the store may have taken already is not owed once more.
                Ok(by_fallback(now, !fault.may_have_run()))
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

    /// Charges what was not taken before the request was answered, or gives back what was taken too much. Each charge
    /// with what it was told and by whom, but for those whose call has no known outcome.
    pub async fn charge(&self, charges: &Checks) -> Vec<(Check, Verdict, Basis)> {
        if charges.is_empty() {
            return Vec::new();
        }
        let Some(remote) = &self.remote else {
            // The memory of this process does not fail.
            let told = self.store.acquire(charges).await.unwrap_or_default();
            let told = charges.iter().cloned().zip(told);
            return told.map(|(charge, told)| (charge, told, Basis::Store)).collect();
        };
        let parts = self.in_calls(charges.iter().cloned(), charges.len(), |charge| charge);
        let told = join_all(parts.into_iter().map(|(node, charges)| async move {
            let charges: Checks = charges.into();
            let (told, basis) = self.charge_at(remote, node, &charges).await;
            let told = charges.into_iter().zip(told);
            told.map(|(charge, told)| (charge, told, basis)).collect::<Vec<_>>()
        }));
        told.await.concat()
    }

    async fn charge_at(&self, remote: &Remote, node: NodeId, charges: &Checks) -> (Verdicts, Basis) {
        let by_fallback = |now| (remote.fallback.charge(node, charges, now), Basis::Fallback);
        let Some(call) = remote.breakers.of(node).admit() else { return by_fallback(self.clock.now()) };
        match self.store.acquire(charges).await {
            Ok(told) => {
                call.answered(self.clock.now());
                (told, Basis::Store)
            }
            Err(fault) => {
                let now = self.clock.now();
                self.failed(node, call, &fault, now);
                if fault.may_have_run() { (Verdicts::new(), Basis::Store) } else { by_fallback(now) }
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

    /// Whether the store answers, as far as is known.
    pub fn store_is_up(&self) -> bool {
        self.store.is_up() && self.breaker_state() == State::Closed
    }

    /// The circuits in front of the store, as one: open if any of them is.
    pub fn breaker_state(&self) -> State {
        let states = || self.store.nodes().into_iter().map(|node| self.breaker_state_of(node));
        let worst = |state| states().any(|known| known == state).then_some(state);
        worst(State::Open).or_else(|| worst(State::HalfOpen)).unwrap_or(State::Closed)
    }

    /// The circuit in front of one node.
    pub fn breaker_state_of(&self, node: NodeId) -> State {
        self.remote.as_ref().map_or(State::Closed, |remote| remote.breakers.of(node).state())
    }

    /// The nodes of the store, and the circuits in front of them.
    pub fn nodes(&self) -> Vec<(Node, State)> {
        let told = |node: Node| {
            let cause = || self.remote.as_ref()?.breakers.of(node.id).cause();
            let (trouble, state) = (node.trouble.clone().or_else(cause), self.breaker_state_of(node.id));
            (Node { trouble, ..node }, state)
        };
        self.store.describe().into_iter().map(told).collect()
    }

    /// Brings the metrics on nodes up to date.
    pub fn count_nodes(&self) {
        let (nodes, metrics) = (self.store.describe(), &self.metrics.store);
        let gauge = |count: usize| i64::try_from(count).unwrap_or(i64::MAX);
        metrics.connected.set(i64::from(self.store.is_up()));
        metrics.nodes.set(gauge(nodes.len()));
        metrics.nodes_up.set(gauge(nodes.iter().filter(|node| node.up).count()));
        let evicted: u64 = nodes.iter().map(|node| node.evicted).sum();
        metrics.evicted_keys.set(i64::try_from(evicted).unwrap_or(i64::MAX));
        self.metrics.breaker_state.set(self.breaker_state() as i64);
    }

    /// Keys on which something is owed to the store.
    pub fn debt_count(&self) -> usize {
        self.remote.as_ref().map_or(0, |remote| remote.fallback.debt_count())
    }

    /// Gateways that share the limits, as far as is known; 1 where there is no store to share.
    pub fn gateways(&self) -> u32 {
        self.remote.as_ref().map_or(1, |remote| remote.fallback.gateways())
    }

    /// A line and a count for each transition of the breaker.
    fn tell(&self, node: NodeId, to: State, cause: &str) {
        self.metrics.breaker_transitions.with_label_values(&[to.label()]).inc();
        self.metrics.breaker_state.set(self.breaker_state() as i64);
        let known = self.store.describe().into_iter().find(|known| known.id == node);
        let (to, node) = (to.label(), known.map(|node| node.address).unwrap_or_default());
        if to == State::Closed.label() {
            tracing::info!(to, cause, node, "store breaker");
        } else {
            tracing::warn!(to, cause, node, "store breaker");
        }
    }

    /// Counts a call that gave no decision.
    fn failed(&self, node: NodeId, call: Call<'_>, fault: &StoreFault, now: Timestamp) {
        if fault.is_of_the_node() && call.failed(fault, now) {
            self.tell(node, State::Open, &fault.to_string());
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

/// What became of checks that share a slot.
struct Part {
    decision: Decision,
    /// Whether what it has spent is owed to the node.
    owes: bool,
    node: NodeId,
}

/// The checks of one slot cannot be asked together: their keys are being moved.
struct Apart;

impl Part {
    /// The decision, with what it has spent written down.
    fn paid_for(self, remote: &Remote, checks: &Checks) -> Decision {
        if self.owes && self.decision.admission == Admission::Admitted {
            remote.fallback.owe(self.node, checks);
        }
        self.decision
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
