//! Leases: the bound on what all gateways together admit, on virtual time with whatever can happen to a
//! gateway; what is left unspent; and the same on a real Redis and with real processes.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use futures_util::FutureExt as _;
use smallvec::smallvec;
use tollgate::breaker::Breakers;
use tollgate::clock::{Clock, ManualClock, SystemClock, Timestamp};
use tollgate::config::{self, Breaker as BreakerSettings, HotKeys as Settings, OnStoreFailure};
use tollgate::decision::{Admission, Basis};
use tollgate::denials::Denials;
use tollgate::fallback::Fallback;
use tollgate::gateways::{GONE_AFTER, Gateways};
use tollgate::hot_keys::HotKeys;
use tollgate::leases::{Leases, slack};
use tollgate::limiter::{Limiter, Remote};
use tollgate::metrics::Metrics;
use tollgate::rule::{Check, Checks, Verdicts};
use tollgate::store::memory::MemoryStore;
use tollgate::store::redis::{Heartbeat, RedisStore};
use tollgate::store::{Store, StoreFault};

use crate::contract::check;
use crate::harness::gateway::{everything_to, on};
use crate::harness::{Connection, Gateway, Random, Redis, Upstream, eventually, get};

const START: Timestamp = Timestamp::from_micros(1_764_000_000_000_000);

/// Requests that the simulation makes in all.
const REQUESTS: u64 = 10_000_000;

const EPSILON_PPM: u32 = 50_000;

fn settings() -> Settings {
    Settings {
        threshold: 100,
        window: Duration::from_secs(1),
        epsilon_ppm: EPSILON_PPM,
        lease_for: Duration::from_millis(100),
    }
}

/// A limiter with leases on `store`.
fn limiter(store: Arc<dyn Store>, gateways: Arc<Gateways>, clock: Arc<dyn Clock>) -> (Limiter, Metrics) {
    let metrics = Metrics::new().unwrap();
    let memory = Arc::new(MemoryStore::new(1_000, Arc::clone(&clock)));
    let breaker = BreakerSettings {
        failure_permille: 500,
        consecutive_failures: 10,
        open_for: Duration::from_secs(1),
        apart: Duration::ZERO,
    };
    let remote = Remote {
        denials: Denials::default(),
        leases: Leases::new(&settings(), Arc::clone(&gateways), metrics.leases.clone()),
        breakers: Breakers::new(breaker, 1),
        fallback: Fallback::new(memory, gateways, 1_000, metrics.clone()),
        probe: check("probe", 1_000, "1000", 1),
    };
    let hot_keys = HotKeys::new(settings().threshold, settings().window);
    (Limiter::new(store, hot_keys, Some(remote), clock, metrics.clone()), metrics)
}

/// The store of all, as one gateway reaches it.
#[derive(Debug)]
struct Link {
    central: Arc<MemoryStore>,
    clock: Arc<ManualClock>,
    up: AtomicBool,
    calls: Arc<AtomicU64>,
}

#[async_trait]
impl Store for Link {
    async fn acquire(&self, checks: &Checks) -> Result<Verdicts, StoreFault> {
        if !self.is_up() {
            return Err(StoreFault::Down);
        }
        self.calls.fetch_add(1, Ordering::Relaxed);
        Ok(self.central.take_at(checks, self.clock.now()))
    }

    fn is_up(&self) -> bool {
        self.up.load(Ordering::Relaxed)
    }
}

struct Member {
    id: u64,
    limiter: Limiter,
    metrics: Metrics,
    link: Arc<Link>,
    gateways: Arc<Gateways>,
    next_beat: Timestamp,
    next_look: Timestamp,
}

/// Gateways on virtual time that come, go, die and are cut off, with the heartbeats that count them.
struct World {
    clock: Arc<ManualClock>,
    central: Arc<MemoryStore>,
    beats: HashMap<u64, Timestamp>,
    members: Vec<Member>,
    joined: u64,
    calls: Arc<AtomicU64>,
    random: Random,
}

impl World {
    fn new(gateways: usize, seed: u64) -> Self {
        let clock = Arc::new(ManualClock::at(START));
        let central = Arc::new(MemoryStore::new(1_000, Arc::clone(&clock) as Arc<dyn Clock>));
        let (beats, members, calls) = (HashMap::new(), Vec::new(), Arc::default());
        let mut world = Self { clock, central, beats, members, joined: 0, calls, random: Random(seed) };
        (0..gateways).for_each(|_| world.join());
        world
    }

    fn join(&mut self) {
        let now = self.clock.now();
        let link = Arc::new(Link {
            central: Arc::clone(&self.central),
            clock: Arc::clone(&self.clock),
            up: AtomicBool::new(true),
            calls: Arc::clone(&self.calls),
        });
        let gateways = Arc::new(Gateways::counted());
        let clock = Arc::clone(&self.clock) as Arc<dyn Clock>;
        let (limiter, metrics) = limiter(Arc::clone(&link) as _, Arc::clone(&gateways), clock);
        let next_beat = now.plus_micros(self.random.below(1_000_000));
        self.joined += 1;
        let id = self.joined;
        self.members.push(Member { id, limiter, metrics, link, gateways, next_beat, next_look: now });
    }

    /// Time passes: heartbeats, and the calls for leases, some time after they were ordered.
    fn advance(&mut self, micros: u64) {
        self.clock.advance(Duration::from_micros(micros));
        let now = self.clock.now();
        for member in &mut self.members {
            if now >= member.next_beat {
                member.next_beat = now.plus_micros(1_000_000);
                if member.link.is_up() {
                    self.beats.insert(member.id, now);
                    self.beats
                        .retain(|_, beat| u128::from(now.micros_since(*beat)) <= GONE_AFTER.as_micros());
                    // A heartbeat takes its time, too.
                    let sent = now.minus_micros(self.random.below(5_000));
                    member.gateways.heard(self.beats.len() as u32, sent, now);
                }
            }
            if now >= member.next_look {
                member.next_look = now.plus_micros(500 + self.random.below(2_000));
                member.limiter.look_after_leases();
                member.limiter.lease().now_or_never().expect("nothing to wait for");
                member.limiter.recover().now_or_never().expect("nothing to wait for");
            }
        }
    }

    fn ask(&self, member: usize, checks: &Checks) -> (bool, Basis) {
        let decision =
            self.members[member].limiter.decide(checks).now_or_never().expect("nothing to wait for");
        (decision.admission == Admission::Admitted, decision.basis)
    }
}

/// The least capacity for which every window so far holds `capacity + rate * time`.
struct Meter {
    per_micro: f64,
    level: f64,
    fullest: f64,
    at: Timestamp,
}

impl Meter {
    fn new(rate: f64) -> Self {
        Self { per_micro: rate / 1e6, level: 0.0, fullest: 0.0, at: START }
    }

    fn admit(&mut self, cost: u64, now: Timestamp) {
        let elapsed = now.micros_since(self.at) as f64;
        self.level = (self.level - self.per_micro * elapsed).max(0.0) + cost as f64;
        self.fullest = self.fullest.max(self.level);
        self.at = self.at.max(now);
    }
}

/// One world: uneven arrivals, up to 20 gateways, and what can happen to them. How many requests it took, and how
/// much of the slack was used at most.
fn run(seed: u64) -> (u64, f64) {
    let mut random = Random(seed);
    let capacity = random.choose(&[20, 100, 200, 1_000, 2_000, 10_000, 20_000, 100_000]);
    let rate = random.choose(&[10, 100, 1_000, 2_000, 5_000, 20_000]);
    let offered = rate * random.choose(&[1, 2, 2, 5]) + 200;
    let mut world = World::new(1 + random.below(20) as usize, seed);
    let costs: &[u64] = random.choose(&[&[1][..], &[1, 1, 1, 5, 20]]);
    let of_cost = |cost| -> Checks {
        smallvec![Check {
            on_store_failure: OnStoreFailure::Deny,
            ..check("a", capacity, &format!("{rate}"), cost)
        }]
    };
    let checks: HashMap<u64, Checks> = costs.iter().map(|cost| (*cost, of_cost(*cost))).collect();
    let slack = slack(&checks[&1][0].limit, EPSILON_PPM);
    let mut meter = Meter::new(rate as f64);
    let requests = (offered * 25).clamp(50_000, 300_000);
    let mut next_event = START.plus_micros(4_000_000);
    for _ in 0..requests {
        world.advance(random.below(2_000_000 / offered + 1));
        let now = world.clock.now();
        if now >= next_event {
            next_event = now.plus_micros(random.below(6_000_000));
            let one = random.below(world.members.len() as u64) as usize;
            match random.below(4) {
                0 if world.members.len() < 20 => world.join(),
                // kill -9
                1 if world.members.len() > 1 => drop(world.members.swap_remove(one)),
                2 => world.members[one].link.up.store(false, Ordering::Relaxed),
                _ => world.members.iter().for_each(|member| member.link.up.store(true, Ordering::Relaxed)),
            }
        }
        // Two thirds go to the first one.
        let member = match random.below(3) {
            0 => random.below(world.members.len() as u64) as usize,
            _ => 0,
        };
        let cost = random.choose(costs);
        if world.ask(member, &checks[&cost]).0 {
            meter.admit(cost, now);
        }
        let bound = (capacity + slack) as f64 + 0.01;
        assert!(
            meter.fullest <= bound,
            "seed {seed}: {} of {bound}: capacity {capacity}, rate {rate}, {} gateways",
            meter.fullest,
            world.members.len()
        );
    }
    let over = (meter.fullest - capacity as f64).max(0.0);
    (requests, if slack == 0 { over } else { over / slack as f64 })
}

/// DESIGN's first promise, with leases: `capacity + rate * time + slack` over every window.
#[test]
fn the_bound_holds_whatever_happens_to_gateways() {
    let (mut requests, mut seed, mut worst) = (0, 0, (0.0, 0));
    while requests < REQUESTS {
        seed += 1;
        let (made, used) = run(seed);
        requests += made;
        if used > worst.0 {
            worst = (used, seed);
        }
    }
    println!(
        "{requests} requests in {seed} worlds: at most {:.1} % of the slack was used (seed {})",
        worst.0 * 100.0,
        worst.1
    );
}

/// Eight gateways, capacity and rate 20,000: what is admitted of the ideal in 10 s at `load` times the rate, and
/// the calls for it. The first gateway has this share of the traffic.
fn ten_seconds(load: f64, first: f64) -> (f64, f64) {
    let (capacity, rate, gateways) = (20_000u64, 20_000u64, 8);
    let mut world = World::new(gateways, 7);
    let checks: Checks = smallvec![check("a", capacity, "20000", 1)];
    let gap = 1e6 / (rate as f64 * load);
    // Until all may hold something, at a low rate.
    for _ in 0..5_000 {
        world.advance(1_000);
        let member = world.random.below(gateways as u64) as usize;
        world.ask(member, &checks);
    }
    let (begin, calls) = (world.clock.now(), world.calls.load(Ordering::Relaxed));
    let (mut admitted, mut asked, mut at) = (0u64, 0u64, 0.0);
    while at < 10e6 {
        at += gap;
        world.advance((at as u64).saturating_sub(world.clock.now().micros_since(begin)));
        let to_first = (world.random.below(1_000) as f64) < first * 1_000.0;
        let member = if to_first { 0 } else { world.random.below(gateways as u64) as usize };
        asked += 1;
        admitted += u64::from(world.ask(member, &checks).0);
    }
    let ideal = (capacity as f64 + rate as f64 * 10.0).min(asked as f64);
    let calls = world.calls.load(Ordering::Relaxed) - calls;
    (admitted as f64 / ideal, calls as f64 / admitted as f64)
}

/// Promise 2: at 95 % of the rate nothing is refused, at 200 % at least 98 % of it is admitted, and Redis hardly
/// notices.
#[test]
fn nothing_is_wasted() {
    for (load, first, least) in [(0.95, 0.0, 1.0), (2.0, 0.0, 0.98), (2.0, 0.6, 0.98), (5.0, 0.6, 0.98)] {
        let (admitted, calls) = ten_seconds(load, first);
        println!(
            "{load} x the rate, {first} of it to one of 8: {:.2} % of the ideal, {calls:.4} calls per admitted request",
            admitted * 100.0
        );
        assert!(admitted >= least && admitted <= 1.02, "{admitted}");
        // At five times the rate a full bucket is gone in a quarter of a second, faster than leases come.
        assert!(calls <= if load > 2.0 { 0.05 } else { 0.02 }, "{calls}");
    }
}

/// Capacity 200, 20 gateways: the share of the slack is half a token, so there are no leases, and the answers
/// are exact.
#[test]
fn where_the_share_is_below_two_tokens_answers_are_exact() {
    let mut world = World::new(20, 3);
    let checks: Checks = smallvec![check("a", 200, "1/h", 1)];
    for _ in 0..6_000 {
        world.advance(1_000);
    }
    let mut admitted = 0;
    for step in 0..20_000 {
        world.advance(100);
        let (is_admitted, basis) = world.ask(step % 20, &checks);
        assert_ne!(basis, Basis::Lease);
        admitted += u64::from(is_admitted);
        assert_eq!(is_admitted, step < 200, "{step}");
    }
    assert_eq!(admitted, 200);
    assert!(world.members.iter().all(|member| member.metrics.leases.fetched.get() == 0));
}

/// Tokens that die with a gateway are no more than its share, and are earned again.
#[test]
fn what_dies_with_a_gateway_is_earned_again() {
    let mut world = World::new(4, 5);
    let checks: Checks = smallvec![check("a", 4_000, "4000", 1)];
    let share = slack(&checks[0].limit, EPSILON_PPM) / 4;
    let storm = |world: &mut World, steps: usize| -> usize {
        let mut ask = |step: usize| {
            world.advance(500);
            world.ask(step % world.members.len(), &checks).0
        };
        (0..steps).filter(|step| ask(*step)).count()
    };
    storm(&mut world, 20_000);
    let held = world.members[0].limiter.hot_keys(1)[0].2;
    assert!((1..=share).contains(&held), "{held} of {share}");
    world.members.remove(0);
    // At half of the rate all that is asked for is admitted again once the bucket has filled.
    storm(&mut world, 4_000);
    assert_eq!(storm(&mut world, 4_000), 4_000);
}

/// Eight limiters on one real Redis, one key at capacity and rate 20,000, offered twice that for 10 s.
#[test]
fn eight_limiters_on_a_real_redis() {
    const GATEWAYS: usize = 8;
    let redis = Redis::start();
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    let clock: Arc<dyn Clock> = Arc::new(SystemClock::start());
    let join = |index: usize| {
        let gateways = Arc::new(Gateways::counted());
        let metrics = Metrics::new().unwrap().store;
        let heartbeat = Heartbeat::new("rl", &format!("g{index}"), Arc::clone(&gateways), Arc::clone(&clock));
        let (store, driver) = RedisStore::new(
            &config::Redis::at(&redis.url(), Duration::from_secs(1)),
            "test",
            Some(heartbeat),
            metrics.clone(),
        )
        .unwrap();
        runtime.spawn(driver.run());
        let store = Arc::new(store);
        eventually("a connection to Redis", || store.is_up().then_some(()));
        let (limiter, _) = limiter(store, Arc::clone(&gateways), Arc::clone(&clock));
        let limiter = Arc::new(limiter);
        let background = Arc::clone(&limiter);
        runtime.spawn(async move { background.keep_leasing().await });
        (limiter, gateways, metrics)
    };
    let all: Vec<_> = (0..GATEWAYS).map(join).collect();
    eventually("leases for all", || {
        all.iter()
            .all(|(_, gateways, _)| gateways.holders(clock.now()) == Some(GATEWAYS as u32))
            .then_some(())
    });
    let checks: Checks = smallvec![check("a", 20_000, "20000", 1)];
    let meter = Arc::new(Mutex::new((Meter { at: clock.now(), ..Meter::new(20_000.0) }, 0u64)));
    let begin = clock.now();
    let load = |limiter: Arc<Limiter>| {
        let (checks, clock, meter) = (checks.clone(), Arc::clone(&clock), Arc::clone(&meter));
        async move {
            let mut asked = 0;
            loop {
                let elapsed = clock.now().micros_since(begin);
                if elapsed >= 10_000_000 {
                    return asked;
                }
                while asked < elapsed * 40_000 / 1_000_000 / GATEWAYS as u64 {
                    asked += 1;
                    if limiter.decide(&checks).await.admission == Admission::Admitted {
                        let mut meter = meter.lock().unwrap();
                        let now = clock.now();
                        meter.0.admit(1, now);
                        meter.1 += 1;
                    }
                }
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        }
    };
    let tasks: Vec<_> = all.iter().map(|(limiter, ..)| runtime.spawn(load(Arc::clone(limiter)))).collect();
    let asked: u64 = tasks.into_iter().map(|task| runtime.block_on(task).unwrap()).sum();
    let seconds = clock.now().micros_since(begin) as f64 / 1e6;
    let (meter, admitted) = &*meter.lock().unwrap();
    let ideal = 20_000.0 + 20_000.0 * seconds;
    let requests: u64 = all.iter().map(|(.., metrics)| metrics.checks.get()).sum();
    let flights: u64 = all.iter().map(|(.., metrics)| metrics.calls.get()).sum();
    println!(
        "{asked} asked in {seconds:.1} s, {admitted} admitted: {:.2} % of the ideal; {:.4} requests to the store and \
         {:.4} calls of Redis per admitted one; at most {:.0} above the capacity at once, of {}",
        *admitted as f64 / ideal * 100.0,
        requests as f64 / *admitted as f64,
        flights as f64 / *admitted as f64,
        meter.fullest - 20_000.0,
        slack(&checks[0].limit, EPSILON_PPM),
    );
    assert!(meter.fullest <= 20_000.0 + 1_000.0, "{}", meter.fullest);
    assert!(*admitted as f64 <= 1.02 * ideal);
    assert!(requests as f64 <= 0.02 * *admitted as f64, "{requests} for {admitted}");
    // A machine that was too slow to ask shows nothing.
    assert!(asked as f64 > 1.5 * ideal, "{asked}");
    assert!(*admitted as f64 >= 0.98 * ideal);
}

/// Tokens that Redis has left of a bucket that hardly refills.
fn left(redis: &Redis, key: &str) -> u64 {
    redis.command::<f64>(&["HGET", key, "tokens"]).floor() as u64
}

/// A gateway with one hot key: capacity 10,000, 1/h, and the upstream behind it.
struct Hot {
    redis: Redis,
    upstream: Upstream,
}

impl Hot {
    const KEY: &str = "rl:{shop}:all";

    fn start() -> Self {
        Self { redis: Redis::start(), upstream: Upstream::start() }
    }

    fn rules(&self, capacity: u64) -> String {
        self.row(&format!("capacity: {capacity}, refill_per_second: 1/h"))
    }

    /// The row of `shop`, and a single gateway.
    fn row(&self, numbers: &str) -> String {
        let row = format!("  rows: [{{tenant: shop, {numbers}}}]");
        format!("{}cluster: {{gateways: 1}}\n", everything_to(&self.upstream, &row))
    }

    fn gateway(&self) -> Gateway {
        Gateway::start(&on(&self.redis), &self.rules(10_000))
    }
}

/// Asks so often; how many were admitted.
fn storm(gateway: &Gateway, count: usize) -> u64 {
    let mut connection = Connection::open(gateway.port);
    (0..count).filter(|_| connection.ask("GET", "/", "shop").status == 200).count() as u64
}

fn leased(gateway: &Gateway) -> u64 {
    gateway.metric(
        "tollgate_decisions_total{basis=\"lease\",outcome=\"admitted\",route=\"all\",rule=\"default\"}",
    )
}

/// B025: what was taken in advance is neither lost nor counted twice: once nobody uses it, Redis has exactly what
/// was not admitted. And the same with a new capacity: an edit clamps, and never refills.
#[test]
fn what_is_not_spent_goes_back() {
    let hot = Hot::start();
    let gateway = hot.gateway();
    assert_eq!(storm(&gateway, 1_000), 1_000);
    assert!(leased(&gateway) > 500, "{}", leased(&gateway));
    assert!(left(&hot.redis, Hot::KEY) < 9_000, "nothing is held in advance");
    eventually("all that was not spent", || (left(&hot.redis, Hot::KEY) == 9_000).then_some(()));
    assert_eq!(storm(&gateway, 500), 500);
    gateway.write(&hot.rules(12_000));
    gateway.reload();
    assert_eq!(storm(&gateway, 500), 500);
    eventually("the same under a new rule", || (left(&hot.redis, Hot::KEY) == 8_000).then_some(()));
    let events = |event: &str| gateway.metric(&format!("tollgate_lease_tokens_total{{event=\"{event}\"}}"));
    eventually("an event for each token", || {
        (events("fetched") == events("spent") + events("returned")).then_some(())
    });
    assert_eq!((events("spent"), events("lost"), events("expired")), (leased(&gateway), 0, 0));
}

#[test]
fn the_end_of_a_gateway_gives_all_back() {
    let hot = Hot::start();
    let mut gateway = hot.gateway();
    assert_eq!(storm(&gateway, 1_000), 1_000);
    gateway.signal("TERM");
    assert!(gateway.wait_for_end().success());
    assert_eq!(left(&hot.redis, Hot::KEY), 9_000);
}

/// kill -9: what it held is lost, and no more than its share of the slack.
#[test]
fn a_gateway_that_dies_loses_its_share_at_most() {
    let hot = Hot::start();
    let mut gateway = hot.gateway();
    assert_eq!(storm(&gateway, 1_000), 1_000);
    gateway.signal("KILL");
    gateway.wait_for_end();
    let lost = 9_000 - left(&hot.redis, Hot::KEY);
    assert!((1..=500).contains(&lost), "{lost} of a slack of 500");
    // Another one gives out the rest, and not a token more.
    let heir = hot.gateway();
    assert_eq!(storm(&heir, 10_000), 9_000 - lost);
}

/// B021: costs share one bucket, also where it is leased: 20 and 1, to the last token.
#[test]
fn costs_above_one_spend_leases_too() {
    let hot = Hot::start();
    let routes = format!(
        "upstreams: {{u: {{servers: [127.0.0.1:{}]}}}}\nroutes:\n  - {{id: all, match: {{path: /*}}, upstream: u, cost: 20}}\n\
         rules: {{rows: [{{tenant: shop, capacity: 20000, refill_per_second: 1/h}}]}}\ncluster: {{gateways: 1}}\n",
        hot.upstream.port
    );
    let gateway = Gateway::start(&on(&hot.redis), &routes);
    assert_eq!(storm(&gateway, 1_200), 1_000);
    assert!(leased(&gateway) > 500, "{}", leased(&gateway));
    eventually("nothing left", || (left(&hot.redis, Hot::KEY) == 0).then_some(()));
}

/// A key that has run dry is refused by hearsay while the flood lasts, and not a moment longer: who waits as he was told
/// is admitted, as are those beside him.
#[test]
fn who_honours_retry_after_on_a_leased_key_is_admitted() {
    let hot = Hot::start();
    let gateway = Gateway::start(&on(&hot.redis), &hot.row("capacity: 200, refill_per_second: 100"));
    let mut connection = Connection::open(gateway.port);
    for round in 0..3 {
        let flood = (0..2_000).map(|_| connection.ask("GET", "/", "shop"));
        let refused = flood.filter(|answer| answer.status == 429).last().expect("a refusal");
        std::thread::sleep(Duration::from_secs(refused.number("retry-after")));
        let admitted = (0..20).filter(|_| connection.ask("GET", "/", "shop").status == 200).count();
        assert_eq!(admitted, 20, "in round {round}");
    }
    assert!(leased(&gateway) > 0, "no lease was spent");
}

#[test]
fn hot_keys_are_listed_without_a_client_value() {
    let hot = Hot::start();
    for store in [on(&hot.redis), "memory".to_owned()] {
        let gateway = Gateway::start(&store, &hot.rules(10_000));
        let mut connection = Connection::open(gateway.port);
        for _ in 0..300 {
            connection.ask("GET", "/", "shop");
            connection.ask("GET", "/", "SENTINELSECRET");
        }
        let answer = get(gateway.admin, "/api/v1/hot-keys", "");
        assert!(!answer.body.contains("SENTINEL"), "{}", answer.body);
        let keys = answer.json()["hot_keys"].as_array().unwrap().clone();
        assert_eq!(keys.len(), 2, "{}", answer.body);
        let shop = keys.iter().find(|key| key["subject"] == "shop").expect("the tenant that a row names");
        assert_eq!(shop["route"], "all");
        assert!(
            shop["rate"].as_u64().unwrap() >= 100 && shop["leased_tokens"].as_u64().unwrap() <= 500,
            "{shop}"
        );
        let is_hashed = |key: &serde_json::Value| key["subject"].as_str().unwrap().starts_with('~');
        assert!(keys.iter().any(is_hashed), "{}", answer.body);
        eventually("nobody asks any more", || {
            let answer = get(gateway.admin, "/api/v1/hot-keys", "").json();
            answer["hot_keys"].as_array().unwrap().is_empty().then_some(())
        });
    }
}

/// A bucket that is split: exactly its capacity is given out, whoever asks, and nothing is refused while a shard
/// still has what is asked for.
#[test]
fn shards_give_out_the_capacity_and_not_a_token_more() {
    for (gateways, capacity, shards, random_arrival) in
        [(1, 800, 8, false), (4, 801, 8, true), (20, 64, 64, true), (3, 7, 2, false)]
    {
        let mut world = World::new(gateways, 9);
        let checks: Checks = smallvec![Check { shards, ..check("a", capacity, "1/h", 1) }];
        let mut admitted = 0;
        for step in 0..2 * capacity as usize {
            world.advance(1_000);
            let member =
                if random_arrival { world.random.below(gateways as u64) as usize } else { step % gateways };
            admitted += u64::from(world.ask(member, &checks).0);
            let all_are_admitted = admitted == step as u64 + 1;
            assert!(all_are_admitted || admitted == capacity, "{admitted} of {capacity} at {step}");
        }
        assert_eq!(admitted, capacity);
    }
}

/// The same with leases, at twice the rate: what is admitted is the rate, and the bound holds.
#[test]
fn shards_of_a_hot_key_waste_nothing() {
    for random_arrival in [false, true] {
        let mut world = World::new(4, 11);
        let checks: Checks = smallvec![Check { shards: 4, ..check("a", 8_000, "8000", 1) }];
        let slack = slack(&checks[0].limit, EPSILON_PPM) as f64;
        let mut meter = Meter::new(8_000.0);
        let (mut admitted, steps) = (0, 240_000usize);
        for step in 0..steps {
            world.advance(if step % 2 == 0 { 62 } else { 63 });
            let member = if random_arrival { world.random.below(4) as usize } else { step % 4 };
            if world.ask(member, &checks).0 {
                admitted += 1;
                meter.admit(1, world.clock.now());
            }
        }
        let ideal = 8_000.0 + 8_000.0 * steps as f64 * 62.5 / 1e6;
        let share = f64::from(admitted) / ideal;
        println!("4 shards, random arrival {random_arrival}: {:.2} % of the ideal", share * 100.0);
        assert!(share >= 0.98, "{share}");
        assert!(meter.fullest <= 8_000.0 + slack, "{}", meter.fullest);
    }
}

#[test]
fn a_rule_with_shards_has_that_many_buckets_in_redis() {
    let hot = Hot::start();
    let row = hot.row("capacity: 90, refill_per_second: 1/h, shards: 4");
    let rules = format!("{row}hot_keys: {{epsilon: 0}}\n");
    let gateway = Gateway::start(&on(&hot.redis), &rules);
    let mut connection = Connection::open(gateway.port);
    let first = connection.ask("GET", "/", "shop");
    assert_eq!((first.number("x-ratelimit-limit"), first.number("x-ratelimit-remaining")), (90, 88));
    assert_eq!(storm(&gateway, 200), 89);
    assert_eq!(hot.redis.keys(), ["rl:shop:all:0", "rl:shop:all:1", "rl:shop:all:2", "rl:shop:all:3"]);
    let refused = connection.ask("GET", "/", "shop");
    assert_eq!((refused.status, refused.number("x-ratelimit-remaining")), (429, 0));
}

/// B135: a gateway in front of another one: a refusal of the inner one is an answer, which is neither repeated nor
/// told as a failure of the upstream.
#[test]
fn a_refusal_of_a_gateway_behind_is_an_answer() {
    let upstream = Upstream::start();
    let inner = Gateway::start(
        "memory",
        &everything_to(&upstream, "  default: {capacity: 3, refill_per_second: 1/h}"),
    );
    let outer = Gateway::start(
        "memory",
        &format!(
            "upstreams: {{u: {{servers: [127.0.0.1:{0}, 127.0.0.1:{0}]}}}}\n\
             routes: [{{id: all, match: {{path: /*}}, upstream: u, tenant_rule: \"off\"}}]\n",
            inner.port
        ),
    );
    let statuses: Vec<u16> = (0..10).map(|_| outer.get("/", "shop").status).collect();
    assert_eq!(statuses, [200, 200, 200, 429, 429, 429, 429, 429, 429, 429]);
    assert_eq!(outer.get("/", "shop").number("retry-after"), 3_600, "told as the inner one has told it");
    let told = |outcome: &str| {
        inner.metric(&format!(
            "tollgate_decisions_total{{basis=\"store\",outcome=\"{outcome}\",route=\"all\",rule=\"default\"}}"
        ))
    };
    assert_eq!((told("admitted"), told("refused")), (3, 8), "nothing was sent twice");
    assert_eq!(outer.metric("tollgate_responses_total{route=\"all\",status=\"5xx\"}"), 0);
}
