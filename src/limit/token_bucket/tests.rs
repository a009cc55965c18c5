use proptest::prelude::*;

use super::*;

const SECOND: u64 = 1_000_000;
const START: Timestamp = Timestamp::from_micros(1_764_000_000_000_000);

fn bucket(capacity: u64, rate: &str) -> TokenBucket {
    TokenBucket::new(capacity, rate.parse().unwrap()).unwrap()
}

/// A bucket with its state, as a store would hold it.
struct Held {
    limit: TokenBucket,
    state: Option<Bucket>,
}

impl Held {
    fn new(capacity: u64, rate: &str) -> Self {
        Self { limit: bucket(capacity, rate), state: None }
    }

    fn ask(&mut self, cost: u64, now: Timestamp) -> Verdict {
        self.state = self.state.map(|held| self.limit.dated_back(held, now).unwrap_or(held));
        let bucket = self.limit.refilled(self.state, now);
        let verdict = self.limit.judge(bucket, cost, now);
        if !verdict.is_allowed() || cost == 0 {
            return verdict;
        }
        let (bucket, verdict) = self.limit.take(bucket, cost, now);
        self.state = Some(bucket);
        verdict
    }

    fn admitted(&mut self, times: impl IntoIterator<Item = Timestamp>) -> u64 {
        times.into_iter().map(|now| u64::from(self.ask(1, now).is_allowed())).sum()
    }
}

fn every(micros: u64, count: u64) -> impl Iterator<Item = Timestamp> {
    (0..count).map(move |step| START.plus_micros(step * micros))
}

#[test]
fn takes_what_is_there_and_no_more() {
    let mut held = Held::new(2, "1/m");
    assert_eq!(held.ask(1, START).remaining, 1);
    assert_eq!(held.ask(1, START).remaining, 0);
    let refused = held.ask(1, START);
    assert_eq!(
        (refused.outcome, refused.retry_after_ms, refused.reset_ms),
        (Outcome::Refused, 60_000, 120_000)
    );
}

/// B003: a rate of 100/s gives one each 10 ms, not a lump each second.
#[test]
fn refill_is_even_below_a_second() {
    let mut held = Held::new(1, "100/s");
    let verdicts: Vec<bool> = every(10_000, 500).map(|now| held.ask(1, now).is_allowed()).collect();
    let admitted = verdicts.iter().filter(|allowed| **allowed).count();
    let longest = verdicts.split(|allowed| *allowed).map(<[bool]>::len).max().unwrap();
    assert!(admitted >= 475 && longest <= 2, "{admitted} admitted, {longest} refused in a row");
}

/// B005: no edge of a second, minute or hour lets twice the limit through.
#[test]
fn no_window_has_an_edge() {
    for edge in [SECOND, 60 * SECOND, 3_600 * SECOND] {
        let edge = Timestamp::from_micros(START.as_micros() / edge * edge + edge);
        for offset in (0..=100_000).step_by(5_000) {
            let mut held = Held::new(50, "10/s");
            let start = edge.minus_micros(50_000).plus_micros(offset);
            let admitted = held.admitted((0..100).map(|step| start.plus_micros(step * 1_000)));
            assert!(admitted <= 50 + 1 + 1, "{admitted} at offset {offset}");
        }
    }
}

/// B007: an old bucket with a high rate neither overflows nor empties.
#[test]
fn four_hundred_days_of_idleness() {
    let mut held = Held::new(1_000_000, "1000000/s");
    assert!(held.ask(1, START).is_allowed());
    let verdict = held.ask(1, START.plus_micros(400 * 86_400 * SECOND));
    assert_eq!((verdict.outcome, verdict.remaining), (Outcome::Allowed, 999_999));
}

/// B009: capacities are exact to the last token up to 2^53, and refused beyond.
#[test]
fn capacities_are_exact_or_refused() {
    for capacity in [1, 2, (1 << 31) - 1, 1 << 31, (1 << 32) + 1, (1 << 53) - 1, 1 << 53] {
        let mut held = Held::new(capacity, "1/m");
        assert_eq!(held.ask(1, START).remaining, capacity - 1, "{capacity}");
        assert_eq!(held.ask(capacity - 1, START).remaining, 0, "{capacity}");
        assert_eq!(held.ask(1, START).outcome, Outcome::Refused, "{capacity}");
    }
    let rate = Rate::per_second(1).unwrap();
    assert_eq!(TokenBucket::new((1 << 53) + 1, rate), Err(TokenBucketError::CapacityTooLarge));
    assert_eq!(TokenBucket::new(u64::MAX, rate), Err(TokenBucketError::CapacityTooLarge));
}

/// B011: nothing but the refill fills.
#[test]
fn no_full_refill_each_period() {
    let mut held = Held::new(3, "3/s");
    let admitted: Vec<u64> = (0..60)
        .map(|second| held.admitted((0..10).map(|step| START.plus_micros(second * SECOND + step * 100_000))))
        .collect();
    assert!(admitted.iter().all(|in_second| *in_second <= 6));
    assert!(admitted.iter().sum::<u64>() <= 3 + 180 + 1);
}

/// B013: 6 per minute with capacity 6 takes 6 at once.
#[test]
fn six_per_minute() {
    let mut held = Held::new(6, "6/m");
    assert_eq!(held.admitted([START; 7]), 6);
    assert_eq!(held.ask(1, START).retry_after_ms, 10_000);
}

/// B015: 0 is no limit and no refusal, it is a fault; 1 is one.
#[test]
fn zero_is_a_fault_and_one_is_one() {
    assert_eq!(TokenBucket::new(0, Rate::per_second(1).unwrap()), Err(TokenBucketError::CapacityZero));
    assert_eq!("0".parse::<Rate>(), Err(crate::limit::rate::RateError::Zero));
    let mut held = Held::new(1, "1/h");
    assert_eq!(held.admitted([START; 3]), 1);
}

/// B029: what was spent does not come back because a key was forgotten early.
#[test]
fn remembered_for_twice_the_fill_time_and_never_zero() {
    assert_eq!(bucket(3, "1/15s").ttl_ms(), 90_000);
    assert_eq!(bucket(1, "1000000000").ttl_ms(), 1);
    assert_eq!(bucket(20, "10").ttl_ms(), 4_000);
    let mut held = Held::new(3, "1/15s");
    assert_eq!(held.admitted([START; 3]), 3);
    assert_eq!(held.admitted([START.plus_micros(8 * SECOND); 3]), 0);
}

/// B121: asking twice as often as allowed does not lock a client out.
#[test]
fn a_refused_request_throws_nothing_away() {
    let mut held = Held::new(5, "5/s");
    let admitted = held.admitted(every(100_000, 600));
    assert!((300..=305).contains(&admitted), "{admitted} of 300");
    // Asked each millisecond, every token is still found in the millisecond that earned it.
    let mut held = Held::new(1, "7/m");
    assert_eq!(held.admitted(every(1_000, 60_000)), 7);
}

/// B095: an edit clamps, and never refills.
#[test]
fn an_edit_keeps_the_bucket() {
    let mut held = Held::new(100, "1/h");
    held.ask(20, START);
    held.limit = bucket(50, "1/h");
    assert_eq!(held.ask(0, START).remaining, 50);
    held.limit = bucket(200, "1/h");
    assert_eq!(held.ask(0, START).remaining, 80);
    held.limit = bucket(2_000_000_000, "1/h");
    assert_eq!(held.ask(0, START).remaining, 80);
}

#[test]
fn a_clock_that_steps_back_mints_nothing() {
    let mut held = Held::new(10, "10/s");
    assert_eq!(held.ask(10, START).remaining, 0);
    let back = START.minus_micros(SECOND);
    assert_eq!(held.ask(1, back).outcome, Outcome::Refused);
    assert_eq!(held.ask(1, START).outcome, Outcome::Refused);
    assert_eq!(held.ask(1, START.plus_micros(100_000)).outcome, Outcome::Allowed);
}

/// A clock that was a day ahead for a moment does not freeze what was written then.
#[test]
fn a_bucket_from_the_future_refills_from_now_on() {
    let mut held = Held::new(10, "10/s");
    held.ask(10, START.plus_micros(86_400 * SECOND));
    assert_eq!(held.ask(1, START).retry_after_ms, 100);
    assert_eq!(held.admitted(every(100_000, 30).skip(1)), 29);
}

#[test]
fn a_cost_above_the_capacity_never_fits() {
    let mut held = Held::new(5, "1");
    for cost in [6, u64::MAX] {
        let verdict = held.ask(cost, START);
        assert_eq!((verdict.outcome, verdict.remaining, verdict.retry_after_ms), (Outcome::NeverFits, 5, 0));
    }
    assert_eq!(held.ask(0, START).outcome, Outcome::Allowed);
    assert_eq!(held.state, None, "asking wrote something");
}

#[test]
fn a_share_is_a_part_of_the_limit() {
    let limit = bucket(100, "50/s");
    let share = limit.share(4, 1);
    assert_eq!((share.capacity(), share.fill_micros()), (25, 2 * SECOND));
    assert_eq!(limit.share(1_000, 1).capacity(), 1);
    assert_eq!(limit.share(0, 1), limit);
    assert_eq!(bucket(1 << 53, "1/m").share(3, 1).capacity(), (1 << 53) / 3);
    assert_eq!((limit.share(50, 5).capacity(), limit.share(50, u64::MAX).capacity()), (5, 100));
}

#[test]
fn rates_that_cannot_be_kept_exactly() {
    // 1/3 per second, as a program would write it, is taken for 1/3.
    let third = TokenBucket::new(10, "0.3333333333333333".parse().unwrap()).unwrap();
    assert_eq!(third, bucket(10, "1/3s"));
    assert!(TokenBucket::new(10, "9007199254.740992".parse().unwrap()).is_ok());
    assert_eq!(TokenBucket::new(10, "9999999999999999".parse().unwrap()), Err(TokenBucketError::RateTooFine));
}

/// Capacities, rates and steps of time of every order of magnitude.
fn any_bucket() -> impl Strategy<Value = TokenBucket> {
    let capacity =
        (0u32..54).prop_flat_map(|bits| (1u64 << bits.saturating_sub(1))..=(1u64 << bits).min(MAX_EXACT));
    let rate = (
        1u64..100_000,
        prop_oneof![Just(1_000u64), Just(SECOND), Just(60 * SECOND), Just(3_600 * SECOND), Just(7 * SECOND)],
    );
    (capacity, rate).prop_map(|(capacity, (tokens, micros))| {
        TokenBucket::new(capacity, Rate::new(tokens, micros).unwrap()).unwrap()
    })
}

fn any_step() -> impl Strategy<Value = u64> {
    prop_oneof![Just(0), 1..100u64, 1..SECOND, 1..3_600 * SECOND]
}

proptest! {
    /// Promise 1, in exact fractions: from any state that is full at the start, what is admitted up
    /// to a time never exceeds capacity + rate * time; and promise 2: what is refused did not fit.
    #[test]
    fn never_above_the_bound_and_never_wasteful(
        limit in any_bucket(),
        steps in prop::collection::vec((any_step(), 0u64..5), 1..60),
    ) {
        let mut held = Held { limit, state: None };
        let (mut now, mut taken) = (START, 0u128);
        // Exact: tokens * d * scale, with everything over the same denominator.
        let full = u128::from(limit.capacity) * u128::from(limit.scale) * u128::from(limit.d);
        let mut level = full;
        for (step, cost) in steps {
            now = now.plus_micros(step);
            level = (level + u128::from(step) * u128::from(limit.n)).min(full);
            let price = u128::from(limit.units(cost)) * u128::from(limit.d);
            let verdict = held.ask(cost, now);
            if verdict.is_allowed() {
                prop_assert!(price <= level, "admitted what the exact bucket does not hold");
                level -= price;
                taken += price;
            } else if verdict.outcome == Outcome::Refused {
                // A unit for each admission so far is all that rounding may have cost.
                let rounding = 60 * u128::from(limit.d);
                prop_assert!(price + rounding > level, "refused what the exact bucket holds");
            }
        }
        let bound = full + u128::from(now.micros_since(START)) * u128::from(limit.n);
        prop_assert!(taken <= bound);
    }

    /// B129, and governor's property: refused at every moment before the told time, allowed at it.
    #[test]
    fn retry_after_is_true(limit in any_bucket(), steps in prop::collection::vec((any_step(), 1u64..5), 1..40)) {
        let mut held = Held { limit, state: None };
        let mut now = START;
        for (step, cost) in steps {
            now = now.plus_micros(step);
            let verdict = held.ask(cost, now);
            if verdict.outcome == Outcome::Refused && verdict.retry_after_ms < 100 * 365 * 86_400_000 {
                let then = now.plus_micros(verdict.retry_after_ms * 1_000);
                let bucket = limit.refilled(held.state, then);
                prop_assert!(limit.judge(bucket, cost, then).is_allowed());
                let too_soon = then.minus_micros(1_001 + 1);
                if too_soon > now {
                    let bucket = limit.refilled(held.state, too_soon);
                    prop_assert!(!limit.judge(bucket, cost, too_soon).is_allowed());
                }
            }
        }
    }

    /// B029 over random rules: a bucket is never forgotten before it is full.
    #[test]
    fn forgotten_only_when_full(limit in any_bucket()) {
        let ttl = limit.ttl_ms();
        prop_assert!(ttl >= 1);
        prop_assert!(limit.fill_micros() == FOREVER_MICROS || ttl * 1_000 >= limit.fill_micros());
    }
}

/// All shards together hold the capacity, and refill as fast as the whole, whatever its numbers are.
#[test]
fn shards_make_up_the_whole() {
    for (capacity, rate) in [(10, "10"), (7, "1/m"), (1_000_003, "33.333"), (1 << 53, "3000000000")] {
        let whole = TokenBucket::new(capacity, rate.parse().unwrap()).unwrap();
        for shards in [1u16, 2, 3, 7] {
            let parts: Vec<_> = (0..shards).map(|shard| whole.shard(shard, shards)).collect();
            assert_eq!(parts.iter().map(TokenBucket::capacity).sum::<u64>(), capacity);
            let hour = 3_600_000_000;
            let earned: u64 = parts.iter().map(|part| part.earned(hour)).sum();
            let missing = whole.earned(hour) - earned;
            assert!(missing <= u64::from(shards) + whole.earned(hour) / 1_000_000_000, "{rate}: {missing}");
        }
    }
}
