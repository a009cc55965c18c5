//! Connections that begin with a PROXY protocol header.

use std::process::Command;
use std::time::Duration;

use crate::access::certificates;
use crate::harness::{Connection, Gateway, Upstream, eventually};

fn config(upstream: &Upstream, trusted: &str) -> String {
    format!(
        "identity: {{client_address: {{trusted_proxies: [{trusted}]}}}}
upstreams: {{u: {{servers: [127.0.0.1:{}]}}}}
routes: [{{id: all, match: {{path: /*}}, upstream: u, rules: [per-address]}}]
rules:
  default: {{capacity: 1000, refill_per_second: 1}}
  named: [{{name: per-address, key: [client_address], limit: {{fixed_window: {{limit: 2, window: 24h}}}}}}]
",
        upstream.port
    )
}

const REQUEST: &str = "GET / HTTP/1.1\r\nHost: g\r\nX-Api-Key: a\r\n";

/// The statuses of two requests on a connection that begins with these bytes.
fn two(gateway: &Gateway, header: &[u8], more: &str) -> Vec<u16> {
    let mut connection = Connection::open(gateway.port);
    connection.send([header, format!("{REQUEST}{more}\r\n").as_bytes()].concat());
    let first = connection.response().status;
    connection.send(format!("{REQUEST}{more}\r\n"));
    vec![first, connection.response().status]
}

#[test]
fn the_header_says_who_has_connected() {
    let upstream = Upstream::start();
    let gateway =
        Gateway::start_listening(", proxy_protocol: true", "memory", &config(&upstream, "127.0.0.0/8"), &[]);
    let line = |address: &str| format!("PROXY TCP4 {address} 127.0.0.1 5000 80\r\n").into_bytes();
    assert_eq!(two(&gateway, &line("203.0.113.7"), ""), [200, 200], "one header for the whole connection");
    assert_eq!(two(&gateway, &line("203.0.113.7"), ""), [429, 429]);
    // Who is named by it and is no proxy says nothing about others.
    assert_eq!(two(&gateway, &line("203.0.113.7"), "X-Forwarded-For: 203.0.113.9\r\n"), [429, 429]);
    assert_eq!(two(&gateway, &line("127.0.0.9"), "X-Forwarded-For: 203.0.113.7\r\n"), [429, 429]);
    assert_eq!(two(&gateway, &line("203.0.113.8"), ""), [200, 200]);
    let mut version_2 = b"\r\n\r\n\0\r\nQUIT\n\x21\x11\0\x0c".to_vec();
    version_2.extend([203, 0, 113, 8, 127, 0, 0, 1, 0x13, 0x88, 0, 80]);
    assert_eq!(two(&gateway, &version_2, ""), [429, 429], "the same client, by version 2");
    let unknown = b"PROXY UNKNOWN\r\n";
    assert_eq!(two(&gateway, unknown, "X-Forwarded-For: 203.0.113.99\r\n"), [200, 200]);
    assert_eq!(
        two(&gateway, unknown, "X-Forwarded-For: 203.0.113.98\r\n"),
        [429, 429],
        "it is nobody, whatever it says"
    );
    assert!(upstream.heads()[0].contains("203.0.113.7"), "the upstream is told of the client");

    // Without a header that counts there is no connection.
    for bytes in
        ["GET / HTTP/1.1\r\nHost: g\r\n\r\n", "PROXY TCP4 1.2.3.4\r\n", "\r\n\r\n\0\r\nQUIT\nxxxxxxxx"]
    {
        let mut connection = Connection::open(gateway.port);
        connection.send(bytes);
        assert!(connection.closes_within(Duration::from_secs(2)), "{bytes:?}");
    }
    eventually("they are counted", || {
        (gateway.metric("tollgate_rejected_requests_total{reason=\"proxy_protocol\"}") >= 3).then_some(())
    });
    let stranger =
        Gateway::start_listening(", proxy_protocol: true", "memory", &config(&upstream, "10.0.0.0/8"), &[]);
    let mut connection = Connection::open(stranger.port);
    connection.send([&line("203.0.113.7")[..], REQUEST.as_bytes(), b"\r\n"].concat());
    assert!(connection.closes_within(Duration::from_secs(2)), "of somebody who is not trusted");
}

/// Before TLS as well.
#[test]
fn the_header_comes_before_tls() {
    let (upstream, folder) = (Upstream::start(), tempfile::tempdir().unwrap());
    certificates(folder.path());
    let file = |name: &str| folder.path().join(name).display().to_string();
    let tls = format!(
        ", proxy_protocol: true, tls: {{certificates: [{{cert: {}, key: {}}}]}}",
        file("server.pem"),
        file("server.key")
    );
    let gateway = Gateway::start_listening(&tls, "memory", &config(&upstream, "127.0.0.0/8"), &[]);
    let curl = |more: &[&str]| {
        let output = Command::new("curl")
            .args([
                "-s",
                "-o",
                "/dev/null",
                "-w",
                "%{http_code}",
                "--cacert",
                &file("ca.pem"),
                "-H",
                "X-Api-Key: a",
            ])
            .args(more)
            .arg(format!("https://127.0.0.1:{}/", gateway.port))
            .output()
            .unwrap();
        String::from_utf8(output.stdout).unwrap()
    };
    // It names the address that it comes from, which is trusted: so the next one to the left counts.
    let of = |client: &str| curl(&["--haproxy-protocol", "-H", &format!("X-Forwarded-For: {client}")]);
    assert_eq!(
        [of("203.0.113.7"), of("203.0.113.7"), of("203.0.113.7"), of("203.0.113.8")],
        ["200", "200", "429", "200"]
    );
    assert_eq!(curl(&[]), "000", "without the header there is no handshake");
}
