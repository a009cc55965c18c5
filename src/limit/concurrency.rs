//! Concurrency: so many at the same time. Each holds a permit that it gives back at its end; one that is not renewed
//! within its time counts no more, so the permits of a dead gateway come back. Twin of `lua/concurrency.lua`.

use super::{Outcome, Verdict, remaining, to_ms};
use crate::clock::Timestamp;

/// What is told to wait: when a permit comes back nobody knows.
const ASK_AGAIN_MS: u64 = 1_000;

/// So many at the same time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Concurrency {
    /// How many.
    pub limit: u64,
    /// How long a permit counts without being renewed, in microseconds.
    pub hold: u64,
}

/// The permits that count, each with the time until which it does.
pub type Permits = Vec<(u64, u64)>;

impl Concurrency {
    /// What counts at `now`.
    pub fn counted(&self, held: Option<&Permits>, now: Timestamp) -> Permits {
        let held = held.map(Vec::as_slice).unwrap_or_default();
        held.iter().copied().filter(|(_, until)| *until > now.as_micros()).collect()
    }

    /// What the limit says to one more.
    pub fn judge(&self, permits: &Permits, cost: u64, now: Timestamp) -> Verdict {
        let left = self.limit.saturating_sub(permits.len() as u64);
        let refused = cost > 0 && left == 0;
        let last = permits.iter().map(|(_, until)| *until).max().unwrap_or(0);
        Verdict {
            outcome: if refused { Outcome::Refused } else { Outcome::Allowed },
            remaining: remaining(left),
            retry_after_ms: if refused { ASK_AGAIN_MS } else { 0 },
            reset_ms: to_ms(last.saturating_sub(now.as_micros())),
        }
    }

    /// Takes a permit; one that counts already goes on.
    pub fn acquire(&self, permits: &mut Permits, permit: u64, now: Timestamp) {
        self.release(permits, permit);
        permits.push((permit, now.as_micros().saturating_add(self.hold)));
    }

    /// Lets a permit that counts go on doing so.
    pub fn renew(&self, permits: &mut Permits, permit: u64, now: Timestamp) {
        for (known, until) in permits {
            if *known == permit {
                *until = now.as_micros().saturating_add(self.hold);
            }
        }
    }

    /// Gives a permit back.
    pub fn release(&self, permits: &mut Permits, permit: u64) {
        permits.retain(|(known, _)| *known != permit);
    }
}
