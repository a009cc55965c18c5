//! One suite over every store: the same questions, the same answers.

use std::sync::Arc;
use std::time::Duration;

use smallvec::smallvec;
use tollgate::clock::SystemClock;
use tollgate::config::{self, OnStoreFailure};
use tollgate::key::{Hasher, Key, Part};
use tollgate::limit::concurrency::Concurrency;
use tollgate::limit::token_bucket::TokenBucket;
use tollgate::limit::{Limit, Outcome};
use tollgate::metrics::Metrics;
use tollgate::rule::{Check, Checks, Demand, RuleId, Verdicts};
use tollgate::store::Store;
use tollgate::store::memory::MemoryStore;
use tollgate::store::redis::RedisStore;

use crate::harness::{Redis, eventually};

/// A check on the bucket `name`.
pub fn check(name: &str, capacity: u64, rate: &str, cost: u64) -> Check {
    let hasher = Hasher::new(b"");
    Check {
        rule: RuleId::TENANT,
        key: Key::tenant_route("rl", &Part::known(name.as_bytes(), &hasher), &Part::known(b"r", &hasher)),
        limit: Limit::TokenBucket(TokenBucket::new(capacity, rate.parse().unwrap()).unwrap()),
        shards: 1,
        permit: 0,
        cost,
        demand: Demand::Take,
        on_store_failure: OnStoreFailure::Local,
    }
}

/// A store on a runtime of its own, with what must live as long as it does.
pub struct Running {
    pub store: Arc<dyn Store>,
    pub runtime: tokio::runtime::Runtime,
}

impl Running {
    pub fn memory() -> Self {
        let store = Arc::new(MemoryStore::new(10_000, Arc::new(SystemClock::start())));
        Self { store, runtime: runtime() }
    }

    pub fn redis(url: &str, timeout: Duration) -> Self {
        let (runtime, metrics) = (runtime(), Metrics::new().unwrap());
        let (store, driver) =
            RedisStore::new(&config::Redis::at(url, timeout), "test", None, metrics.store.clone()).unwrap();
        runtime.spawn(driver.run());
        eventually("a connection to Redis", || store.is_up().then_some(()));
        Self { store: Arc::new(store), runtime }
    }

    pub fn take(&self, checks: &[Check]) -> Verdicts {
        let checks: Checks = checks.into();
        self.runtime.block_on(self.store.acquire(&checks)).expect("a decision")
    }
}

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap()
}

/// Runs each behaviour on both stores, and on the other servers that can be a store.
macro_rules! contract {
    ($($name:ident),* $(,)?) => {
        mod redis_6_2 {
            $(#[test] fn $name() {
                let redis = super::Redis::other("redis-6.2");
                super::$name(&super::Running::redis(&redis.url(), std::time::Duration::from_secs(5)));
            })*
        }
        mod valkey {
            $(#[test] fn $name() {
                let redis = super::Redis::other("valkey-9.1");
                super::$name(&super::Running::redis(&redis.url(), std::time::Duration::from_secs(5)));
            })*
        }
        mod memory {
            $(#[test] fn $name() { super::$name(&super::Running::memory()); })*
        }
        mod redis {
            $(#[test] fn $name() {
                let redis = super::Redis::start();
                super::$name(&super::Running::redis(&redis.url(), std::time::Duration::from_secs(5)));
            })*
        }
    };
}

contract![
    takes_what_is_there_and_no_more,
    refills_within_a_second,
    asking_takes_nothing,
    a_cost_above_the_capacity_never_fits,
    all_or_none,
    buckets_are_apart,
    an_edit_clamps_and_never_refills,
    what_is_spent_stays_spent,
    threads_take_exactly_what_is_there,
    capacities_are_exact,
    many_requests_at_once_get_each_its_own_answer,
    a_lease_takes_what_is_there_and_can_be_given_back,
    permits_of_one_key_in_one_call_are_each_looked_after,
];

fn takes_what_is_there_and_no_more(store: &Running) {
    let check = check("a", 2, "1/m", 1);
    let remaining: Vec<u64> = (0..2).map(|_| store.take(std::slice::from_ref(&check))[0].remaining).collect();
    assert_eq!(remaining, [1, 0]);
    let refused = store.take(&[check])[0];
    assert_eq!((refused.outcome, refused.remaining), (Outcome::Refused, 0));
    assert!((59_000..=60_000).contains(&refused.retry_after_ms), "{refused:?}");
    assert!((119_000..=120_000).contains(&refused.reset_ms), "{refused:?}");
}

fn refills_within_a_second(store: &Running) {
    let check = check("a", 1, "50/s", 1);
    assert!(store.take(std::slice::from_ref(&check))[0].is_allowed());
    let wait = store.take(std::slice::from_ref(&check))[0].retry_after_ms;
    assert!(wait <= 20, "{wait} ms");
    std::thread::sleep(Duration::from_millis(wait));
    assert!(store.take(&[check])[0].is_allowed());
}

fn asking_takes_nothing(store: &Running) {
    for _ in 0..5 {
        let verdict = store.take(&[check("a", 3, "1/h", 0)])[0];
        assert_eq!((verdict.outcome, verdict.remaining, verdict.reset_ms), (Outcome::Allowed, 3, 0));
    }
}

fn a_cost_above_the_capacity_never_fits(store: &Running) {
    for cost in [4, u64::MAX] {
        let verdict = store.take(&[check("a", 3, "1/h", cost)])[0];
        assert_eq!((verdict.outcome, verdict.remaining), (Outcome::NeverFits, 3));
    }
    assert_eq!(store.take(&[check("a", 3, "1/h", 3)])[0].outcome, Outcome::Allowed);
}

/// B119: a refused request costs no other bucket anything, and is told what it did not take.
fn all_or_none(store: &Running) {
    let (user, site) = (check("user", 5, "1/h", 1), check("site", 100, "1/h", 1));
    for step in 0..50 {
        let verdicts = store.take(&[user.clone(), site.clone()]);
        assert_eq!(verdicts.iter().all(tollgate::limit::Verdict::is_allowed), step < 5);
    }
    let verdicts = store.take(&[user, site]);
    assert_eq!((verdicts[0].outcome, verdicts[1].outcome), (Outcome::Refused, Outcome::Allowed));
    assert_eq!(verdicts[1].remaining, 95);
}

fn buckets_are_apart(store: &Running) {
    for name in ["a", "b", "a:b", "{a}", "~a"] {
        assert_eq!(store.take(&[check(name, 1, "1/h", 1)])[0].outcome, Outcome::Allowed, "{name}");
    }
    assert_eq!(store.take(&[check("a:b", 1, "1/h", 1)])[0].outcome, Outcome::Refused);
}

/// B095: 80 of 100 left: a rule of 50 says 50 at once, one of 200 says 80.
fn an_edit_clamps_and_never_refills(store: &Running) {
    assert_eq!(store.take(&[check("a", 100, "1/h", 20)])[0].remaining, 80);
    assert_eq!(store.take(&[check("a", 50, "1/h", 0)])[0].remaining, 50);
    assert_eq!(store.take(&[check("a", 200, "1/h", 0)])[0].remaining, 80);
    // From a fast rule, under which it would be full and forgotten soon, to a slow one.
    assert!(store.take(&[check("b", 10, "1000/s", 10)])[0].is_allowed());
    let slow = check("b", 10, "1/h", 10);
    let verdict = store.take(std::slice::from_ref(&slow))[0];
    assert_eq!(verdict.outcome, Outcome::Refused);
    std::thread::sleep(Duration::from_millis(60));
    assert_eq!(store.take(&[slow])[0].outcome, Outcome::Refused, "forgetting refilled it");
}

/// B029: 3 tokens at one per 15 s, drained: a short quiet spell brings none of them back.
fn what_is_spent_stays_spent(store: &Running) {
    let check = check("a", 3, "1/15s", 1);
    for _ in 0..3 {
        assert!(store.take(std::slice::from_ref(&check))[0].is_allowed());
    }
    std::thread::sleep(Duration::from_millis(1_500));
    assert!(!store.take(&[check])[0].is_allowed());
}

/// B027 on every store.
fn threads_take_exactly_what_is_there(store: &Running) {
    let check = check("a", 100, "1/d", 1);
    let admitted: usize = std::thread::scope(|scope| {
        let ask = || (0..100).filter(|_| store.take(std::slice::from_ref(&check))[0].is_allowed()).count();
        let threads: Vec<_> = (0..16).map(|_| scope.spawn(ask)).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).sum()
    });
    assert_eq!(admitted, 100);
}

/// B009: exact to the last token.
fn capacities_are_exact(store: &Running) {
    for capacity in [(1 << 31) - 1, 1 << 31, (1 << 32) + 1, 1_000_000_001, (1 << 53) - 1, 1 << 53] {
        let name = capacity.to_string();
        let remaining = |cost| store.take(&[check(&name, capacity, "1/m", cost)])[0].remaining;
        assert_eq!(remaining(1), capacity - 1);
        assert_eq!(remaining(capacity - 1), 0);
    }
}

fn many_requests_at_once_get_each_its_own_answer(store: &Running) {
    let ask = |index: u64| {
        let store = Arc::clone(&store.store);
        async move {
            let capacity = 10 + index;
            let checks: Checks = smallvec![check(&format!("k{index}"), capacity, "1/h", 1 + index % 3)];
            (capacity - (1 + index % 3), store.acquire(&checks).await.unwrap()[0].remaining)
        }
    };
    let answers = store.runtime.block_on(async {
        let tasks: Vec<_> = (0..500).map(|index| tokio::spawn(ask(index))).collect();
        let mut answers = Vec::new();
        for task in tasks {
            answers.push(task.await.unwrap());
        }
        answers
    });
    for (expected, got) in answers {
        assert_eq!(expected, got);
    }
}

fn a_lease_takes_what_is_there_and_can_be_given_back(store: &Running) {
    let ask = |demand, cost| store.take(&[Check { demand, ..check("a", 10, "1/h", cost) }])[0];
    let leased = ask(Demand::Lease, 7);
    assert_eq!((leased.outcome, leased.remaining), (Outcome::Leased(7), 3));
    assert_eq!(ask(Demand::Take, 1).remaining, 2);
    let rest = ask(Demand::Lease, 7);
    assert_eq!((rest.outcome, rest.remaining), (Outcome::Leased(2), 0));
    assert_eq!(ask(Demand::Lease, 7).outcome, Outcome::Leased(0));
    assert_eq!(ask(Demand::Return, 4).remaining, 4);
    assert_eq!(ask(Demand::Return, 100).remaining, 10, "more than the capacity came back");
    // Below 0 there is nothing to lease, and what is given back fills the hole first.
    ask(Demand::Debit, 15);
    assert_eq!(ask(Demand::Lease, 1).outcome, Outcome::Leased(0));
    assert_eq!(ask(Demand::Return, 8).remaining, 3);
}

fn permits_of_one_key_in_one_call_are_each_looked_after(store: &Running) {
    let permits = Limit::Concurrency(Concurrency { limit: 3, hold: 60_000_000 });
    let one = |permit, demand| Check { limit: permits, permit, demand, ..check("a", 1, "1", 1) };
    for permit in 1..=3 {
        assert!(store.take(&[one(permit, Demand::Take)])[0].is_allowed());
    }
    assert_eq!(store.take(&[one(4, Demand::Take)])[0].outcome, Outcome::Refused);
    store.take(&[one(1, Demand::Return), one(2, Demand::Return), one(3, Demand::Renew)]);
    assert_eq!(store.take(&[Check { cost: 0, ..one(0, Demand::Take) }])[0].remaining, 2);
}
