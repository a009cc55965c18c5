use super::quota::{Period, Zone};
use super::*;

const START: u64 = 1_764_000_000_000_000;

fn at(micros: u64) -> Timestamp {
    Timestamp::from_micros(START + micros)
}

/// A limit with what it remembers, asked one at a time.
struct Asked {
    limit: Limit,
    held: Option<State>,
}

impl Asked {
    fn ask(&mut self, cost: u64, now: Timestamp) -> Verdict {
        let limit = self.limit.on(now);
        self.held = self.held.take().map(|held| limit.dated_back(&held, now).unwrap_or(held));
        let mut state = limit.look(self.held.as_ref(), false, now);
        let verdict = limit.judge(&state, cost, now);
        if verdict.is_allowed() {
            limit.add(&mut state, cost, 1, now);
            self.held = Some(state);
        }
        verdict
    }
}

fn windows() -> Vec<Limit> {
    let window = 1_000_000;
    vec![
        Limit::FixedWindow(FixedWindow { limit: 3, window }),
        Limit::SlidingWindow(SlidingWindow { limit: 3, window }),
        Limit::SlidingLog(SlidingLog { limit: 3, window }),
        Limit::Quota(Quota::new(3, Period::Day, Zone::UTC)),
    ]
}

/// The issue's own: limit 3, four calls in a window: yes, yes, yes, no.
#[test]
fn three_pass_and_the_fourth_does_not() {
    for limit in windows() {
        let mut asked = Asked { limit, held: None };
        let told: Vec<(bool, u64)> = (0..4)
            .map(|call| asked.ask(1, at(call)))
            .map(|verdict| (verdict.is_allowed(), verdict.remaining))
            .collect();
        assert_eq!(told, [(true, 3), (true, 2), (true, 1), (false, 0)], "{limit:?}");
        assert_eq!(asked.ask(4, at(5)).outcome, Outcome::NeverFits);
        assert_eq!(asked.ask(0, at(5)).outcome, Outcome::Allowed);
    }
}

/// Whoever waits as long as he is told is let in, and a moment before that he is not.
#[test]
fn the_wait_is_true_and_no_longer_than_it_must_be() {
    let mut random = 7u64;
    let mut below = |most: u64| {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (random >> 33) % most
    };
    for limit in windows() {
        let mut asked = Asked { limit, held: None };
        let (mut now, mut refusals) = (0, 0);
        for _ in 0..20_000 {
            now += if limit.algorithm() == "quota" { below(30_000_000_000) } else { below(400_000) };
            let cost = 1 + below(3);
            let verdict = asked.ask(cost, at(now));
            if verdict.outcome != Outcome::Refused {
                continue;
            }
            refusals += 1;
            let wait = verdict.retry_after_ms * 1_000;
            let judged = |micros: u64| {
                let limit = limit.on(at(micros));
                limit.judge(&limit.look(asked.held.as_ref(), false, at(micros)), cost, at(micros))
            };
            assert!(
                judged(now + wait).is_allowed(),
                "{limit:?} {cost} at {now}: {verdict:?} {:?}",
                asked.held
            );
            assert!(wait < 2_000 || !judged(now + wait - 2_000).is_allowed(), "{limit:?}: {verdict:?}");
        }
        assert!(refusals > 500, "{limit:?}: {refusals}");
    }
}

/// What was counted while the clock was far ahead counts for a period from now on, not until it is that late again.
#[test]
fn a_clock_that_was_ahead_freezes_nothing() {
    for limit in windows() {
        let mut asked = Asked { limit, held: None };
        let (now, ahead) = (500_000, 400 * 86_400_000_000);
        assert!(asked.ask(3, at(now + ahead)).is_allowed());
        let refused = asked.ask(1, at(now));
        assert_eq!(refused.outcome, Outcome::Refused, "{limit:?}: nothing is given for free");
        let period_ms = limit.on(at(now)).window_seconds() * 1_000;
        assert!(refused.retry_after_ms <= period_ms, "{limit:?}: {refused:?}");
        assert!(asked.ask(1, at(now + refused.retry_after_ms * 1_000)).is_allowed(), "{limit:?}");
    }
}

/// A clock that was ahead by less than a period: what it counted counts in its own period.
#[test]
fn a_clock_that_steps_back_a_little_mints_nothing() {
    for limit in windows() {
        let mut asked = Asked { limit, held: None };
        let period = limit.on(at(0)).window_seconds() * 1_000_000;
        assert!(asked.ask(3, at(period)).is_allowed());
        let refused = asked.ask(1, at(period / 10));
        assert_eq!(refused.outcome, Outcome::Refused, "{limit:?}");
        assert!(refused.retry_after_ms <= 2 * period / 1_000, "{limit:?}: {refused:?}");
    }
}

/// No window of that length ever holds more than the limit.
#[test]
fn a_sliding_log_is_exact() {
    let mut asked =
        Asked { limit: Limit::SlidingLog(SlidingLog { limit: 5, window: 1_000_000 }), held: None };
    let mut admitted: Vec<u64> = Vec::new();
    for step in 0..10_000u64 {
        let now = step * 37_003;
        if asked.ask(1, at(now)).is_allowed() {
            admitted.push(now);
        }
    }
    assert!(admitted.windows(6).all(|six| six[5] - six[0] >= 1_000_000));
    assert!(admitted.len() as u64 >= 5 * (10_000 * 37_003 / 1_000_000) * 9 / 10);
}

/// B005: where a fixed window lets twice its limit through around an edge, the sliding ones do not.
#[test]
fn around_the_edge_of_a_window() {
    for limit in windows() {
        let edge = 1_000_000 - START % 1_000_000;
        let mut asked = Asked { limit, held: None };
        let admitted = (0..20).filter(|step| asked.ask(1, at(edge + 1_000_000 - 10 + step)).is_allowed());
        let expect = if limit.algorithm() == "fixed_window" { 6 } else { 3 };
        assert_eq!(admitted.count(), expect, "{limit:?}");
    }
}

/// What a dead gateway held comes back by itself; what lives is renewed.
#[test]
fn permits_come_back() {
    let limit = Concurrency { limit: 2, hold: 1_000_000 };
    let mut permits = Permits::new();
    limit.acquire(&mut permits, 1, at(0));
    limit.acquire(&mut permits, 2, at(0));
    assert_eq!(limit.judge(&permits, 1, at(1)).outcome, Outcome::Refused);
    limit.renew(&mut permits, 1, at(900_000));
    let permits = limit.counted(Some(&permits), at(1_000_000));
    assert_eq!(permits, [(1, START + 1_900_000)]);
    assert!(limit.judge(&permits, 1, at(1_000_000)).is_allowed());
}

#[test]
fn edits_keep_what_was_counted() {
    let now = at(500_000_000);
    for (old, new) in [
        (
            Limit::FixedWindow(FixedWindow { limit: 10, window: 1_000_000 }),
            Limit::FixedWindow(FixedWindow { limit: 10, window: 60_000_000 }),
        ),
        (
            Limit::SlidingLog(SlidingLog { limit: 10, window: 60_000_000 }),
            Limit::SlidingLog(SlidingLog { limit: 5, window: 60_000_000 }),
        ),
    ] {
        let mut state = old.look(None, false, now);
        old.add(&mut state, 8, 0, now);
        let left = new.judge(&new.look(Some(&state), false, now), 0, now).remaining;
        assert_eq!(left, new.capacity().saturating_sub(8));
    }
}

/// A share of each: all together no more than the whole, but one each at least.
#[test]
fn shares_divide_the_limit() {
    for limit in windows() {
        assert_eq!(limit.share(3, 1).capacity(), 1, "{limit:?}");
        assert_eq!(limit.share(20, 1).capacity(), 1, "{limit:?}");
        assert_eq!(limit.share(20, 3).capacity(), 3, "room for the cost: {limit:?}");
    }
}
