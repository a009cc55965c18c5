//! The sliding log: no window of that length ever holds more than the limit, for each one is remembered with its
//! time. Twin of `lua/sliding_log.lua`. The exact one, and the dearest: one entry each.

use super::{Outcome, Verdict, remaining, to_ms};
use crate::clock::Timestamp;

/// The most that a limit may be: as many entries are kept for each key.
pub const MOST_ENTRIES: u64 = 10_000;

/// So many in any window.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SlidingLog {
    /// How many, at most [`MOST_ENTRIES`].
    pub limit: u64,
    /// Length of the window in microseconds.
    pub window: u64,
}

/// The times of all that count, the oldest first.
pub type Log = Vec<u64>;

impl SlidingLog {
    /// What counts at `now`.
    pub fn counted(&self, held: Option<&Log>, now: Timestamp) -> Log {
        let gone = now.as_micros().saturating_sub(self.window);
        let held = held.map(Vec::as_slice).unwrap_or_default();
        held.iter().copied().filter(|at| *at > gone).collect()
    }

    /// A log that a clock has written to which was ahead by more than a window: what is to come, dated back to `now`.
    pub fn dated_back(&self, log: &Log, now: Timestamp) -> Option<Log> {
        let now = now.as_micros();
        let is_ahead = log.last().is_some_and(|last| last.saturating_sub(now) > self.window);
        is_ahead.then(|| log.iter().map(|at| *at.min(&now)).collect())
    }

    /// What the limit says to `cost`.
    pub fn judge(&self, log: &Log, cost: u64, now: Timestamp) -> Verdict {
        let used = log.len() as u64;
        let left = self.limit.saturating_sub(used);
        let leaves_in = |at: Option<&u64>| {
            at.map_or(0, |at| to_ms(at.saturating_add(self.window).saturating_sub(now.as_micros())))
        };
        let outcome = if cost > self.limit {
            Outcome::NeverFits
        } else if cost > left {
            Outcome::Refused
        } else {
            Outcome::Allowed
        };
        let retry_after_ms = match outcome {
            // So many must leave, the oldest first.
            Outcome::Refused => leaves_in(log.get((used + cost - self.limit - 1) as usize)),
            _ => 0,
        };
        Verdict { outcome, remaining: remaining(left), retry_after_ms, reset_ms: leaves_in(log.last()) }
    }

    /// Adds `cost` at `now`: no more in all than can be kept.
    pub fn add(&self, log: &mut Log, cost: u64, now: Timestamp) {
        let room = MOST_ENTRIES.saturating_sub(log.len() as u64);
        let place = log.partition_point(|at| *at <= now.as_micros());
        let new = std::iter::repeat_n(now.as_micros(), cost.min(room) as usize);
        log.splice(place..place, new);
    }

    /// Takes the latest `cost` back.
    pub fn give_back(&self, log: &mut Log, cost: u64) {
        log.truncate(log.len().saturating_sub(cost as usize));
    }
}
