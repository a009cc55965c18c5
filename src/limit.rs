//! Limits: an algorithm and its numbers, and what one says. Pure: no clock, no lock, no I/O.

pub mod concurrency;
pub mod fixed_window;
pub mod quota;
pub mod rate;
pub mod sliding_log;
pub mod sliding_window;
pub mod token_bucket;

use concurrency::{Concurrency, Permits};
use fixed_window::FixedWindow;
use quota::Quota;
use sliding_log::{Log, SlidingLog};
use sliding_window::SlidingWindow;
use token_bucket::{Bucket, TokenBucket};

use crate::clock::Timestamp;

/// The largest whole number that a double, and so Lua on Redis, holds exactly: 2^53.
pub const MAX_EXACT: u64 = 1 << 53;

/// The algorithm of a rule with its numbers. A closed set.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Limit {
    /// Tokens that refill evenly up to a capacity.
    TokenBucket(TokenBucket),
    /// So many in each window of the clock.
    FixedWindow(FixedWindow),
    /// So many in about any window.
    SlidingWindow(SlidingWindow),
    /// So many in any window.
    SlidingLog(SlidingLog),
    /// So many in each day, week or month.
    Quota(Quota),
    /// So many at the same time.
    Concurrency(Concurrency),
}

/// What is remembered under one key: which kind, the limit says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum State {
    /// Of a token bucket.
    Bucket(Bucket),
    /// Of windows and quotas.
    Counted(Counted),
    /// Of a sliding log.
    Log(Log),
    /// Of a concurrency limit.
    Permits(Permits),
}

/// What is counted in one period, and in the one before where that matters.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counted {
    /// In the period that began at `since`.
    pub count: u64,
    /// In the one before.
    pub previous: u64,
    /// In microseconds since 1970.
    pub since: u64,
}

impl Limit {
    /// The most that passes at once: `X-RateLimit-Limit`, and `q` of `RateLimit-Policy`.
    pub const fn capacity(&self) -> u64 {
        match self {
            Self::TokenBucket(bucket) => bucket.capacity(),
            Self::FixedWindow(FixedWindow { limit, .. })
            | Self::SlidingWindow(SlidingWindow { limit, .. })
            | Self::SlidingLog(SlidingLog { limit, .. })
            | Self::Quota(Quota { limit, .. })
            | Self::Concurrency(Concurrency { limit, .. }) => *limit,
        }
    }

    /// The name of the algorithm, as it is written.
    pub const fn algorithm(&self) -> &'static str {
        match self {
            Self::TokenBucket(_) => "token_bucket",
            Self::FixedWindow(_) => "fixed_window",
            Self::SlidingWindow(_) => "sliding_window",
            Self::SlidingLog(_) => "sliding_log",
            Self::Quota(_) => "quota",
            Self::Concurrency(_) => "concurrency",
        }
    }

    /// Seconds, rounded up, in which all of it comes back: `w` of `RateLimit-Policy`.
    pub const fn window_seconds(&self) -> u64 {
        let micros = match self {
            Self::TokenBucket(bucket) => bucket.fill_micros(),
            Self::FixedWindow(FixedWindow { window, .. })
            | Self::SlidingWindow(SlidingWindow { window, .. })
            | Self::SlidingLog(SlidingLog { window, .. }) => *window,
            Self::Quota(Quota { edges, .. }) => edges[2].saturating_sub(edges[1]),
            Self::Concurrency(Concurrency { hold, .. }) => *hold,
        };
        micros.div_ceil(1_000_000)
    }

    /// Whole tokens that are earned in `micros`. What is counted in windows is not earned bit by bit.
    pub const fn earned(&self, micros: u64) -> u64 {
        match self {
            Self::TokenBucket(bucket) => bucket.earned(micros),
            _ => 0,
        }
    }

    /// Microseconds in which `tokens` are earned, at most 100 years.
    pub const fn micros_to_earn(&self, tokens: u64) -> u64 {
        match self {
            Self::TokenBucket(bucket) => bucket.micros_to_earn(tokens),
            _ => 0,
        }
    }

    /// Whether tokens can be taken in advance and given back.
    pub const fn is_token_bucket(&self) -> bool {
        matches!(self, Self::TokenBucket(_))
    }

    /// Whether it gives permits, which are given back.
    pub const fn counts_permits(&self) -> bool {
        matches!(self, Self::Concurrency(_))
    }

    /// Whether what was refused cannot fit before the time that was told: others only take.
    pub const fn tells_when(&self) -> bool {
        !matches!(self, Self::Concurrency(_))
    }

    /// The limit as it is at `now`: where its periods begin.
    #[must_use]
    pub fn on(self, now: Timestamp) -> Self {
        match self {
            Self::Quota(quota) => Self::Quota(quota.on(now)),
            other => other,
        }
    }

    /// What an allowed request is told of a limit with so much left.
    pub fn at_level(&self, left: u64, now: Timestamp) -> Verdict {
        self.judge(&self.with_left(left, now), 0, now)
    }

    /// What is remembered where so much is left.
    pub fn with_left(&self, left: u64, now: Timestamp) -> State {
        let count = self.capacity().saturating_sub(left);
        let counted = |empty: Counted| State::Counted(Counted { count, ..empty });
        match self {
            Self::TokenBucket(bucket) => State::Bucket(bucket.at_level(left, now).0),
            Self::FixedWindow(window) => counted(window.counted(None, now)),
            Self::SlidingWindow(window) => counted(window.counted(None, now)),
            Self::Quota(quota) => counted(quota.counted(None, now)),
            Self::SlidingLog(log) => {
                let mut entries = Log::new();
                log.add(&mut entries, count, now);
                State::Log(entries)
            }
            Self::Concurrency(_) => State::Permits(Permits::new()),
        }
    }

    /// The part of this limit that one of `shards` buckets holds: all together hold it exactly.
    #[must_use]
    pub fn shard(&self, shard: u16, shards: u16) -> Self {
        match self {
            Self::TokenBucket(bucket) => Self::TokenBucket(bucket.shard(shard, shards)),
            other => *other,
        }
    }

    /// The part of this limit that one of `gateways` may give out alone, when no store joins them;
    /// room enough for `cost`, which could never pass otherwise.
    #[must_use]
    pub fn share(&self, gateways: u32, cost: u64) -> Self {
        let part = |limit: u64| (limit / u64::from(gateways.max(1))).max(cost.clamp(1, limit));
        match *self {
            Self::TokenBucket(bucket) => Self::TokenBucket(bucket.share(gateways, cost)),
            Self::FixedWindow(window) => {
                Self::FixedWindow(FixedWindow { limit: part(window.limit), ..window })
            }
            Self::SlidingWindow(window) => {
                Self::SlidingWindow(SlidingWindow { limit: part(window.limit), ..window })
            }
            Self::SlidingLog(log) => Self::SlidingLog(SlidingLog { limit: part(log.limit), ..log }),
            Self::Quota(quota) => Self::Quota(Quota { limit: part(quota.limit), ..quota }),
            Self::Concurrency(permits) => {
                Self::Concurrency(Concurrency { limit: part(permits.limit), ..permits })
            }
        }
    }

    /// What is held, if a clock has written it that was ahead of `now` by more than a period of the limit (a fill
    /// time, a window): dated back, for else it would stand until it is that late again. `None` where it may stay as
    /// it is. Permits stay, for they are renewed under the rule of their request, which may have held them longer.
    pub fn dated_back(&self, held: &State, now: Timestamp) -> Option<State> {
        match (self, held) {
            (Self::TokenBucket(limit), State::Bucket(held)) => {
                limit.dated_back(*held, now).map(State::Bucket)
            }
            (Self::FixedWindow(limit), State::Counted(held)) => {
                limit.dated_back(held, now).map(State::Counted)
            }
            (Self::SlidingWindow(limit), State::Counted(held)) => {
                limit.dated_back(held, now).map(State::Counted)
            }
            (Self::Quota(limit), State::Counted(held)) => limit.dated_back(held, now).map(State::Counted),
            (Self::SlidingLog(limit), State::Log(held)) => limit.dated_back(held, now).map(State::Log),
            _ => None,
        }
    }

    /// What counts at `now` of what is held; a debit sees also what is beyond the limit.
    pub fn look(&self, held: Option<&State>, debits: bool, now: Timestamp) -> State {
        match (self, held) {
            (Self::TokenBucket(limit), held) => {
                let held = match held {
                    Some(State::Bucket(bucket)) => Some(*bucket),
                    _ => None,
                };
                State::Bucket(if debits {
                    limit.refilled_for_debit(held, now)
                } else {
                    limit.refilled(held, now)
                })
            }
            (Self::FixedWindow(limit), held) => State::Counted(limit.counted(counted(held), now)),
            (Self::SlidingWindow(limit), held) => State::Counted(limit.counted(counted(held), now)),
            (Self::Quota(limit), held) => State::Counted(limit.counted(counted(held), now)),
            (Self::SlidingLog(limit), Some(State::Log(log))) => State::Log(limit.counted(Some(log), now)),
            (Self::SlidingLog(limit), _) => State::Log(limit.counted(None, now)),
            (Self::Concurrency(limit), Some(State::Permits(permits))) => {
                State::Permits(limit.counted(Some(permits), now))
            }
            (Self::Concurrency(limit), _) => State::Permits(limit.counted(None, now)),
        }
    }

    /// What it says to `cost` when `state` counts.
    pub fn judge(&self, state: &State, cost: u64, now: Timestamp) -> Verdict {
        match (self, state) {
            (Self::TokenBucket(limit), State::Bucket(bucket)) => limit.judge(*bucket, cost, now),
            (Self::FixedWindow(limit), State::Counted(counted)) => limit.judge(counted, cost, now),
            (Self::SlidingWindow(limit), State::Counted(counted)) => limit.judge(counted, cost, now),
            (Self::Quota(limit), State::Counted(counted)) => limit.judge(counted, cost, now),
            (Self::SlidingLog(limit), State::Log(log)) => limit.judge(log, cost, now),
            (Self::Concurrency(limit), State::Permits(permits)) => limit.judge(permits, cost, now),
            // `look` gives each limit its own kind of state.
            _ => self.judge(&self.look(None, false, now), cost, now),
        }
    }

    /// Adds `cost` to what counts, or one `permit`.
    pub fn add(&self, state: &mut State, cost: u64, permit: u64, now: Timestamp) {
        match (self, state) {
            (Self::TokenBucket(limit), State::Bucket(bucket)) => *bucket = limit.take(*bucket, cost, now).0,
            (Self::SlidingLog(limit), State::Log(log)) => limit.add(log, cost, now),
            (Self::Concurrency(limit), State::Permits(permits)) => limit.acquire(permits, permit, now),
            (_, State::Counted(counted)) => {
                counted.count = counted.count.saturating_add(cost).min(MAX_EXACT);
            }
            _ => {}
        }
    }

    /// Takes `cost` out of what counts, or one `permit`.
    pub fn give_back(&self, state: &mut State, cost: u64, permit: u64, now: Timestamp) {
        match (self, state) {
            (Self::TokenBucket(limit), State::Bucket(bucket)) => {
                *bucket = limit.give_back(*bucket, cost, now).0;
            }
            (Self::SlidingLog(limit), State::Log(log)) => limit.give_back(log, cost),
            (Self::Concurrency(limit), State::Permits(permits)) => limit.release(permits, permit),
            // What was taken in a period that is over is not given back into the next one.
            (Self::Quota(quota), State::Counted(_)) if !quota.is_present(now) => {}
            (_, State::Counted(counted)) => counted.count = counted.count.saturating_sub(cost),
            _ => {}
        }
    }

    /// Whether what was taken too much can be given back: where it is known that it still counts.
    pub const fn takes_back(&self) -> bool {
        matches!(self, Self::TokenBucket(_) | Self::Quota(_))
    }

    /// Milliseconds that `state` is remembered for, which is worth it for `reset_ms`; at least 1.
    pub const fn ttl_ms(&self, reset_ms: u64) -> u64 {
        match self {
            Self::TokenBucket(bucket) => bucket.ttl_ms(),
            _ if reset_ms == 0 => 1,
            _ => reset_ms,
        }
    }
}

fn counted(held: Option<&State>) -> Option<&Counted> {
    match held {
        Some(State::Counted(counted)) => Some(counted),
        _ => None,
    }
}

/// 100 years in milliseconds: the longest wait that is told.
const FOREVER_MS: u64 = 3_155_760_000_000;

/// Whole milliseconds, rounded up.
const fn to_ms(micros: u64) -> u64 {
    let ms = micros.div_ceil(1_000);
    if ms > FOREVER_MS { FOREVER_MS } else { ms }
}

/// What is left, as it is told.
const fn remaining(left: u64) -> u64 {
    if left > MAX_EXACT { MAX_EXACT } else { left }
}

/// What one limit says to one cost. A refusal is an answer, not an error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Verdict {
    /// Whether the cost fits.
    pub outcome: Outcome,
    /// Whole tokens left: after taking if all checks of the request were allowed, else untaken.
    pub remaining: u64,
    /// Milliseconds, rounded up, after which this cost fits if nobody else takes; 0 if it fits now.
    pub retry_after_ms: u64,
    /// Milliseconds, rounded up, after which the bucket is full if nobody takes.
    pub reset_ms: u64,
}

/// Whether a cost fits a limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Outcome {
    /// It fits.
    Allowed,
    /// It does not fit now.
    Refused,
    /// It is above the capacity: no waiting will help.
    NeverFits,
    /// So many whole tokens of it were taken in advance.
    Leased(u64),
}

impl Verdict {
    /// Whether the cost fits now.
    pub const fn is_allowed(&self) -> bool {
        matches!(self.outcome, Outcome::Allowed)
    }
}

#[cfg(test)]
mod tests;
