use super::*;
use crate::book::TenantRecord;
use crate::config::{self, Terms};

const NOW: Timestamp = Timestamp::from_micros(1_764_000_000_000_000);

const BASE: &str = "
upstreams: {u: {servers: [127.0.0.1:1]}}
routes:
  - {id: orders, match: {path: /orders}, upstream: u}
  - {id: items, match: {path: /items/*}, upstream: u, cost: 3, on_store_failure: deny}
  - {id: open, match: {path: /open}, upstream: u, tenant_rule: \"off\"}
rules:
";

/// What a request from somewhere asks for on a route.
fn asked<'r>(headers: &'r http::HeaderMap, snapshot: &Snapshot, id: &str) -> Asked<'r> {
    let cost = snapshot.routes.get(route(snapshot, id)).cost;
    Asked { headers, path: "/", client: std::net::IpAddr::from([192, 0, 2, 1]), cost }
}

fn build(rules: &str) -> Result<Snapshot, Vec<String>> {
    let config = config::read(&format!("{BASE}{rules}"), &|_| None).map_err(|faults| texts(&faults))?;
    Snapshot::build(&config, &Book::default(), 1).map_err(|faults| texts(&faults))
}

fn texts(faults: &[Fault]) -> Vec<String> {
    faults.iter().map(ToString::to_string).collect()
}

fn route(snapshot: &Snapshot, id: &str) -> RouteId {
    let index = snapshot.routes.all().iter().position(|route| &*route.id == id).unwrap();
    RouteId::from_index(index).unwrap()
}

fn checks_of(snapshot: &Snapshot, id: &str, tenant: &[u8]) -> Checks {
    snapshot
        .checks(
            route(snapshot, id),
            &snapshot.tenant(tenant),
            &asked(&http::HeaderMap::new(), snapshot, id),
            NOW,
            &mut |_| {},
        )
        .unwrap()
}

#[track_caller]
fn check(snapshot: &Snapshot, route_id: &str, tenant: &str, expect: (&str, u64)) {
    let checks = checks_of(snapshot, route_id, tenant.as_bytes());
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
    let stranger = checks_of(&snapshot, "orders", b"zz");
    assert_eq!(stranger[0].limit.capacity(), 103);
    assert_eq!(checks_of(&snapshot, "items", b"zz")[0].limit.capacity(), 20);
    assert_eq!(snapshot.rows(), 5);
}

#[test]
fn strangers_are_hashed_and_known_tenants_are_not() {
    let snapshot = build("  rows: [{tenant: a, capacity: 5, refill_per_second: 1}]").unwrap();
    let key = |tenant: &[u8]| checks_of(&snapshot, "orders", tenant)[0].key.as_str().to_owned();
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
    let checks = |id: &str| checks_of(&snapshot, id, b"a");
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

fn terms(capacity: u64) -> Terms {
    let bucket = crate::limit::token_bucket::TokenBucket::new(capacity, "1".parse().unwrap()).unwrap();
    Terms::of(bucket)
}

fn row(holder: Holder, route: Option<&str>, terms: Terms) -> Option<BookRow> {
    BookRow { holder, route: route.map(Into::into), terms: Ok(Arc::new(terms)) }.into()
}

/// (tenant, route) > (tenant, any) > (plan, route) > (plan, any) > (route) > default, the database
/// before the file, and what is taken away leaves what was behind it.
#[test]
fn precedence_of_a_database_and_the_file() {
    let mut snapshot = build(
        "  default: {capacity: 20, refill_per_second: 10}
  rows: [{tenant: a, route: orders, capacity: 101, refill_per_second: 1}]",
    )
    .unwrap();
    let mut book = Book::default();
    let tenant = || Holder::Tenant("a".into());
    let plan = || Holder::Plan("pro".into());
    let steps = [
        (RowId::Rule(1), row(Holder::Anyone, None, terms(30)), 101, 30),
        (RowId::Rule(2), row(Holder::Anyone, Some("items"), terms(40)), 101, 40),
        (RowId::Plan(1), row(plan(), None, terms(50)), 101, 50),
        (RowId::Plan(2), row(plan(), Some("items"), terms(60)), 101, 60),
        (RowId::Rule(3), row(tenant(), None, terms(70)), 101, 70),
        (RowId::Rule(4), row(tenant(), Some("items"), terms(80)), 101, 80),
        (RowId::Rule(5), row(tenant(), Some("orders"), terms(90)), 90, 80),
        (RowId::Rule(5), None, 101, 80),
        (RowId::Rule(4), None, 101, 70),
        (RowId::Rule(3), None, 101, 60),
        (RowId::Plan(2), None, 101, 50),
    ];
    let record = TenantRecord { plan: Some("pro".into()), suspended: false };
    snapshot = snapshot.with_changes(&mut book, &[Change::Tenant("a".into(), Some(record))]);
    for (id, row, orders, items) in steps {
        snapshot = snapshot.with_changes(&mut book, &[Change::Row(id, row)]);
        check(&snapshot, "orders", "a", ("rl:{a}:orders", orders));
        check(&snapshot, "items", "a", ("rl:{a}:items", items));
        let whole = snapshot.with_book(&book);
        check(&whole, "orders", "a", ("rl:{a}:orders", orders));
        check(&whole, "items", "a", ("rl:{a}:items", items));
        assert_eq!(whole.rows(), snapshot.rows());
    }
}

#[test]
fn a_bad_row_takes_no_other_down() {
    let snapshot = build("  on_store_failure: local").unwrap();
    let mut book = Book::default();
    let tenant = || Holder::Tenant("a".into());
    let changes = [
        Change::Row(RowId::Rule(1), row(tenant(), Some("nowhere"), terms(5))),
        Change::Row(RowId::Rule(2), row(tenant(), Some("items"), terms(2))),
        Change::Row(
            RowId::Rule(3),
            Some(BookRow { holder: tenant(), route: None, terms: Err("nonsense".into()) }),
        ),
        Change::Row(RowId::Rule(4), row(tenant(), Some("orders"), terms(6))),
    ];
    let snapshot = snapshot.with_changes(&mut book, &changes);
    check(&snapshot, "orders", "a", ("rl:{a}:orders", 6));
    assert_eq!((snapshot.rows(), snapshot.skipped.size()), (1, 3));
    let reason = |id| snapshot.skipped.get(&RowId::Rule(id)).unwrap().reason.to_string();
    assert_eq!(reason(1), "there is no route with the id `nowhere`");
    assert_eq!(reason(2), "the capacity 2 is below the cost 3 of the route `items`");
    assert_eq!(reason(3), "nonsense");
    let mended = [Change::Row(RowId::Rule(1), row(tenant(), Some("default"), terms(5)))];
    assert_eq!(snapshot.with_changes(&mut book, &mended).skipped.size(), 2);
}

#[test]
fn a_row_counts_within_its_time() {
    let snapshot = build(
        "  rows:
    - {tenant: a, capacity: 100, refill_per_second: 1}
    - {tenant: a, route: orders, capacity: 500, refill_per_second: 1,
       valid_from: '2025-11-24T16:00:00Z', valid_until: '2025-11-24T16:00:01Z'}",
    )
    .unwrap();
    let capacity = |micros: u64| {
        let at = Timestamp::from_rfc3339("2025-11-24T16:00:00Z").unwrap().plus_micros(micros);
        let orders = route(&snapshot, "orders");
        snapshot.tenant_checks(orders, &snapshot.tenant(&b"a"[..]), 1, at)[0].limit.capacity()
    };
    assert_eq!((capacity(0), capacity(999_999), capacity(1_000_000)), (500, 500, 100));
}

#[test]
fn modes_and_candidates() {
    let snapshot = build(
        "  rows:
    - {tenant: s, capacity: 5, refill_per_second: 1, mode: shadow}
    - {tenant: x, capacity: 5, refill_per_second: 1, mode: \"off\"}
    - {tenant: c, capacity: 5, refill_per_second: 1, candidate: {capacity: 3, refill_per_second: 2}}",
    )
    .unwrap();
    assert_eq!(checks_of(&snapshot, "orders", b"s")[0].demand, Demand::Shadow);
    assert!(checks_of(&snapshot, "orders", b"x").is_empty());
    let checks = checks_of(&snapshot, "orders", b"c");
    assert_eq!((checks[0].demand, checks[1].demand), (Demand::Take, Demand::Shadow));
    assert_eq!(checks[1].key.as_str(), "rl:{c}:orders:candidate");
    assert_eq!((checks[0].limit.capacity(), checks[1].limit.capacity()), (5, 3));
}

/// The same subjects stay in as the share grows.
#[test]
fn a_share_of_subjects_is_stable() {
    let among = |percent: u8| -> Vec<u32> {
        (0..10_000).filter(|n| is_among(format!("shop-{n}").as_bytes(), percent)).collect()
    };
    let mut smaller = among(0);
    assert!(smaller.is_empty());
    for percent in [1, 10, 50, 99, 100] {
        let larger = among(percent);
        let expect = usize::from(percent) * 100;
        assert!(larger.len().abs_diff(expect) <= 100, "{percent} %: {}", larger.len());
        assert!(smaller.iter().all(|n| larger.contains(n)));
        smaller = larger;
    }
}
