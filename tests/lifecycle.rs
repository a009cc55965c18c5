//! Reload, shutdown, the admin listener.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use crate::harness::gateway::{TOKEN, everything_to, on};
use crate::harness::{Connection, Gateway, Redis, Upstream, eventually, get};

/// 200 SIGHUPs under load: nothing dropped, no free token; then a broken file changes nothing.
#[test]
fn two_hundred_reloads_under_load() {
    let (redis, upstream) = (Redis::start(), Upstream::start());
    let rules = |comment: usize| {
        let rows = "  rows:\n    - {tenant: busy, capacity: 1000000, refill_per_second: 1000}\n    - {tenant: drained, capacity: 50, refill_per_second: 1/d}";
        format!("# {comment}\n{}", everything_to(&upstream, rows))
    };
    let gateway = Gateway::start(&on(&redis), &rules(0));
    let stop = AtomicBool::new(false);
    let (served, admitted) = thread::scope(|scope| {
        let busy: Vec<_> = (0..4)
            .map(|_| {
                scope.spawn(|| {
                    let mut client = Connection::open(gateway.port);
                    let mut served = 0;
                    while !stop.load(Ordering::Relaxed) {
                        assert_eq!(client.ask("GET", "/", "busy").status, 200);
                        served += 1;
                        thread::sleep(Duration::from_millis(7));
                    }
                    served
                })
            })
            .collect();
        let drained = scope.spawn(|| {
            let mut client = Connection::open(gateway.port);
            let mut admitted = 0;
            while !stop.load(Ordering::Relaxed) {
                admitted += usize::from(client.ask("GET", "/", "drained").status == 200);
                thread::sleep(Duration::from_millis(5));
            }
            admitted
        });
        for round in 1..=200 {
            gateway.write(&rules(round));
            gateway.signal("HUP");
            thread::sleep(Duration::from_millis(15));
        }
        stop.store(true, Ordering::Relaxed);
        (busy.into_iter().map(|thread| thread.join().unwrap()).sum::<usize>(), drained.join().unwrap())
    });
    println!("{served} requests served during 200 SIGHUPs");
    assert!(served > 200, "{served}");
    assert_eq!(admitted, 50, "a reload gave tokens away");
    // Signals that arrive while one is being handled are one signal to the system.
    let applied = gateway.metric("tollgate_config_reloads_total{outcome=\"applied\"}");
    assert!((50..=200).contains(&applied), "{applied}");

    gateway.write("routes: [{id: a, match: {path: /, methods: [GET}]\n");
    gateway.reload();
    assert_eq!(gateway.metric("tollgate_config_reloads_total{outcome=\"rejected\"}"), 1);
    assert_eq!(gateway.get("/", "busy").status, 200);
    let log = gateway.log();
    assert!(
        log.contains("configuration not reloaded") && log.contains("tollgate.yaml has 1 faults: 5:"),
        "{log}"
    );
    let status = get(gateway.admin, "/api/v1/status", "").json();
    assert!(status["last_reload_error"].as_str().unwrap().contains("not YAML"), "{status}");
}

#[test]
fn a_reload_swaps_routes_upstreams_rules_and_log_level() {
    let (one, two) = (Upstream::start(), Upstream::start());
    let gateway = Gateway::start(
        "memory",
        &everything_to(&one, "  rows: [{tenant: a, capacity: 5, refill_per_second: 1/h}]"),
    );
    let mut kept = Connection::open(gateway.port);
    assert_eq!(kept.ask("GET", "/", "a").header("x-ratelimit-remaining"), Some("4"));
    gateway.write(&format!(
        "upstreams: {{v: {{servers: [127.0.0.1:{}]}}}}
routes: [{{id: all, match: {{path: /new/*}}, upstream: v}}]
rules: {{rows: [{{tenant: a, capacity: 3, refill_per_second: 1/h}}]}}
log: {{level: debug}}
",
        two.port
    ));
    gateway.reload();
    assert_eq!(kept.ask("GET", "/", "a").status, 404);
    let answer = kept.ask("GET", "/new/x", "a");
    // Clamped to the new capacity, not refilled by the edit.
    assert_eq!((answer.status, answer.header("x-ratelimit-remaining")), (200, Some("2")));
    assert_eq!((one.count(), two.count()), (1, 1));
    assert_eq!(get(gateway.admin, "/api/v1/status", "").json()["revision"], 2);
}

#[test]
fn reload_over_http_needs_the_token() {
    let upstream = Upstream::start();
    let gateway =
        Gateway::start("memory", &everything_to(&upstream, "  default: {capacity: 9, refill_per_second: 1}"));
    let post = |authorization: &str| {
        let mut client = Connection::open(gateway.admin);
        client
            .send(format!("POST /-/reload HTTP/1.1\r\nHost: a\r\n{authorization}Content-Length: 0\r\n\r\n"));
        client.response()
    };
    assert_eq!(post("").status, 401);
    assert_eq!(post("Authorization: Bearer wrong\r\n").status, 401);
    assert_eq!(post(&format!("Authorization: Basic {TOKEN}\r\n")).status, 401);
    let bearer = format!("Authorization: Bearer {TOKEN}\r\n");
    let applied = post(&bearer);
    assert_eq!((applied.status, &applied.json()["revision"]), (200, &2.into()));
    gateway.write("nonsense: 1\n");
    let rejected = post(&bearer);
    assert_eq!(rejected.status, 422);
    assert!(
        rejected.json()["error"].as_str().unwrap().contains("5:1: unknown key `nonsense`"),
        "{}",
        rejected.body
    );
    assert_eq!(post(&format!("Authorization: bearer  {TOKEN}\r\n")).status, 422, "schemes have no case");
    assert_eq!(post(&format!("Authorization: Bearer{TOKEN}\r\n")).status, 401);
    let read = get(gateway.admin, "/-/reload", "");
    assert_eq!((read.status, read.header("allow")), (405, Some("POST")));
    let mut client = Connection::open(gateway.admin);
    for (path, status) in [("/healthz", 405), ("/nowhere", 404)] {
        client.send(format!("POST {path} HTTP/1.1\r\nHost: a\r\nContent-Length: 0\r\n\r\n"));
        assert_eq!(client.response().status, status, "{path}");
    }
    assert_eq!(gateway.get("/", "a").header("x-ratelimit-limit"), Some("9"));
}

#[test]
fn what_needs_a_restart_is_said() {
    let upstream = Upstream::start();
    let rest = everything_to(&upstream, "  default: {capacity: 9, refill_per_second: 1}");
    let gateway = Gateway::start("memory", &rest);
    let text = std::fs::read_to_string(gateway.config()).unwrap();
    std::fs::write(gateway.config(), text.replace("threads: 2", "threads: 1")).unwrap();
    gateway.reload();
    assert!(gateway.log().contains("needs_restart\":\"threads\""), "{}", gateway.log());
    assert_eq!(get(gateway.admin, "/api/v1/status", "").json()["needs_restart"][0], "threads");
    // What the names of buckets are made of stays until then: no reload refills a bucket.
    assert_eq!(gateway.get("/", "a").header("x-ratelimit-remaining"), Some("8"));
    let secret = format!("{text}identity: {{hash_secret: another}}\n");
    std::fs::write(gateway.config(), secret).unwrap();
    gateway.reload();
    assert_eq!(gateway.get("/", "a").header("x-ratelimit-remaining"), Some("7"));
    assert!(gateway.log().contains("identity.hash_secret"));
}

/// SIGTERM ends the process when the last request has ended, not when a grace period has.
#[test]
fn sigterm_ends_when_nothing_is_in_flight() {
    let upstream = Upstream::start();
    let rest = everything_to(&upstream, "  default: {capacity: 9, refill_per_second: 1}");
    let mut idle = Gateway::start("memory", &rest);
    let mut keep_alive = Connection::open(idle.port);
    assert_eq!(keep_alive.ask("GET", "/", "a").status, 200);
    let started = Instant::now();
    idle.signal("TERM");
    assert!(idle.wait_for_end().success());
    assert!(started.elapsed() < Duration::from_secs(2), "{:?}", started.elapsed());

    let mut busy = Gateway::start("memory", &rest);
    let mut client = Connection::open(busy.port);
    client.send(crate::harness::client::request("GET", "/slow", "a"));
    eventually("a request in flight", || (busy.metric("tollgate_requests_in_flight") == 1).then_some(()));
    busy.signal("TERM");
    assert_eq!(client.response().status, 200);
    assert!(busy.wait_for_end().success());
}

#[test]
fn sighup_never_kills() {
    let upstream = Upstream::start();
    let mut gateway =
        Gateway::start("memory", &everything_to(&upstream, "  default: {capacity: 9, refill_per_second: 1}"));
    for _ in 0..20 {
        gateway.signal("HUP");
    }
    gateway.reload();
    assert!(gateway.is_running());
    assert_eq!(gateway.get("/", "a").status, 200);
}

#[test]
fn the_admin_listener() {
    let upstream = Upstream::start();
    let gateway = Gateway::start(
        "memory",
        &everything_to(&upstream, "  default: {capacity: 1, refill_per_second: 1/h}"),
    );
    gateway.get("/", "a");
    gateway.get("/", "a");
    let ask = |path: &str| get(gateway.admin, path, "");
    assert_eq!((ask("/healthz").status, &*ask("/healthz").body), (200, "ok\n"));
    assert_eq!((ask("/readyz").status, &*ask("/readyz").body), (200, "ready\n"));
    assert_eq!(ask("/nope").status, 404);
    assert!(ask("/").header("content-type").unwrap().starts_with("text/html"));
    let metrics = ask("/metrics");
    assert!(metrics.header("content-type").unwrap().starts_with("text/plain"));
    // B155: every series has HELP and TYPE, counters end in _total, seconds are the unit.
    for line in metrics.body.lines().filter(|line| !line.starts_with('#')) {
        let name = line.split(['{', ' ']).next().unwrap();
        assert!(name.starts_with("tollgate_"), "{line}");
        let family = name.trim_end_matches("_bucket").trim_end_matches("_sum").trim_end_matches("_count");
        assert!(metrics.body.contains(&format!("# TYPE {family} ")), "{line}");
        assert!(metrics.body.contains(&format!("# HELP {family} ")), "{line}");
        let is_counter = metrics.body.contains(&format!("# TYPE {name} counter"));
        assert!(!is_counter || name.ends_with("_total"), "{line}");
    }
    // B157: requests are admitted plus refused, in whatever way they are counted.
    let decisions = |outcome: &str| {
        gateway.metric(&format!(
            "tollgate_decisions_total{{basis=\"store\",outcome=\"{outcome}\",route=\"all\",rule=\"default\"}}"
        ))
    };
    let responses = |class: &str| {
        gateway.metric(&format!("tollgate_responses_total{{route=\"all\",status=\"{class}\"}}"))
    };
    assert_eq!((decisions("admitted"), decisions("refused")), (1, 1));
    assert_eq!((responses("2xx"), responses("4xx")), (1, 1));
}

#[test]
fn an_address_in_use_is_said_with_its_place() {
    let taken = std::net::TcpListener::bind(("127.0.0.1", 0)).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("a.yaml");
    let text = format!(
        "listeners: [{{address: '{}'}}]\nadmin: {{address: 127.0.0.1:{}}}\nupstreams: {{u: {{servers: [127.0.0.1:1]}}}}\nroutes: [{{id: r, match: {{path: /}}, upstream: u}}]\n",
        taken.local_addr().unwrap(),
        crate::harness::free_port()
    );
    std::fs::write(&file, text).unwrap();
    let output = std::process::Command::new(env!("CARGO_BIN_EXE_tollgate"))
        .args(["serve", "--config"])
        .arg(&file)
        .output()
        .unwrap();
    let error = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(error.contains("a.yaml:1:23: cannot listen on 127.0.0.1:"), "{error}");
}
