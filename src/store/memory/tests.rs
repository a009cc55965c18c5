use std::time::Duration;

use smallvec::smallvec;

use super::*;
use crate::clock::ManualClock;
use crate::config::OnStoreFailure;
use crate::key::{Hasher, Part};
use crate::limit::token_bucket::TokenBucket;
use crate::rule::{Demand, RuleId};

const START: Timestamp = Timestamp::from_micros(1_764_000_000_000_000);

fn check(name: &str, capacity: u64, rate: &str) -> Check {
    let hasher = Hasher::new(b"");
    Check {
        rule: RuleId::TENANT,
        key: Key::tenant_route("rl", &Part::known(name.as_bytes(), &hasher), &Part::known(b"r", &hasher)),
        limit: Limit::TokenBucket(TokenBucket::new(capacity, rate.parse().unwrap()).unwrap()),
        shards: 1,
        permit: 0,
        cost: 1,
        demand: Demand::Take,
        on_store_failure: OnStoreFailure::Local,
    }
}

fn store(max_keys: usize) -> (MemoryStore, Arc<ManualClock>) {
    let clock = Arc::new(ManualClock::at(START));
    (MemoryStore::new(max_keys, Arc::clone(&clock) as Arc<dyn Clock>), clock)
}

fn allowed(store: &MemoryStore, checks: &[Check]) -> bool {
    store.take(checks).iter().all(crate::limit::Verdict::is_allowed)
}

/// B119: a refusal by one rule takes nothing from another.
#[test]
fn all_or_none() {
    let (store, _) = store(100);
    let (user, site) = (check("user", 5, "1/h"), check("site", 100, "1/h"));
    for _ in 0..1_000 {
        store.take(&[user.clone(), site.clone()]);
    }
    let verdicts = store.take(&[Check { cost: 0, ..site }]);
    assert_eq!(verdicts[0].remaining, 95);
}

/// B027: 16 threads on one bucket take exactly what is there.
#[test]
fn threads_share_one_bucket() {
    let (store, _) = store(100);
    let check = check("a", 100, "1/d");
    let admitted: usize = std::thread::scope(|scope| {
        let ask = || (0..1_000).filter(|_| allowed(&store, std::slice::from_ref(&check))).count();
        let threads: Vec<_> = (0..16).map(|_| scope.spawn(ask)).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).sum()
    });
    assert_eq!(admitted, 100);
}

/// Two requests that need the same two shards in opposite order cannot wait for each other.
#[test]
fn threads_with_two_buckets_each_do_not_deadlock() {
    let (store, _) = store(1_000);
    let checks: Vec<Check> = (0..20).map(|index| check(&format!("k{index}"), 50, "1/d")).collect();
    std::thread::scope(|scope| {
        for thread in 0..8 {
            let (store, checks) = (&store, &checks);
            scope.spawn(move || {
                for step in 0..500 {
                    let (a, b) = ((step * 7 + thread) % 20, (step * 3 + 1) % 20);
                    store.take(&[checks[a].clone(), checks[b].clone()]);
                }
            });
        }
    });
    assert!(store.len() <= 20);
}

/// B079: a small bound is enforced, never ignored.
#[test]
fn small_bounds_hold() {
    for max_keys in [0, 1, 2, 255, 256, 600] {
        let (store, _) = store(max_keys);
        for index in 0..2_000 {
            store.take(&[check(&format!("k{index}"), 5, "1/h")]);
            assert!(store.len() <= max_keys.max(1), "{} of {max_keys}", store.len());
        }
        assert!(store.evicted() > 0);
    }
}

/// B081: a flood of keys pushes out itself, not the client who has used up its own.
#[test]
fn a_flood_resets_nobody() {
    let (store, clock) = store(1_000);
    let active: Vec<Check> = (0..20).map(|index| check(&format!("active{index}"), 10, "1/h")).collect();
    for check in &active {
        for _ in 0..10 {
            assert!(allowed(&store, std::slice::from_ref(check)));
        }
    }
    for index in 0..100_000 {
        store.take(&[check(&format!("flood{index}"), 10, "1/h")]);
        clock.advance(Duration::from_micros(10));
    }
    let reset = active.iter().filter(|check| allowed(&store, std::slice::from_ref(*check))).count();
    assert_eq!(reset, 0, "of {} clients who had used up their limit", active.len());
    assert!(store.len() <= 1_000);
}

/// A slower rule makes the bucket live longer, also if it is only asked in vain.
#[test]
fn an_edit_to_a_slower_rule_does_not_refill_by_forgetting() {
    let (store, clock) = store(100);
    let fast = check("a", 10, "100/s");
    assert!(allowed(&store, &[Check { cost: 10, ..fast }]));
    let slow = check("a", 10, "1/h");
    assert!(!allowed(&store, std::slice::from_ref(&slow)));
    clock.advance(Duration::from_secs(10));
    assert!(!allowed(&store, &[slow]), "the bucket was forgotten and so full again");
}

#[test]
fn verdicts_of_a_refusal_are_restated() {
    let (store, _) = store(100);
    let (roomy, narrow) = (check("roomy", 10, "1/h"), check("narrow", 1, "1/h"));
    let both: Checks = smallvec![roomy, narrow];
    assert_eq!(store.take(&both)[0].remaining, 9);
    let verdicts = store.take(&both);
    assert_eq!((verdicts[0].remaining, verdicts[0].outcome), (9, Outcome::Allowed));
    assert_eq!((verdicts[1].remaining, verdicts[1].outcome), (0, Outcome::Refused));
}
