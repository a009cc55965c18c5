//! What users of other limiters met (see the numbers), tried on ours, end to end.

use std::time::{Duration, Instant};

use tollgate::store::StoreFault;

use crate::contract::{Running, check};
use crate::harness::gateway::{everything_to, on};
use crate::harness::{Connection, FaultProxy, Gateway, Redis, Upstream, eventually};

/// B023: a call whose outcome is unknown is never sent again.
#[test]
fn b023_a_lost_reply_is_not_replayed() {
    let redis = Redis::start();
    let proxy = FaultProxy::to(redis.port);
    let store = Running::redis(&format!("redis://127.0.0.1:{}", proxy.port), Duration::from_millis(150));
    let ask = |name: &str, cost: u64| {
        let checks: tollgate::rule::Checks = [check(name, 10, "1/h", cost)].as_slice().into();
        store.runtime.block_on(store.store.acquire(&checks))
    };
    let mut lost = 0;
    while lost < 3 {
        proxy.swallow_replies(true);
        match ask("a", 1).unwrap_err() {
            StoreFault::Timeout => lost += 1,
            // It has waited behind a PING, and was not sent.
            StoreFault::Waited | StoreFault::Down => {}
            fault => panic!("{fault}"),
        }
        proxy.swallow_replies(false);
        // That answer never comes; a new connection does.
        eventually("an answer again", || ask("probe", 0).ok());
    }
    let tokens: String = redis.command(&["HGET", "rl:{a}:r", "tokens"]);
    let left: f64 = tokens.parse().unwrap();
    assert!((left - (10.0 - f64::from(lost))).abs() < 0.1, "{left} left after {lost} calls");
}

/// B007: a bucket with a high rate that was left alone for 400 days, on Redis.
#[test]
fn b007_four_hundred_days_of_idleness() {
    let redis = Redis::start();
    let store = Running::redis(&redis.url(), Duration::from_secs(5));
    let check = check("a", 1_000_000, "1000000/s", 1);
    store.take(std::slice::from_ref(&check));
    let at: u64 = redis.command(&["HGET", "rl:{a}:r", "ts"]);
    let long_ago = (at - 400 * 86_400 * 1_000_000).to_string();
    let _: i64 = redis.command(&["HSET", "rl:{a}:r", "tokens", "0", "ts", &long_ago]);
    let verdict = store.take(&[check])[0];
    assert_eq!((verdict.outcome, verdict.remaining), (tollgate::limit::Outcome::Allowed, 999_999));
}

/// B015: 1 and the largest number mean the same in both stores; 0 is a fault at load in either case.
#[test]
fn b015_the_ends_of_the_range_are_the_same_in_both_stores() {
    let redis = Redis::start();
    let stores = [Running::redis(&redis.url(), Duration::from_secs(5)), Running::memory()];
    for (capacity, rate) in [(1, "1/h"), (1, "9000000000"), (1 << 53, "1/h"), (1 << 53, "9000000000")] {
        let ask = |store: &Running, cost| {
            let verdict = store.take(&[check(&format!("{capacity}-{rate}"), capacity, rate, cost)])[0];
            (verdict.outcome, verdict.remaining)
        };
        for cost in [capacity, 0] {
            assert_eq!(ask(&stores[0], cost).0, ask(&stores[1], cost).0, "{capacity} at {rate}, cost {cost}");
        }
        if rate == "1/h" {
            assert_eq!(ask(&stores[0], 1), ask(&stores[1], 1));
        }
    }
}

/// B031: the first request ever has a cost of 7; B031 too: a first request that is refused.
#[test]
fn b031_every_key_has_a_ttl() {
    let redis = Redis::start();
    let store = Running::redis(&redis.url(), Duration::from_secs(5));
    store.take(&[check("a", 20, "10", 7)]);
    let ttl: i64 = redis.command(&["PTTL", "rl:{a}:r"]);
    assert!((1..=4_000).contains(&ttl), "{ttl}");
    store.take(&[check("b", 20, "10", 21)]);
    store.take(&[check("c", 20, "10", 0)]);
    assert_eq!(redis.keys(), ["rl:{a}:r"]);
    // A key that lost its time to live by hand gets one again, even from a refusal.
    store.take(&[check("d", 1, "1/h", 1)]);
    let _: i64 = redis.command(&["PERSIST", "rl:{d}:r"]);
    assert!(!store.take(&[check("d", 1, "1/h", 1)])[0].is_allowed());
    let ttl: i64 = redis.command(&["PTTL", "rl:{d}:r"]);
    assert!(ttl > 3_600_000, "{ttl}");
}

/// A refusal writes nothing: the key is as it was, to the byte.
#[test]
fn a_refusal_writes_nothing() {
    let redis = Redis::start();
    let store = Running::redis(&redis.url(), Duration::from_secs(5));
    store.take(&[check("a", 1, "1/h", 1)]);
    let before: Vec<String> = redis.command(&["HGETALL", "rl:{a}:r"]);
    let _: () = redis.command(&["CONFIG", "RESETSTAT"]);
    for _ in 0..10 {
        assert!(!store.take(&[check("a", 1, "1/h", 1)])[0].is_allowed());
    }
    let after: Vec<String> = redis.command(&["HGETALL", "rl:{a}:r"]);
    assert_eq!(before, after);
    let statistics: String = redis.command(&["INFO", "commandstats"]);
    for command in ["hset", "pexpire"] {
        assert!(!statistics.contains(&format!("cmdstat_{command}:")), "{statistics}");
    }
}

/// B033: 300 ms on the way to Redis make no bucket expire early.
#[test]
fn b033_a_slow_network_mints_nothing() {
    let redis = Redis::start();
    let proxy = FaultProxy::to(redis.port);
    let store = Running::redis(&format!("redis://127.0.0.1:{}", proxy.port), Duration::from_secs(5));
    proxy.delay(Duration::from_millis(300));
    let started = Instant::now();
    let mut admitted = 0;
    while started.elapsed() < Duration::from_secs(9) {
        admitted += u32::from(store.take(&[check("a", 2, "1/2s", 1)])[0].is_allowed());
    }
    let bound = 2.0 + started.elapsed().as_secs_f64() / 2.0 + 1.0;
    assert!(f64::from(admitted) <= bound && admitted >= 5, "{admitted} of {bound}");
}

/// B035: one client, one rule, however often the file is reordered: one key.
#[test]
fn b035_nothing_that_changes_leaks_into_the_key() {
    let (redis, upstream) = (Redis::start(), Upstream::start());
    let rules = |rows: &str| everything_to(&upstream, &format!("  rows: {rows}"));
    let gateway = Gateway::start(
        &on(&redis),
        &rules(
            "[{tenant: shop-a, capacity: 2000, refill_per_second: 1/h}, {tenant: b, capacity: 9, refill_per_second: 1}]",
        ),
    );
    let mut client = Connection::open(gateway.port);
    for step in 0..1_000 {
        if step == 500 {
            gateway.write(&rules(
                "[{refill_per_second: 1, capacity: 9, tenant: b}, {refill_per_second: 2/h, capacity: 3000, tenant: shop-a}] # other words",
            ));
            gateway.reload();
        }
        assert_eq!(client.ask("GET", "/", "shop-a").status, 200);
    }
    assert_eq!(redis.keys(), ["rl:{shop-a}:all"]);
    assert_eq!(client.ask("GET", "/", "shop-a").header("x-ratelimit-remaining"), Some("999"));
}

/// B039, B041: keys of one length for whatever clients send, and none of it to be found anywhere.
#[test]
fn b041_no_raw_key_anywhere() {
    let (redis, upstream) = (Redis::start(), Upstream::start());
    let rest = everything_to(&upstream, "  default: {capacity: 1, refill_per_second: 1/h}");
    let gateway =
        Gateway::start(&on(&redis), &format!("{rest}log: {{level: debug, access: {{sample: 1}}}}\n"));
    for status in [200, 429, 429] {
        assert_eq!(gateway.get("/", "SENTINELSECRET").status, status);
    }
    let metrics = crate::harness::get(gateway.admin, "/metrics", "").body;
    let status = crate::harness::get(gateway.admin, "/api/v1/status", "").body;
    for (place, text) in
        [("keys", redis.keys().join(" ")), ("metrics", metrics), ("status", status), ("log", gateway.log())]
    {
        assert!(!text.contains("SENTINELSECRET"), "in {place}");
    }
    assert!(gateway.log().contains("\"target\":\"access\""));
}

/// B043: times to live of every length reach Redis as whole numbers.
#[test]
fn b043_numbers_arrive_as_numbers() {
    for redis in [Redis::start(), Redis::other("redis-6.2"), Redis::other("valkey-9.1")] {
        numbers_arrive_as_numbers(&redis);
    }
}

fn numbers_arrive_as_numbers(redis: &Redis) {
    let store = Running::redis(&redis.url(), Duration::from_secs(5));
    for (name, capacity, rate, ttl) in [
        ("e5", 50, "1/s", 100_000u64),
        ("e6", 500, "1/s", 1_000_000),
        ("e7", 5_000, "1/s", 10_000_000),
        ("e8", 50_000, "1/s", 100_000_000),
        ("e9", 500_000, "1/s", 1_000_000_000),
        ("e10", 5_000_000, "1/s", 10_000_000_000),
        ("max", 1 << 53, "1/d", 6_311_520_000_000),
    ] {
        assert!(store.take(&[check(name, capacity, rate, 1)])[0].is_allowed(), "{name}");
        let told: u64 = redis.command(&["PTTL", &format!("rl:{{{name}}}:r")]);
        assert!(told <= ttl && told + 2_000 > ttl, "{name}: {told} of {ttl}");
        let tokens: String = redis.command(&["HGET", &format!("rl:{{{name}}}:r"), "tokens"]);
        assert_eq!(tokens, (capacity - 1).to_string());
        let at: String = redis.command(&["HGET", &format!("rl:{{{name}}}:r"), "ts"]);
        assert!(at.len() == 16 && at.bytes().all(|byte| byte.is_ascii_digit()), "{at}");
    }
}

/// B045, B047: SCRIPT FLUSH ten times and one restart of Redis, under load on two gateways.
#[test]
fn b045_scripts_come_back() {
    let (mut redis, upstream) = (Redis::process(), Upstream::start());
    let rules = everything_to(&upstream, "  rows: [{tenant: shop-a, capacity: 100, refill_per_second: 50}]");
    let gateways = [Gateway::start(&on(&redis), &rules), Gateway::start(&on(&redis), &rules)];
    let stop = std::sync::atomic::AtomicBool::new(false);
    let started = Instant::now();
    let statuses: Vec<u16> = std::thread::scope(|scope| {
        let threads: Vec<_> = gateways
            .iter()
            .map(|gateway| {
                let stop = &stop;
                scope.spawn(move || {
                    let mut client = Connection::open(gateway.port);
                    let mut statuses = Vec::new();
                    while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                        statuses.push(client.ask("GET", "/", "shop-a").status);
                        std::thread::sleep(Duration::from_millis(5));
                    }
                    statuses
                })
            })
            .collect();
        for _ in 0..10 {
            let _: () = redis.command(&["SCRIPT", "FLUSH"]);
            std::thread::sleep(Duration::from_millis(100));
        }
        let reloads: Vec<u64> =
            gateways.iter().map(|gateway| gateway.metric("tollgate_script_reloads_total")).collect();
        redis.kill();
        std::thread::sleep(Duration::from_millis(200));
        redis.restart();
        for gateway in &gateways {
            eventually("the store again", || (gateway.metric("tollgate_store_connected") == 1).then_some(()));
        }
        std::thread::sleep(Duration::from_millis(300));
        stop.store(true, std::sync::atomic::Ordering::Relaxed);
        for reloads in reloads {
            assert!((1..=10).contains(&reloads), "{reloads} reloads of 10 flushes");
        }
        threads.into_iter().flat_map(|thread| thread.join().unwrap()).collect()
    });
    assert!(statuses.iter().all(|status| matches!(status, 200 | 429)), "{statuses:?}");
    let admitted = statuses.iter().filter(|status| **status == 200).count() as f64;
    // The restart emptied Redis: a bucket anew there, and one in each gateway meanwhile.
    let bound = 4.0 * 100.0 + 50.0 * started.elapsed().as_secs_f64() * 2.0;
    assert!(admitted <= bound, "{admitted} of {bound}");
    let calls = gateways.iter().map(|gateway| gateway.metric("tollgate_store_calls_total")).sum::<u64>();
    assert!(calls > 20, "{calls}");
}

/// One request whose key holds something else does not fail its neighbours in the same flight.
#[test]
fn a_key_of_the_wrong_type_is_its_own_problem() {
    let redis = Redis::start();
    let store = Running::redis(&redis.url(), Duration::from_secs(5));
    let _: () = redis.command(&["SET", "rl:{bad}:r", "a string"]);
    let _: i64 = redis.command(&["HSET", "rl:{odd}:r", "tokens", "many", "ts", "1"]);
    let _: i64 = redis.command(&["HSET", "rl:{nan}:r", "tokens", "nan", "ts", "inf"]);
    let ask = |name: String| {
        let store = std::sync::Arc::clone(&store.store);
        async move { (name.clone(), store.acquire(&[check(&name, 5, "1/h", 1)].as_slice().into()).await) }
    };
    let answers = store.runtime.block_on(async {
        let names = ["bad", "odd", "nan"]
            .map(str::to_owned)
            .into_iter()
            .chain((0..60).map(|index| format!("good{index}")));
        let tasks: Vec<_> = names.map(|name| tokio::spawn(ask(name))).collect();
        let mut answers = Vec::new();
        for task in tasks {
            answers.push(task.await.unwrap());
        }
        answers
    });
    for (name, answer) in answers {
        match &*name {
            "bad" | "odd" | "nan" => assert_eq!(answer.unwrap_err().kind(), "wrong_type", "{name}"),
            _ => assert_eq!(answer.unwrap()[0].remaining, 4, "{name}"),
        }
    }
    let untouched: String = redis.command(&["GET", "rl:{bad}:r"]);
    assert_eq!(untouched, "a string");
}

/// The same over HTTP: the rule's fallback decides, aloud, and no 5xx comes of it.
#[test]
fn a_key_of_the_wrong_type_over_http() {
    let (redis, upstream) = (Redis::start(), Upstream::start());
    let gateway = Gateway::start(
        &on(&redis),
        &everything_to(&upstream, "  rows: [{tenant: shop-a, capacity: 2, refill_per_second: 1/h}]"),
    );
    let _: () = redis.command(&["SET", "rl:{shop-a}:all", "a string"]);
    let statuses: Vec<u16> = (0..3).map(|_| gateway.get("/", "shop-a").status).collect();
    assert_eq!(statuses, [200, 200, 429]);
    assert_eq!(gateway.metric("tollgate_store_errors_total{kind=\"wrong_type\"}"), 3);
    assert!(gateway.log().contains("rl:{shop-a}:all: WRONGTYPE"), "{}", gateway.log());
}

/// B085: what the file says is what is loaded, and it can be seen to act.
#[test]
fn b085_every_rule_is_active() {
    let upstream = Upstream::start();
    let gateway = Gateway::start(
        "memory",
        &everything_to(
            &upstream,
            "  rows:\n    - {tenant: a, capacity: 1, refill_per_second: 1/h}\n    - {route: all, capacity: 2, refill_per_second: 1/h}",
        ),
    );
    let admitted = |key: &str| (0..4).filter(|_| gateway.get("/", key).status == 200).count();
    assert_eq!((admitted("a"), admitted("somebody")), (1, 2));
    let status = crate::harness::get(gateway.admin, "/api/v1/status", "").json();
    assert_eq!((&status["rows"], &status["routes"]), (&2.into(), &1.into()));
    let refused =
        "tollgate_decisions_total{basis=\"store\",outcome=\"refused\",route=\"all\",rule=\"default\"}";
    assert_eq!(gateway.metric(refused), 5);
}

/// When Redis is down calls fail at once, the fallback decides, and no client waits for a connection.
#[test]
fn without_redis_nobody_waits() {
    let (mut redis, upstream) = (Redis::process(), Upstream::start());
    let rules = everything_to(
        &upstream,
        "  rows:
    - {tenant: local, capacity: 5, refill_per_second: 1/h}
    - {tenant: open, capacity: 1, refill_per_second: 1/h, on_store_failure: allow}
    - {tenant: shut, capacity: 5, refill_per_second: 1/h, on_store_failure: deny}",
    );
    let gateway = Gateway::start(&on(&redis), &rules);
    assert_eq!(gateway.get("/", "local").status, 200);
    redis.kill();
    eventually("the loss is noticed", || {
        gateway.get("/", "notice");
        (gateway.metric("tollgate_store_connected") == 0).then_some(())
    });
    let started = Instant::now();
    let statuses = |key: &str| (0..7).map(|_| gateway.get("/", key).status).collect::<Vec<_>>();
    // One of five was taken on Redis: the local bucket begins where that one was.
    assert_eq!(statuses("local"), [200, 200, 200, 200, 429, 429, 429]);
    assert_eq!(statuses("open"), [200; 7]);
    let shut = gateway.get("/", "shut");
    assert_eq!((shut.status, shut.header("retry-after")), (503, Some("1")));
    assert_eq!(
        shut.json()["type"],
        "https://iana.org/assignments/http-problem-types#temporary-reduced-capacity"
    );
    assert!(started.elapsed() < Duration::from_secs(3), "{:?}", started.elapsed());
    assert_eq!(crate::harness::get(gateway.admin, "/readyz", "").status, 200);
    redis.restart();
    eventually("the store again", || (gateway.metric("tollgate_store_connected") == 1).then_some(()));
    eventually("decisions of the store again", || (gateway.get("/", "shut").status == 200).then_some(()));
    // What was spent without Redis is debited there, though it came back empty.
    assert_eq!(gateway.get("/", "local").status, 200);
    eventually("the debit of 4 beside the 1 that was just taken", || {
        let left: String = redis.command(&["HGET", "rl:{local}:all", "tokens"]);
        left.starts_with('0').then_some(())
    });
}
