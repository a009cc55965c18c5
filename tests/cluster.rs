//! Two gateways on a Redis Cluster that loses masters, moves slots, grows and shrinks under load.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use smallvec::smallvec;
use tollgate::config::fault::{Place, Placed};
use tollgate::config::{Secret, Servers};
use tollgate::key::{Hasher, Key};
use tollgate::limit::Limit;
use tollgate::limit::concurrency::Concurrency;
use tollgate::limit::fixed_window::FixedWindow;
use tollgate::limit::sliding_log::SlidingLog;
use tollgate::limit::sliding_window::SlidingWindow;
use tollgate::limit::token_bucket::TokenBucket;
use tollgate::metrics::Metrics;
use tollgate::rule::{Check, Checks, Demand};
use tollgate::store::Store;
use tollgate::store::redis::RedisStore;

use crate::access::granted;
use crate::harness::cluster::Cluster;
use crate::harness::gateway::everything_to;
use crate::harness::{Connection, Gateway, Random, Redis, Upstream, eventually, get};

const CAPACITY: usize = 200;
const RATE: usize = 50;

struct World {
    cluster: Cluster,
    gateways: [Gateway; 2],
    _upstream: Upstream,
}

/// What came of the requests of one run.
struct Run {
    requests: usize,
    other: Vec<u16>,
    slowest: Duration,
    /// Admitted of the limited tenant.
    admitted: usize,
    took: Duration,
    by_fallback: u64,
}

impl World {
    fn start() -> Self {
        let (cluster, upstream) = (Cluster::start(), Upstream::start());
        let rules = everything_to(
            &upstream,
            &format!(
                "  default: {{capacity: 100000, refill_per_second: 100000}}
  rows: [{{tenant: limited, capacity: {CAPACITY}, refill_per_second: {RATE}}}]"
            ),
        );
        let start = || Gateway::start(&cluster.store(""), &rules);
        let gateways = [start(), start()];
        let world = Self { cluster, gateways, _upstream: upstream };
        world.all_is_well();
        world
    }

    /// Waits until both gateways are on all nodes again, and count each other.
    fn all_is_well(&self) {
        for gateway in &self.gateways {
            eventually("a gateway on all nodes", || {
                let status = get(gateway.admin, "/api/v1/status", "").json();
                (status["store"]["up"] == true && status["gateways"] == 2).then_some(())
            });
        }
    }

    fn decided(&self, basis: &str) -> u64 {
        let basis = format!("basis=\"{basis}\"");
        let of = |gateway: &Gateway| -> u64 {
            let metrics = get(gateway.admin, "/metrics", "").body;
            let lines = metrics.lines().filter(|line| line.starts_with("tollgate_decisions_total"));
            let values = lines.filter(|line| line.contains(&basis)).filter_map(|line| line.split(' ').nth(1));
            values.map(|value| value.parse::<u64>().unwrap()).sum()
        };
        self.gateways.iter().map(of).sum()
    }

    /// `change` under about a thousand requests a second, of 40 tenants and one that is limited.
    fn under_load(&mut self, change: impl FnOnce(&mut Cluster)) -> Run {
        let (stop, before, started) = (AtomicBool::new(false), self.decided("fallback"), Instant::now());
        let Self { cluster, gateways, .. } = self;
        let gateways = &*gateways;
        let results: Vec<(bool, u16, Duration)> = thread::scope(|scope| {
            let client = |gateway: &'static str, port: u16, is_limited: bool| {
                let stop = &stop;
                scope.spawn(move || {
                    let mut client = Connection::open(port);
                    let (mut results, mut turn) = (Vec::new(), 0);
                    while !stop.load(Ordering::Relaxed) {
                        turn += 1;
                        let tenant =
                            if is_limited { "limited".into() } else { format!("{gateway}-{}", turn % 40) };
                        let asked = Instant::now();
                        let status = client.ask("GET", "/", &tenant).status;
                        results.push((is_limited, status, asked.elapsed()));
                        thread::sleep(Duration::from_millis(5));
                    }
                    results
                })
            };
            let clients: Vec<_> = gateways
                .iter()
                .flat_map(|gateway| {
                    [("a", false), ("b", false), ("c", true)]
                        .map(|(name, limited)| client(name, gateway.port, limited))
                })
                .collect();
            thread::sleep(Duration::from_millis(300));
            let changed = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| change(cluster)));
            thread::sleep(Duration::from_millis(300));
            // Also when something above has panicked: the clients must not go on for ever.
            stop.store(true, Ordering::Relaxed);
            let results = clients.into_iter().flat_map(|client| client.join().unwrap()).collect();
            if let Err(panic) = changed {
                std::panic::resume_unwind(panic);
            }
            results
        });
        Run {
            requests: results.len(),
            other: results
                .iter()
                .map(|result| result.1)
                .filter(|status| !matches!(status, 200 | 429))
                .collect(),
            slowest: results.iter().map(|result| result.2).max().unwrap(),
            admitted: results.iter().filter(|(limited, status, _)| *limited && *status == 200).count(),
            took: started.elapsed(),
            by_fallback: self.decided("fallback") - before,
        }
    }
}

impl Run {
    /// `spare` tokens may be admitted beyond the limit.
    #[track_caller]
    fn check(&self, what: &str, spare: usize) {
        let bound = CAPACITY + (RATE as f64 * self.took.as_secs_f64()) as usize + spare + 4;
        println!(
            "{what}: {} requests in {:.1?}, slowest {:.0?}, {} by the fallback, limited: {} of at most {bound} admitted",
            self.requests, self.took, self.slowest, self.by_fallback, self.admitted
        );
        assert!(self.other.is_empty(), "{what}: {:?}", self.other);
        assert!(self.admitted <= bound, "{what}: {} admitted of at most {bound}", self.admitted);
        assert!(self.slowest < Duration::from_millis(500), "{what}: {:?}", self.slowest);
        assert!(self.requests > 200, "{what}: only {} requests", self.requests);
    }
}

/// A shard that fails over may have lost what its replica was not told yet: that counts as not taken.
const LOST: usize = CAPACITY;

/// What is decided without a node, by calls whose outcome is unknown, is not owed.
const SOME: usize = CAPACITY / 4;

#[test]
fn b045_masters_fail_over() {
    let mut world = World::start();
    let victim = world.cluster.master_of("rl:{limited}:all");
    let mut took = Duration::ZERO;
    let admins: Vec<u16> = world.gateways.iter().map(|gateway| gateway.admin).collect();
    let run = world.under_load(|cluster| {
        let heir = cluster.replica_of(victim);
        cluster.nodes[victim].kill();
        let killed = Instant::now();
        eventually("a failover", || {
            cluster.nodes[heir]
                .command::<String>(&["INFO", "replication"])
                .contains("role:master")
                .then_some(())
        });
        let failed_over = Instant::now();
        for admin in &admins {
            eventually("a gateway that is back", || {
                (get(*admin, "/api/v1/status", "").json()["store"]["up"] == true).then_some(())
            });
        }
        took = failed_over.elapsed();
        println!("failed over after {:.1?}, back on it {took:.1?} later", failed_over - killed);
    });
    run.check("kill -9 of a master", LOST);
    assert!(took < Duration::from_secs(2), "{took:?} after the failover");
    assert!(run.by_fallback > 0, "nothing has happened");

    // It comes back as a replica of its heir, and takes over by force.
    world.cluster.nodes[victim].restart();
    world.cluster.settle();
    eventually("a replica in step", || {
        let info: String = world.cluster.nodes[victim].command(&["INFO", "replication"]);
        info.contains("master_link_status:up").then_some(())
    });
    world.all_is_well();
    let run = world.under_load(|cluster| {
        let _: String = cluster.nodes[victim].command(&["CLUSTER", "FAILOVER", "FORCE"]);
        eventually("a failover", || cluster.masters().contains(&victim).then_some(()));
        thread::sleep(Duration::from_secs(1));
    });
    run.check("CLUSTER FAILOVER FORCE", LOST);
    world.all_is_well();
}

/// B049: one node forgets the script. B061: slots and nodes come and go.
#[test]
fn b049_b061_slots_move_and_nodes_come_and_go() {
    let mut world = World::start();
    let masters = world.cluster.masters();
    let victim = world.cluster.master_of("rl:{limited}:all");
    let reloads = |world: &World| -> u64 {
        world.gateways.iter().map(|gateway| gateway.metric("tollgate_script_reloads_total")).sum()
    };
    let before = reloads(&world);
    let run = world.under_load(|cluster| {
        let _: String = cluster.nodes[victim].command(&["SCRIPT", "FLUSH"]);
        thread::sleep(Duration::from_millis(500));
    });
    run.check("SCRIPT FLUSH on one node", SOME);
    assert!((1..=2).contains(&(reloads(&world) - before)), "one for each gateway at most");

    // Their own buckets are among the slots that move: the first ones.
    let run = world.under_load(|cluster| cluster.reshard(masters[0], masters[1], 500));
    run.check("500 slots move", SOME);
    let run = world.under_load(|cluster| {
        let new = cluster.add();
        cluster.reshard(victim, new, 200);
        let owner = cluster.masters().into_iter().find(|master| *master != new).unwrap();
        cluster.reshard(new, owner, 200);
        cluster.remove(new);
    });
    run.check("a node comes and goes", SOME);
    world.cluster.settle();
    world.all_is_well();
    // Everything is decided by Redis again.
    let (before, run) =
        (world.decided("fallback"), world.under_load(|_| thread::sleep(Duration::from_secs(1))));
    run.check("afterwards", SOME);
    assert_eq!(world.decided("fallback"), before);
}

/// B063: one shard is lost altogether: its keys fall back, those of the others do not notice, and it comes back.
#[test]
fn b063_one_lost_shard_is_no_outage() {
    let world = World::start();
    let lost = world.cluster.master_of("rl:{limited}:all");
    let replica = world.cluster.replica_of(lost);
    for index in [replica, lost] {
        world.cluster.nodes[index].signal("STOP");
    }
    let nodes = |gateway: &Gateway| get(gateway.admin, "/api/v1/status", "").json()["store"]["nodes"].clone();
    let gateway = &world.gateways[0];
    eventually("an open breaker", || {
        gateway.get("/", "limited");
        let nodes = nodes(gateway);
        let open = nodes.as_array().unwrap().iter().filter(|node| node["breaker"] == "open").count();
        (open == 1).then_some(())
    });
    let mut client = Connection::open(gateway.port);
    let before = [world.decided("store"), world.decided("fallback")];
    let mut slowest = Duration::ZERO;
    for tenant in 0..300 {
        let asked = Instant::now();
        assert_eq!(client.ask("GET", "/", &format!("t-{tenant}")).status, 200);
        slowest = slowest.max(asked.elapsed());
    }
    assert!(slowest < Duration::from_millis(40), "nobody waits for it: {slowest:?}");
    let [by_store, by_fallback] = [world.decided("store") - before[0], world.decided("fallback") - before[1]];
    println!("of 300 tenants {by_fallback} are on the lost shard, {by_store} were decided by the others");
    assert_eq!(by_store + by_fallback, 300);
    assert!((60..=140).contains(&by_fallback), "a third of them");
    for index in [replica, lost] {
        world.cluster.nodes[index].signal("CONT");
    }
    world.all_is_well();
}

/// Two limits in different slots: who is refused by one has cost the other nothing.
#[test]
fn all_or_none_across_slots() {
    let (cluster, upstream) = (Cluster::start(), Upstream::start());
    let rules = format!(
        "upstreams: {{u: {{servers: [127.0.0.1:{}]}}}}
routes: [{{id: all, match: {{path: /*}}, upstream: u, rules: [user, busy]}}]
rules:
  default: {{capacity: 1000, refill_per_second: 1/h}}
  named:
    - {{name: user, key: ['header:x-user'], limit: {{token_bucket: {{capacity: 5, refill_per_second: 1/h}}}}}}
    - {{name: busy, key: [route], limit: {{concurrency: {{limit: 100, max_hold: 30s}}}}}}
headers: [x-ratelimit]
",
        upstream.port
    );
    let store = cluster.store("").replace("40ms", "5s");
    let gateways = [Gateway::start(&store, &rules), Gateway::start(&store, &rules)];
    let admitted: usize = thread::scope(|scope| {
        let client = |gateway: &Gateway, client: usize| {
            let port = gateway.port;
            scope.spawn(move || {
                let mut connection = Connection::open(port);
                let ask = |turn: usize| {
                    let user = (turn + client) % 20;
                    connection.send(format!(
                        "GET / HTTP/1.1\r\nHost: g\r\nX-Api-Key: shop\r\nX-User: u{user}\r\n\r\n"
                    ));
                    usize::from(connection.response().status == 200)
                };
                (0..60).map(ask).sum::<usize>()
            })
        };
        let clients: Vec<_> = (0..8).map(|number| client(&gateways[number % 2], number)).collect();
        clients.into_iter().map(|client| client.join().unwrap()).sum()
    });
    assert_eq!(admitted, 20 * 5, "of 480 requests of 20 users, each of whom has 5");
    let mut connection = Connection::open(gateways[0].port);
    connection.send("GET / HTTP/1.1\r\nHost: g\r\nX-Api-Key: shop\r\nX-User: new\r\n\r\n");
    let response = connection.response();
    assert_eq!(response.number("x-ratelimit-remaining"), 4, "{response:?}");
    // What the tenant has left: 1000, less those admitted.
    let key: String = one_key(&cluster, "rl:{*}:all");
    let node = &cluster.nodes[cluster.master_of(&key)];
    assert_eq!(node.command::<String>(&["HGET", &key, "tokens"]).split('.').next(), Some("899"));
    // And nobody holds a permit.
    let busy = one_key(&cluster, "rl:{*}:busy:concurrency");
    let left = || -> Option<()> {
        let key = busy.as_str();
        (key.is_empty() || cluster.nodes[cluster.master_of(key)].command::<u64>(&["ZCARD", key]) == 0)
            .then_some(())
    };
    eventually("no permit held", left);
}

/// The only key that matches, or none.
fn one_key(cluster: &Cluster, pattern: &str) -> String {
    let masters = cluster.masters().into_iter();
    let mut keys: Vec<String> =
        masters.flat_map(|master| cluster.nodes[master].command::<Vec<String>>(&["KEYS", pattern])).collect();
    assert!(keys.len() <= 1, "{keys:?}");
    keys.pop().unwrap_or_default()
}

/// A slot whose keys are partly here and partly there: each request is decided, and counted once.
#[test]
fn a_slot_on_the_move() {
    let (cluster, upstream) = (Cluster::start(), Upstream::start());
    let rules = format!(
        "upstreams: {{u: {{servers: [127.0.0.1:{}]}}}}
routes: [{{id: all, match: {{path: /*}}, upstream: u, rules: [second]}}]
rules:
  default: {{capacity: 100, refill_per_second: 1/h}}
  rows: [{{tenant: old, capacity: 100, refill_per_second: 1/h}}, {{tenant: new, capacity: 100, refill_per_second: 1/h}}]
  named: [{{name: second, key: [tenant], limit: {{fixed_window: {{limit: 50, window: 24h}}}}}}]
headers: [x-ratelimit]
",
        upstream.port
    );
    // With the rights of the guide, and no more.
    for node in &cluster.nodes {
        let rights = granted(1);
        let words: Vec<&str> = rights.iter().map(String::as_str).collect();
        let _: String = node.command(&[&["ACL", "SETUSER", "tollgate"], &words[..]].concat());
    }
    let store = cluster.store(", user: tollgate, password: secret").replace("40ms", "5s");
    let gateway = Gateway::start(&store, &rules);
    for tenant in ["old", "new"] {
        let keys = [format!("rl:{{{tenant}}}:all"), format!("rl:{{{tenant}}}:second:fixed_window")];
        let source = cluster.master_of(&keys[0]);
        let target = cluster.masters().into_iter().find(|master| *master != source).unwrap();
        let slot = cluster.nodes[0].command::<u64>(&["CLUSTER", "KEYSLOT", &keys[0]]).to_string();
        let mut left = 50;
        let mut ask = |what: &str| {
            left -= 1;
            let response = gateway.get("/", tenant);
            assert_eq!(
                (response.status, response.number("x-ratelimit-remaining")),
                (200, left),
                "{tenant}: {what}"
            );
        };
        if tenant == "old" {
            ask("at home");
        }
        let ids = [cluster.id(source), cluster.id(target)];
        let set = |node: usize, state: &str, other: &str| {
            let _: String = cluster.nodes[node].command(&["CLUSTER", "SETSLOT", &slot, state, other]);
        };
        set(target, "IMPORTING", &ids[0]);
        set(source, "MIGRATING", &ids[1]);
        ask("all are where they were, or there are none");
        ask("the same again");
        let port = cluster.nodes[target].port.to_string();
        for key in &keys {
            let _: String = cluster.nodes[source].command(&["MIGRATE", "127.0.0.1", &port, key, "0", "1000"]);
            ask("one more has moved");
        }
        for node in [target, source] {
            set(node, "NODE", &ids[1]);
        }
        ask("the slot has moved");
        assert_eq!(
            cluster.nodes[target].command::<String>(&["HGET", &keys[0], "tokens"]).split('.').next(),
            Some(&*format!("{}", left + 50))
        );
    }
    let refused = |node: &Redis| node.command::<Vec<::redis::Value>>(&["ACL", "LOG"]).len();
    assert_eq!(cluster.nodes.iter().map(refused).sum::<usize>(), 0);
    let fallback = get(gateway.admin, "/metrics", "").body;
    assert!(!fallback.contains("tollgate_decisions_total{basis=\"fallback\""), "{fallback}");
}

/// B061: the cluster moves to other machines altogether, none of which the configuration names.
#[test]
fn b061_every_node_is_replaced() {
    let mut world = World::start();
    let run = world.under_load(|cluster| {
        for _ in 0..3 {
            // The first one is always an old one.
            let master = cluster.masters()[0];
            let old = cluster.replica_of(master);
            let new = cluster.add_replica(master);
            cluster.fail_over_to(new);
            cluster.settle();
            for index in [master.max(old), master.min(old)] {
                cluster.remove(index);
            }
            cluster.settle();
        }
    });
    run.check("every node is replaced", LOST);
    world.all_is_well();
    for gateway in &world.gateways {
        let nodes = get(gateway.admin, "/api/v1/status", "").json()["store"]["nodes"].clone();
        let mut told: Vec<String> = nodes
            .as_array()
            .unwrap()
            .iter()
            .map(|node| node["address"].as_str().unwrap().to_owned())
            .collect();
        told.sort();
        let mut ports: Vec<String> =
            world.cluster.nodes.iter().map(|node| format!("127.0.0.1:{}", node.port)).collect();
        ports.sort();
        assert_eq!(told, ports);
    }
    let before = world.decided("fallback");
    world.under_load(|_| thread::sleep(Duration::from_secs(1))).check("afterwards", SOME);
    assert_eq!(world.decided("fallback"), before);
}

/// B051: the script touches no key that it was not given, whatever the algorithm; a cluster would refuse it.
#[test]
fn b051_ten_thousand_keys() {
    let cluster = Cluster::start();
    // On a busy machine a master may be silent for long: a failover would lose keys.
    for node in &cluster.nodes {
        let _: String = node.command(&["CONFIG", "SET", "cluster-node-timeout", "60000"]);
    }
    let nodes =
        cluster.nodes.iter().map(|node| Placed { value: Secret(node.url()), place: Place::default() });
    let config = tollgate::config::Redis {
        servers: Servers::Cluster(nodes.take(1).collect()),
        ..tollgate::config::Redis::at("redis://unused", Duration::from_secs(5))
    };
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    let metrics = Metrics::new().unwrap().store;
    let (store, driver) = RedisStore::new(&config, "tollgate-test", None, metrics).unwrap();
    runtime.spawn(driver.run());
    eventually("all nodes", || store.is_up().then_some(()));
    let limits = [
        Limit::TokenBucket(TokenBucket::new(2, "1/h".parse().unwrap()).unwrap()),
        Limit::FixedWindow(FixedWindow { limit: 2, window: 3_600_000_000 }),
        Limit::SlidingWindow(SlidingWindow { limit: 2, window: 3_600_000_000 }),
        Limit::SlidingLog(SlidingLog { limit: 2, window: 3_600_000_000 }),
        Limit::Concurrency(Concurrency { limit: 2, hold: 3_600_000_000 }),
    ];
    let mut random = Random(7);
    let hasher = Hasher::new(b"");
    let take = |limit: Limit, tenant: u64, permit: u64| {
        let part = hasher.part(&tenant.to_le_bytes());
        let key = Key::named("rl", &[part], "r", limit.algorithm());
        Check { permit, ..Check::own(key, limit, 1, Demand::Take) }
    };
    for batch in 0..100 {
        let checks: Vec<Checks> = (0..100)
            .map(|number| smallvec![take(random.choose(&limits), random.next(), batch * 100 + number + 1)])
            .collect();
        let all = join_all(checks.iter().map(|checks| store.acquire(checks)));
        for told in runtime.block_on(all) {
            assert!(told.expect("a decision")[0].is_allowed());
        }
    }
    let written: u64 =
        cluster.masters().into_iter().map(|master| cluster.nodes[master].command::<u64>(&["DBSIZE"])).sum();
    assert_eq!(written, 10_000);
}
