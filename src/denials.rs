//! Keys that are exhausted, remembered until they can refill: until then a request is refused here, and
//! the store is not asked. So a flood over its limit costs the store next to nothing.
//!
//! What the store has refused cannot fit before the time that it told: others only take. The wait is
//! counted from when the store was asked, not from when it answered, and less the part of a millisecond
//! that was rounded up; so a denial never refuses what the store would admit.

use std::sync::atomic::{AtomicUsize, Ordering};

use crate::clock::Timestamp;
use crate::decision::{Admission, Basis, Decision};
use crate::keyed::{Keyed, Part};
use crate::limit::{Limit, Outcome, Verdict};
use crate::rule::{Check, Checks};

/// Denials that are remembered at most, per lock. A flood of keys that are all over their limit is
/// asked for beyond that.
const MOST_PER_LOCK: usize = 4_096;

/// Denials looked at when one must go.
const LOOKED_AT: usize = 8;

/// The longest that a denial stands. A bucket that somebody resets by hand is noticed after that.
const LONGEST_MICROS: u64 = 1_000_000;

/// What the store rounds up in a wait.
const ROUNDED_MICROS: u64 = 1_000;

/// The denials of one gateway.
#[derive(Debug, Default)]
pub struct Denials {
    denied: Keyed<Denial>,
    /// How many there are, so that a gateway without any looks nowhere.
    count: AtomicUsize,
}

#[derive(Clone, Copy, Debug)]
struct Denial {
    limit: Limit,
    cost: u64,
    /// Until here the cost cannot fit.
    until: Timestamp,
    /// From here on it surely does, if nobody else takes: what a client is told.
    fits_at: Timestamp,
    full_at: Timestamp,
    remaining: u64,
}

impl Denials {
    /// The refusal of a request whose key is known to be exhausted for its cost.
    pub fn refuse(&self, checks: &Checks, now: Timestamp) -> Option<Decision> {
        let check = alone(checks).filter(|_| self.count.load(Ordering::Relaxed) > 0)?;
        let mut denied = self.denied.of(&check.key);
        let (index, _, denial) = denied.get_full(&check.key)?;
        // Under another limit the bucket refills otherwise, also if the old one comes back.
        if now >= denial.until || denial.limit != check.limit {
            denied.swap_remove_index(index);
            self.count.fetch_sub(1, Ordering::Relaxed);
            return None;
        }
        // Less may fit, and what can never fit is another answer: that is for the store to say.
        if denial.cost > check.cost || check.cost > check.limit.capacity() {
            return None;
        }
        let verdict = Verdict {
            outcome: Outcome::Refused,
            remaining: denial.remaining,
            retry_after_ms: denial.fits_at.micros_since(now).div_ceil(1_000),
            reset_ms: denial.full_at.micros_since(now).div_ceil(1_000),
        };
        Some(Decision::from_verdicts(Basis::Denial, checks, smallvec::smallvec![verdict]))
    }

    /// Remembers a refusal of the store, which was asked at `asked` and has answered at `now`.
    pub fn note(&self, checks: &Checks, decision: &Decision, asked: Timestamp, now: Timestamp) {
        let (Some(check), [verdict]) = (alone(checks), &decision.verdicts[..]) else { return };
        if decision.admission != Admission::Refused || verdict.outcome != Outcome::Refused {
            return;
        }
        let wait = (verdict.retry_after_ms.saturating_mul(1_000)).saturating_sub(ROUNDED_MICROS);
        let until = asked.plus_micros(wait.min(LONGEST_MICROS));
        if until <= now {
            return;
        }
        let denial = Denial {
            limit: check.limit,
            cost: check.cost,
            until,
            fits_at: now.plus_micros(verdict.retry_after_ms.saturating_mul(1_000)),
            full_at: now.plus_micros(verdict.reset_ms.saturating_mul(1_000)),
            remaining: verdict.remaining,
        };
        let mut denied = self.denied.of(&check.key);
        if denied.len() >= MOST_PER_LOCK && !denied.contains_key(&check.key) {
            forget_one(&mut denied);
            self.count.fetch_sub(1, Ordering::Relaxed);
        }
        if denied.insert(check.key.clone(), denial).is_none() {
            self.count.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// How many denials are remembered.
    pub fn len(&self) -> usize {
        self.count.load(Ordering::Relaxed)
    }

    /// Whether none is remembered.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// The check of a request that has only one, and that can be refused by it. With several the longest of
/// their waits would have to be known, and shadows want to be asked in any case.
fn alone(checks: &Checks) -> Option<&Check> {
    match &checks[..] {
        [check] if check.votes() && check.cost > 0 && check.limit.tells_when() => Some(check),
        _ => None,
    }
}

/// Forgets, of a few denials, the one that ends first.
fn forget_one(denied: &mut Part<Denial>) {
    let first = (0..LOOKED_AT.min(denied.len())).min_by_key(|index| denied[*index].until);
    if let Some(index) = first {
        denied.swap_remove_index(index);
    }
}

#[cfg(test)]
mod tests;
