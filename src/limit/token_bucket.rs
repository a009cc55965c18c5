//! The token bucket, in whole numbers. Its twin is `lua/token_bucket.lua`: the same integers in the
//! same order, so that both give the same verdicts.
//!
//! Tokens are counted in units of `1/scale` token, time in microseconds, and the refill is `n` units
//! each `d` microseconds. `n * d <= 2^53`, so that every product is exact in a double as well.
//!
//! A bucket is below 0 where more was spent without the store than there was: it refills from there.
//!
//! An edit of the rule keeps the bucket: what it holds is clamped to the new capacity, and refills
//! at the new rate from the moment up to which it was counted. A bucket that was left alone for
//! twice its fill time is forgotten, and a forgotten bucket is full under the rule of the day.

use thiserror::Error;

use super::rate::{Rate, gcd};
use super::{MAX_EXACT, Outcome, Verdict};
use crate::clock::Timestamp;

/// 100 years in microseconds: the longest wait that is told, and below 2^53.
const FOREVER_MICROS: u64 = 3_155_760_000_000_000;

/// What stands for more units than can be counted in the scale at hand.
const UNCOUNTABLE: i64 = 2 * MAX_EXACT.cast_signed();

/// How far a rate may be rounded to fit into `n * d <= 2^53`: one part in a thousand million.
const ROUNDING: u128 = 1_000_000_000;

/// The numbers of a token bucket, ready to decide with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct TokenBucket {
    capacity: u64,
    scale: u64,
    n: u64,
    d: u64,
}

/// What a key holds: units, their scale, and the time up to which the refill is counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bucket {
    units: i64,
    scale: u64,
    at: Timestamp,
}

/// Why numbers make no token bucket.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum TokenBucketError {
    /// A bucket without room refuses everything; that is said by other means.
    #[error("must be at least 1 (0 would refuse every request)")]
    CapacityZero,
    /// Doubles, and so Redis, count exactly up to 2^53 only.
    #[error("must be at most 9007199254740992 (2^53), the largest number that is counted exactly")]
    CapacityTooLarge,
    /// The rate has more digits than exact arithmetic can carry.
    #[error("has more digits than can be counted exactly: use fewer, or a longer period as in 20/m")]
    RateTooFine,
}

impl TokenBucket {
    /// A bucket of `capacity` tokens that refills at `rate`.
    pub fn new(capacity: u64, rate: Rate) -> Result<Self, TokenBucketError> {
        if capacity == 0 {
            return Err(TokenBucketError::CapacityZero);
        }
        if capacity > MAX_EXACT {
            return Err(TokenBucketError::CapacityTooLarge);
        }
        let scale = scale_for(capacity);
        let (tokens, micros) = rate.fraction();
        let (n, d) = exact_fraction(u128::from(tokens) * u128::from(scale), micros)
            .ok_or(TokenBucketError::RateTooFine)?;
        Ok(Self { capacity, scale, n, d })
    }

    /// Tokens that fit.
    pub const fn capacity(&self) -> u64 {
        self.capacity
    }

    /// The rate at which it refills.
    pub fn rate(&self) -> Rate {
        Rate::of(self.n, u128::from(self.d) * u128::from(self.scale))
    }

    /// Microseconds in which an empty bucket fills, at most 100 years.
    pub const fn fill_micros(&self) -> u64 {
        self.time_to_earn(self.capacity * self.scale)
    }

    /// Milliseconds that a bucket is remembered for: twice its fill time, at least 1.
    pub const fn ttl_ms(&self) -> u64 {
        (self.fill_micros() * 2).div_ceil(1_000)
    }

    /// The share of one of `gateways`: capacity and rate divided by their number; room for at least
    /// one token and for `cost`.
    #[must_use]
    pub fn share(&self, gateways: u32, cost: u64) -> Self {
        if gateways <= 1 {
            // The whole: no arithmetic on the path of every request that the store has answered.
            return *self;
        }
        let gateways = u64::from(gateways);
        self.part((self.capacity / gateways).max(cost.clamp(1, self.capacity)), gateways)
    }

    /// One of `shards` buckets that together hold this one's capacity, and refill as fast.
    #[must_use]
    pub fn shard(&self, shard: u16, shards: u16) -> Self {
        let (shard, shards) = (u64::from(shard), u64::from(shards.max(1)));
        let capacity = self.capacity / shards + u64::from(shard < self.capacity % shards);
        self.part(capacity.max(1), shards)
    }

    /// A bucket of `capacity` that refills at one of so many parts of the rate.
    fn part(&self, capacity: u64, parts: u64) -> Self {
        let scale = scale_for(capacity);
        // Each answer of the store comes by here: mostly a product is all it takes.
        let slower = self.d.saturating_mul(parts);
        if scale == self.scale && self.n.saturating_mul(slower) <= MAX_EXACT {
            return Self { capacity, scale, n: self.n, d: slower };
        }
        // A scale that differs multiplies n; if that cannot be exact, dividing less is the safe side
        // only for `d`, so the rate is rounded down.
        let (n, d) = (u128::from(self.n) * u128::from(scale), u128::from(self.d) * u128::from(self.scale));
        let (n, d) = exact_fraction(n, d * u128::from(parts)).unwrap_or((1, MAX_EXACT));
        Self { capacity, scale, n, d }
    }

    /// Whole tokens that are earned in `micros`.
    pub const fn earned(&self, micros: u64) -> u64 {
        let units =
            (micros / self.d).saturating_mul(self.n).saturating_add((micros % self.d) * self.n / self.d);
        units / self.scale
    }

    /// Microseconds in which `tokens` are earned, at most 100 years.
    pub const fn micros_to_earn(&self, tokens: u64) -> u64 {
        self.time_to_earn(tokens.saturating_mul(self.scale))
    }

    /// Units of a cost in tokens; a cost above the capacity stays above it.
    pub const fn units(&self, cost: u64) -> u64 {
        let most = self.capacity + 1;
        (if cost > most { most } else { cost }) * self.scale
    }

    /// Units of what is debited or given back, which may be more than the capacity: as many as can be counted.
    pub const fn spent_units(&self, tokens: u64) -> u64 {
        let units = tokens.saturating_mul(self.scale);
        if units > MAX_EXACT { MAX_EXACT } else { units }
    }

    /// The numbers that the Lua twin takes: capacity in units, n, d, scale.
    pub const fn script_numbers(&self) -> [u64; 4] {
        [self.capacity * self.scale, self.n, self.d, self.scale]
    }

    /// A bucket that a clock has written which was ahead by more than one fill time, dated back to `now`; `None`
    /// for any other.
    pub fn dated_back(&self, bucket: Bucket, now: Timestamp) -> Option<Bucket> {
        let is_ahead = bucket.at.micros_since(now) > self.fill_micros();
        is_ahead.then_some(Bucket { at: now, ..bucket })
    }

    /// What the bucket is at `now`: refilled up to then. `None` is a bucket nobody has taken from.
    pub fn refilled(&self, bucket: Option<Bucket>, now: Timestamp) -> Bucket {
        self.refilled_from(self.lowest(), bucket, now)
    }

    fn refilled_from(&self, least: i64, bucket: Option<Bucket>, now: Timestamp) -> Bucket {
        let full = self.full();
        let Some(bucket) = bucket else { return Bucket { units: full, scale: self.scale, at: now } };
        let units = bucket.units_at_scale(self.scale).clamp(least, full);
        let elapsed = now.micros_since(bucket.at);
        if elapsed == 0 {
            // A clock that steps back mints nothing.
            return Bucket { units, scale: self.scale, at: bucket.at };
        }
        let part = (elapsed % self.d) * self.n;
        let earned = (elapsed / self.d).saturating_mul(self.n).saturating_add(part / self.d);
        if earned >= full.abs_diff(units) {
            return Bucket { units: full, scale: self.scale, at: now };
        }
        // Time that has not made up a whole unit yet stays on the clock: it is never thrown away.
        let leftover = (part % self.d) / self.n;
        Bucket { units: units + earned.cast_signed(), scale: self.scale, at: now.minus_micros(leftover) }
    }

    /// [`TokenBucket::refilled`] for a debit. It may come from an older rule: it only subtracts, so what
    /// is above its capacity stays there, and what is far below as well.
    pub fn refilled_for_debit(&self, bucket: Option<Bucket>, now: Timestamp) -> Bucket {
        let units = bucket.map_or(0, |bucket| bucket.units_at_scale(self.scale));
        match bucket {
            Some(bucket) if units > MAX_EXACT.cast_signed() => {
                Bucket { units: UNCOUNTABLE, scale: self.scale, at: bucket.at }
            }
            Some(bucket) if units > self.full() => {
                Bucket { units, scale: self.scale, at: bucket.at.max(now) }
            }
            bucket => self.refilled_from(self.full() - MAX_EXACT.cast_signed(), bucket, now),
        }
    }

    /// What the limit says to `cost` when `bucket` (refilled to `now`) holds what it holds.
    pub fn judge(&self, bucket: Bucket, cost: u64, now: Timestamp) -> Verdict {
        let cost = self.units(cost).cast_signed();
        let outcome = if cost > self.full() {
            Outcome::NeverFits
        } else if cost > bucket.units.max(0) {
            Outcome::Refused
        } else {
            Outcome::Allowed
        };
        let retry_after_ms = if outcome == Outcome::Refused {
            self.wait_ms(bucket, cost.abs_diff(bucket.units), now)
        } else {
            0
        };
        Verdict { outcome, retry_after_ms, ..self.state(bucket, now) }
    }

    /// Takes an allowed `cost` from `bucket` and restates the verdict.
    pub fn take(&self, bucket: Bucket, cost: u64, now: Timestamp) -> (Bucket, Verdict) {
        let units = bucket.units - self.units(cost).cast_signed();
        let bucket = Bucket { units, ..bucket };
        (bucket, self.state(bucket, now))
    }

    /// Takes `cost` that has been spent elsewhere already, also below 0: down to one capacity, so that
    /// what was spent too early is earned before the next request passes.
    pub fn debit(&self, bucket: Bucket, cost: u64, now: Timestamp) -> (Bucket, Verdict) {
        let lowest = bucket.units.min(self.lowest());
        let units = (bucket.units - self.spent_units(cost).cast_signed()).max(lowest);
        let bucket = Bucket { units, ..bucket };
        (bucket, self.state(bucket, now))
    }

    /// Takes whole tokens in advance, as many as there are up to `wanted`.
    pub fn lease(&self, bucket: Bucket, wanted: u64, now: Timestamp) -> (Bucket, Verdict) {
        let there = bucket.units.max(0).cast_unsigned() / self.scale;
        let tokens = wanted.min(there);
        let units = bucket.units - (tokens * self.scale).cast_signed();
        let bucket = Bucket { units, ..bucket };
        (bucket, Verdict { outcome: Outcome::Leased(tokens), ..self.state(bucket, now) })
    }

    /// Gives `tokens` back that were taken in advance; what does not fit is let go.
    pub fn give_back(&self, bucket: Bucket, tokens: u64, now: Timestamp) -> (Bucket, Verdict) {
        let units = (bucket.units + self.spent_units(tokens).cast_signed()).min(self.full());
        let bucket = Bucket { units, ..bucket };
        (bucket, self.state(bucket, now))
    }

    /// A bucket that holds `tokens` at `now`, at most the capacity.
    pub fn at_level(&self, tokens: u64, now: Timestamp) -> (Bucket, Verdict) {
        let units = (tokens.min(self.capacity) * self.scale).cast_signed();
        let bucket = Bucket { units, scale: self.scale, at: now };
        (bucket, self.state(bucket, now))
    }

    /// What an allowed request is told of `bucket`.
    pub fn state(&self, bucket: Bucket, now: Timestamp) -> Verdict {
        let missing = self.full().saturating_sub(bucket.units).max(0).cast_unsigned();
        Verdict {
            outcome: Outcome::Allowed,
            remaining: bucket.units.max(0).cast_unsigned() / self.scale,
            retry_after_ms: 0,
            reset_ms: self.wait_ms(bucket, missing, now),
        }
    }

    /// Units of a full bucket: at most 2^53.
    const fn full(&self) -> i64 {
        (self.capacity * self.scale).cast_signed()
    }

    /// The least that a bucket holds: one capacity below 0, and never so far that what is missing in it
    /// cannot be counted exactly.
    fn lowest(&self) -> i64 {
        -self.full().min(MAX_EXACT.cast_signed() - self.full())
    }

    /// Milliseconds from `now` until `bucket` has earned `need` more units.
    fn wait_ms(&self, bucket: Bucket, need: u64, now: Timestamp) -> u64 {
        let ready = bucket.at.plus_micros(self.time_to_earn(need));
        ready.micros_since(now).min(FOREVER_MICROS).div_ceil(1_000)
    }

    /// Microseconds that it takes to earn `need` units.
    const fn time_to_earn(&self, need: u64) -> u64 {
        let whole = need / self.n;
        // Both factors are below n and d, whose product is exact.
        let rest = ((need % self.n) * self.d).div_ceil(self.n);
        let time = whole.saturating_mul(self.d).saturating_add(rest);
        if time > FOREVER_MICROS { FOREVER_MICROS } else { time }
    }
}

impl Bucket {
    /// Units at another scale, rounded as the Lua twin rounds the decimal text it stored.
    #[expect(
        clippy::cast_precision_loss,
        reason = "units stay below 2^53, and only an edit across a scale takes this way"
    )]
    fn units_at_scale(self, scale: u64) -> i64 {
        if self.scale == scale {
            return self.units;
        }
        let tokens = self.units as f64 / self.scale as f64;
        let units = tokens * scale as f64;
        // Half a unit goes up, also below 0.
        let whole = units.floor();
        (if units - whole >= 0.5 { whole + 1.0 } else { whole }) as i64
    }

    /// Whether its units can be counted in the scale of the limit that it was refilled for.
    pub const fn is_countable(&self) -> bool {
        self.units != UNCOUNTABLE
    }

    /// The time up to which the refill is counted.
    pub const fn counted_at(&self) -> Timestamp {
        self.at
    }
}

/// Units per token: the finest at which the capacity, and a rounding to whole units, stay exact in
/// a double (`capacity * scale <= 2^50`).
const fn scale_for(capacity: u64) -> u64 {
    match capacity {
        0..=1_000_000_000 => 1_000_000,
        1_000_000_001..=1_000_000_000_000 => 1_000,
        _ => 1,
    }
}

/// `n/d` in lowest terms with `n * d <= 2^53`: exactly, or else by the best continued fraction,
/// if that is within one part in a thousand million.
fn exact_fraction(n: u128, d: u128) -> Option<(u64, u64)> {
    let common = gcd(n, d);
    let (n, d) = (n / common, d / common);
    let fits = |n: u128, d: u128| n.checked_mul(d).is_some_and(|product| product <= u128::from(MAX_EXACT));
    if fits(n, d) {
        return Some((n as u64, d as u64));
    }
    // Convergents h/k of n/d.
    let (mut a, mut b) = (n, d);
    let (mut h, mut h_before, mut k, mut k_before) = (1u128, 0u128, 0u128, 1u128);
    while b > 0 {
        let quotient = a / b;
        let (h_next, k_next) = (
            quotient.checked_mul(h)?.checked_add(h_before)?,
            quotient.checked_mul(k)?.checked_add(k_before)?,
        );
        if !fits(h_next, k_next) {
            break;
        }
        (h_before, h, k_before, k) = (h, h_next, k, k_next);
        (a, b) = (b, a % b);
    }
    if h == 0 || k == 0 {
        return None;
    }
    let error = (n.checked_mul(k)?).abs_diff(h.checked_mul(d)?);
    (error.checked_mul(ROUNDING)? <= n.checked_mul(k)?).then_some((h as u64, k as u64))
}

#[cfg(test)]
mod tests;
