//! Redis breaks, in every way it can, under load on two gateways: no request fails by it, nobody waits,
//! no flood gate opens, and the way back is found.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use crate::harness::gateway::everything_to;
use crate::harness::{Connection, FaultProxy, Gateway, Redis, Upstream, eventually, get};

const CAPACITY: usize = 60;
const RATE: usize = 20;
/// What an outage may cost that Redis remembers: what is decided here in the first ten deadlines, for
/// calls that Redis may have run, is not owed.
const SOME: usize = CAPACITY / 4;

/// What came of the requests of one run.
struct Run {
    statuses: Vec<u16>,
    slowest: Duration,
    /// Admitted of the limited tenant.
    admitted: usize,
    took: Duration,
}

/// Stops the clients when it goes.
struct Stopper<'s>(&'s AtomicBool);

impl Drop for Stopper<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

struct Outage {
    redis: Redis,
    gateways: [Gateway; 2],
    _upstream: Upstream,
}

impl Outage {
    fn start() -> Self {
        let redis = Redis::process();
        let port = redis.port;
        Self::start_at(redis, port)
    }

    fn start_at(redis: Redis, port: u16) -> Self {
        let upstream = Upstream::start();
        let store = format!(
            "{{redis: {{url: 'redis://127.0.0.1:{port}', timeout: 40ms}}, breaker: {{open_for: 200ms}}}}"
        );
        let rules = everything_to(
            &upstream,
            &format!(
                "  rows:
    - {{tenant: open, capacity: 1000000, refill_per_second: 1000000}}
    - {{tenant: limited, capacity: {CAPACITY}, refill_per_second: {RATE}}}"
            ),
        );
        let gateways = [Gateway::start(&store, &rules), Gateway::start(&store, &rules)];
        for gateway in &gateways {
            eventually("both gateways counted", || {
                (gateway.metric("tollgate_live_gateways") == 2).then_some(())
            });
        }
        Self { redis, gateways, _upstream: upstream }
    }

    /// Load before, during and after `break_it` .. `heal`; then the way back must be found.
    fn run(&mut self, break_it: impl FnOnce(&mut Redis), heal: impl FnOnce(&mut Redis)) -> Run {
        let stop = AtomicBool::new(false);
        let Self { redis, gateways, .. } = self;
        let gateways = &*gateways;
        let started = Instant::now();
        let results: Vec<(&str, u16, Duration)> = thread::scope(|scope| {
            let clients: Vec<_> = gateways
                .iter()
                .flat_map(|gateway| [(gateway, "open"), (gateway, "open"), (gateway, "limited")])
                .map(|(gateway, tenant)| {
                    let stop = &stop;
                    scope.spawn(move || {
                        let mut client = Connection::open(gateway.port);
                        let mut results = Vec::new();
                        while !stop.load(Ordering::Relaxed) {
                            let asked = Instant::now();
                            let status = client.ask("GET", "/", tenant).status;
                            results.push((tenant, status, asked.elapsed()));
                            thread::sleep(Duration::from_millis(4));
                        }
                        results
                    })
                })
                .collect();
            // Also when something below panics: the clients must not go on for ever.
            let _stopper = Stopper(&stop);
            thread::sleep(Duration::from_millis(500));
            break_it(redis);
            thread::sleep(Duration::from_millis(1_500));
            heal(redis);
            for gateway in gateways {
                eventually("the breaker closed again", || {
                    let status = get(gateway.admin, "/api/v1/status", "").json();
                    (status["store"]["up"] == true).then_some(())
                });
            }
            // Who came back first may have had what the other one was still spending; that leaves the bucket
            // below 0, by half a capacity at most. Until it is earned the run is not over.
            thread::sleep(Duration::from_millis(500 + (1_000 * CAPACITY / 2 / RATE) as u64));
            stop.store(true, Ordering::Relaxed);
            clients.into_iter().flat_map(|client| client.join().unwrap()).collect()
        });
        let admitted =
            results.iter().filter(|(tenant, status, _)| *tenant == "limited" && *status == 200).count();
        Run {
            statuses: results.iter().map(|(_, status, _)| *status).collect(),
            slowest: results.iter().map(|(.., took)| *took).max().unwrap(),
            admitted,
            took: started.elapsed(),
        }
    }

    fn transitions(&self, to: &str) -> u64 {
        self.gateways
            .iter()
            .map(|gateway| gateway.metric(&format!("tollgate_breaker_transitions_total{{to=\"{to}\"}}")))
            .sum()
    }

    fn errors(&self, kind: &str) -> u64 {
        self.gateways
            .iter()
            .map(|gateway| gateway.metric(&format!("tollgate_store_errors_total{{kind=\"{kind}\"}}")))
            .sum()
    }
}

impl Run {
    /// `spare` tokens more than the limit are what this outage may cost: a whole capacity if Redis has
    /// forgotten what was taken, else what was decided while nobody knew that it was an outage.
    #[track_caller]
    fn check(&self, what: &str, spare: usize) {
        let bad: Vec<u16> =
            self.statuses.iter().copied().filter(|status| !matches!(status, 200 | 429)).collect();
        assert!(bad.is_empty(), "{what}: {bad:?}");
        let bound = CAPACITY + spare + (RATE as f64 * self.took.as_secs_f64()) as usize + 4;
        println!(
            "{what}: {} requests, slowest {:?}, admitted {} of at most {bound} in {:?}",
            self.statuses.len(),
            self.slowest,
            self.admitted,
            self.took
        );
        assert!(self.admitted <= bound, "{what}: {} admitted, at most {bound}", self.admitted);
        // The deadline is 40 ms; the rest is what a busy machine needs to schedule six clients.
        assert!(self.slowest < Duration::from_millis(400), "{what}: a request took {:?}", self.slowest);
        assert!(self.statuses.len() > 200, "{what}: only {} requests", self.statuses.len());
    }
}

#[test]
fn killed_and_started_again_empty() {
    let mut outage = Outage::start();
    let run = outage.run(Redis::kill, Redis::restart);
    // Redis has forgotten, so it begins full: one capacity more, less what the gateways debit.
    run.check("killed, back empty", CAPACITY);
    assert!(outage.transitions("open") >= 2 && outage.transitions("closed") >= 2);
}

#[test]
fn killed_and_started_again_with_its_data() {
    let mut outage = Outage::start();
    let run = outage.run(
        |redis| {
            let _: String = redis.command(&["SAVE"]);
            redis.kill();
        },
        Redis::restart,
    );
    run.check("killed, back with data", SOME);
}

#[test]
fn stopped() {
    let mut outage = Outage::start();
    let run = outage.run(|redis| redis.signal("STOP"), |redis| redis.signal("CONT"));
    run.check("SIGSTOP", SOME);
    assert!(outage.errors("timeout") > 0);
}

#[test]
fn paused() {
    let mut outage = Outage::start();
    let run = outage.run(
        |redis| {
            let _: String = redis.command(&["CLIENT", "PAUSE", "1500", "ALL"]);
        },
        |_| {},
    );
    run.check("CLIENT PAUSE", SOME);
    assert!(outage.errors("timeout") > 0);
}

#[test]
fn asleep() {
    let mut outage = Outage::start();
    let run = outage.run(
        |redis| {
            let client = redis.client();
            thread::spawn(move || {
                let mut connection = client.get_connection().unwrap();
                redis::cmd("DEBUG").arg("SLEEP").arg("1.4").exec(&mut connection)
            });
        },
        |_| {},
    );
    run.check("DEBUG SLEEP", SOME);
}

#[test]
fn in_a_black_hole() {
    let redis = Redis::process();
    let proxy = FaultProxy::to(redis.port);
    let mut outage = Outage::start_at(redis, proxy.port);
    let run = outage.run(|_| proxy.black_hole(true), |_| proxy.black_hole(false));
    run.check("black hole", SOME);
    assert!(outage.errors("timeout") > 0);
}

#[test]
fn full() {
    let mut outage = Outage::start();
    let run = outage.run(
        |redis| {
            let _: String = redis.command(&["CONFIG", "SET", "maxmemory-policy", "noeviction"]);
            let _: String = redis.command(&["CONFIG", "SET", "maxmemory", "1mb"]);
        },
        |redis| {
            let _: String = redis.command(&["CONFIG", "SET", "maxmemory", "0"]);
        },
    );
    run.check("OOM", SOME);
    assert!(outage.errors("oom") > 0);
}

/// A node that is connected, and refuses: what for is told, each time it begins.
#[test]
fn what_a_connected_node_refuses_is_told() {
    let (redis, upstream) = (Redis::start(), Upstream::start());
    let rules = "  default: {capacity: 1000000, refill_per_second: 1}";
    let store = format!("{{redis: {{url: '{}', timeout: 50ms}}}}", redis.url());
    let gateway = Gateway::start(&store, &everything_to(&upstream, rules));
    let node = || get(gateway.admin, "/api/v1/status", "").json()["store"]["nodes"][0].clone();
    let set = |bytes: &str| redis.command::<String>(&["CONFIG", "SET", "maxmemory", bytes]);
    let said = |what: &str| gateway.log().matches(what).count();
    for times in 1..=2 {
        set("1");
        eventually("the breaker opens", || {
            assert_eq!(gateway.get("/", "a").status, 200);
            (node()["breaker"] != "closed").then_some(())
        });
        let told = node();
        assert!(told["up"] == true && told["trouble"].as_str().unwrap().contains("OOM"), "{told}");
        eventually("the heartbeat is refused", || (said("refuses the heartbeat") == times).then_some(()));
        set("0");
        eventually("all is well", || (node()["breaker"] == "closed").then_some(()));
        assert!(node()["trouble"].is_null());
        eventually("the heartbeat is taken", || (said("takes the heartbeat again") == times).then_some(()));
    }
}

#[test]
fn busy_with_a_script() {
    let mut outage = Outage::start();
    let _: String = outage.redis.command(&["CONFIG", "SET", "busy-reply-threshold", "50"]);
    let run = outage.run(
        |redis| {
            let client = redis.client();
            thread::spawn(move || {
                let mut connection = client.get_connection().unwrap();
                redis::cmd("EVAL").arg("while true do end").arg(0).exec(&mut connection)
            });
        },
        |redis| {
            let _: String = redis.command(&["SCRIPT", "KILL"]);
        },
    );
    run.check("BUSY", SOME);
    assert!(outage.errors("busy") + outage.errors("timeout") > 0);
}

#[test]
fn behind_a_new_password() {
    let mut outage = Outage::start();
    let run = outage.run(
        |redis| {
            let _: String = redis.command(&["CONFIG", "SET", "requirepass", "changed"]);
            let mut connection = redis::Client::open(format!("redis://:changed@127.0.0.1:{}", redis.port))
                .unwrap()
                .get_connection()
                .unwrap();
            let _: () = redis::cmd("CLIENT")
                .arg(&["KILL", "TYPE", "normal", "SKIPME", "yes"])
                .query(&mut connection)
                .unwrap();
        },
        |redis| {
            let mut connection = redis::Client::open(format!("redis://:changed@127.0.0.1:{}", redis.port))
                .unwrap()
                .get_connection()
                .unwrap();
            redis::cmd("CONFIG").arg(&["SET", "requirepass", ""]).exec(&mut connection).unwrap();
        },
    );
    run.check("password changed", SOME);
}

#[test]
fn demoted_to_a_replica() {
    let mut outage = Outage::start();
    let run = outage.run(
        |redis| {
            let _: String = redis.command(&["REPLICAOF", "127.0.0.1", "1"]);
        },
        |redis| {
            let _: String = redis.command(&["REPLICAOF", "NO", "ONE"]);
        },
    );
    run.check("READONLY", SOME);
    assert!(outage.errors("readonly") > 0);
}

/// B077: refusals and a lost script are answers; the breaker stays closed.
#[test]
fn refusals_and_lost_scripts_open_nothing() {
    let mut outage = Outage::start();
    let run = outage.run(
        |redis| {
            for _ in 0..5 {
                let _: String = redis.command(&["SCRIPT", "FLUSH"]);
                thread::sleep(Duration::from_millis(50));
            }
        },
        |_| {},
    );
    run.check("SCRIPT FLUSH", 0);
    let refused = run.statuses.iter().filter(|status| **status == 429).count();
    assert!(refused > 20, "{refused}");
    assert_eq!(outage.transitions("open"), 0);
}

/// The count of gateways: grows by heartbeat, and the last one holds through an outage.
#[test]
fn gateways_are_counted() {
    let mut outage = Outage::start();
    let status =
        |outage: &Outage| get(outage.gateways[0].admin, "/api/v1/status", "").json()["gateways"].clone();
    assert_eq!(status(&outage), 2);
    outage.redis.kill();
    thread::sleep(Duration::from_millis(1_500));
    assert_eq!(status(&outage), 2);
    outage.redis.restart();
    for gateway in &outage.gateways {
        eventually("the store again", || (gateway.metric("tollgate_store_connected") == 1).then_some(()));
    }
    thread::sleep(Duration::from_millis(300));
    assert_eq!(status(&outage), 2);
}

#[test]
fn cut_off_from_its_master() {
    let mut outage = Outage::start();
    let _: String = outage.redis.command(&["CONFIG", "SET", "replica-serve-stale-data", "no"]);
    let run = outage.run(
        |redis| {
            let _: String = redis.command(&["REPLICAOF", "127.0.0.1", "1"]);
        },
        |redis| {
            let _: String = redis.command(&["REPLICAOF", "NO", "ONE"]);
        },
    );
    run.check("MASTERDOWN", SOME);
    assert!(outage.errors("masterdown") > 0);
}

#[test]
fn loading_its_data() {
    let mut outage = Outage::start();
    let _: String = outage.redis.command(&["DEBUG", "POPULATE", "1000", "ballast"]);
    let run = outage.run(
        |redis| {
            let _: String = redis.command(&["SAVE"]);
            redis.kill();
            // 1,000 keys, 2 ms each; it answers that it loads every 70 of them or so.
            redis.restart_with(&[
                "--key-load-delay",
                "2000",
                "--loading-process-events-interval-bytes",
                "1024",
            ]);
        },
        |_| {},
    );
    run.check("LOADING", SOME);
    let kinds: Vec<_> = ["down", "io", "refused", "timeout", "waited", "loading"]
        .map(|kind| (kind, outage.errors(kind)))
        .into();
    assert!(outage.errors("loading") > 0, "{kinds:?}");
}

#[test]
fn the_new_password_is_counted_as_such() {
    let redis = Redis::process();
    let _: String = redis.command(&["CONFIG", "SET", "requirepass", "secret"]);
    let upstream = Upstream::start();
    let rules = everything_to(&upstream, "  default: {capacity: 5, refill_per_second: 1/h}");
    let gateway = Gateway::start(&format!("{{redis: {{url: '{}'}}}}", redis.url()), &rules);
    assert_eq!(gateway.get("/", "a").status, 200);
    eventually("the refusal is counted", || {
        (gateway.metric("tollgate_store_errors_total{kind=\"noauth\"}") > 0).then_some(())
    });
    let ready = get(gateway.admin, "/readyz", "");
    assert_eq!((ready.status, &*ready.body), (200, "ready, degraded: the store is down\n"));
}

/// B057: a Redis that may evict buckets is warned about, and what it has evicted is counted.
#[test]
fn b057_eviction_is_warned_about() {
    let redis = Redis::process();
    let _: String = redis.command(&["CONFIG", "SET", "maxmemory", "4mb"]);
    let _: String = redis.command(&["CONFIG", "SET", "maxmemory-policy", "allkeys-lru"]);
    for number in 0..200 {
        let _: String = redis.command(&["SET", &format!("noise-{number}"), &"x".repeat(40_000)]);
    }
    let upstream = Upstream::start();
    let rules = everything_to(&upstream, "  default: {capacity: 5, refill_per_second: 1/h}");
    let gateway = Gateway::start(&format!("{{redis: {{url: '{}'}}}}", redis.url()), &rules);
    eventually("the warning", || gateway.log().contains("Redis may evict buckets").then_some(()));
    assert!(gateway.metric("tollgate_store_evicted_keys") > 50);
}

/// B059, B067: neither a store that is away nor one that only reads is stormed with connections.
#[test]
fn b059_b067_no_storm_of_connections() {
    let mut redis = Redis::process();
    let proxy = FaultProxy::to(redis.port);
    let upstream = Upstream::start();
    let rules = everything_to(&upstream, "  default: {capacity: 5, refill_per_second: 1/h}");
    let gateway = Gateway::start(&format!("{{redis: {{url: 'redis://127.0.0.1:{}'}}}}", proxy.port), &rules);
    let count = |what: &str, seconds: u64| {
        let before = proxy.connections();
        let until = Instant::now() + Duration::from_secs(seconds);
        while Instant::now() < until {
            assert!(matches!(gateway.get("/", "a").status, 200 | 429));
            thread::sleep(Duration::from_millis(5));
        }
        let made = proxy.connections() - before;
        println!("{what}: {made} connections in {seconds} s");
        made
    };
    let _: String = redis.command(&["REPLICAOF", "127.0.0.1", "1"]);
    assert!(count("a replica", 4) <= 12);
    redis.kill();
    assert!(count("nobody there", 4) <= 12);
}

/// B065: RSS stays where it is while a stalled Redis is asked by many.
#[test]
fn b065_a_stalled_store_costs_no_memory() {
    let outage = Outage::start();
    let resident = || -> u64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", outage.gateways[0].pid())).unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
        line.trim().trim_end_matches(" kB").parse().unwrap()
    };
    let ask = |seconds| {
        let until = Instant::now() + Duration::from_secs(seconds);
        thread::scope(|scope| {
            for _ in 0..16 {
                scope.spawn(|| {
                    let mut client = Connection::open(outage.gateways[0].port);
                    while Instant::now() < until {
                        assert_eq!(client.ask("GET", "/", "open").status, 200);
                    }
                });
            }
        });
    };
    ask(1);
    let before = resident();
    outage.redis.signal("STOP");
    ask(3);
    let after = resident();
    outage.redis.signal("CONT");
    println!("RSS {before} kB before, {after} kB after 3 s of a stalled store");
    assert!(after < before + 20 * 1024, "{before} kB, then {after} kB");
}

/// A store that answers something else: a fault, never a decision, never a 5xx.
#[test]
fn a_store_that_answers_nonsense() {
    use std::io::{Read as _, Write as _};
    let listener = std::net::TcpListener::bind(("127.0.0.1", 0)).unwrap();
    let port = listener.local_addr().unwrap().port();
    thread::spawn(move || {
        for mut stream in listener.incoming().flatten() {
            thread::spawn(move || {
                let mut buffer = vec![0; 65536];
                while let Ok(length @ 1..) = stream.read(&mut buffer) {
                    if buffer[..length].windows(5).any(|word| word == b"HELLO") {
                        let told =
                            ["server", "redis", "version", "7.0.0", "mode", "standalone", "role", "master"];
                        let told: String = told.map(|word| format!("+{word}\r\n")).concat();
                        let _ = stream.write_all(format!("*8\r\n{told}").as_bytes());
                        continue;
                    }
                    // One +OK per command: each begins with `*`.
                    let commands = buffer[..length]
                        .split(|byte| *byte == b'\n')
                        .filter(|line| line.starts_with(b"*"))
                        .count();
                    if stream.write_all("+OK\r\n".repeat(commands.max(1)).as_bytes()).is_err() {
                        return;
                    }
                }
            });
        }
    });
    let upstream = Upstream::start();
    let rules = everything_to(&upstream, "  default: {capacity: 5, refill_per_second: 1/h}");
    let gateway = Gateway::start(&format!("{{redis: {{url: 'redis://127.0.0.1:{port}'}}}}"), &rules);
    let statuses: Vec<u16> = (0..8).map(|_| gateway.get("/", "a").status).collect();
    assert_eq!(statuses, [200, 200, 200, 200, 200, 429, 429, 429]);
    assert!(gateway.metric("tollgate_store_errors_total{kind=\"bad_reply\"}") > 0);
}

/// A rule on `deny` answers 503 with Retry-After; its neighbours on `local` do not notice.
#[test]
fn deny_beside_local() {
    let mut redis = Redis::process();
    let upstream = Upstream::start();
    let rules = everything_to(
        &upstream,
        "  rows:
    - {tenant: pay, capacity: 50, refill_per_second: 50, on_store_failure: deny}
    - {tenant: shop, capacity: 1000, refill_per_second: 1000}",
    );
    let gateway = Gateway::start(&format!("{{redis: {{url: '{}'}}}}", redis.url()), &rules);
    assert_eq!((gateway.get("/", "pay").status, gateway.get("/", "shop").status), (200, 200));
    redis.kill();
    eventually("the loss is noticed", || (gateway.get("/", "pay").status == 503).then_some(()));
    for _ in 0..20 {
        let denied = gateway.get("/", "pay");
        assert_eq!((denied.status, denied.header("retry-after")), (503, Some("1")));
        assert_eq!(gateway.get("/", "shop").status, 200);
    }
    assert!(
        gateway.metric(
            "tollgate_fallback_decisions_total{mode=\"deny\",outcome=\"unavailable\",rule=\"default\"}"
        ) >= 20
    );
}
