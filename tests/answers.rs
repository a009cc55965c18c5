//! What a client sees: status, headers, body, and what becomes of its connection.

use std::time::Duration;

use crate::access::certificates;
use crate::harness::client::request;
use crate::harness::gateway::{everything_to, on};
use crate::harness::{Connection, Gateway, Redis, Upstream, free_port};

fn small(upstream: &Upstream) -> Gateway {
    Gateway::start(
        "memory",
        &everything_to(upstream, "  rows: [{tenant: shop-a, capacity: 2, refill_per_second: 1/m}]"),
    )
}

/// The first thing to show: three orders in a second on a limit of two, and what Redis holds then.
#[test]
fn two_pass_and_the_third_is_told_when() {
    let (redis, upstream) = (Redis::start(), Upstream::start());
    let gateway = Gateway::start(
        &on(&redis),
        &format!(
            "upstreams: {{orders: {{servers: [127.0.0.1:{}]}}}}
routes: [{{id: create-order, match: {{path: /orders, methods: [POST]}}, upstream: orders}}]
rules: {{rows: [{{tenant: shop-a, route: create-order, capacity: 2, refill_per_second: 0.5}}]}}
headers: [x-ratelimit, ratelimit-draft]
",
            upstream.port
        ),
    );
    let mut client = Connection::open(gateway.port);
    let answers: Vec<_> = (0..3).map(|_| client.ask("POST", "/orders", "shop-a")).collect();
    assert_eq!(answers.iter().map(|answer| answer.status).collect::<Vec<_>>(), [200, 200, 429]);
    assert_eq!(answers[0].header("x-ratelimit-remaining"), Some("1"));
    assert_eq!(answers[0].header("x-ratelimit-limit"), Some("2"));
    assert_eq!(answers[0].header("ratelimit-policy"), Some("\"default\";q=2;w=4"));
    assert_eq!(answers[0].header("ratelimit"), Some("\"default\";r=1;t=2"));
    assert_eq!(answers[0].body, "hello");

    let refused = &answers[2];
    assert_eq!(refused.header("content-type"), Some("application/problem+json"));
    assert_eq!(refused.header("cache-control"), Some("no-store"));
    assert_eq!(refused.header("x-ratelimit-remaining"), Some("0"));
    let wait = refused.number("retry-after");
    assert_eq!(wait, 2);
    let problem = refused.json();
    assert_eq!(problem["type"], "https://iana.org/assignments/http-problem-types#quota-exceeded");
    assert_eq!((&problem["status"], &problem["retry_after"]), (&429.into(), &wait.into()));
    assert_eq!(problem["violated-policies"][0], "default");
    assert!(problem["title"].is_string() && problem["detail"].is_string());
    assert_eq!(upstream.count(), 2);

    assert_eq!(redis.keys(), ["rl:{shop-a}:create-order"]);
    let mut fields: Vec<String> = redis.command(&["HKEYS", "rl:{shop-a}:create-order"]);
    fields.sort();
    assert_eq!(fields, ["tokens", "ts"]);
    let ttl: i64 = redis.command(&["PTTL", "rl:{shop-a}:create-order"]);
    assert!((7_000..=8_000).contains(&ttl), "{ttl} ms, of twice 4 s");
}

#[test]
fn every_response_says_what_is_left() {
    let upstream = Upstream::start();
    let gateway = Gateway::start(
        "memory",
        &format!(
            "upstreams: {{u: {{servers: [127.0.0.1:{}]}}, away: {{servers: [127.0.0.1:{}]}}}}
routes:
  - {{id: here, match: {{path: /here}}, upstream: u}}
  - {{id: away, match: {{path: /away}}, upstream: away}}
",
            upstream.port,
            free_port()
        ),
    );
    for (path, key, status, remaining) in [
        ("/here", "a", 200, "19"),
        ("/here", "", 401, "0"),
        ("/nowhere", "a", 404, "19"),
        ("/away", "a", 502, "19"),
        ("/%", "a", 400, "0"),
    ] {
        let answer = gateway.get(path, key);
        assert_eq!(
            (answer.status, answer.header("x-ratelimit-remaining")),
            (status, Some(remaining)),
            "{path}"
        );
        if status != 200 {
            assert_eq!(answer.header("content-type"), Some("application/problem+json"), "{path}");
            assert_eq!(answer.json()["status"], status);
        }
    }
    let unauthorized = gateway.get("/here", "");
    assert!(unauthorized.header("www-authenticate").unwrap().starts_with("ApiKey"));
    // No route: charged to the tenant's route `default`, and so limited as well.
    let statuses: Vec<u16> = (0..30).map(|_| gateway.get("/nowhere", "a").status).collect();
    assert!(statuses.contains(&404) && statuses.contains(&429), "{statuses:?}");
}

#[test]
fn the_families_of_headers_are_chosen() {
    let upstream = Upstream::start();
    let rest = everything_to(&upstream, "  rows: [{tenant: a, capacity: 100, refill_per_second: 100/m}]");
    for (families, present, absent) in [
        ("[]", vec![], vec!["x-ratelimit-limit", "ratelimit-limit", "ratelimit", "ratelimit-policy"]),
        (
            "[x-ratelimit]",
            vec!["x-ratelimit-limit", "x-ratelimit-reset"],
            vec!["ratelimit-limit", "ratelimit"],
        ),
        (
            "[ratelimit-legacy]",
            vec!["ratelimit-limit", "ratelimit-remaining", "ratelimit-reset"],
            vec!["x-ratelimit-limit", "ratelimit"],
        ),
        (
            "[ratelimit-draft]",
            vec!["ratelimit-policy", "ratelimit"],
            vec!["x-ratelimit-limit", "ratelimit-limit"],
        ),
    ] {
        let rest = rest.replace("[x-ratelimit, ratelimit-legacy, ratelimit-draft]", families);
        let gateway = Gateway::start("memory", &rest);
        let answer = gateway.get("/", "a");
        assert_eq!(answer.header("x-ratelimit-remaining"), Some("99"), "{families}");
        for name in present {
            assert!(answer.header(name).is_some(), "{families}: no {name}");
        }
        for name in absent {
            assert!(answer.header(name).is_none(), "{families}: {name}");
        }
    }
}

#[test]
fn head_has_the_headers_and_no_body() {
    let upstream = Upstream::start();
    let gateway = small(&upstream);
    let mut client = Connection::open(gateway.port);
    for status in [200, 200, 429, 429] {
        let answer = client.ask("HEAD", "/", "shop-a");
        assert_eq!((answer.status, &*answer.body), (status, ""));
        assert!(answer.number("content-length") > 0);
    }
    assert_eq!(client.ask("HEAD", "/", "").status, 401);
    assert_eq!(client.ask("GET", "/", "shop-a").status, 429);
}

/// B145: 100 refusals use one connection.
#[test]
fn a_refused_connection_goes_on() {
    let upstream = Upstream::start();
    let gateway = small(&upstream);
    let mut client = Connection::open(gateway.port);
    for step in 0..102 {
        let answer = client.ask("GET", "/", "shop-a");
        assert_eq!(answer.status, if step < 2 { 200 } else { 429 });
        assert_ne!(answer.header("connection"), Some("close"));
    }
    assert_eq!(upstream.count(), 2);
}

/// An unread body never becomes the next request.
#[test]
fn the_body_of_a_refused_request_is_not_the_next_request() {
    let upstream = Upstream::start();
    let gateway = small(&upstream);
    let mut client = Connection::open(gateway.port);
    for _ in 0..2 {
        assert_eq!(client.ask("GET", "/", "shop-a").status, 200);
    }
    let smuggled = "GET /smuggled HTTP/1.1\r\nHost: gateway.test\r\nX-Api-Key: other\r\n\r\n";
    let head = format!(
        "POST / HTTP/1.1\r\nHost: gateway.test\r\nX-Api-Key: shop-a\r\nContent-Length: {}\r\n\r\n",
        smuggled.len()
    );
    client.send(&head);
    assert_eq!(client.response().status, 429);
    client.send(smuggled);
    let next = client.ask("GET", "/honest", "other");
    assert_eq!(next.status, 200);
    let heads = upstream.heads();
    assert_eq!(heads.len(), 3);
    assert!(heads[2].starts_with("GET /honest "), "{heads:?}");
}

/// A body that never comes holds nothing up: the answer is there at once, the connection ends later.
#[test]
fn a_body_that_never_comes() {
    let upstream = Upstream::start();
    let gateway = small(&upstream);
    let mut client = Connection::open(gateway.port);
    client.send("POST / HTTP/1.1\r\nHost: gateway.test\r\nContent-Length: 100\r\n\r\n");
    assert_eq!(client.response().status, 401);
    assert!(client.closes_within(Duration::from_secs(10)));
}

/// B147: a client that is still uploading sees why it was refused.
#[test]
fn a_large_upload_sees_its_refusal() {
    let upstream = Upstream::start();
    let gateway = small(&upstream);
    for _ in 0..2 {
        gateway.get("/", "shop-a");
    }
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("upload");
    std::fs::write(&file, vec![b'x'; 50 * 1024 * 1024]).unwrap();
    for round in 0..20 {
        let output = std::process::Command::new("curl")
            .args([
                "-s",
                "-o",
                "/dev/null",
                "-w",
                "%{http_code}",
                "-H",
                "X-Api-Key: shop-a",
                "-H",
                "Expect:",
                "-T",
            ])
            .arg(&file)
            .arg(format!("http://127.0.0.1:{}/", gateway.port))
            .output()
            .expect("curl is installed (./test installs it)");
        let status = String::from_utf8(output.stdout).unwrap();
        assert_eq!((status.as_str(), output.status.code()), ("429", Some(0)), "round {round}");
    }
    assert_eq!(upstream.count(), 2);
}

#[test]
fn an_upload_that_waits_for_100_continue_is_refused_before_it_begins() {
    let upstream = Upstream::start();
    let gateway = small(&upstream);
    let mut client = Connection::open(gateway.port);
    client
        .send("PUT / HTTP/1.1\r\nHost: gateway.test\r\nContent-Length: 1000\r\nExpect: 100-continue\r\n\r\n");
    let answer = client.response();
    assert_eq!((answer.status, answer.header("connection")), (401, Some("close")));
    assert_eq!(upstream.count(), 0);
}

#[test]
fn what_is_ambiguous_on_the_wire_is_refused() {
    let upstream = Upstream::start();
    let gateway = small(&upstream);
    let key = "X-Api-Key: a\r\n";
    for head in [
        format!("GET / HTTP/1.1\r\n{key}\r\n"),
        format!("GET / HTTP/1.1\r\nHost:\r\n{key}\r\n"),
        format!("GET / HTTP/1.1\r\nHost: a b\r\n{key}\r\n"),
        format!("GET / HTTP/1.1\r\nHost: a/../b?c\r\n{key}\r\n"),
        format!(
            "POST / HTTP/1.1\r\nHost: a\r\n{key}Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
        ),
        format!("POST / HTTP/1.1\r\nHost: a\r\n{key}Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n"),
        format!("POST / HTTP/1.1\r\nHost: a\r\n{key}Transfer-Encoding: identity\r\n\r\n"),
        format!("POST / HTTP/1.1\r\nHost: a\r\n{key}Content-Length: 3\r\nContent-Length: 3\r\n\r\nabc"),
        format!("POST / HTTP/1.1\r\nHost: a\r\n{key}Content-Length: 3, 3\r\n\r\nabc"),
        "GET / HTTP/1.1\r\nHost: a\nX-Api-Key: a\r\n\r\n".to_string(),
        format!("POST / HTTP/1.1\r\nHost: a\n{key}Content-Length: 3\r\n\r\nabc"),
    ] {
        let mut client = Connection::open(gateway.port);
        client.send(head.clone() + "GET / HTTP/1.1\r\nHost: a\r\nX-Api-Key: a\r\n\r\n");
        let answer = client.try_response(false).unwrap_or_else(|| panic!("no answer to {head:?}"));
        assert_eq!((answer.status, answer.header("connection")), (400, Some("close")), "{head:?}");
        // Nobody knows where the next request begins.
        assert!(client.try_response(false).is_none(), "{head:?}");
    }
    for head in [
        format!("GET /a\\b HTTP/1.1\r\nHost: a\r\n{key}\r\n"),
        format!("GET /%00 HTTP/1.1\r\nHost: a\r\n{key}\r\n"),
        format!("GET /../x HTTP/1.1\r\nHost: a\r\n{key}\r\n"),
        format!("GET /x/..%2Fy HTTP/1.1\r\nHost: a\r\n{key}\r\n"),
        format!("GET /x/..;/y HTTP/1.1\r\nHost: a\r\n{key}\r\n"),
        format!("GET admin/delete HTTP/1.1\r\nHost: a\r\n{key}\r\n"),
        format!("GET foo:bar://a/secret HTTP/1.1\r\nHost: a\r\n{key}\r\n"),
        format!("GET ?x=1 HTTP/1.1\r\nHost: a\r\n{key}\r\n"),
    ] {
        let mut client = Connection::open(gateway.port);
        client.send(&head);
        let status = client.try_response(false).map(|answer| answer.status);
        assert_eq!(status, Some(400), "{head:?}");
        // Such a request is whole, and so is the next one.
        client.send("GET / HTTP/1.1\r\nHost: a\r\n\r\n");
        assert_eq!(client.response().status, 401, "{head:?}");
    }
    assert_eq!(upstream.count(), 0);
}

/// Promise 10: a request is matched as it is forwarded, however it is spelled.
#[test]
fn a_request_is_matched_as_it_is_forwarded() {
    let upstream = Upstream::start();
    let gateway = Gateway::start(
        "memory",
        &format!(
            "upstreams: {{u: {{servers: [127.0.0.1:{}]}}}}
routes:
  - {{id: guarded, match: {{path: /login}}, upstream: u}}
  - {{id: rest, match: {{path: /*}}, upstream: u}}
rules:
  rows:
    - {{tenant: a, route: guarded, capacity: 3, refill_per_second: 1/h}}
    - {{tenant: a, capacity: 1000, refill_per_second: 1}}
",
            upstream.port
        ),
    );
    let spellings = [
        "/login",
        "//login",
        "/./login",
        "/x/../login",
        "/%6cogin",
        "/%6Cogin",
        "/x/%2e%2e/login",
        "/x/.%2E/login",
        "///login",
        "/login?x=1",
        "http://gateway.test/login",
        "http://gateway.test//login?x=1",
    ];
    let admitted = spellings.iter().filter(|path| gateway.get(path, "a").status == 200).count();
    assert_eq!(admitted, 3);
    for head in upstream.heads() {
        assert!(
            head.starts_with("GET /login HTTP/1.1\r\n") || head.starts_with("GET /login?x=1 HTTP/1.1\r\n"),
            "{head}"
        );
    }
    for (path, forwarded) in
        [("/a%2fb//c", "/a%2Fb/c"), ("/q?a=//b/../%61", "/q?a=//b/../%61"), ("/;x=1", "/;x=1")]
    {
        assert_eq!(gateway.get(path, "a").status, 200);
        let head = upstream.heads().pop().unwrap();
        assert!(head.starts_with(&format!("GET {forwarded} HTTP/1.1\r\n")), "{head}");
    }
}

/// What upstreams decode, or read without its case, is held by the same rule.
#[test]
fn no_spelling_passes_by_a_rule() {
    let upstream = Upstream::start();
    let gateway = Gateway::start(
        "memory",
        &format!(
            "upstreams: {{u: {{servers: [127.0.0.1:{}]}}}}
routes:
  - {{id: import, match: {{path: '/docs:import', methods: [POST]}}, upstream: u}}
  - {{id: cafe, match: {{path: /caf%C3%A9}}, upstream: u}}
  - {{id: rest, match: {{path: /*}}, upstream: u}}
rules:
  rows:
    - {{tenant: a, route: import, capacity: 2, refill_per_second: 1/h}}
    - {{tenant: a, route: cafe, capacity: 2, refill_per_second: 1/h}}
    - {{tenant: a, capacity: 1000, refill_per_second: 1}}
",
            upstream.port
        ),
    );
    let admitted = |lines: &[&[u8]]| {
        let status = |line: &&[u8]| {
            let mut client = Connection::open(gateway.port);
            let head = b" HTTP/1.1\r\nHost: gateway.test\r\nX-Api-Key: a\r\n\r\n";
            client.send([line, &head[..]].concat());
            client.response().status
        };
        lines.iter().map(status).filter(|status| *status == 200).count()
    };
    let imports: [&[u8]; 5] = [
        b"POST /docs:import",
        b"post /docs:import",
        b"Post /docs%3Aimport",
        b"POST /docs%3aimport",
        b"POST //%64ocs%3Aimport",
    ];
    assert_eq!(admitted(&imports), 2);
    assert_eq!(
        admitted(&[b"GET /caf%c3%a9", b"GET /caf%C3%A9", b"GET /caf\xC3\xA9", b"GET /x/../caf\xc3%A9"]),
        2
    );
    for head in upstream.heads() {
        let path = head.split(' ').nth(1).unwrap();
        assert!(["/docs:import", "/caf%C3%A9"].contains(&path), "{head}");
    }
}

/// A refused body that nobody reads would end the stream by a reset, and curl tells no answer then.
#[test]
fn a_refused_body_over_http2() {
    let (upstream, folder) = (Upstream::start(), tempfile::tempdir().unwrap());
    certificates(folder.path());
    let file = |name: &str| folder.path().join(name).display().to_string();
    let tls =
        format!(", tls: {{certificates: [{{cert: {}, key: {}}}]}}", file("server.pem"), file("server.key"));
    let rules = "  rows: [{tenant: shop-a, capacity: 1, refill_per_second: 1/h}]";
    let gateway = Gateway::start_listening(&tls, "memory", &everything_to(&upstream, rules), &[]);
    let url = format!("https://127.0.0.1:{}/", gateway.port);
    let post = |key: &str, body: &str| {
        let output = std::process::Command::new("curl")
            .args([
                "-s",
                "--http2",
                "--cacert",
                &file("ca.pem"),
                "-o",
                "/dev/null",
                "-w",
                "%{http_version} %{http_code}",
            ])
            .args(["-H", &format!("X-Api-Key: {key}"), "--data", body, &url])
            .output()
            .unwrap();
        String::from_utf8(output.stdout).unwrap()
    };
    assert_eq!(post("shop-a", "abc"), "2 200");
    for body in ["abc", &"x".repeat(60_000), &"x".repeat(70_000)] {
        for _ in 0..10 {
            assert_eq!([post("shop-a", body), post("", body)], ["2 429", "2 401"], "{} bytes", body.len());
        }
    }
}

/// Malformed and huge keys, and more than one: a clear answer, and never somebody else's bucket.
#[test]
fn strange_keys() {
    let (redis, upstream) = (Redis::start(), Upstream::start());
    let gateway = Gateway::start(
        &on(&redis),
        &everything_to(&upstream, "  rows: [{tenant: shop-a, capacity: 5, refill_per_second: 1/h}]"),
    );
    let ask = |lines: &[u8]| {
        let mut client = Connection::open(gateway.port);
        client.send([b"GET / HTTP/1.1\r\nHost: gateway.test\r\n", lines, b"\r\n"].concat());
        client
            .try_response(false)
            .map(|answer| (answer.status, answer.header("x-ratelimit-remaining").map(str::to_owned)))
    };
    let long = |length| format!("X-Api-Key: {}\r\n", "k".repeat(length));
    let fresh = Some((200, Some("19".to_owned())));
    for lines in [
        &b"X-Api-Key: {shop-a}:all\r\n"[..],
        b"X-Api-Key: shop-a}:all\r\n",
        b"X-Api-Key: shop-a:\r\n",
        b"X-Api-Key: SHOP-A\r\n",
        b"X-Api-Key: rl:{shop-a}:all\r\n",
        b"X-Api-Key: ~shop-a\r\n",
        b"X-Api-Key: shop-a%00\r\n",
        b"X-Api-Key: \xc3\xa4\xff\r\n",
        b"X-Api-Key: shop-a, shop-a\r\n",
        long(4 * 1024).as_bytes(),
        long(8 * 1024).as_bytes(),
    ] {
        assert_eq!(ask(lines), fresh, "{}", String::from_utf8_lossy(&lines[..lines.len().min(40)]));
    }
    assert_eq!(ask(long(8 * 1024 + 1).as_bytes()), Some((431, Some("0".into()))));
    assert_eq!(ask(long(60 * 1024).as_bytes()), Some((431, Some("0".into()))));
    assert_eq!(ask(b"X-Api-Key: shop-a\r\nX-Api-Key: shop-b\r\n"), Some((400, Some("0".into()))));
    assert_eq!(ask(b"X-Api-Key:\r\n"), Some((401, Some("0".into()))));
    assert_eq!(ask(b"X-Api-Key:   \r\n"), Some((401, Some("0".into()))));
    assert_eq!(ask(b"X-Api-Key: shop\r-a\r\n").map(|(status, _)| status), Some(400));
    assert_eq!(ask(b"X-Api-Key: shop-a\r\n"), Some((200, Some("4".into()))), "somebody used this bucket");
    let keys = redis.keys();
    assert_eq!(keys.len(), 12);
    assert!(keys.iter().all(|key| key.len() <= 128 && key.is_ascii()), "{keys:?}");
}

#[test]
fn upstreams_take_turns_and_a_dead_one_is_passed_over() {
    let (one, two) = (Upstream::start(), Upstream::start());
    let gateway = Gateway::start(
        "memory",
        &format!(
            "upstreams: {{u: {{servers: [127.0.0.1:{}, 127.0.0.1:{}, 127.0.0.1:{}]}}}}
routes: [{{id: all, match: {{path: /*}}, upstream: u}}]
rules: {{default: {{capacity: 1000, refill_per_second: 1000}}}}
",
            one.port,
            two.port,
            free_port()
        ),
    );
    for _ in 0..30 {
        let answer = gateway.get("/", "a");
        assert_eq!((answer.status, answer.header("x-upstream")), (200, Some("yes")));
    }
    let (first, second) = (one.count(), two.count());
    assert_eq!(first + second, 30);
    assert!(first >= 10 && second >= 10, "{first} and {second}");
    assert!(one.heads()[0].contains("X-Forwarded-For: 127.0.0.1"), "{}", one.heads()[0]);
}

/// B127: a request is what its own method says, for its limits as for its upstream.
#[test]
fn another_method_is_not_forwarded() {
    let upstream = Upstream::start();
    let gateway = small(&upstream);
    for header in ["X-HTTP-Method-Override", "x-http-method", "X-Method-Override", "X_HTTP-METHOD_Override"] {
        let mut client = Connection::open(gateway.port);
        client.send(format!(
            "GET / HTTP/1.1\r\nHost: a\r\nX-Api-Key: {header}\r\n{header}: POST\r\nX-Method: 1\r\n\r\n"
        ));
        assert_eq!(client.response().status, 200);
        let head = upstream.heads().pop().unwrap();
        assert!(head.starts_with("GET / ") && head.contains("X-Method: 1"), "{head}");
        assert!(!head.contains("POST"), "{head}");
    }
}

#[test]
fn without_a_key_everybody_may_be_anonymous() {
    let upstream = Upstream::start();
    let rest = everything_to(&upstream, "  rows: [{tenant: anonymous, capacity: 2, refill_per_second: 1/h}]");
    let gateway = Gateway::start("memory", &format!("{rest}identity: {{tenant: {{missing: anonymous}}}}\n"));
    let statuses: Vec<u16> = (0..3).map(|_| gateway.get("/", "").status).collect();
    assert_eq!(statuses, [200, 200, 429]);
    assert_eq!(gateway.get("/", "somebody").status, 200);
}

#[test]
fn a_route_without_a_rule_is_not_limited() {
    let upstream = Upstream::start();
    let gateway = Gateway::start(
        "memory",
        &format!(
            "upstreams: {{u: {{servers: [127.0.0.1:{}]}}}}
routes: [{{id: open, match: {{path: /*}}, upstream: u, tenant_rule: off}}]
rules: {{default: {{capacity: 1, refill_per_second: 1/h}}}}
",
            upstream.port
        ),
    );
    for _ in 0..5 {
        let answer = gateway.get("/", "a");
        assert_eq!((answer.status, answer.header("x-ratelimit-remaining")), (200, None));
    }
}

#[test]
fn pipelined_requests_are_each_answered_or_the_connection_ends() {
    let upstream = Upstream::start();
    let gateway = small(&upstream);
    let mut client = Connection::open(gateway.port);
    client.send(request("GET", "/", "shop-a").repeat(3));
    let mut answers = Vec::new();
    while let Some(answer) = client.try_response(false) {
        answers.push(answer.status);
        if answers.len() == 3 {
            break;
        }
    }
    assert!(answers == [200, 200, 429] || answers == [200], "{answers:?}");
}
