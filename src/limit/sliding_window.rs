//! The sliding window: so many in about any window, from two counters. Twin of `lua/sliding_window.lua`.
//!
//! The count of the window before is weighted by what remains of it: `estimate = current + previous * rest / window`. That
//! is exact for even traffic, and at most one limit off for traffic that is not. Whole numbers: counts times
//! milliseconds, below 2^53.

use super::fixed_window::dated_back_to;
use super::{Counted, MAX_EXACT, Outcome, Verdict, remaining, to_ms};
use crate::clock::Timestamp;

/// So many in about any window.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SlidingWindow {
    /// How many.
    pub limit: u64,
    /// Length of a window in microseconds, whole milliseconds.
    pub window: u64,
}

impl SlidingWindow {
    /// Whether all products stay exact.
    pub const fn is_exact(limit: u64, window_micros: u64) -> bool {
        (limit as u128) * (window_micros as u128 / 1_000) <= MAX_EXACT as u128 / 4
    }

    /// What counts at `now`.
    pub fn counted(&self, held: Option<&Counted>, now: Timestamp) -> Counted {
        let start = self.start(now);
        match held {
            Some(held) if held.since >= start => *held,
            Some(held) if held.since >= start.saturating_sub(self.window) => {
                Counted { count: 0, previous: held.count, since: start }
            }
            _ => Counted { count: 0, previous: 0, since: start },
        }
    }

    /// What was counted in a window that is more than one ahead, dated back to the present one.
    pub fn dated_back(&self, counted: &Counted, now: Timestamp) -> Option<Counted> {
        let start = self.start(now);
        dated_back_to(start, start.saturating_add(self.window), counted)
    }

    const fn start(&self, now: Timestamp) -> u64 {
        now.as_micros() - now.as_micros() % self.window
    }

    /// What the limit says to `cost`.
    pub fn judge(&self, counted: &Counted, cost: u64, now: Timestamp) -> Verdict {
        let window = self.window / 1_000;
        let passed = (now.as_micros().saturating_sub(counted.since) / 1_000).min(window);
        let remains = window - passed;
        let all = self.limit * window;
        // An edit to a lower limit leaves counts that are far above it.
        let count = counted.count.min(2 * self.limit);
        let previous = counted.previous.min(2 * self.limit);
        let used = count * window + previous * remains;
        let left = all.saturating_sub(used) / window;
        let outcome = if cost > self.limit {
            Outcome::NeverFits
        } else if cost > 0 && used + cost * window > all {
            Outcome::Refused
        } else {
            Outcome::Allowed
        };
        let retry = match outcome {
            Outcome::Refused if count + cost <= self.limit => {
                // The weight of the window before falls until it fits.
                window - (all - (count + cost) * window) / previous - passed
            }
            // In the next window, once what is counted now weighs little enough.
            Outcome::Refused => remains + (window - (all - cost * window) / count),
            _ => 0,
        };
        let reset = match (count, previous) {
            (0, 0) => 0,
            (0, _) => remains,
            _ => remains + window,
        };
        Verdict {
            outcome,
            remaining: remaining(left),
            retry_after_ms: to_ms(retry.max(u64::from(outcome == Outcome::Refused)) * 1_000),
            reset_ms: to_ms(reset * 1_000),
        }
    }
}
