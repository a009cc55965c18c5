use smallvec::smallvec;

use super::*;
use crate::config::OnStoreFailure;
use crate::key::{Hasher, Key, Part};
use crate::keyed::LOCKS;
use crate::limit::token_bucket::TokenBucket;
use crate::rule::{Demand, RuleId};

const START: Timestamp = Timestamp::from_micros(1_764_000_000_000_000);

fn check(name: &str, capacity: u64, cost: u64) -> Check {
    let part = Part::known(name.as_bytes(), &Hasher::new(b""));
    Check {
        rule: RuleId::TENANT,
        key: Key::tenant_route("rl", &part, &part),
        limit: Limit::TokenBucket(TokenBucket::new(capacity, "10".parse().unwrap()).unwrap()),
        shards: 1,
        permit: 0,
        cost,
        demand: Demand::Take,
        on_store_failure: OnStoreFailure::Local,
    }
}

fn refusal(checks: &Checks, retry_after_ms: u64) -> Decision {
    let outcome = Outcome::Refused;
    let verdict = Verdict { outcome, remaining: 1, retry_after_ms, reset_ms: 2 * retry_after_ms };
    Decision::from_verdicts(Basis::Store, checks, smallvec![verdict])
}

fn at(ms: u64) -> Timestamp {
    START.plus_micros(ms * 1_000)
}

/// Asked at 0, answered at 3 ms, refused for 100 ms: until 99 ms nothing can fit; the client is told 103.
#[test]
fn it_stands_as_long_as_nothing_can_fit() {
    let denials = Denials::default();
    let checks: Checks = smallvec![check("a", 20, 2)];
    assert!(denials.refuse(&checks, at(0)).is_none());
    denials.note(&checks, &refusal(&checks, 100), at(0), at(3));
    let told = denials.refuse(&checks, at(50)).unwrap();
    assert_eq!((told.admission, told.basis), (Admission::Refused, Basis::Denial));
    assert_eq!(
        (told.verdicts[0].retry_after_ms, told.verdicts[0].reset_ms, told.verdicts[0].remaining),
        (53, 153, 1)
    );
    assert!(denials.refuse(&checks, START.plus_micros(98_999)).is_some());
    assert!(denials.refuse(&checks, at(99)).is_none());
    assert!(denials.is_empty());
}

#[test]
fn what_is_another_question_is_asked() {
    let denials = Denials::default();
    let checks: Checks = smallvec![check("a", 20, 2)];
    denials.note(&checks, &refusal(&checks, 100), at(0), at(0));
    let refused = |check: Check| denials.refuse(&smallvec![check], at(1)).is_some();
    assert!(refused(check("a", 20, 3)), "more cannot fit either");
    assert!(!refused(check("a", 20, 1)), "less may fit");
    assert!(!refused(check("b", 20, 2)), "another key");
    assert!(!refused(Check { demand: Demand::Shadow, ..check("a", 20, 2) }));
    assert!(denials.refuse(&smallvec![check("a", 20, 2), check("b", 20, 2)], at(1)).is_none());
    assert!(!refused(check("a", 50, 2)), "another limit");
    assert!(!refused(check("a", 20, 2)), "and the old one again: it has refilled otherwise meanwhile");
}

/// However long the wait is, the store is asked again after a second; a wait below the way there and back
/// is no denial.
#[test]
fn it_ends_soon() {
    let denials = Denials::default();
    let checks: Checks = smallvec![check("a", 20, 2)];
    denials.note(&checks, &refusal(&checks, 86_400_000), at(0), at(0));
    assert!(denials.refuse(&checks, at(999)).is_some());
    assert!(denials.refuse(&checks, at(1_000)).is_none());
    denials.note(&checks, &refusal(&checks, 3), at(2_000), at(2_002));
    assert!(denials.is_empty());
}

#[test]
fn there_is_a_bound() {
    let denials = Denials::default();
    for n in 0..2 * LOCKS * MOST_PER_LOCK {
        let checks: Checks = smallvec![check(&format!("t{n}"), 20, 1)];
        denials.note(&checks, &refusal(&checks, 500), at(0), at(0));
    }
    assert!(denials.len() <= LOCKS * MOST_PER_LOCK);
    assert!(denials.len() > LOCKS * MOST_PER_LOCK * 9 / 10);
}
