//! A gateway follows its master where the Sentinels say it is, and does not knock in vain.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use crate::harness::gateway::everything_to;
use crate::harness::sentinels::{MASTER, Sentinels};
use crate::harness::{Connection, FaultProxy, Gateway, Redis, Upstream, eventually, get};

const CAPACITY: usize = 100;
const RATE: usize = 50;

/// What a failover may cost: the replica may not have been told of anything.
const BEYOND: i64 = 104;

fn is_up(gateway: &Gateway) -> Option<()> {
    (get(gateway.admin, "/api/v1/status", "").json()["store"]["up"] == true).then_some(())
}

/// Load on two gateways while `change` runs: all answers but 200 and 429, and how many were admitted beyond
/// what the limit allows in that time.
fn under_load(gateways: &[Gateway; 2], change: impl FnOnce()) -> (Vec<u16>, i64, Duration) {
    let (stop, started) = (AtomicBool::new(false), Instant::now());
    let statuses: Vec<(u16, Duration)> = thread::scope(|scope| {
        let clients: Vec<_> = gateways
            .iter()
            .map(|gateway| {
                let (port, stop) = (gateway.port, &stop);
                scope.spawn(move || {
                    let (mut client, mut statuses) = (Connection::open(port), Vec::new());
                    while !stop.load(Ordering::Relaxed) {
                        let asked = Instant::now();
                        statuses.push((client.ask("GET", "/", "limited").status, asked.elapsed()));
                        thread::sleep(Duration::from_millis(3));
                    }
                    statuses
                })
            })
            .collect();
        thread::sleep(Duration::from_millis(300));
        let changed = std::panic::catch_unwind(std::panic::AssertUnwindSafe(change));
        stop.store(true, Ordering::Relaxed);
        let statuses = clients.into_iter().flat_map(|client| client.join().unwrap()).collect();
        if let Err(panic) = changed {
            std::panic::resume_unwind(panic);
        }
        statuses
    });
    let admitted = statuses.iter().filter(|(status, _)| *status == 200).count();
    let ideal = CAPACITY as f64 + RATE as f64 * started.elapsed().as_secs_f64();
    let other =
        statuses.iter().map(|(status, _)| *status).filter(|status| !matches!(status, 200 | 429)).collect();
    (other, (admitted as f64 - ideal) as i64, statuses.iter().map(|(_, took)| *took).max().unwrap())
}

#[test]
fn masters_change_under_load() {
    let (mut world, upstream) = (Sentinels::start(), Upstream::start());
    let rows = format!("  rows: [{{tenant: limited, capacity: {CAPACITY}, refill_per_second: {RATE}}}]");
    let rules = everything_to(&upstream, &rows);
    let gateways = [Gateway::start(&world.store(), &rules), Gateway::start(&world.store(), &rules)];
    for gateway in &gateways {
        eventually("both are counted", || (gateway.metric("tollgate_live_gateways") == 2).then_some(()));
    }
    let on_master = |world: &Sentinels| {
        let address = format!("127.0.0.1:{}", world.data[world.master().unwrap()].port);
        for gateway in &gateways {
            eventually("a gateway on the new master", || {
                let store = get(gateway.admin, "/api/v1/status", "").json()["store"].clone();
                (store["up"] == true && store["nodes"][0]["address"] == *address).then_some(())
            });
        }
    };
    on_master(&world);

    let first = world.master().unwrap();
    let (other, beyond, slowest) = under_load(&gateways, || {
        let _: String = world.sentinels[0].command(&["SENTINEL", "FAILOVER", MASTER]);
        eventually("a failover", || (world.master() == Some(1 - first)).then_some(()));
        let changed = Instant::now();
        on_master(&world);
        println!("SENTINEL FAILOVER: on the new master {:.1?} later", changed.elapsed());
        assert!(changed.elapsed() < Duration::from_secs(3), "{:?}", changed.elapsed());
    });
    println!("SENTINEL FAILOVER: {beyond} beyond the limit, slowest {slowest:.0?}");
    assert!(other.is_empty() && beyond <= BEYOND, "{other:?}, {beyond} beyond the limit");

    // The Sentinels make the old one a replica of the new one; then that one dies.
    eventually("a replica again", || {
        let info: String = world.data[first].command(&["INFO", "replication"]);
        info.contains("master_link_status:up").then_some(())
    });
    for sentinel in &world.sentinels {
        eventually("all Sentinels know it", || {
            let told: Vec<String> = sentinel.command(&["SENTINEL", "GET-MASTER-ADDR-BY-NAME", MASTER]);
            (told[1] == world.data[1 - first].port.to_string()).then_some(())
        });
    }
    let (data, sentinels) = (&mut world.data, &world.sentinels);
    let (dead, heir) = (1 - first, first);
    let (other, beyond, slowest) = under_load(&gateways, || {
        data[dead].kill();
        let killed = Instant::now();
        eventually("a failover", || {
            let info: String = data[heir].command(&["INFO", "replication"]);
            info.contains("role:master").then_some(())
        });
        let changed = Instant::now();
        for gateway in &gateways {
            eventually("a gateway that is back", || is_up(gateway));
        }
        println!("kill -9: failed over after {:.1?}, back {:.1?} later", changed - killed, changed.elapsed());
        assert!(changed.elapsed() < Duration::from_secs(3), "{:?}", changed.elapsed());
    });
    println!("kill -9: {beyond} beyond the limit, slowest {slowest:.0?}");
    assert!(other.is_empty() && beyond <= BEYOND, "{other:?}, {beyond} beyond the limit");

    // Without Sentinels the last word holds.
    let names = sentinels.len();
    world.sentinels.clear();
    thread::sleep(Duration::from_millis(1_500));
    for gateway in &gateways {
        assert!(is_up(gateway).is_some(), "of {names} Sentinels none is needed to go on");
    }
}

/// B059: the Sentinels keep naming a replica. That is looked at now and then, and no more.
#[test]
fn b059_a_replica_is_named_for_long() {
    let (world, upstream) = (Sentinels::start(), Upstream::start());
    let replica = FaultProxy::to(world.data[1].port);
    let text = format!(
        "sentinel monitor {MASTER} 127.0.0.1 {} 1\nsentinel down-after-milliseconds {MASTER} 60000\n",
        replica.port
    );
    let liar = Redis::of_file("redis-server", &text, &["--sentinel"]);
    liar.wait();
    let before = replica.connections();
    let store = format!("{{redis: {{sentinel: {{master: {MASTER}, nodes: ['{}']}}}}}}", liar.url());
    let gateway =
        Gateway::start(&store, &everything_to(&upstream, "  default: {capacity: 5, refill_per_second: 1/h}"));
    let statuses: Vec<u16> = (0..8).map(|_| gateway.get("/", "a").status).collect();
    assert_eq!(statuses, [200, 200, 200, 200, 200, 429, 429, 429]);
    let started = Instant::now();
    thread::sleep(Duration::from_secs(8));
    let connections = replica.connections() - before;
    // The Sentinel itself has two.
    println!("{connections} connections in {:?}", started.elapsed());
    assert!(connections <= 12, "{connections}");
    assert!(gateway.metric("tollgate_store_errors_total{kind=\"readonly\"}") > 0);
    let nodes = get(gateway.admin, "/api/v1/status", "").json()["store"]["nodes"].clone();
    assert!(nodes[0]["trouble"].as_str().unwrap().contains("it is a replica"), "{nodes}");
}
