//! The fixed window: so many in each window of the clock, all of them at once if they like. Twin of
//! `lua/fixed_window.lua`.
//!
//! Windows begin at whole multiples of their length since 1970. Around the edge of two windows up to twice the limit
//! passes within one length; where that matters, take a sliding one.
//!
//! What is counted belongs to the window that began last. A longer window after an edit of the rule keeps the count,
//! if it began in it.

use super::{Counted, Outcome, Verdict, remaining, to_ms};
use crate::clock::Timestamp;

/// So many in each window of the clock.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct FixedWindow {
    /// How many.
    pub limit: u64,
    /// Length of a window in microseconds.
    pub window: u64,
}

impl FixedWindow {
    /// What counts at `now`.
    pub fn counted(&self, held: Option<&Counted>, now: Timestamp) -> Counted {
        counted_since(held, self.start(now))
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
        let end = counted.since.saturating_add(self.window);
        judge_until(self.limit, counted, end, cost, now)
    }
}

/// What is held of the period that began at `start`. A clock that steps back stays in the later one.
pub(super) fn counted_since(held: Option<&Counted>, start: u64) -> Counted {
    match held {
        Some(held) if held.since >= start => *held,
        _ => Counted { count: 0, previous: 0, since: start },
    }
}

/// What a clock has counted that was more than a period ahead, as if in the present one, which is from `start` to
/// `end`: else it would count until it is that late again.
pub(super) fn dated_back_to(start: u64, end: u64, counted: &Counted) -> Option<Counted> {
    (counted.since > end).then_some(Counted { since: start, ..*counted })
}

/// What a limit says to `cost` in a period that ends at `end`.
pub(super) fn judge_until(limit: u64, counted: &Counted, end: u64, cost: u64, now: Timestamp) -> Verdict {
    let left = limit.saturating_sub(counted.count);
    let wait = to_ms(end.saturating_sub(now.as_micros()));
    let outcome = if cost > limit {
        Outcome::NeverFits
    } else if cost > left {
        Outcome::Refused
    } else {
        Outcome::Allowed
    };
    Verdict {
        outcome,
        remaining: remaining(left),
        retry_after_ms: if outcome == Outcome::Refused { wait } else { 0 },
        reset_ms: if counted.count > 0 { wait } else { 0 },
    }
}
