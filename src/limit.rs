//! Limits: an algorithm and its numbers, and what one says. Pure: no clock, no lock, no I/O.

pub mod rate;
pub mod token_bucket;

use token_bucket::TokenBucket;

use crate::clock::Timestamp;

/// The largest whole number that a double, and so Lua on Redis, holds exactly: 2^53.
pub const MAX_EXACT: u64 = 1 << 53;

/// The algorithm of a rule with its numbers. A closed set.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Limit {
    /// Tokens that refill evenly up to a capacity.
    TokenBucket(TokenBucket),
}

impl Limit {
    /// The most that passes at once: `X-RateLimit-Limit`, and `q` of `RateLimit-Policy`.
    pub const fn capacity(&self) -> u64 {
        match self {
            Self::TokenBucket(bucket) => bucket.capacity(),
        }
    }

    /// Seconds, rounded up, in which an empty bucket is full again: `w` of `RateLimit-Policy`.
    pub const fn window_seconds(&self) -> u64 {
        match self {
            Self::TokenBucket(bucket) => bucket.fill_micros().div_ceil(1_000_000),
        }
    }

    /// Whole tokens that are earned in `micros`.
    pub const fn earned(&self, micros: u64) -> u64 {
        match self {
            Self::TokenBucket(bucket) => bucket.earned(micros),
        }
    }

    /// Microseconds in which `tokens` are earned, at most 100 years.
    pub const fn micros_to_earn(&self, tokens: u64) -> u64 {
        match self {
            Self::TokenBucket(bucket) => bucket.micros_to_earn(tokens),
        }
    }

    /// What an allowed request is told of a bucket that holds `tokens`.
    pub fn at_level(&self, tokens: u64, now: Timestamp) -> Verdict {
        match self {
            Self::TokenBucket(bucket) => bucket.at_level(tokens, now).1,
        }
    }

    /// The part of this limit that one of `shards` buckets holds: all together hold it exactly.
    #[must_use]
    pub fn shard(&self, shard: u16, shards: u16) -> Self {
        match self {
            Self::TokenBucket(bucket) => Self::TokenBucket(bucket.shard(shard, shards)),
        }
    }

    /// The part of this limit that one of `gateways` may give out alone, when no store joins them;
    /// room enough for `cost`, which could never pass otherwise.
    #[must_use]
    pub fn share(&self, gateways: u32, cost: u64) -> Self {
        match self {
            Self::TokenBucket(bucket) => Self::TokenBucket(bucket.share(gateways, cost)),
        }
    }
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
