//! What every request pays: deciding in memory, finding the checks among 500,000 rows, headers.
//!
//! `cargo bench`; `cargo bench -- load` for the time that a large file takes to load.

#![expect(clippy::unwrap_used, reason = "a bench may stop at the first thing that is wrong")]

use std::sync::Arc;

use divan::{Bencher, black_box};
use pingora::http::ResponseHeader;
use tollgate::book::{Book, BookRow, Change, Holder, RowId};
use tollgate::clock::{SystemClock, Timestamp};
use tollgate::config::{self, Config, Terms};
use tollgate::decision::{Basis, Decision};
use tollgate::proxy::headers;
use tollgate::route::RouteId;
use tollgate::rule::Checks;
use tollgate::snapshot::{Asked, Snapshot};
use tollgate::store::memory::MemoryStore;
use tollgate::store::redis::script::Flight;

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

const TENANTS: usize = 100_000;
const NOW: Timestamp = Timestamp::from_micros(1_764_000_000_000_000);

fn main() {
    divan::main();
}

/// 100,000 tenants with a row for each of 5 routes.
fn text(tenants: usize) -> String {
    use std::fmt::Write as _;
    let mut text = String::from("upstreams: {u: {servers: [127.0.0.1:1]}}\nroutes:\n");
    for route in 0..5 {
        writeln!(text, "  - {{id: route-{route}, match: {{path: /r{route}/*}}, upstream: u}}").unwrap();
    }
    text.push_str("rules:\n  rows:\n");
    for tenant in 0..tenants {
        for route in 0..5 {
            let capacity = 100 + tenant % 7;
            writeln!(
                text,
                "    - {{tenant: tenant-{tenant}, route: route-{route}, capacity: {capacity}, refill_per_second: 50}}"
            )
            .unwrap();
        }
    }
    text
}

fn config(tenants: usize) -> Config {
    config::read(&text(tenants), &|_| None).unwrap()
}

fn snapshot(tenants: usize) -> Snapshot {
    Snapshot::build(&config(tenants), &Book::default(), 1).unwrap()
}

fn checks(snapshot: &Snapshot, tenant: &str) -> Checks {
    let headers = http::HeaderMap::new();
    let asked = Asked { headers: &headers, path: "/", client: [192, 0, 2, 1].into(), cost: 1 };
    snapshot.checks(route(), &snapshot.tenant(tenant.as_bytes()), &asked, NOW, &mut |_| {}).unwrap()
}

fn route() -> RouteId {
    RouteId::from_index(3).unwrap()
}

#[divan::bench]
fn checks_among_500_000_rows(bencher: Bencher) {
    let snapshot = snapshot(TENANTS);
    let names: Vec<String> = (0..10_007).map(|step| format!("tenant-{}", step * 7_919 % TENANTS)).collect();
    let mut next = 0;
    bencher.bench_local(|| {
        next = (next + 1) % names.len();
        black_box(checks(&snapshot, &names[next]))
    });
}

#[divan::bench]
fn checks_of_a_stranger(bencher: Bencher) {
    let snapshot = snapshot(10);
    bencher.bench(|| black_box(checks(&snapshot, black_box("an-api-key-nobody-knows"))));
}

#[divan::bench]
fn find_a_route(bencher: Bencher) {
    let snapshot = snapshot(1);
    bencher.bench(|| snapshot.routes.find(black_box("host"), black_box("GET"), black_box("/r3/some/item")));
}

#[divan::bench]
fn decide_in_memory(bencher: Bencher) {
    let snapshot = snapshot(1_000);
    let store = MemoryStore::new(100_000, Arc::new(SystemClock::start()));
    let checks: Vec<_> = (0..1_000).map(|tenant| checks(&snapshot, &format!("tenant-{tenant}"))).collect();
    let mut next = 0;
    bencher.bench_local(|| {
        next = (next + 1) % checks.len();
        black_box(store.take(&checks[next]))
    });
}

#[divan::bench]
fn render_headers(bencher: Bencher) {
    let snapshot = snapshot(1);
    let checks = checks(&snapshot, "tenant-0");
    let store = MemoryStore::new(10, Arc::new(SystemClock::start()));
    let decided = (checks.clone(), Decision::from_verdicts(Basis::Store, &checks, store.take(&checks)));
    let families = config::Headers { x_ratelimit: true, ratelimit_legacy: false, ratelimit_draft: true };
    bencher.with_inputs(|| ResponseHeader::build(200, Some(8)).unwrap()).bench_values(|mut response| {
        headers::write(&mut response, &families, Some(&decided)).unwrap();
        response
    });
}

#[divan::bench]
fn encode_a_flight_of_16(bencher: Bencher) {
    let snapshot = snapshot(16);
    bencher
        .with_inputs(|| {
            let mut flight = Flight::new();
            for tenant in 0..16 {
                flight.board(checks(&snapshot, &format!("tenant-{tenant}")));
            }
            flight
        })
        .bench_refs(|flight| flight.command("0123456789abcdef0123456789abcdef01234567").get_packed_command());
}

/// From rows to a snapshot: what a reload pays after the file is read.
#[divan::bench(sample_count = 5, sample_size = 1)]
fn load_snapshot_of_500_000_rows(bencher: Bencher) {
    let config = config(TENANTS);
    bencher.bench(|| Snapshot::build(&config, &Book::default(), 1).unwrap());
}

/// A hundred changed rows among half a million: what a refresh from the database pays.
#[divan::bench]
fn change_100_of_500_000_rows(bencher: Bencher) {
    let snapshot = snapshot(TENANTS);
    let mut book = Book::default();
    let bucket = tollgate::config::built_in_default();
    let row = |tenant: i64| {
        let holder = Holder::Tenant(format!("tenant-{}", tenant * 997).into());
        let terms = Ok(Arc::new(Terms::of(bucket)));
        Change::Row(RowId::Rule(tenant), Some(BookRow { holder, route: Some("route-1".into()), terms }))
    };
    let changes: Vec<Change> = (0..100).map(row).collect();
    bencher.bench_local(|| black_box(snapshot.with_changes(&mut book, &changes)));
}

/// From the text of a file to rows: 45 MB of YAML.
#[divan::bench(sample_count = 3, sample_size = 1)]
fn load_yaml_of_500_000_rows(bencher: Bencher) {
    let text = text(TENANTS);
    bencher.bench(|| config::read(&text, &|_| None).unwrap());
}
