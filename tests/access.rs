//! Who the gateway is to Redis: TLS, passwords, and no more rights than it needs.

use std::path::Path;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use rcgen::{BasicConstraints, CertificateParams, DnType, IsCa, Issuer, KeyPair};
use smallvec::smallvec;
use tollgate::clock::{Clock, SystemClock};
use tollgate::config;
use tollgate::gateways::Gateways;
use tollgate::key::Key;
use tollgate::limit::Limit;
use tollgate::limit::concurrency::Concurrency;
use tollgate::limit::fixed_window::FixedWindow;
use tollgate::limit::sliding_log::SlidingLog;
use tollgate::limit::sliding_window::SlidingWindow;
use tollgate::limit::token_bucket::TokenBucket;
use tollgate::metrics::Metrics;
use tollgate::rule::{Check, Checks, Demand};
use tollgate::store::Store;
use tollgate::store::redis::{Heartbeat, RedisStore};

use crate::harness::gateway::everything_to;
use crate::harness::{Gateway, Redis, Upstream, eventually, get};

const RULES: &str = "  default: {capacity: 5, refill_per_second: 1/h}";

/// Certificates in a folder: `ca`, and signed by it `server`, `client` and `expired`; `other` is of nobody.
pub fn certificates(folder: &Path) {
    let write = |name: &str, certificate: &rcgen::Certificate, key: &KeyPair| {
        std::fs::write(folder.join(format!("{name}.pem")), certificate.pem()).unwrap();
        std::fs::write(folder.join(format!("{name}.key")), key.serialize_pem()).unwrap();
    };
    let authority = |name: &str| {
        let mut params = CertificateParams::default();
        params.distinguished_name.push(DnType::CommonName, name);
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let key = KeyPair::generate().unwrap();
        write(name, &params.self_signed(&key).unwrap(), &key);
        Issuer::new(params, key)
    };
    let ca = authority("ca");
    authority("other");
    for name in ["server", "client", "expired"] {
        let mut params = CertificateParams::new(["127.0.0.1".to_owned()]).unwrap();
        if name == "expired" {
            params.not_after = rcgen::date_time_ymd(2020, 1, 1);
        }
        let key = KeyPair::generate().unwrap();
        write(name, &params.signed_by(&key, &ca).unwrap(), &key);
    }
}

/// A Redis that speaks TLS only, with `name`'s certificate.
fn with_tls(folder: &Path, name: &str) -> (Redis, u16) {
    let port = crate::harness::free_port();
    let file = |name: &str| folder.join(name).to_str().unwrap().to_owned();
    let redis = Redis::with(&[
        "--tls-port",
        &port.to_string(),
        "--tls-cert-file",
        &file(&format!("{name}.pem")),
        "--tls-key-file",
        &file(&format!("{name}.key")),
        "--tls-ca-cert-file",
        &file("ca.pem"),
    ]);
    (redis, port)
}

/// Decides, whatever becomes of Redis; tells what the gateway says about it.
#[track_caller]
fn on_the_fallback(gateway: &Gateway) -> String {
    let asked = Instant::now();
    let statuses: Vec<u16> = (0..7).map(|_| gateway.get("/", "a").status).collect();
    assert_eq!(statuses, [200, 200, 200, 200, 200, 429, 429]);
    assert!(asked.elapsed() < Duration::from_secs(1), "nobody waits for it: {:?}", asked.elapsed());
    assert!(get(gateway.admin, "/readyz", "").body.contains("degraded"));
    let status = get(gateway.admin, "/api/v1/status", "").json();
    status["store"]["nodes"][0]["trouble"].as_str().unwrap().to_owned()
}

fn by_store(gateway: &Gateway) {
    let decided = |gateway: &Gateway| {
        let metrics = get(gateway.admin, "/metrics", "").body;
        metrics.lines().any(|line| line.starts_with("tollgate_decisions_total{basis=\"store\""))
    };
    eventually("a decision of Redis", || {
        gateway.get("/", "b");
        decided(gateway).then_some(())
    });
}

#[test]
fn tls_with_right_and_wrong_certificates() {
    let (folder, upstream) = (tempfile::tempdir().unwrap(), Upstream::start());
    certificates(folder.path());
    let rules = everything_to(&upstream, RULES);
    let (_redis, port) = with_tls(folder.path(), "server");
    let (_late, late) = with_tls(folder.path(), "expired");
    let file = |name: &str| folder.path().join(name).display().to_string();
    let start = |port: u16, ca: &str, client: &str| {
        let client = match client {
            "" => String::new(),
            name => {
                format!(", cert: {}, key: {}", file(&format!("{name}.pem")), file(&format!("{name}.key")))
            }
        };
        let tls = format!("{{ca: {}{client}}}", file(ca));
        Gateway::start(
            &format!("{{redis: {{url: 'rediss://127.0.0.1:{port}', timeout: 5s, tls: {tls}}}}}"),
            &rules,
        )
    };
    by_store(&start(port, "ca.pem", "client"));
    for (port, ca, client, expected) in [
        (port, "other.pem", "client", "UnknownIssuer"),
        (late, "ca.pem", "client", "expired"),
        (port, "ca.pem", "", "ertificate"),
    ] {
        let gateway = start(port, ca, client);
        let trouble = on_the_fallback(&gateway);
        println!("{ca}, client {client:?}: {trouble}");
        // In TLS 1.3 the peer may hang up before it has said why: then the next attempt tells.
        eventually(expected, || gateway.log().contains(expected).then_some(()));
        assert!(gateway.log().contains("cannot connect to Redis"));
        assert!(gateway.log().contains("this one's share is the whole of each limit"));
    }
}

/// A password that is wrong is told; a reload brings the right one, and a rotation needs no restart.
#[test]
fn a_password_is_rotated() {
    let (redis, upstream) = (Redis::process(), Upstream::start());
    let user = |words: &[&str]| {
        redis.command::<String>(&[&["ACL", "SETUSER", "app", "on", "allkeys", "+@all"], words].concat())
    };
    user(&[">right"]);
    let rules = everything_to(&upstream, RULES);
    let store = |password: &str| {
        format!(
            "{{redis: {{url: '{}', user: app, password: {password}}}, breaker: {{open_for: 200ms}}}}",
            redis.url()
        )
    };
    let mut gateway = Gateway::start(&store("wrong"), &rules);
    let trouble = on_the_fallback(&gateway);
    assert!(trouble.contains("Password authentication failed"), "{trouble}");
    assert!(gateway.metric("tollgate_store_errors_total{kind=\"noauth\"}") > 0);

    gateway.write_store(&store("right"), &rules);
    gateway.reload();
    by_store(&gateway);
    user(&["resetpass", ">new"]);
    let _: u64 = redis.command(&["CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes"]);
    eventually("the old password is refused", || {
        gateway.get("/", "c");
        (get(gateway.admin, "/api/v1/status", "").json()["store"]["up"] == false).then_some(())
    });
    gateway.write_store(&store("new"), &rules);
    gateway.reload();
    eventually("the new one is used", || {
        (get(gateway.admin, "/api/v1/status", "").json()["store"]["up"] == true).then_some(())
    });
    // Who it would be elsewhere, after a restart, changes nothing here.
    gateway.write_store("{redis: {url: 'redis://127.0.0.1:1', user: app, password: other}}", &rules);
    gateway.reload();
    let status = get(gateway.admin, "/api/v1/status", "").json();
    assert_eq!(status["needs_restart"], serde_json::json!(["store"]));
    let _: u64 = redis.command(&["CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes"]);
    eventually("a new connection", || {
        let clients: String = redis.command(&["CLIENT", "LIST"]);
        let status = get(gateway.admin, "/api/v1/status", "").json();
        (clients.contains("name=tollgate-") && status["store"]["up"] == true).then_some(())
    });
    let shown = [
        gateway.log(),
        get(gateway.admin, "/api/v1/status", "").body,
        get(gateway.admin, "/metrics", "").body,
    ];
    for secret in ["wrong", "right", "new", "other"] {
        let secret = format!("\"{secret}\"");
        assert!(shown.iter().all(|text| !text.contains(&secret)), "{secret} is shown");
    }
    let clients: String = redis.command(&["CLIENT", "LIST"]);
    assert!(clients.contains("name=tollgate-"), "{clients}");
}

/// What the guide tells to grant: the words after the user's name.
pub fn granted(line: usize) -> Vec<String> {
    let guide = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/docs/redis.md")).unwrap();
    let all = guide.split("ACL SETUSER tollgate ").nth(1).unwrap();
    let of_one: Vec<String> = all.lines().next().unwrap().split(' ').map(String::from).collect();
    let in_a_cluster = guide.split("In a cluster also `").nth(1).unwrap().split('`').next().unwrap();
    match line {
        0 => of_one,
        _ => of_one.into_iter().chain(in_a_cluster.split(' ').map(String::from)).collect(),
    }
}

/// With the rights of the guide everything works; without any one of them something does not.
#[test]
fn the_guide_grants_what_is_needed_and_no_more() {
    let redis = Redis::process();
    let all = granted(0);
    assert_eq!(refused_with(&redis, &all), "", "refused with the rights of the guide");
    let rights = all.iter().filter(|word| word.starts_with('+') || word.starts_with('~'));
    for right in rights {
        let rest: Vec<String> = all.iter().filter(|word| *word != right).cloned().collect();
        assert_ne!(refused_with(&redis, &rest), "", "{right} is not needed");
    }
}

/// Does all that a gateway does, as a user with these rights; tells what Redis has refused.
fn refused_with(redis: &Redis, rights: &[String]) -> String {
    let words: Vec<&str> = rights.iter().map(String::as_str).collect();
    let _: u64 = redis.command(&["ACL", "DELUSER", "tollgate"]);
    let _: String = redis.command(&[&["ACL", "SETUSER", "tollgate"], &words[..]].concat());
    let _: String = redis.command(&["FLUSHALL"]);
    let _: String = redis.command(&["ACL", "LOG", "RESET"]);
    let url = format!("redis://tollgate:secret@127.0.0.1:{}", redis.port);
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let clock: Arc<dyn Clock> = Arc::new(SystemClock::start());
    let heartbeat = Heartbeat::new("rl", "g", Arc::new(Gateways::counted()), Arc::clone(&clock));
    for heartbeat in [None, Some(heartbeat)] {
        let config = config::Redis::at(&url, Duration::from_secs(1));
        let metrics = Metrics::new().unwrap().store;
        let (store, driver) = RedisStore::new(&config, "tollgate-test", heartbeat, metrics).unwrap();
        runtime.spawn(driver.run());
        let until = Instant::now() + Duration::from_millis(150);
        while !store.is_up() && Instant::now() < until {
            thread::sleep(Duration::from_millis(2));
        }
        if store.is_up() {
            runtime.block_on(everything(&store));
        }
    }
    let log: Vec<::redis::Value> = redis.command(&["ACL", "LOG"]);
    log.into_iter().map(|entry| format!("{entry:?}\n")).collect()
}

/// Each algorithm, asked for everything there is to ask of it.
async fn everything(store: &RedisStore) {
    let second = 1_000_000;
    let limits = [
        Limit::TokenBucket(TokenBucket::new(10, "1/s".parse().unwrap()).unwrap()),
        Limit::FixedWindow(FixedWindow { limit: 10, window: second }),
        Limit::SlidingWindow(SlidingWindow { limit: 10, window: second }),
        Limit::SlidingLog(SlidingLog { limit: 10, window: second }),
        Limit::Concurrency(Concurrency { limit: 10, hold: second }),
    ];
    for limit in limits {
        let key = Key::named("rl", &[], "r", limit.algorithm());
        let of = |demand, cost, permit| Check { permit, ..Check::own(key.clone(), limit, cost, demand) };
        let leases = matches!(limit, Limit::TokenBucket(_));
        let first = [
            of(Demand::Take, 1, 1),
            of(Demand::Take, 1, 2),
            of(Demand::Peek, 1, 3),
            of(Demand::Shadow, 1, 4),
        ];
        let then = [
            of(Demand::Return, 1, 1),
            of(Demand::Renew, 1, 2),
            of(Demand::Debit, 2, 2),
            of(Demand::Take, 99, 5),
        ];
        let lease = [of(Demand::Lease, 3, 0)];
        for check in first.into_iter().chain(then).chain(lease.into_iter().filter(|_| leases)) {
            let checks: Checks = smallvec![check];
            let _ = store.acquire(&checks).await;
        }
        // Full, so that the wait is asked for.
        for number in 10..30 {
            let checks: Checks = smallvec![of(Demand::Take, 1, number)];
            let _ = store.acquire(&checks).await;
        }
    }
}

/// What answers cannot be a store: the gateway does not start, and says why.
#[test]
fn what_cannot_be_a_store_is_refused_at_the_start() {
    let old = a_server_that_says("-ERR unknown command `HELLO`, with args beginning with: `2`, \r\n");
    let older = a_server_that_says(
        "*8\r\n+server\r\n+redis\r\n+version\r\n+6.0.16\r\n+mode\r\n+standalone\r\n+role\r\n+master\r\n",
    );
    let member = Redis::with(&["--cluster-enabled", "yes"]);
    let alone = Redis::process();
    let sentinel = Redis::of_file("redis-server", "sentinel monitor m 127.0.0.1 1 1\n", &["--sentinel"]);
    sentinel.wait();
    for (store, expected) in [
        (
            format!("url: 'redis://127.0.0.1:{old}'"),
            "does not know HELLO: the scripts need Redis 6.2 or newer",
        ),
        (
            format!("url: 'redis://127.0.0.1:{older}'"),
            "this is redis 6.0.16: the scripts need Redis 6.2 or newer",
        ),
        (format!("url: '{}'", member.url()), "this is a node of a cluster: name it in store.redis.cluster"),
        (format!("cluster: ['{}']", alone.url()), "is no node of a cluster: name it in store.redis.url"),
        (format!("url: '{}'", sentinel.url()), "this is a Sentinel: name it in store.redis.sentinel.nodes"),
    ] {
        let folder = tempfile::tempdir().unwrap();
        let config = folder.path().join("c.yaml");
        let ports = [crate::harness::free_port(), crate::harness::free_port()];
        let text = format!(
            "listeners: [{{address: 127.0.0.1:{}}}]\nadmin: {{address: 127.0.0.1:{}}}\nstore: {{redis: {{{store}}}}}
upstreams: {{u: {{servers: [127.0.0.1:1]}}}}\nroutes: [{{id: a, match: {{path: /}}, upstream: u}}]\n",
            ports[0], ports[1]
        );
        std::fs::write(&config, text).unwrap();
        let output = std::process::Command::new(env!("CARGO_BIN_EXE_tollgate"))
            .args(["serve", "--config"])
            .arg(&config)
            .output()
            .unwrap();
        let told = String::from_utf8(output.stderr).unwrap();
        assert!(!output.status.success() && told.contains(expected), "{store}: {told}");
    }
}

/// The port of a server that answers everything with `reply`.
fn a_server_that_says(reply: &'static str) -> u16 {
    use std::io::{Read as _, Write as _};
    let listener = std::net::TcpListener::bind(("127.0.0.1", 0)).unwrap();
    let port = listener.local_addr().unwrap().port();
    thread::spawn(move || {
        for mut stream in listener.incoming().flatten() {
            let mut buffer = [0; 4096];
            while matches!(stream.read(&mut buffer), Ok(1..)) && stream.write_all(reply.as_bytes()).is_ok() {}
        }
    });
    port
}
