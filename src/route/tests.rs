use super::*;
use crate::config;

/// A table of `id host methods path` lines, and the faults in it.
fn table(lines: &[&str]) -> (RouteTable, Vec<String>) {
    let mut yaml = String::from("upstreams: {u: {servers: [127.0.0.1:1]}}\nroutes:\n");
    for line in lines {
        let [id, host, methods, path] = line.split_whitespace().collect::<Vec<_>>()[..] else {
            panic!("{line}")
        };
        let host = if host == "-" { String::new() } else { format!(", host: '{host}'") };
        let methods = if methods == "-" { String::new() } else { format!(", methods: [{methods}]") };
        yaml += &format!("  - {{id: {id}, match: {{path: '{path}'{host}{methods}}}, upstream: u}}\n");
    }
    let (config, faults) = config::read_all(&yaml, &|_| None);
    assert_eq!(faults, []);
    let config = config.unwrap();
    let mut faults = Vec::new();
    let hasher = Hasher::new(b"");
    let table =
        RouteTable::build(&config.routes, &config.upstreams, OnStoreFailure::Local, &hasher, &mut faults);
    (table, faults.iter().map(ToString::to_string).collect())
}

#[track_caller]
fn check(lines: &[&str], requests: &[(&str, &str)]) {
    let (table, faults) = table(lines);
    assert!(faults.is_empty(), "{faults:?}");
    for (request, expect) in requests {
        let [host, method, path] = request.split_whitespace().collect::<Vec<_>>()[..] else {
            panic!("{request}")
        };
        let id = &*table.get(table.find(host, method, path)).id;
        assert_eq!(id, *expect, "{request}");
    }
}

#[test]
fn paths() {
    check(
        &["orders - - /orders", "items - - /items/*", "one - - /items/{id}", "special - - /items/special"],
        &[
            ("h GET /orders", "orders"),
            ("h GET /orders/", "default"),
            ("h GET /Orders", "default"),
            ("h GET /items/special", "special"),
            ("h GET /items/7", "one"),
            ("h GET /items/7/parts", "items"),
            ("h GET /items/", "items"),
            ("h GET /items", "default"),
            ("h GET /", "default"),
            ("h OPTIONS *", "default"),
        ],
    );
    check(&["all - - /*"], &[("h GET /", "all"), ("h GET /a/b", "all")]);
}

#[test]
fn methods() {
    check(
        &["create - POST,PUT /orders", "read - GET /orders", "rest - - /*"],
        &[
            ("h POST /orders", "create"),
            ("h PUT /orders", "create"),
            ("h GET /orders", "read"),
            ("h HEAD /orders", "read"),
            ("h DELETE /orders", "rest"),
            ("h get /orders", "read"),
            ("h Post /orders", "create"),
        ],
    );
    check(&["create - POST /orders"], &[("h GET /orders", "default"), ("h POST /orders", "create")]);
    check(
        &["head - HEAD /x", "get - GET /x", "get-y - GET /y", "rest - - /*"],
        &[("h HEAD /x", "head"), ("h GET /x", "get"), ("h HEAD /y", "get-y"), ("h HEAD /z", "rest")],
    );
}

#[test]
fn hosts() {
    check(
        &["a a.example.com - /x", "any-sub *.example.com - /*", "deep *.b.example.com - /x", "rest - - /*"],
        &[
            ("a.example.com GET /x", "a"),
            ("a.example.com GET /y", "any-sub"),
            ("c.b.example.com GET /x", "deep"),
            ("example.com GET /x", "rest"),
            ("other GET /x", "rest"),
        ],
    );
}

#[track_caller]
fn fault(lines: &[&str], expect: &str) {
    let (_, faults) = table(lines);
    assert!(faults.len() == 1 && faults[0].contains(expect), "{faults:?}");
}

#[test]
fn faults() {
    fault(&["a - - /x", "a - - /y"], "already the id of the route at 3");
    fault(&["a - - /x", "b - - /x"], "matches the same requests as the route `a`");
    fault(&["a - GET /x", "b - - /x"], "matches the same requests as the route `a`");
    fault(&["a - - /x/{a}", "b - - /x/{b}"], "matches the same requests as the route `a`");
    fault(&["a - - /x/*", "b - - /x/*"], "matches the same requests as the route `a`");
    for host in ["h:80", "h.", "*h", "*", "*.", "a*.h", "h/x"] {
        fault(&[&format!("a {host} - /x")], "expected a host such as");
    }
    fault(&["a - - x"], "expected a path");
    fault(&["a - - /x*"], "`*` may only stand alone");
    fault(&["a - - //x"], "can never match");
    fault(&["a - - /x/../y"], "can never match");
    fault(&["a - - /x/{"], "is no path pattern");
    // The same path for other methods or hosts is no conflict; a literal beside `/*` is not either.
    check(&["a - GET /x", "b - POST /x", "c h - /x", "d - - /y/", "e - - /y/*"], &[("z GET /y/", "d")]);
}
