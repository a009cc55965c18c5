//! Many gateways, one store that fails in every way, virtual time, no sockets. A seed gives the same run
//! every time; a failure prints its seed.
//!
//! Held are: never more than the bound, whatever fails; nothing refused that the bound has room for,
//! while nothing fails; and after all is well again, a client is served again.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use tollgate::breaker::{Breakers, State};
use tollgate::clock::{Clock, ManualClock, Timestamp};
use tollgate::config::{Breaker as Settings, HotKeys as HotKeysSettings};
use tollgate::decision::Admission;
use tollgate::denials::Denials;
use tollgate::fallback::Fallback;
use tollgate::gateways::Gateways;
use tollgate::hot_keys::HotKeys;
use tollgate::leases::Leases;
use tollgate::limiter::{Limiter, Remote};
use tollgate::metrics::Metrics;
use tollgate::rule::{Checks, Verdicts};
use tollgate::store::memory::MemoryStore;
use tollgate::store::{Store, StoreFault};

use crate::contract::check;
use crate::harness::Random;

const SEEDS: u64 = 3_000;
/// Failures in a row that open a breaker.
const FAILURES: u32 = 3;
const START: Timestamp = Timestamp::from_micros(1_764_000_000_000_000);

/// What one gateway's way to the store does to a call.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Link {
    Well,
    /// The call does not arrive.
    Broken,
    /// It arrives, and its answer does not.
    Deaf,
    /// Nothing is sent, for the connection is known to be lost.
    Down,
}

/// A store that all gateways share, behind a link of their own.
#[derive(Debug)]
struct Shared {
    buckets: Mutex<Arc<MemoryStore>>,
    clock: Arc<ManualClock>,
    /// How far the store's clock is ahead, in microseconds.
    ahead: Mutex<u64>,
}

#[derive(Debug)]
struct Behind {
    shared: Arc<Shared>,
    link: Mutex<Link>,
}

#[async_trait]
impl Store for Behind {
    async fn acquire(&self, checks: &Checks) -> Result<Verdicts, StoreFault> {
        let link = *self.link.lock().unwrap();
        match link {
            Link::Down => return Err(StoreFault::Down),
            Link::Broken => return Err(StoreFault::Timeout),
            Link::Well | Link::Deaf => {}
        }
        let now = self.shared.clock.now().plus_micros(*self.shared.ahead.lock().unwrap());
        let verdicts = self.shared.buckets.lock().unwrap().take_at(checks, now);
        if link == Link::Deaf { Err(StoreFault::Timeout) } else { Ok(verdicts) }
    }

    fn is_up(&self) -> bool {
        *self.link.lock().unwrap() != Link::Down
    }
}

struct World {
    clock: Arc<ManualClock>,
    shared: Arc<Shared>,
    gateways: Vec<(Arc<Behind>, Limiter)>,
    runtime: tokio::runtime::Runtime,
}

impl World {
    fn new(gateways: u64, seed: u64) -> Self {
        let clock = Arc::new(ManualClock::at(START));
        let shared = Arc::new(Shared {
            buckets: Mutex::new(Arc::new(MemoryStore::new(1_000, Arc::clone(&clock) as Arc<dyn Clock>))),
            clock: Arc::clone(&clock),
            ahead: Mutex::new(0),
        });
        let live = Arc::new(Gateways::fixed(gateways as u32));
        let metrics = Metrics::new().unwrap();
        let gateway = |index: u64| {
            let store = Arc::new(Behind { shared: Arc::clone(&shared), link: Mutex::new(Link::Well) });
            let memory = Arc::new(MemoryStore::new(1_000, Arc::clone(&clock) as Arc<dyn Clock>));
            let settings = Settings {
                failure_permille: 500,
                consecutive_failures: FAILURES,
                open_for: Duration::from_secs(1),
                apart: Duration::ZERO,
            };
            // No leases: what they may add has a simulation of its own.
            let hot_keys = HotKeysSettings {
                threshold: u64::MAX,
                window: Duration::from_secs(1),
                epsilon_ppm: 0,
                lease_for: Duration::from_millis(100),
            };
            let remote = Remote {
                denials: Denials::default(),
                leases: Leases::new(&hot_keys, Arc::clone(&live), metrics.leases.clone()),
                breakers: Breakers::new(settings, seed ^ index),
                fallback: Fallback::new(memory, Arc::clone(&live), 1_000, metrics.clone()),
                probe: check(&format!("probe{index}"), 1_000, "1000", 1),
            };
            let clock = Arc::clone(&clock) as Arc<dyn Clock>;
            let hot_keys = HotKeys::new(hot_keys.threshold, hot_keys.window);
            let limiter = Limiter::new(
                Arc::clone(&store) as Arc<dyn Store>,
                hot_keys,
                Some(remote),
                clock,
                metrics.clone(),
            );
            (store, limiter)
        };
        let gateways = (0..gateways).map(gateway).collect();
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        Self { clock, shared, gateways, runtime }
    }

    fn forget(&self) {
        let empty = MemoryStore::new(1_000, Arc::clone(&self.clock) as Arc<dyn Clock>);
        *self.shared.buckets.lock().unwrap() = Arc::new(empty);
    }

    fn set_links(&self, mut link: impl FnMut() -> Link) {
        for (store, _) in &self.gateways {
            *store.link.lock().unwrap() = link();
        }
    }

    /// The share of gateways that decide without the store, if others decide with it.
    fn share_cut_off(&self) -> f64 {
        let cut_off = self.gateways.iter().filter(|(store, limiter)| {
            *store.link.lock().unwrap() != Link::Well || limiter.breaker_state() != State::Closed
        });
        let (cut_off, all) = (cut_off.count(), self.gateways.len());
        if cut_off == all { 0.0 } else { cut_off as f64 / all as f64 }
    }

    fn recover(&self) {
        for (_, limiter) in &self.gateways {
            self.runtime.block_on(limiter.recover());
        }
    }

    fn ask(&self, gateway: usize, checks: &Checks) -> bool {
        let decision = self.runtime.block_on(self.gateways[gateway].1.decide(checks));
        decision.admission == Admission::Admitted
    }
}

/// The fullest that a leaky bucket ever gets that admissions pour into: the least capacity for which
/// every window holds `capacity + rate * time`.
struct Meter {
    level: f64,
    fullest: f64,
    at: Timestamp,
}

impl Meter {
    fn leak(&mut self, now: Timestamp, rate: f64) {
        self.level = (self.level - rate * now.micros_since(self.at) as f64 / 1e6).max(0.0);
        self.at = now;
    }

    fn admit(&mut self) {
        self.level += 1.0;
        self.fullest = self.fullest.max(self.level);
    }
}

/// One run: gateways, a rule, arrivals and faults from the seed. What was used of the bound, or why not.
fn run(seed: u64, faults: bool) -> Result<f64, String> {
    let mut random = Random(seed);
    let gateways = 1 + random.below(20);
    let capacity = gateways * (1 + random.below(20));
    let per_second = 1 + random.below(capacity * 2);
    let rate = format!("{per_second}/s");
    let world = World::new(gateways, seed);
    let checks: Checks = std::iter::once(check("a", capacity, &rate, 1)).collect();
    let mut meter = Meter { level: 0.0, fullest: 0.0, at: START };
    // Outages and what the store forgot: each may cost one capacity more. A clock that jumps forth
    // refills at most one bucket.
    let mut spare = 0u64;
    let mean_gap = 1_000_000 / (per_second * (1 + random.below(4))).max(1);
    let mut next_recovery = START;
    for step in 0..600 {
        world.clock.advance(Duration::from_micros(random.below(2 * mean_gap + 1)));
        let now = world.clock.now();
        // Gateways that do not reach the store go on with their shares, while it refills for the others.
        meter.leak(now, per_second as f64 * (1.0 + world.share_cut_off()));
        if faults && random.below(60) == 0 {
            match random.below(6) {
                0 => world.set_links(|| Link::Well),
                1 => {
                    world.forget();
                    spare += 1;
                }
                2 => {
                    *world.shared.ahead.lock().unwrap() += random.below(5_000_000);
                    spare += 1;
                }
                _ => {
                    let links = [Link::Well, Link::Broken, Link::Deaf, Link::Down];
                    let all = random.choose(&[true, false]);
                    let one = random.choose(&links);
                    world.set_links(|| if all { one } else { random.choose(&links) });
                    spare += 1;
                }
            }
        }
        if now >= next_recovery {
            world.recover();
            next_recovery = now.plus_micros(50_000);
        }
        let gateway = random.below(gateways) as usize;
        if world.ask(gateway, &checks) {
            meter.admit();
        } else if !faults && meter.level + 1.0 <= capacity as f64 - 0.001 {
            // Without faults only what would break the bound is refused.
            return Err(format!("seed {seed}, step {step}: refused at level {} of {capacity}", meter.level));
        }
        let bound = (capacity * (1 + spare)) as f64 + 0.001;
        if meter.fullest > bound {
            return Err(format!(
                "seed {seed}, step {step}: {gateways} gateways, {capacity} at {rate}: {} above {bound}",
                meter.fullest
            ));
        }
    }
    // All is well again: within the longest pause and one fill time every gateway serves from the store.
    world.set_links(|| Link::Well);
    for _ in 0..200 {
        world.clock.advance(
            Duration::from_millis(50) + Duration::from_micros(capacity * 1_000_000 / per_second / 100),
        );
        world.recover();
    }
    for gateway in 0..gateways as usize {
        if !world.ask(gateway, &checks) {
            return Err(format!("seed {seed}: gateway {gateway} of {gateways} refuses after recovery"));
        }
        if world.gateways[gateway].1.breaker_state() != State::Closed {
            return Err(format!("seed {seed}: the breaker of gateway {gateway} stays open"));
        }
    }
    Ok(meter.fullest / (capacity * (1 + spare)) as f64)
}

#[test]
fn without_faults_the_limit_is_exact() {
    for seed in 1..=SEEDS / 3 {
        run(seed, false).unwrap_or_else(|failure| panic!("{failure}"));
    }
}

#[test]
fn whatever_fails_the_bound_holds_and_the_way_back_is_found() {
    let mut worst = (0.0, 0);
    for seed in 1..=SEEDS {
        let used = run(seed, true).unwrap_or_else(|failure| panic!("{failure}"));
        if used > worst.0 {
            worst = (used, seed);
        }
    }
    println!("{SEEDS} seeds; at most {:.1} % of the bound was used (seed {})", worst.0 * 100.0, worst.1);
}

/// N gateways together leave no free burst behind an outage in which the store kept its data.
#[test]
fn the_way_back_is_no_free_burst() {
    for gateways in [1, 2, 5, 20] {
        let world = World::new(gateways, 1);
        let checks: Checks = std::iter::once(check("a", 100, "1/h", 1)).collect();
        let storm =
            |count: usize| (0..count).filter(|step| world.ask(step % gateways as usize, &checks)).count();
        // Nobody has asked before, so the shares are full: 100 in all.
        world.set_links(|| Link::Down);
        let during = storm(1_000);
        assert_eq!(during, 100, "{gateways} gateways");
        world.set_links(|| Link::Well);
        for _ in 0..100 {
            world.clock.advance(Duration::from_millis(50));
            world.recover();
        }
        assert_eq!(storm(1_000), 0, "{gateways} gateways gave out a second capacity");
    }
}

/// B075: after an outage much longer than the refill nothing old is charged.
#[test]
fn a_long_outage_leaves_no_debt() {
    let world = World::new(2, 1);
    let checks: Checks = std::iter::once(check("a", 10, "10", 1)).collect();
    world.set_links(|| Link::Broken);
    for step in 0..500 {
        world.clock.advance(Duration::from_millis(50));
        world.ask(step % 2, &checks);
    }
    world.clock.advance(Duration::from_secs(5));
    world.set_links(|| Link::Well);
    for _ in 0..100 {
        world.clock.advance(Duration::from_millis(50));
        world.recover();
    }
    assert_eq!((0..100).filter(|step| world.ask(step % 2, &checks)).count(), 10);
}

/// Outages of all gateways at twice the rate, some shorter than what a breaker needs to notice: with the
/// way back, in all no more than the limit, whoever comes back first, and little less.
#[test]
fn over_outage_and_recovery_no_more_than_the_limit() {
    let (mut most, mut least) = (f64::MIN, f64::MAX);
    for seed in 1..=SEEDS / 10 {
        let mut random = Random(seed);
        let gateways = 1 + random.below(20);
        let capacity = gateways * (5 + random.below(20));
        let rate = 50 + random.below(capacity * 2);
        let checks: Checks = std::iter::once(check("a", capacity, &format!("{rate}/s"), 1)).collect();
        let world = World::new(gateways, seed);
        let gap = 500_000 / rate;
        let outage = 3_000_000..3_000_000 + 10_000 + random.below(10_000_000);
        let link = random.choose(&[Link::Down, Link::Broken]);
        let (mut admitted, mut next_recovery) = (0u64, START);
        let mut now = START;
        while now.micros_since(START) < outage.end + 10_000_000 {
            world.clock.advance(Duration::from_micros(gap));
            now = world.clock.now();
            let broken = outage.contains(&now.micros_since(START));
            world.set_links(|| if broken { link } else { Link::Well });
            if now >= next_recovery {
                world.recover();
                next_recovery = now.plus_micros(50_000);
            }
            admitted += u64::from(world.ask(random.below(gateways) as usize, &checks));
        }
        let ideal = capacity as f64 + rate as f64 * now.micros_since(START) as f64 / 1e6;
        let above = admitted as f64 - ideal;
        // A token of each gateway is rounded away; calls without an answer may have taken, and are not owed.
        let unowed = if link == Link::Broken { FAILURES } else { 0 };
        assert!(
            above <= (gateways * u64::from(1 + unowed)) as f64,
            "seed {seed}: {admitted} of {ideal}, {gateways} gateways"
        );
        assert!(admitted as f64 > 0.85 * ideal, "seed {seed}: {admitted} of {ideal}, {gateways} gateways");
        most = most.max(above);
        least = least.min(admitted as f64 / ideal);
    }
    println!(
        "{} outages: at most {most:.1} above the limit, at least {:.1} % of it",
        SEEDS / 10,
        least * 100.0
    );
}

/// An outage of 10 s at twice the rate: over outage and recovery no more than the limit. Beside it what
/// buckets that begin full, and a way back without debits, would have given out.
#[test]
fn ten_seconds_at_twice_the_rate() {
    let (gateways, capacity, rate) = (4u64, 200u64, 100u64);
    let checks: Checks = std::iter::once(check("a", capacity, "100", 1)).collect();
    let world = World::new(gateways, 1);
    let mut meter = Meter { level: 0.0, fullest: 0.0, at: START };
    // 5 s before, 10 s of outage, 15 s after, at 200 requests a second.
    for step in 0..6_000u64 {
        world.clock.advance(Duration::from_millis(5));
        meter.leak(world.clock.now(), rate as f64);
        if step == 1_000 {
            world.set_links(|| Link::Down);
        } else if step == 3_000 {
            world.set_links(|| Link::Well);
        }
        if step % 10 == 0 {
            world.recover();
        }
        if world.ask((step % gateways) as usize, &checks) {
            meter.admit();
        }
    }
    // The same arrivals, on plain buckets: local ones that begin full, and a store that is told nothing.
    let clock = ManualClock::at(START);
    let store = MemoryStore::new(10, Arc::new(ManualClock::at(START)));
    let locals: Vec<_> =
        (0..gateways).map(|_| MemoryStore::new(10, Arc::new(ManualClock::at(START)))).collect();
    let share = check("a", capacity / gateways, "25", 1);
    let mut careless = Meter { level: 0.0, fullest: 0.0, at: START };
    for step in 0..6_000u64 {
        clock.advance(Duration::from_millis(5));
        let now = clock.now();
        careless.leak(now, rate as f64);
        let verdict = if (1_000..3_000).contains(&step) {
            locals[(step % gateways) as usize].take_at(std::slice::from_ref(&share), now)[0]
        } else {
            store.take_at(&checks, now)[0]
        };
        if verdict.is_allowed() {
            careless.admit();
        }
    }
    println!(
        "capacity {capacity}, {rate}/s, {gateways} gateways, 10 s of outage at twice the rate: at most {:.1} at once; \
         beginning full and without debits: {:.1}",
        meter.fullest, careless.fullest
    );
    assert!(meter.fullest <= (capacity + gateways) as f64, "{}", meter.fullest);
    assert!(careless.fullest > 1.5 * capacity as f64, "{}", careless.fullest);
}
