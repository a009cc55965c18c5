use std::time::Duration;

use super::*;
use crate::key::{Hasher, Part};
use crate::limit::token_bucket::TokenBucket;
use crate::metrics::Metrics;

const NOW: Timestamp = Timestamp::from_micros(1_764_000_000_000_000);

fn after(millis: u64) -> Timestamp {
    NOW.plus_micros(millis * 1_000)
}

fn check(capacity: u64, rate: &str, cost: u64) -> Check {
    let part = Part::known(b"a", &Hasher::new(b""));
    let limit = Limit::TokenBucket(TokenBucket::new(capacity, rate.parse().unwrap()).unwrap());
    Check::own(Key::tenant_route("rl", &part, &part), limit, cost, Demand::Take)
}

fn leases(gateways: u32) -> Leases {
    let settings = Settings {
        threshold: 100,
        window: Duration::from_secs(1),
        epsilon_ppm: 50_000,
        lease_for: Duration::from_millis(100),
    };
    Leases::new(&settings, Arc::new(Gateways::fixed(gateways)), Metrics::new().unwrap().leases)
}

/// What was ordered: demand and tokens.
fn orders(leases: &Leases) -> Vec<(Demand, u64)> {
    leases.take_orders().into_iter().map(|order| (order.check.demand, order.check.cost)).collect()
}

/// Answers the one order there is with so many tokens, when `left` are left in the store.
fn answer(leases: &Leases, tokens: u64, left: u64, now: Timestamp) -> u64 {
    let [order] = &leases.take_orders()[..] else { panic!("not one order") };
    let verdict = order.check.limit.at_level(left, now);
    leases.land(order, Some(Verdict { outcome: Outcome::Leased(tokens), ..verdict }), now);
    order.check.cost
}

#[test]
fn hot_requests_are_served_from_what_was_fetched_before_it_runs_out() {
    let (leases, check) = (leases(1), check(20_000, "20000", 1));
    assert_eq!(leases.take(&check, 5_000, NOW), None, "the first one is for the store");
    // 100 ms at 5,000 tokens a second.
    assert_eq!(answer(&leases, 500, 19_000, NOW), 500);
    for spent in 1..375 {
        let verdict = leases.take(&check, 5_000, NOW).expect("leased");
        assert_eq!((verdict.outcome, verdict.remaining), (Outcome::Allowed, 19_500 - spent));
        assert_eq!(orders(&leases), [], "{spent}");
    }
    assert!(leases.take(&check, 5_000, NOW).is_some());
    assert_eq!(answer(&leases, 375, 18_000, NOW), 375, "a quarter is left");
    assert_eq!(leases.held(&check.key), 500);
}

/// DESIGN: capacity and rate 20,000, 20 gateways: 50 tokens each; capacity 200, rate 100/s: no lease.
#[test]
fn no_more_than_the_share_of_the_slack_is_ever_held() {
    let large = check(20_000, "20000", 1);
    let leases = leases(20);
    assert_eq!(leases.take(&large, 1_000_000, NOW), None);
    assert_eq!(orders(&leases), [(Demand::Lease, 50)]);
    assert_eq!(leases.take(&large, 1_000_000, NOW), None);
    assert_eq!(orders(&leases), [], "what is on its way counts");
    let small = Check { key: large.key.of_candidate(), ..check(200, "100", 1) };
    assert_eq!(leases.take(&small, 1_000_000, NOW), None);
    assert_eq!(orders(&leases), [], "half a token each is no lease");
}

#[test]
fn a_cost_above_one_spends_as_much_and_one_above_the_share_is_for_the_store() {
    let leases = leases(20);
    let ask = |cost| leases.take(&check(20_000, "20000", cost), 10_000, NOW);
    assert_eq!(ask(7), None);
    answer(&leases, 50, 10_000, NOW);
    assert!(ask(7).is_some_and(|verdict| verdict.is_allowed() && verdict.remaining == 10_043));
    assert_eq!(ask(51), None);
    assert_eq!(leases.held(&check(1, "1", 1).key), 43);
}

/// A dry key is refused here, until this gateway's share of the rate can have filled what it may hold.
#[test]
fn a_dry_key_is_left_alone_for_its_share_of_the_rate() {
    let (leases, check) = (leases(20), check(20_000, "20000", 1));
    leases.take(&check, 10_000, NOW);
    answer(&leases, 1, 0, NOW);
    assert!(leases.take(&check, 10_000, NOW).is_some_and(|verdict| verdict.is_allowed()));
    // 50 tokens at 1,000 a second are 50 ms.
    let refused = leases.take(&check, 10_000, after(1)).expect("dry");
    assert_eq!((refused.outcome, refused.remaining, refused.retry_after_ms), (Outcome::Refused, 0, 49));
    assert!(leases.take(&check, 10_000, after(49)).is_some_and(|verdict| !verdict.is_allowed()));
    assert_eq!(orders(&leases), []);
    leases.take(&check, 10_000, after(50));
    assert_eq!(answer(&leases, 50, 0, after(51)), 50, "all that it may hold");
    // All was there, but not enough for the others: still dry, and asked for when it is time again.
    for _ in 0..50 {
        assert!(leases.take(&check, 10_000, after(52)).is_some_and(|verdict| verdict.is_allowed()));
    }
    // The flood goes on.
    for millis in 53..100 {
        assert!(leases.take(&check, 10_000, after(millis)).is_some_and(|verdict| !verdict.is_allowed()));
    }
    assert_eq!(orders(&leases), []);
    leases.take(&check, 10_000, after(100));
    answer(&leases, 50, 1_000, after(100));
    for _ in 0..50 {
        assert!(leases.take(&check, 10_000, after(101)).is_some_and(|verdict| verdict.is_allowed()));
    }
    assert!(leases.take(&check, 10_000, after(101)).is_some_and(|verdict| !verdict.is_allowed()));
    answer(&leases, 50, 2_000, after(102));
    for _ in 0..50 {
        assert!(leases.take(&check, 10_000, after(102)).is_some_and(|verdict| verdict.is_allowed()));
    }
    assert_eq!(leases.take(&check, 10_000, after(102)), None, "there is plenty again");
}

/// Who waits as he was told, and finds nobody else there, is not refused by what was known before he waited.
#[test]
fn a_dry_key_is_for_the_store_again_after_a_lull() {
    let (leases, check) = (leases(1), check(200, "100", 1));
    leases.take(&check, 200, NOW);
    answer(&leases, 0, 0, NOW);
    let refused = leases.take(&check, 200, after(1)).expect("dry");
    assert_eq!((refused.outcome, refused.retry_after_ms), (Outcome::Refused, 99));
    // A second, as the header has it.
    for _ in 0..3 {
        assert_eq!(leases.take(&check, 200, after(1_001)), None, "also those beside him");
    }
    answer(&leases, 10, 0, after(1_002));
    for _ in 0..10 {
        assert!(leases.take(&check, 200, after(1_002)).is_some_and(|verdict| verdict.is_allowed()));
    }
    assert!(leases.take(&check, 200, after(1_003)).is_some_and(|verdict| !verdict.is_allowed()), "dry again");
}

/// A rate that fills hardly anything in the time of a lease: the exact answer costs less than waiting.
#[test]
fn a_dry_key_that_refills_slowly_is_for_the_store() {
    let (leases, check) = (leases(1), check(1_000, "10", 1));
    leases.take(&check, 10_000, NOW);
    answer(&leases, 0, 0, NOW);
    assert_eq!(leases.take(&check, 10_000, after(1)), None);
    assert_eq!(orders(&leases), []);
    leases.take(&check, 10_000, after(1_000));
    assert_eq!(orders(&leases).len(), 1);
}

#[test]
fn what_nobody_uses_goes_back_and_what_comes_too_late_as_well() {
    let (leases, check) = (leases(1), check(20_000, "20000", 1));
    leases.take(&check, 5_000, NOW);
    answer(&leases, 500, 19_000, NOW);
    leases.sweep(after(999));
    assert_eq!(orders(&leases), []);
    leases.sweep(after(1_000));
    assert_eq!(orders(&leases), [(Demand::Return, 500)]);
    assert!(leases.is_empty());
    leases.take(&check, 5_000, after(2_000));
    let [late] = &leases.take_orders()[..] else { panic!("not one order") };
    leases.give_all_back(after(2_001));
    let verdict = check.limit.at_level(0, NOW);
    leases.land(late, Some(Verdict { outcome: Outcome::Leased(500), ..verdict }), after(2_002));
    assert_eq!(orders(&leases), [(Demand::Return, 500)]);
}

#[test]
fn another_rule_begins_anew() {
    let (leases, old, new) = (leases(1), check(20_000, "20000", 1), check(40_000, "20000", 1));
    leases.take(&old, 5_000, NOW);
    answer(&leases, 500, 19_000, NOW);
    assert_eq!(leases.take(&new, 5_000, NOW), None);
    assert_eq!(orders(&leases), [(Demand::Return, 500), (Demand::Lease, 500)]);
}

/// What was asked for under the old rule is given back when it comes.
#[test]
fn an_answer_to_another_rule_goes_back() {
    let (leases, old, new) = (leases(1), check(20_000, "20000", 1), check(40_000, "20000", 1));
    leases.take(&old, 5_000, NOW);
    let [order] = &leases.take_orders()[..] else { panic!("not one order") };
    leases.take(&new, 5_000, NOW);
    assert_eq!(orders(&leases), [], "one call at a time");
    let verdict = old.limit.at_level(100, NOW);
    leases.land(order, Some(Verdict { outcome: Outcome::Leased(500), ..verdict }), NOW);
    assert_eq!(orders(&leases), [(Demand::Return, 500)]);
}

/// B023: a call whose outcome is unknown is not repeated; requests go to the store, which will say.
#[test]
fn a_call_without_an_answer_is_not_made_again_at_once() {
    let (leases, check) = (leases(1), check(20_000, "20000", 1));
    leases.take(&check, 5_000, NOW);
    let [order] = &leases.take_orders()[..] else { panic!("not one order") };
    leases.land(order, None, NOW);
    assert_eq!(leases.take(&check, 5_000, NOW), None);
    assert_eq!(orders(&leases), []);
    assert_eq!(leases.take(&check, 5_000, after(10)), None);
    assert_eq!(orders(&leases).len(), 1);
}

/// Who is not heard any more spends nothing: the others will count it as gone.
#[test]
fn without_a_heartbeat_nothing_is_held() {
    let gateways = Arc::new(Gateways::counted());
    let leases = Leases { gateways: Arc::clone(&gateways), ..leases(1) };
    let check = check(20_000, "20000", 1);
    for second in 0..5 {
        assert_eq!(leases.take(&check, 5_000, after(second * 1_000)), None);
        gateways.heard(2, after(second * 1_000), after(second * 1_000));
    }
    leases.take(&check, 5_000, after(4_000));
    assert_eq!(answer(&leases, 500, 19_000, after(4_000)), 500);
    // A third gateway: what is more than a third of the slack goes back at once, unspent.
    gateways.heard(3, after(5_000), after(5_000));
    assert!(leases.take(&check, 5_000, after(5_000)).is_some());
    assert_eq!(orders(&leases), [(Demand::Return, 167)]);
    leases.sweep(after(8_001));
    assert_eq!((leases.take(&check, 5_000, after(8_001)), leases.held(&check.key)), (None, 0));
    assert_eq!(orders(&leases), [], "they are let go");
}
