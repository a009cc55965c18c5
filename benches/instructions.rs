//! Instructions of what every request pays, counted by callgrind: `scripts/count-instructions`. They are the same on
//! a busy machine as on a quiet one, so a change of some per cent is one of the code.
//!
//! `instructions CASE TIMES` does one thing so many times. What comes before is paid once, so the difference
//! of two runs is the thing alone. Without arguments it lists the cases.

#![expect(
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "a bench may stop at the first thing that is wrong, and says so on the terminal"
)]

use std::hint::black_box;
use std::sync::Arc;
use std::time::Duration;

use pingora::http::ResponseHeader;
use redis::Value;
use smallvec::smallvec;
use tollgate::book::Book;
use tollgate::clock::{ManualClock, Timestamp};
use tollgate::config;
use tollgate::decision::{Admission, Basis, Decision};
use tollgate::denials::Denials;
use tollgate::gateways::Gateways;
use tollgate::hot_keys::HotKeys;
use tollgate::leases::Leases;
use tollgate::limit::{Outcome, Verdict};
use tollgate::metrics::Metrics;
use tollgate::proxy::headers;
use tollgate::route::{RouteId, path};
use tollgate::rule::Checks;
use tollgate::snapshot::{Asked, Snapshot};
use tollgate::store::memory::MemoryStore;
use tollgate::store::redis::script::Flight;

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

const NOW: Timestamp = Timestamp::from_micros(1_764_000_000_000_000);

/// Requests of one flight, as many as share one under load.
const ON_BOARD: usize = 16;

type Case = (&'static str, fn(u32));

const CASES: [Case; 8] = [
    ("find_checks", find_checks),
    ("decide_in_memory", decide_in_memory),
    ("decide_on_a_lease", decide_on_a_lease),
    ("refuse_by_a_denial", refuse_by_a_denial),
    ("write_headers", write_headers),
    ("normalise_a_path", normalise_a_path),
    ("encode_a_flight_of_16", encode_a_flight),
    ("decode_a_flight_of_16", decode_a_flight),
];

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).filter(|word| !word.starts_with("--")).collect();
    let case = arguments.first().and_then(|name| CASES.iter().find(|(known, _)| known == name));
    match (case, arguments.get(1).and_then(|times| times.parse().ok())) {
        (Some((_, run)), Some(times)) => run(times),
        _ => CASES.iter().for_each(|(name, _)| println!("{name}")),
    }
}

fn snapshot() -> Snapshot {
    let mut text = String::from(
        "upstreams: {u: {servers: [127.0.0.1:1]}}\nroutes: [{id: orders, match: {path: /orders/*}, upstream: u}]\nrules:\n  rows:\n",
    );
    for tenant in 0..1_000 {
        text += &format!(
            "    - {{tenant: tenant-{tenant}, route: orders, capacity: 1000000000, refill_per_second: 1000000}}\n"
        );
    }
    let config = config::read(&text, &|_| None).unwrap();
    Snapshot::build(&config, &Book::default(), 1).unwrap()
}

fn checks(snapshot: &Snapshot, tenant: &str) -> Checks {
    let headers = http::HeaderMap::new();
    let asked = Asked { headers: &headers, path: "/orders/7", client: [192, 0, 2, 1].into(), cost: 1 };
    let route = RouteId::from_index(1).unwrap();
    snapshot.checks(route, &snapshot.tenant(tenant.as_bytes()), &asked, NOW, &mut |_| {}).unwrap()
}

fn memory() -> MemoryStore {
    MemoryStore::new(10_000, Arc::new(ManualClock::at(NOW)))
}

fn find_checks(times: u32) {
    let snapshot = snapshot();
    for _ in 0..times {
        black_box(checks(&snapshot, black_box("tenant-500")));
    }
}

fn decide_in_memory(times: u32) {
    let (checks, store) = (checks(&snapshot(), "tenant-500"), memory());
    for _ in 0..times {
        black_box(store.take(&checks));
    }
}

fn decide_on_a_lease(times: u32) {
    let checks = checks(&snapshot(), "tenant-500");
    let settings = config::HotKeys {
        threshold: 1,
        window: Duration::from_secs(1),
        epsilon_ppm: 1_000_000,
        lease_for: Duration::from_secs(1),
    };
    let hot_keys = HotKeys::new(settings.threshold, settings.window);
    let leases = Leases::new(&settings, Arc::new(Gateways::fixed(1)), Metrics::new().unwrap().leases);
    let check = &checks[0];
    let mut taken = 0;
    for turn in 0..u64::from(times) + 2_000 {
        let now = NOW.plus_micros(turn * 50);
        let heat = hot_keys.see(&check.key, check.cost, now);
        taken += u32::from(heat.and_then(|heat| leases.take(check, heat.tokens, now)).is_some());
        for order in leases.take_orders() {
            let outcome = Outcome::Leased(order.check.cost);
            let told = Verdict { outcome, remaining: 1_000_000_000, retry_after_ms: 0, reset_ms: 0 };
            leases.land(&order, Some(told), now);
        }
    }
    assert!(taken >= times, "{taken} of {times} were served from a lease");
}

fn refuse_by_a_denial(times: u32) {
    let checks = checks(&snapshot(), "tenant-500");
    let refused = Verdict { outcome: Outcome::Refused, remaining: 0, retry_after_ms: 900, reset_ms: 900 };
    let refusal = Decision::from_verdicts(Basis::Store, &checks, smallvec![refused]);
    let denials = Denials::default();
    denials.note(&checks, &refusal, NOW, NOW);
    for _ in 0..times {
        let told = black_box(denials.refuse(&checks, NOW)).unwrap();
        assert_eq!(told.admission, Admission::Refused);
    }
}

fn write_headers(times: u32) {
    let checks = checks(&snapshot(), "tenant-500");
    let decided = (checks.clone(), Decision::from_verdicts(Basis::Store, &checks, memory().take(&checks)));
    let families = config::Headers { x_ratelimit: true, ratelimit_legacy: false, ratelimit_draft: true };
    for _ in 0..times {
        let mut response = ResponseHeader::build(200, Some(8)).unwrap();
        headers::write(&mut response, &families, Some(&decided)).unwrap();
        black_box(response);
    }
}

fn normalise_a_path(times: u32) {
    for _ in 0..times {
        let _ = black_box(path::normalise(black_box("/orders/2026/11/item-1234567")));
    }
}

fn flight() -> Flight {
    let (snapshot, mut flight) = (snapshot(), Flight::new());
    for tenant in 0..ON_BOARD {
        flight.board(checks(&snapshot, &format!("tenant-{tenant}")));
    }
    flight
}

fn encode_a_flight(times: u32) {
    let flight = flight();
    for _ in 0..times {
        black_box(flight.command("0123456789abcdef0123456789abcdef01234567").get_packed_command());
    }
}

fn decode_a_flight(times: u32) {
    let flight = flight();
    let verdict = [1, 41, 0, 590].map(Value::Int);
    let told = std::iter::once(Value::Int(1_764_000_000_000_000)).chain(vec![verdict; ON_BOARD].concat());
    let reply = Value::Array(told.collect());
    for _ in 0..times {
        black_box(flight.answers(&reply));
    }
}
