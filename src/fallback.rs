//! What is decided without the store: each rule's `on_store_failure`.
//!
//! `local` decides on a bucket in memory with this gateway's share of the limit: capacity and rate
//! divided by the number of live gateways, room for at least one token. It begins at this gateway's
//! share of the level that the store told last. All gateways together so admit no more than the limit
//! (plus one token a gateway where the capacity is below their number).
//!
//! What is spent here is owed to the store. On the way back each gateway has it debited there once:
//! as much as it spent, but not more than is missing in its own bucket by then, for what has been
//! refilled meanwhile would have been refilled in the store as well. Where others were quicker and have
//! had it from the store already, the debit leaves the bucket there below 0.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use indexmap::IndexMap;

use crate::clock::Timestamp;
use crate::config::OnStoreFailure;
use crate::decision::{Basis, Decision};
use crate::gateways::Gateways;
use crate::key::Key;
use crate::limit::{Outcome, Verdict};
use crate::metrics::Metrics;
use crate::rule::{Check, Checks, Demand, Verdicts};
use crate::store::NodeId;
use crate::store::memory::MemoryStore;

/// Decides while the store does not.
#[derive(Debug)]
pub struct Fallback {
    memory: Arc<MemoryStore>,
    gateways: Arc<Gateways>,
    most_debts: usize,
    /// By the node that is owed to.
    books: Box<[OnceLock<Book>]>,
    /// Keys in all of them.
    debt_count: AtomicUsize,
    metrics: Metrics,
}

/// What is owed to one node.
#[derive(Debug, Default)]
struct Book {
    debts: Mutex<IndexMap<Key, Debt>>,
    /// Whether there are any, without a lock.
    in_debt: AtomicBool,
}

/// What was spent on one key without the store.
#[derive(Clone, Debug)]
pub struct Debt {
    /// The debit: its cost is all that was spent.
    check: Check,
    /// The largest cost of one request: the local bucket had room for it.
    largest: u64,
}

impl Fallback {
    /// A fallback on buckets in `memory`, for one of `gateways`, that remembers at most `most_debts`
    /// keys on which it owes.
    pub fn new(
        memory: Arc<MemoryStore>,
        gateways: Arc<Gateways>,
        most_debts: usize,
        metrics: Metrics,
    ) -> Self {
        Self {
            memory,
            gateways,
            most_debts,
            books: (0..NodeId::MOST).map(|_| OnceLock::new()).collect(),
            debt_count: AtomicUsize::new(0),
            metrics,
        }
    }

    /// Decides all checks of one request: all of them take, or none does.
    pub fn decide(&self, checks: &Checks, now: Timestamp) -> Decision {
        let denies = |check: &Check| check.votes() && check.on_store_failure == OnStoreFailure::Deny;
        let decision = if checks.iter().any(denies) {
            Decision::unavailable()
        } else {
            Decision::from_verdicts(Basis::Fallback, checks, self.verdicts(checks, now))
        };
        for check in checks {
            let labels = [check.rule.name(), check.on_store_failure.label(), decision.admission.label()];
            self.metrics.fallback_decisions.with_label_values(&labels).inc();
        }
        decision
    }

    /// Notes the levels that the store has told, to begin at if it fails. Not while there are debts: what
    /// is missing in the buckets here tells how much of them is still to be debited.
    pub fn learn(&self, node: NodeId, checks: &Checks, verdicts: &Verdicts, now: Timestamp) {
        if self.in_debt(node) {
            return;
        }
        let gateways = self.gateways();
        // Who holds a permit the store does not say; those that were given here are known here.
        let told = checks.iter().zip(verdicts).filter(|(check, _)| !check.limit.counts_permits());
        for (check, verdict) in told.filter(|(check, _)| !self.is_owed(&check.key)) {
            let share = check.limit.share(gateways, check.cost);
            self.memory.set_level(&check.key, &share, verdict.remaining / u64::from(gateways), now);
        }
    }

    /// Notes what an admitted request has spent here and certainly not in the store, to be debited there. Shadows
    /// refuse nobody, so nothing is owed for them.
    pub fn owe(&self, node: NodeId, checks: &Checks) {
        for check in checks.iter().filter(|check| check.votes()) {
            // A check that only looked has spent nothing, and a permit comes back by itself.
            let spends = check.demand == Demand::Take && !check.limit.counts_permits();
            if spends && check.on_store_failure == OnStoreFailure::Local && check.cost > 0 {
                let check = Check { demand: Demand::Debit, ..check.clone() };
                self.add(node, Debt { largest: check.cost, check });
            }
        }
    }

    /// Gives back what was taken here for a request that was refused elsewhere.
    pub fn give_back(&self, checks: &Checks, now: Timestamp) {
        let gateways = self.gateways();
        let taken = checks.iter().filter(|check| check.demand == Demand::Take && check.cost > 0);
        let back: Checks = taken
            .filter(|check| check.on_store_failure == OnStoreFailure::Local)
            .map(|check| Check {
                limit: check.limit.share(gateways, check.cost),
                demand: Demand::Return,
                ..check.clone()
            })
            .collect();
        self.memory.take_at(&back, now);
    }

    /// Takes here what is charged afterwards, and owes it to the store; gives back what was taken too much.
    pub fn charge(&self, node: NodeId, charges: &Checks, now: Timestamp) -> Verdicts {
        let gateways = self.gateways();
        let local: Checks = charges
            .iter()
            .map(|check| Check { limit: check.limit.share(gateways, 1), ..check.clone() })
            .collect();
        // Taken before it is owed: what is missing here tells how much of a debt is still to be debited.
        let told = self.memory.take_at(&local, now);
        for check in charges.iter().filter(|check| check.demand == Demand::Debit) {
            self.add(node, Debt { check: check.clone(), largest: check.cost });
        }
        told
    }

    /// Renews or gives back permits that were given here.
    pub fn carry_out(&self, checks: &[Check], now: Timestamp) {
        self.memory.take_at(checks, now);
    }

    /// Takes all debts to a node out of its book.
    pub fn take_debts(&self, node: NodeId) -> Vec<Debt> {
        let debts = std::mem::take(&mut *lock(&self.book(node).debts));
        self.debt_count.fetch_sub(debts.len(), Ordering::Relaxed);
        debts.into_values().collect()
    }

    /// Notes that nothing is owed to a node any more, if that is so.
    pub fn settled(&self, node: NodeId) {
        let book = self.book(node);
        let debts = lock(&book.debts);
        book.in_debt.store(!debts.is_empty(), Ordering::Release);
    }

    /// Whether something is owed to a node.
    pub fn in_debt(&self, node: NodeId) -> bool {
        self.books[node.index()].get().is_some_and(|book| book.in_debt.load(Ordering::Acquire))
    }

    /// Whether something is owed on a key, to whichever node: its slot may have moved since.
    fn is_owed(&self, key: &Key) -> bool {
        let mut books = self.books.iter().filter_map(OnceLock::get);
        self.debt_count() > 0 && books.any(|book| lock(&book.debts).contains_key(key))
    }

    /// The nodes to which something is owed.
    pub fn creditors(&self) -> Vec<NodeId> {
        (0..NodeId::MOST).map(NodeId::at).filter(|node| self.in_debt(*node)).collect()
    }

    /// Notes a debt, or puts one back that the store was not asked for.
    pub fn add(&self, node: NodeId, debt: Debt) {
        let book = self.book(node);
        let mut debts = lock(&book.debts);
        book.in_debt.store(true, Ordering::Release);
        if let Some(known) = debts.get_mut(&debt.check.key) {
            known.check.cost = known.check.cost.saturating_add(debt.check.cost);
            known.check.limit = debt.check.limit;
            known.largest = known.largest.max(debt.largest);
        } else if self.debt_count() < self.most_debts {
            self.debt_count.fetch_add(1, Ordering::Relaxed);
            debts.insert(debt.check.key.clone(), debt);
        } else {
            self.metrics.dropped_debits.inc();
        }
    }

    /// Keys on which something is owed.
    pub fn debt_count(&self) -> usize {
        self.debt_count.load(Ordering::Relaxed)
    }

    /// What of a debt is still to be debited at `now` in a store that was last known to be away at
    /// `down_at`: what is missing in the bucket here, at most. The rest has been refilled meanwhile, and
    /// so it has in the store. But what was refilled here since `down_at` counts as missing: the store may
    /// have given the same to gateways that came back earlier.
    pub fn debit(&self, debt: &Debt, down_at: Timestamp, now: Timestamp) -> Option<Check> {
        let check = &debt.check;
        let share = check.limit.share(self.gateways(), debt.largest);
        let ask = Check { limit: share, cost: 0, demand: Demand::Take, ..check.clone() };
        let left = self.memory.take_at(&[ask], now).first().map_or(0, |verdict| verdict.remaining);
        let missing = share.capacity().saturating_sub(left);
        let cost = check.cost.min(missing.saturating_add(share.earned(now.micros_since(down_at))));
        (cost > 0).then(|| Check { cost, ..check.clone() })
    }

    /// Gateways that share the limits now, as far as is known.
    pub fn gateways(&self) -> u32 {
        self.gateways.count()
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

    fn book(&self, node: NodeId) -> &Book {
        self.books[node.index()].get_or_init(Book::default)
    }
}

impl Debt {
    /// The same, with what is still to be debited of it.
    #[must_use]
    pub fn less(self, debit: Check) -> Self {
        Self { check: debit, ..self }
    }

    /// The bucket on which it is owed.
    pub const fn key(&self) -> &Key {
        &self.check.key
    }
}

/// What is behind the lock is never half written, so a panic elsewhere does no harm.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What a rule on `allow` says: everything fits, nothing is counted.
fn open(check: &Check) -> Verdict {
    Verdict { outcome: Outcome::Allowed, remaining: check.limit.capacity(), retry_after_ms: 0, reset_ms: 0 }
}
