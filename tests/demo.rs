//! `tollgate demo`: one command, nothing else installed.

use std::io::{BufRead as _, BufReader};
use std::net::TcpStream;
use std::process::{Command, Stdio};

use crate::harness::{Connection, eventually, free_port, get};

#[test]
fn the_demo_does_what_it_says() {
    let (port, admin) = (free_port(), free_port());
    let mut child = Command::new(env!("CARGO_BIN_EXE_tollgate"))
        .args(["demo", "--port", &port.to_string(), "--admin-port", &admin.to_string()])
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut said = BufReader::new(child.stdout.take().unwrap());
    let mut text = String::new();
    while !text.contains("Ctrl-C") {
        assert!(said.read_line(&mut text).unwrap() > 0, "{text}");
    }
    for expect in [
        format!("http://127.0.0.1:{port}"),
        format!("http://127.0.0.1:{admin}"),
        "1. ".into(),
        "2. ".into(),
        "3. ".into(),
    ] {
        assert!(text.contains(&expect), "{expect} not in {text}");
    }
    eventually("the demo", || TcpStream::connect(("127.0.0.1", port)).is_ok().then_some(()));
    let mut client = Connection::open(port);
    let statuses: Vec<u16> = (0..3).map(|_| client.ask("POST", "/orders", "shop-a").status).collect();
    assert_eq!(statuses, [200, 200, 429]);
    let echo = client.ask("GET", "/items/7?x=1", "somebody");
    assert_eq!((echo.status, echo.header("x-ratelimit-remaining")), (200, Some("19")));
    assert_eq!((&echo.json()["path"], &echo.json()["query"]), (&"/items/7".into(), &"x=1".into()));
    assert!(get(admin, "/", "").body.contains("Tollgate"));
    assert!(get(admin, "/metrics", "").body.contains("tollgate_decisions_total"));
    let _ = Command::new("kill").args(["-s", "INT", &child.id().to_string()]).status();
    let status = eventually("the end of the demo", || child.try_wait().unwrap());
    assert!(status.success(), "{status:?}");
}
