use super::*;
use crate::config;

const BASE: &str = "
upstreams: {u: {servers: [127.0.0.1:1]}}
routes:
  - {id: orders, match: {path: /orders}, upstream: u}
  - {id: items, match: {path: /items/*}, upstream: u, cost: 3, on_store_failure: deny}
  - {id: open, match: {path: /open}, upstream: u, tenant_rule: \"off\"}
rules:
";

fn build(rules: &str) -> Result<Snapshot, Vec<String>> {
    let config = config::read(&format!("{BASE}{rules}"), &|_| None).map_err(|faults| texts(&faults))?;
    Snapshot::build(&config, 1).map_err(|faults| texts(&faults))
}

fn texts(faults: &[Fault]) -> Vec<String> {
    faults.iter().map(ToString::to_string).collect()
}

fn route(snapshot: &Snapshot, id: &str) -> RouteId {
    let index = snapshot.routes.all().iter().position(|route| &*route.id == id).unwrap();
    RouteId::from_index(index).unwrap()
}

#[track_caller]
fn check(snapshot: &Snapshot, route_id: &str, tenant: &str, expect: (&str, u64)) {
    let checks = snapshot.checks(route(snapshot, route_id), tenant.as_bytes());
    assert_eq!((checks[0].key.as_str(), checks[0].limit.capacity()), expect);
}

#[test]
fn the_nearest_row_wins() {
    let snapshot = build(
        "  default: {capacity: 20, refill_per_second: 10}
  rows:
    - {tenant: a, route: orders, capacity: 101, refill_per_second: 1}
    - {tenant: a, capacity: 102, refill_per_second: 1}
    - {route: orders, capacity: 103, refill_per_second: 1}
    - {tenant: b, route: '*', capacity: 104, refill_per_second: 1}
    - {tenant: b, route: default, capacity: 105, refill_per_second: 1}",
    )
    .unwrap();
    check(&snapshot, "orders", "a", ("rl:{a}:orders", 101));
    check(&snapshot, "items", "a", ("rl:{a}:items", 102));
    check(&snapshot, "default", "a", ("rl:{a}:default", 102));
    check(&snapshot, "orders", "b", ("rl:{b}:orders", 104));
    check(&snapshot, "default", "b", ("rl:{b}:default", 105));
    let stranger = snapshot.checks(route(&snapshot, "orders"), b"zz");
    assert_eq!(stranger[0].limit.capacity(), 103);
    assert_eq!(snapshot.checks(route(&snapshot, "items"), b"zz")[0].limit.capacity(), 20);
    assert_eq!(snapshot.rows(), 5);
}

#[test]
fn strangers_are_hashed_and_known_tenants_are_not() {
    let snapshot = build("  rows: [{tenant: a, capacity: 5, refill_per_second: 1}]").unwrap();
    let orders = route(&snapshot, "orders");
    let key = |tenant: &[u8]| snapshot.checks(orders, tenant)[0].key.as_str().to_owned();
    assert_eq!(key(b"a"), "rl:{a}:orders");
    assert_eq!(key(b"anonymous"), "rl:{anonymous}:orders");
    assert!(key(b"stranger").starts_with("rl:{~"));
    assert!(!key(b"stranger").contains("stranger"));
    assert_ne!(key(b"stranger"), key(b"strangers"));
    assert_ne!(key(b"\xff\xfe"), key(b"\xff\xff"));
}

#[test]
fn what_a_route_says() {
    let snapshot = build("  on_store_failure: allow").unwrap();
    let checks = |id: &str| snapshot.checks(route(&snapshot, id), b"a");
    assert!(checks("open").is_empty());
    assert_eq!((checks("items")[0].cost, checks("items")[0].on_store_failure), (3, OnStoreFailure::Deny));
    assert_eq!((checks("orders")[0].cost, checks("orders")[0].on_store_failure), (1, OnStoreFailure::Allow));
}

#[test]
fn faults_name_their_place() {
    let faults = |rules: &str| build(rules).map(drop).unwrap_err();
    assert_eq!(
        faults("  rows:\n    - {tenant: a, route: nope, capacity: 5, refill_per_second: 1}"),
        ["9:26: rules.rows[0].route: there is no route with the id `nope`"]
    );
    assert_eq!(
        faults(
            "  rows:\n    - {tenant: a, capacity: 5, refill_per_second: 1}\n    - {tenant: a, route: '*', capacity: 6, refill_per_second: 1}"
        ),
        ["10:7: rules.rows[1]: a second row for the same tenant and route; the first one is at 9:7"]
    );
    assert_eq!(
        faults("  rows:\n    - {tenant: a, route: items, capacity: 2, refill_per_second: 1}"),
        ["9:43: rules.rows[0].capacity: 2 is below the cost 3 of the route `items`: it could never pass"]
    );
    assert_eq!(
        faults("  default: {capacity: 2, refill_per_second: 1}"),
        [
            "5:61: routes[1].cost: rules.default.capacity 2 is below the cost 3 of the route `items`: it could never pass"
        ]
    );
    // A row of its own for the dear route makes a small one for the other routes right.
    let own = "  rows:\n    - {tenant: a, route: items, capacity: 9, refill_per_second: 1}\n    - {tenant: a, capacity: 2, refill_per_second: 1}";
    assert!(build(own).is_ok());
}
