//! Buckets in the memory of this process: the embedded default, and what decides while Redis does
//! not. Bounded and sharded; every decision is made under the locks of its shards.

use std::collections::hash_map::RandomState;
use std::hash::BuildHasher;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use async_trait::async_trait;
use indexmap::IndexMap;
use smallvec::SmallVec;

use super::{Store, StoreFault};
use crate::clock::{Clock, Timestamp};
use crate::key::Key;
use crate::limit::{Limit, Outcome, State, Verdict};
use crate::rule::{Check, Checks, Demand, Verdicts};

/// Locks that requests spread over.
const SHARDS: usize = 64;

/// Buckets that a shard has room for at least: in smaller ones two busy keys could push out each other.
const FEWEST_PER_SHARD: usize = 256;

/// Buckets looked at when one must go.
const LOOKED_AT: usize = 8;

/// Buckets in memory.
#[derive(Debug)]
pub struct MemoryStore {
    shards: Box<[Mutex<Shard>]>,
    hasher: RandomState,
    per_shard: usize,
    clock: Arc<dyn Clock>,
    evicted: AtomicU64,
}

#[derive(Debug, Default)]
struct Shard {
    buckets: IndexMap<Key, Entry, RandomState>,
    hand: usize,
}

#[derive(Clone, Debug)]
struct Entry {
    state: State,
    /// From here on it is full, and forgetting it loses nothing.
    full_at: Timestamp,
    /// From here on it counts as forgotten, as on Redis.
    expires_at: Timestamp,
}

impl MemoryStore {
    /// A store of at most `max_keys` buckets (at least 1).
    pub fn new(max_keys: usize, clock: Arc<dyn Clock>) -> Self {
        let max_keys = max_keys.max(1);
        let shards = (max_keys / FEWEST_PER_SHARD).clamp(1, SHARDS);
        Self {
            shards: (0..shards).map(|_| Mutex::default()).collect(),
            hasher: RandomState::new(),
            per_shard: max_keys / shards,
            clock,
            evicted: AtomicU64::new(0),
        }
    }

    /// Decides all checks of one request, and takes from all of their buckets or from none.
    pub fn take(&self, checks: &[Check]) -> Verdicts {
        self.take_at(checks, self.clock.now())
    }

    /// [`MemoryStore::take`] at a given time.
    pub fn take_at(&self, checks: &[Check], now: Timestamp) -> Verdicts {
        let homes: SmallVec<[usize; 4]> = checks.iter().map(|check| self.home(&check.key)).collect();
        let mut shards = self.lock(&homes);
        let mut verdicts = Verdicts::new();
        let mut states: SmallVec<[State; 2]> = SmallVec::new();
        for (check, home) in checks.iter().zip(&homes) {
            let held = shards.of(*home).recall(check, now);
            let state = check.limit.look(held, check.demand == Demand::Debit, now);
            let asked = match check.demand {
                Demand::Take | Demand::Shadow | Demand::Peek | Demand::Watch => check.cost,
                Demand::Debit | Demand::Lease | Demand::Return | Demand::Renew => 0,
            };
            verdicts.push(check.limit.judge(&state, asked, now));
            states.push(state);
        }
        let mut votes = checks.iter().zip(&verdicts).filter(|(check, _)| check.votes());
        let admitted = votes.all(|(_, verdict)| verdict.outcome == Outcome::Allowed);
        let spent = checks.iter().zip(&homes).zip(states).zip(&mut verdicts).enumerate();
        for (position, (((check, home), mut state), verdict)) in spent {
            let shard = shards.of(*home);
            // Permits of one call may be of one key: each finds what the one before has left.
            if checks[..position].iter().any(|earlier| earlier.key == check.key) {
                let held = shard.recall(check, now);
                state = check.limit.look(held, check.demand == Demand::Debit, now);
            }
            let (changed, told) = spend(check, &mut state, *verdict, admitted, now);
            *verdict = told;
            if changed {
                // A debit, or what is given back, from an older and faster rule must not shorten a life, nor
                // end it.
                let keeps = match check.limit {
                    Limit::TokenBucket(_) => matches!(check.demand, Demand::Debit | Demand::Return),
                    _ => told.reset_ms == 0,
                };
                let longest = keeps.then(|| shard.expiry(&check.key));
                let evicted = shard.put(&check.key, &check.limit, state, told.reset_ms, now, self.per_shard);
                if let Some(longest) = longest {
                    shard.live_until(&check.key, longest);
                }
                self.evicted.fetch_add(u64::from(evicted), Ordering::Relaxed);
            } else if matches!(told.outcome, Outcome::Refused | Outcome::Leased(0)) {
                shard.keep(&check.key, &check.limit, told.reset_ms, now);
            }
        }
        verdicts
    }

    /// Sets what is left of one limit.
    pub fn set_level(&self, key: &Key, limit: &Limit, left: u64, now: Timestamp) {
        let reset_ms = limit.at_level(left, now).reset_ms;
        let mut shard = lock(&self.shards[self.home(key)]);
        let evicted = shard.put(key, limit, limit.with_left(left, now), reset_ms, now, self.per_shard);
        self.evicted.fetch_add(u64::from(evicted), Ordering::Relaxed);
    }

    /// Buckets that are held now.
    pub fn len(&self) -> usize {
        self.shards.iter().map(|shard| lock(shard).buckets.len()).sum()
    }

    /// Whether no bucket is held.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Buckets that were forgotten before they were full, because there was no room.
    pub fn evicted(&self) -> u64 {
        self.evicted.load(Ordering::Relaxed)
    }

    fn home(&self, key: &Key) -> usize {
        self.hasher.hash_one(key) as usize % self.shards.len()
    }

    /// Locks the shards of one request, each once and in order, so that two requests cannot wait for
    /// each other.
    fn lock(&self, homes: &[usize]) -> Locked<'_> {
        let mut order: SmallVec<[usize; 4]> = homes.into();
        order.sort_unstable();
        order.dedup();
        Locked(order.into_iter().map(|home| (home, lock(&self.shards[home]))).collect())
    }
}

#[async_trait]
impl Store for MemoryStore {
    async fn acquire(&self, checks: &Checks) -> Result<Verdicts, StoreFault> {
        Ok(self.take(checks))
    }

    fn is_up(&self) -> bool {
        true
    }
}

/// The locked shards of one request.
struct Locked<'s>(SmallVec<[(usize, MutexGuard<'s, Shard>); 2]>);

impl Locked<'_> {
    fn of(&mut self, home: usize) -> &mut Shard {
        let index = self.0.iter().position(|(locked, _)| *locked == home).unwrap_or(0);
        &mut self.0[index].1
    }
}

impl Shard {
    /// What is remembered; what has expired is forgotten on sight, as on Redis, and what a clock wrote that was far
    /// ahead is dated back.
    fn recall(&mut self, check: &Check, now: Timestamp) -> Option<&State> {
        let (index, _, entry) = self.buckets.get_full(&check.key)?;
        if now >= entry.expires_at {
            self.buckets.swap_remove_index(index);
            return None;
        }
        let (_, entry) = self.buckets.get_index_mut(index)?;
        if let Some(state) = check.limit.dated_back(&entry.state, now) {
            entry.state = state;
        }
        Some(&entry.state)
    }

    /// Writes a bucket; tells whether another one had to be forgotten for it too early.
    fn put(
        &mut self,
        key: &Key,
        limit: &Limit,
        state: State,
        reset_ms: u64,
        now: Timestamp,
        most: usize,
    ) -> bool {
        let entry = Entry {
            state,
            full_at: now.plus_micros(reset_ms.saturating_mul(1_000)),
            expires_at: now.plus_micros(limit.ttl_ms(reset_ms).saturating_mul(1_000)),
        };
        if let Some(known) = self.buckets.get_mut(key) {
            *known = entry;
            return false;
        }
        let lost = self.buckets.len() >= most && self.evict(now);
        self.buckets.insert(key.clone(), entry);
        lost
    }

    fn expiry(&self, key: &Key) -> Timestamp {
        self.buckets.get(key).map(|entry| entry.expires_at).unwrap_or_default()
    }

    fn live_until(&mut self, key: &Key, at_least: Timestamp) {
        if let Some(entry) = self.buckets.get_mut(key) {
            entry.expires_at = entry.expires_at.max(at_least);
        }
    }

    /// A refusal writes nothing, unless the bucket would be forgotten before it is full again (a
    /// slower rule since): see `lua/acquire.lua`.
    fn keep(&mut self, key: &Key, limit: &Limit, reset_ms: u64, now: Timestamp) {
        let Some(entry) = self.buckets.get_mut(key) else { return };
        entry.full_at = now.plus_micros(reset_ms.saturating_mul(1_000));
        if entry.expires_at < entry.full_at {
            entry.expires_at = now.plus_micros(limit.ttl_ms(reset_ms).saturating_mul(1_000));
        }
    }

    /// Forgets, of a few buckets, the one that is full first: a flood of new keys pushes out itself
    /// and buckets that are nearly full, not the client who has used up its own.
    fn evict(&mut self, now: Timestamp) -> bool {
        let length = self.buckets.len();
        // Spread over the shard: neighbours came together, and may all be busy.
        let stride = (length / LOOKED_AT).max(1);
        let looked_at = (0..LOOKED_AT.min(length)).map(|step| (self.hand + step * stride) % length);
        let fullest =
            looked_at.filter_map(|index| Some((self.buckets.get_index(index)?.1.full_at, index))).min();
        self.hand = (self.hand + 1) % length.max(1);
        let Some((full_at, index)) = fullest else { return false };
        self.buckets.swap_remove_index(index);
        now < full_at
    }
}

/// What becomes of `state` and of what `check` was told, once it is known whether all of the request's checks
/// fit; and whether anything has changed.
fn spend(check: &Check, state: &mut State, told: Verdict, admitted: bool, now: Timestamp) -> (bool, Verdict) {
    let limit = &check.limit;
    match (check.demand, limit, &mut *state) {
        (Demand::Take, ..) if admitted && check.cost > 0 => limit.add(state, check.cost, check.permit, now),
        (Demand::Shadow, ..) if told.is_allowed() && check.cost > 0 => {
            limit.add(state, check.cost, check.permit, now);
        }
        (Demand::Debit, Limit::TokenBucket(limit), State::Bucket(bucket)) => {
            let before = *bucket;
            if admitted && bucket.is_countable() {
                *bucket = limit.debit(*bucket, check.cost, now).0;
            }
            return (*bucket != before, limit.state(*bucket, now));
        }
        (Demand::Lease, Limit::TokenBucket(limit), State::Bucket(bucket)) => {
            let (after, told) = limit.lease(*bucket, check.cost, now);
            *bucket = after;
            return (told.outcome != Outcome::Leased(0), told);
        }
        // There are no permits for what is over.
        (Demand::Debit, Limit::Concurrency(_), _) => return (false, told),
        (Demand::Debit, ..) if admitted && check.cost > 0 => limit.add(state, check.cost, 0, now),
        (Demand::Return, ..) => {
            let before = state.clone();
            limit.give_back(state, check.cost, check.permit, now);
            return (*state != before, limit.judge(state, 0, now));
        }
        (Demand::Renew, Limit::Concurrency(limit), State::Permits(permits)) => {
            let known = permits.iter().any(|(known, _)| *known == check.permit);
            limit.renew(permits, check.permit, now);
            return (known, limit.judge(permits, 0, now));
        }
        _ => return (false, told),
    }
    (true, limit.judge(state, 0, now))
}

/// A panic while a shard was locked cannot leave a bucket half written, so the lock is taken anyway.
fn lock(shard: &Mutex<Shard>) -> MutexGuard<'_, Shard> {
    shard.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests;
