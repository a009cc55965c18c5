//! `tollgate demo`: one command, nothing else installed.

use std::io::{BufRead as _, BufReader};
use std::net::TcpStream;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use crate::harness::{Connection, eventually, free_port, get};

/// A demo that ends with its test.
struct Demo {
    port: u16,
    admin: u16,
    child: Child,
}

impl Demo {
    fn start() -> Self {
        let (port, admin) = (free_port(), free_port());
        let child = Command::new(env!("CARGO_BIN_EXE_tollgate"))
            .args(["demo", "--port", &port.to_string(), "--admin-port", &admin.to_string()])
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        Self { port, admin, child }
    }
}

impl Drop for Demo {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn the_demo_does_what_it_says() {
    let mut demo = Demo::start();
    let mut said = BufReader::new(demo.child.stdout.take().unwrap());
    let mut text = String::new();
    while !text.contains("Ctrl-C") {
        assert!(said.read_line(&mut text).unwrap() > 0, "{text}");
    }
    for expect in [
        format!("http://127.0.0.1:{}", demo.port),
        format!("http://127.0.0.1:{}", demo.admin),
        "1. ".into(),
        "2. ".into(),
        "3. ".into(),
    ] {
        assert!(text.contains(&expect), "{expect} not in {text}");
    }
    eventually("the demo", || TcpStream::connect(("127.0.0.1", demo.port)).is_ok().then_some(()));
    let mut client = Connection::open(demo.port);
    let statuses: Vec<u16> = (0..3).map(|_| client.ask("POST", "/orders", "shop-a").status).collect();
    assert_eq!(statuses, [200, 200, 429]);
    let echo = client.ask("GET", "/items/7?x=1", "somebody");
    assert_eq!((echo.status, echo.header("x-ratelimit-remaining")), (200, Some("19")));
    assert_eq!((&echo.json()["path"], &echo.json()["query"]), (&"/items/7".into(), &"x=1".into()));
    assert!(get(demo.admin, "/", "").body.contains("Tollgate"));
    assert!(get(demo.admin, "/metrics", "").body.contains("tollgate_decisions_total"));
    let _ = Command::new("kill").args(["-s", "INT", &demo.child.id().to_string()]).status();
    let status = eventually("the end of the demo", || demo.child.try_wait().unwrap());
    assert!(status.success(), "{status:?}");
}

/// Nothing listens before it stays: not the port of the gateway, and not the echo behind it.
#[test]
fn who_comes_first_is_served() {
    for _ in 0..10 {
        let demo = Demo::start();
        let deadline = Instant::now() + Duration::from_secs(20);
        while TcpStream::connect(("127.0.0.1", demo.port)).is_err() {
            assert!(Instant::now() < deadline, "the demo never listened");
        }
        assert_eq!(Connection::open(demo.port).ask("GET", "/items/1", "first").status, 200);
    }
}
