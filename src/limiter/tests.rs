use std::sync::Mutex;

use async_trait::async_trait;
use smallvec::smallvec;

use super::*;
use crate::clock::ManualClock;
use crate::config::{Breaker as Settings, OnStoreFailure};
use crate::decision::Admission;
use crate::gateways::Gateways;
use crate::key::{Hasher, Key, Part};
use crate::limit::token_bucket::TokenBucket;
use crate::limit::{Limit, Outcome, Verdict};
use crate::rule::{Check, Demand, RuleId, Verdicts};
use crate::store::memory::MemoryStore;

/// A store that answers what it was told to.
#[derive(Debug)]
struct Scripted(Mutex<Vec<Result<Outcome, StoreFault>>>);

#[async_trait]
impl Store for Scripted {
    async fn acquire(&self, _checks: &Checks) -> Result<Verdicts, StoreFault> {
        let next = self.0.lock().unwrap().remove(0);
        next.map(|outcome| smallvec![Verdict { outcome, remaining: 0, retry_after_ms: 7, reset_ms: 7 }])
    }

    fn is_up(&self) -> bool {
        true
    }
}

fn checks(capacity: u64, on_store_failure: OnStoreFailure) -> Checks {
    let part = Part::known(b"a", &Hasher::new(b""));
    smallvec![Check {
        rule: RuleId::TENANT,
        key: Key::tenant_route("rl", &part, &part),
        limit: Limit::TokenBucket(TokenBucket::new(capacity, "1/h".parse().unwrap()).unwrap()),
        shards: 1,
        permit: 0,
        cost: 1,
        demand: Demand::Take,
        on_store_failure,
    }]
}

fn limiter(gateways: u32, answers: Vec<Result<Outcome, StoreFault>>) -> (Limiter, Arc<MemoryStore>) {
    let clock: Arc<dyn Clock> = Arc::new(ManualClock::at(Timestamp::from_micros(1_764_000_000_000_000)));
    let metrics = Metrics::new().unwrap();
    let memory = Arc::new(MemoryStore::new(100, Arc::clone(&clock)));
    let gateways = Arc::new(Gateways::fixed(gateways));
    let leases = Leases::new(&hot_keys(), Arc::clone(&gateways), metrics.leases.clone());
    let fallback = Fallback::new(Arc::clone(&memory), gateways, 100, metrics.clone());
    let settings = Settings {
        failure_permille: 500,
        consecutive_failures: 10,
        open_for: Duration::from_secs(1),
        apart: Duration::ZERO,
    };
    let probe = checks(10, OnStoreFailure::Local).remove(0);
    let (denials, breakers) = (Denials::default(), Breakers::new(settings, 1));
    let remote = Remote { denials, leases, breakers, fallback, probe };
    let store = Arc::new(Scripted(Mutex::new(answers)));
    let hot_keys = HotKeys::new(hot_keys().threshold, hot_keys().window);
    (Limiter::new(store, hot_keys, Some(remote), clock, metrics), memory)
}

fn hot_keys() -> crate::config::HotKeys {
    crate::config::HotKeys {
        threshold: 100,
        window: Duration::from_secs(1),
        epsilon_ppm: 50_000,
        lease_for: Duration::from_millis(100),
    }
}

fn decide(limiter: &Limiter, checks: &Checks) -> (Admission, Basis) {
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    let decision = runtime.block_on(limiter.decide(checks));
    (decision.admission, decision.basis)
}

#[test]
fn without_checks_nothing_is_asked() {
    let (limiter, _) = limiter(1, vec![]);
    assert_eq!(decide(&limiter, &Checks::new()), (Admission::Admitted, Basis::NoRule));
}

/// B071: a refusal is an answer; the fallback is not asked for a second opinion.
#[test]
fn the_fallback_is_not_consulted_on_a_refusal() {
    let (limiter, memory) = limiter(1, vec![Ok(Outcome::Refused)]);
    assert_eq!(decide(&limiter, &checks(100, OnStoreFailure::Local)), (Admission::Refused, Basis::Store));
    let left = memory.take(&[Check { cost: 0, ..checks(100, OnStoreFailure::Local)[0].clone() }]);
    assert_eq!(left[0].remaining, 0, "what the store told last, and nothing of its own");
}

#[test]
fn each_mode_of_a_failing_store() {
    let down = || vec![Err(StoreFault::Down); 3];
    let (limiter_, _) = limiter(1, down());
    assert_eq!(
        decide(&limiter_, &checks(1, OnStoreFailure::Deny)),
        (Admission::Unavailable, Basis::Fallback)
    );
    for _ in 0..2 {
        assert_eq!(
            decide(&limiter_, &checks(1, OnStoreFailure::Allow)),
            (Admission::Admitted, Basis::Fallback)
        );
    }
    let (limiter_, _) = limiter(1, down());
    assert_eq!(decide(&limiter_, &checks(1, OnStoreFailure::Local)), (Admission::Admitted, Basis::Fallback));
    assert_eq!(decide(&limiter_, &checks(1, OnStoreFailure::Local)), (Admission::Refused, Basis::Fallback));
}

/// B073: without the store, all gateways together stay at the limit.
#[test]
fn a_local_decision_is_on_a_share() {
    let (limiter, _) = limiter(4, vec![Err(StoreFault::Timeout); 100]);
    let limit = checks(40, OnStoreFailure::Local);
    let admitted = (0..100).filter(|_| decide(&limiter, &limit).0 == Admission::Admitted).count();
    assert_eq!(admitted, 10);
}

/// A call of several debits that cannot be made together: what was debited on the way is not debited again.
#[test]
fn each_debit_is_made_once() {
    let answers = vec![
        Err(StoreFault::Down),
        Err(StoreFault::Down),
        // Both at once, then each for itself.
        Err(StoreFault::Apart),
        Ok(Outcome::Allowed),
        Err(StoreFault::Elsewhere(StoreFault::Down.into())),
        // Only the one that is left.
        Ok(Outcome::Allowed),
    ];
    let (limiter, _) = limiter(1, answers);
    let first = checks(10, OnStoreFailure::Local);
    let mut second = first.clone();
    second[0].key = second[0].key.of_candidate();
    for checks in [&first, &second] {
        assert_eq!(decide(&limiter, checks), (Admission::Admitted, Basis::Fallback));
    }
    assert_eq!(limiter.debt_count(), 2);
    let recover = || {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        runtime.block_on(limiter.recover());
        (limiter.debt_count(), limiter.metrics.debited_tokens.get(), limiter.metrics.dropped_debits.get())
    };
    assert_eq!(recover(), (1, 1, 0));
    assert_eq!(recover(), (0, 2, 0));
    assert_eq!(limiter.breaker_state(), State::Closed, "another node's fault is not this one's");
}

/// Several debits that went to another node, and nobody knows what became of them: none is made again.
#[test]
fn debits_of_unknown_outcome_are_not_made_again() {
    let lost = Err(StoreFault::Elsewhere(StoreFault::Timeout.into()));
    let (limiter, _) = limiter(1, vec![Err(StoreFault::Down), Err(StoreFault::Down), lost]);
    let first = checks(10, OnStoreFailure::Local);
    let mut second = first.clone();
    second[0].key = second[0].key.of_candidate();
    for checks in [&first, &second] {
        decide(&limiter, checks);
    }
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    runtime.block_on(limiter.recover());
    assert_eq!((limiter.debt_count(), limiter.metrics.dropped_debits.get()), (0, 2));
}
