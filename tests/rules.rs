//! Rules from a real PostgreSQL, while gateways run: changes are seen, and its faults are not.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use crate::harness::gateway::on;
use crate::harness::world::{World, limit, soon};
use crate::harness::{Connection, Gateway, Postgres, eventually, get};

/// The four columns of the design are all it takes; an UPDATE keeps the tokens, a DELETE goes back.
#[test]
fn rows_by_hand_hold_at_once_on_every_gateway() {
    let world = World::new();
    let gateways = [world.gateway(), world.gateway()];
    let all = |what: &str, expected: u64| {
        for gateway in &gateways {
            soon(what, &expected, || limit(gateway, "/orders", "shop-a"));
        }
    };
    all("the default", 20);
    world.postgres.sql(
        "INSERT INTO rate_limit_rule (tenant_id, route_id, capacity, refill_per_second) VALUES ('shop-a','create-order',100,1)",
    );
    all("the row", 100);
    assert_eq!(limit(&gateways[0], "/else", "shop-a"), 20);

    // B095: 80 left of 100; 50 clamps them at once, 200 gives none.
    let left = || gateways[1].get("/orders", "shop-a").number("x-ratelimit-remaining");
    while left() > 80 {}
    world.postgres.sql("UPDATE rate_limit_rule SET capacity = 50");
    all("the smaller one", 50);
    assert!((40..=50).contains(&left()), "{}", left());
    world.postgres.sql("UPDATE rate_limit_rule SET capacity = 200");
    all("the larger one", 200);
    assert!(left() <= 52, "{}", left());

    world.postgres.sql("DELETE FROM rate_limit_rule");
    all("the default again", 20);
    world.postgres.sql("INSERT INTO rate_limit_rule (tenant_id, route_id, capacity, refill_per_second) SELECT 'shop-a', '*', 7, 1");
    all("any route", 7);
    world.postgres.sql("TRUNCATE rate_limit_rule");
    all("nothing", 20);
}

/// B097: once a gateway says that it has a version, nothing is decided by an older one.
#[test]
fn no_old_rule_after_the_new_version_is_told() {
    let world = World::new();
    let gateways = [world.gateway(), world.gateway(), world.gateway()];
    let insert = "INSERT INTO rate_limit_rule (tenant_id, route_id, capacity, refill_per_second) VALUES ('t','*',1000000,1000)";
    world.postgres.sql(insert);
    let version = |gateway: &Gateway| {
        get(gateway.admin, "/api/v1/status", "").json()["database"]["version"].as_i64().unwrap()
    };
    let asking = AtomicUsize::new(0);
    thread::scope(|scope| {
        for gateway in &gateways {
            let asking = &asking;
            scope.spawn(move || {
                soon("version 1", &1, || version(gateway));
                let mut connection = Connection::open(gateway.port);
                let started = Instant::now();
                asking.fetch_add(1, Ordering::Relaxed);
                while version(gateway) < 2 {
                    connection.ask("GET", "/", "t");
                    assert!(started.elapsed() < Duration::from_secs(10), "never came");
                }
                for _ in 0..50 {
                    assert_eq!(connection.ask("GET", "/", "t").number("x-ratelimit-limit"), 3);
                }
            });
        }
        eventually("all of them ask", || (asking.load(Ordering::Relaxed) == gateways.len()).then_some(()));
        world.postgres.sql("UPDATE rate_limit_rule SET capacity = 3");
    });
}

/// Transactions do not end in the order in which they began: none is missed.
#[test]
fn commits_out_of_order_are_all_seen() {
    let world = World::new();
    let gateway = world.gateway();
    thread::scope(|scope| {
        scope.spawn(|| {
            world.postgres.sql(
                "BEGIN; INSERT INTO rate_limit_rule (tenant_id, route_id, capacity, refill_per_second) VALUES ('slow','*',11,1);
                 SELECT pg_sleep(1.5); COMMIT",
            )
        });
        let begun = "SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'PgSleep'";
        eventually("the slow transaction", || (world.postgres.sql(begun) == "1").then_some(()));
        for tenant in ["a", "b", "c"] {
            world.postgres.sql(&format!(
                "INSERT INTO rate_limit_rule (tenant_id, route_id, capacity, refill_per_second) VALUES ('{tenant}','*',12,1)"
            ));
            soon(tenant, &12, || limit(&gateway, "/", tenant));
        }
        assert_eq!(limit(&gateway, "/", "slow"), 20);
    });
    soon("the first one that was begun", &11, || limit(&gateway, "/", "slow"));
}

/// A pooler in transaction mode passes no notification on: then it is the looking that finds changes.
#[test]
fn without_notifications_changes_are_found_by_looking() {
    let world = World::new();
    world.postgres.sql("CREATE OR REPLACE FUNCTION pg_temp.nothing() RETURNS void LANGUAGE sql AS 'SELECT'");
    let source = world.postgres.sql("SELECT prosrc FROM pg_proc WHERE proname = 'tollgate_version'");
    let silent = source.replace("PERFORM pg_notify('tollgate_rules', known::text);", "");
    assert_ne!(source, silent);
    world.postgres.sql(&format!(
        "CREATE OR REPLACE FUNCTION tollgate_version() RETURNS bigint LANGUAGE plpgsql AS $body${silent}$body$"
    ));
    let config = world.config("", "").replace("cache:", "refresh: 200ms, cache:");
    let gateway = Gateway::start(&on(&world.redis), &config);
    world.postgres.sql("INSERT INTO rate_limit_rule (tenant_id, route_id, capacity, refill_per_second) VALUES ('t','*',33,1)");
    soon("the row", &33, || limit(&gateway, "/", "t"));
}

/// Rows that were put in around the checks, or that name no route, take no other down; they are counted
/// and named (B089).
#[test]
fn a_bad_row_is_skipped_and_named() {
    let world = World::new();
    let gateway = world.gateway();
    world.postgres.sql(
        "DO $$ DECLARE c text; BEGIN
           FOR c IN SELECT conname FROM pg_constraint WHERE conrelid = 'rate_limit_rule'::regclass AND contype = 'c' LOOP
             EXECUTE format('ALTER TABLE rate_limit_rule DROP CONSTRAINT %I', c);
           END LOOP;
         END $$;
         ALTER TABLE rate_limit_rule ALTER capacity DROP NOT NULL, ALTER refill_per_second TYPE numeric;
         INSERT INTO rate_limit_rule (tenant_id, route_id, capacity, refill_per_second, mode) VALUES
           ('good','*',31,1,'enforce'), ('a','no-such-route',5,1,'enforce'), ('b','*',-5,1,'enforce'),
           ('c','*',9007199254740993,1,'enforce'), ('d','*',NULL,1,'enforce'), ('e','*',5,'NaN','enforce'),
           ('f','*',5,0.5,'enforce'), ('g','*',5,1,'observe'), ('h','*',5,0,'enforce');
         INSERT INTO rate_limit_rule (tenant_id, route_id, capacity, refill_per_second, valid_from, valid_until) VALUES
           ('parked','*',5,1,'infinity',NULL), ('late','*',32,1,'-infinity','294276-12-31'), ('past','*',5,1,NULL,'-infinity');
         UPDATE rate_limit_rule SET valid_until = 'infinity', valid_from = '-infinity' WHERE tenant_id = 'good';
         ALTER TABLE rate_limit_rule ALTER tenant_id DROP NOT NULL;
         INSERT INTO rate_limit_rule (tenant_id, route_id, capacity, refill_per_second) VALUES (NULL,'*',5,1);
         ALTER TABLE api_keys DROP CONSTRAINT api_keys_key_hash_check;
         INSERT INTO api_keys (key_hash, tenant) VALUES ('short', 't')",
    );
    soon("the good one", &31, || limit(&gateway, "/", "good"));
    assert_eq!(
        (limit(&gateway, "/", "late"), limit(&gateway, "/", "parked"), limit(&gateway, "/", "past")),
        (32, 20, 20)
    );
    assert_eq!(gateway.metric("tollgate_rules_skipped"), 9);
    let rules = get(gateway.admin, "/api/v1/rules", "").json();
    let reasons: Vec<String> = rules["skipped"]
        .as_array()
        .unwrap()
        .iter()
        .map(|row| format!("{} {}", row["tenant"].as_str().unwrap(), row["reason"].as_str().unwrap()))
        .collect();
    for expected in [
        "a there is no route with the id `no-such-route`",
        "b capacity: expected a whole number above 0, got `-5`",
        "c capacity or rate: must be at most 9007199254740992 (2^53), the largest number that is counted exactly",
        "d capacity: expected a whole number above 0, got nothing",
        "e refill_per_second: expected a whole number above 0, got `NaN`",
        "f refill_per_second: expected a whole number above 0, got `0.5`",
        "g mode: expected enforce, shadow or off, got `observe`",
        "h refill_per_second: expected a whole number above 0, got `0`",
        " expected a tenant or plan, and a route; * is any",
    ] {
        assert!(reasons.iter().any(|reason| reason == expected), "{expected} is not in {reasons:?}");
    }
    assert!(gateway.log().contains("no-such-route"));
    assert_eq!(limit(&gateway, "/", "a"), 20);
    // A route that comes makes the row right.
    gateway.write(&world.config("", "").replace("id: other", "id: no-such-route"));
    gateway.reload();
    soon("with its route", &5, || limit(&gateway, "/", "a"));
    eventually("a whole look", || (gateway.metric("tollgate_rules_skipped") == 8).then_some(()));
    assert_eq!(limit(&gateway, "/", "good"), 31, "and the whole look, too, goes by them");
}

/// B099: the connection that listens is cut again and again, and the server is stopped: changes are seen.
#[test]
fn a_lost_connection_is_noticed_and_replaced() {
    let mut world = World::on(Postgres::process());
    world.command(&["migrate"]);
    let gateway = world.gateway();
    world.postgres.sql("INSERT INTO rate_limit_rule (tenant_id, route_id, capacity, refill_per_second) VALUES ('t','*',100,1)");
    let kill = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'tollgate'";
    for round in 0..20u64 {
        world.postgres.sql(&format!("{kill}; UPDATE rate_limit_rule SET capacity = {}", 101 + round));
        soon("after a cut", &(101 + round), || limit(&gateway, "/", "t"));
    }
    world.postgres.kill();
    eventually("the loss is told", || {
        (gateway.metric("tollgate_rules_database_connected") == 0).then_some(())
    });
    assert_eq!(limit(&gateway, "/", "t"), 120, "the last good rules go on");
    assert_eq!(get(gateway.admin, "/readyz", "").status, 200);
    let age = || get(gateway.admin, "/api/v1/status", "").json()["database"]["age_seconds"].as_u64().unwrap();
    eventually("its age", || (age() >= 1).then_some(()));
    world.postgres.restart();
    world.postgres.sql("UPDATE rate_limit_rule SET capacity = 99");
    // The longest pause between two attempts is 2 s.
    eventually("after the outage", || (limit(&gateway, "/", "t") == 99).then_some(()));
    assert_eq!((age(), gateway.metric("tollgate_rules_database_connected")), (0, 1));
}

/// PostgreSQL is killed under load: no request notices.
#[test]
fn killed_under_load() {
    let mut world = World::on(Postgres::process());
    world.command(&["migrate"]);
    world.postgres.sql("INSERT INTO rate_limit_rule (tenant_id, route_id, capacity, refill_per_second) VALUES ('t','*',1000000000,1000000)");
    let gateway = world.gateway();
    let (ends, served) = (AtomicBool::new(false), AtomicUsize::new(0));
    thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                let mut connection = Connection::open(gateway.port);
                while !ends.load(Ordering::Relaxed) {
                    let response = connection.ask("GET", "/", "t");
                    assert_eq!((response.status, response.number("x-ratelimit-limit")), (200, 1_000_000_000));
                    served.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
        let hundred_more = || {
            let before = served.load(Ordering::Relaxed);
            eventually("a hundred more", || (served.load(Ordering::Relaxed) > before + 100).then_some(()));
        };
        hundred_more();
        world.postgres.kill();
        hundred_more();
        eventually("the loss is told", || {
            (gateway.metric("tollgate_rules_database_connected") == 0).then_some(())
        });
        hundred_more();
        world.postgres.restart();
        hundred_more();
        ends.store(true, Ordering::Relaxed);
    });
    assert!(served.load(Ordering::Relaxed) > 200);
    world.postgres.sql("UPDATE rate_limit_rule SET capacity = 77");
    eventually("a change after it is back", || (limit(&gateway, "/", "t") == 77).then_some(()));
}

/// The database is away at the start: the last good rules from disk, or the file alone. Both loudly.
#[test]
fn a_start_without_the_database() {
    let mut world = World::on(Postgres::process());
    world.command(&["migrate"]);
    world.postgres.sql(
        "INSERT INTO rate_limit_rule (tenant_id, route_id, capacity, refill_per_second, per_seconds, mode, candidate_capacity, candidate_refill_per_second)
           VALUES ('kept','create-order',41,5,60,'enforce',3,1), ('*','other',42,1,1,'enforce',NULL,NULL);
         INSERT INTO tenants (id, plan, status) VALUES ('gone', 'pro', 'suspended');
         INSERT INTO plan_rules (plan, route_id, capacity, refill_per_second) VALUES ('pro', '*', 43, 1)",
    );
    let file = "  rows: [{tenant: filed, capacity: 44, refill_per_second: 1}]";
    let start = |world: &World| Gateway::start(&on(&world.redis), &world.config("", file));
    let expect = |gateway: &Gateway| {
        assert_eq!(limit(gateway, "/orders", "kept"), 41);
        assert_eq!(limit(gateway, "/x", "kept"), 42);
        assert_eq!(limit(gateway, "/x", "filed"), 44);
        assert_eq!(gateway.get("/x", "gone").status, 403);
    };
    let gateway = start(&world);
    expect(&gateway);
    let cache = world.folder.path().join("cache");
    eventually("the rules on disk", || cache.exists().then_some(()));
    drop(gateway);
    world.postgres.kill();
    let gateway = start(&world);
    expect(&gateway);
    assert!(gateway.log().contains("beginning with the last good rules, kept on disk"));
    assert_eq!(get(gateway.admin, "/api/v1/status", "").json()["database"]["up"], false);
    let ready = get(gateway.admin, "/readyz", "");
    assert_eq!((ready.status, &*ready.body), (200, "ready, degraded: the database is down\n"));
    drop(gateway);
    for broken in ["", "half", "another database"] {
        let text = std::fs::read_to_string(&cache).unwrap_or_default();
        match broken {
            "" => std::fs::remove_file(&cache).unwrap(),
            "half" => std::fs::write(&cache, &text[..text.len() / 2]).unwrap(),
            _ => std::fs::write(&cache, text.replacen("tollgate rules 1\",\"", "tollgate rules 1\",\"0", 1))
                .unwrap(),
        }
        let gateway = start(&world);
        assert_eq!((limit(&gateway, "/x", "filed"), limit(&gateway, "/orders", "kept")), (44, 20));
        assert!(gateway.log().contains("beginning with the file alone"));
        std::fs::write(&cache, text).unwrap();
    }
    // And when it comes, it is there.
    let gateway = start(&world);
    world.postgres.restart();
    world.postgres.sql("UPDATE rate_limit_rule SET capacity = 45 WHERE tenant_id = 'kept'");
    eventually("the database", || (limit(&gateway, "/orders", "kept") == 45).then_some(()));
}

/// A database that was never migrated, or that a newer version has migrated.
#[test]
fn schemas_that_are_older_or_newer() {
    let world = World::on(Postgres::empty());
    let gateway = world.gateway();
    assert!(gateway.log().contains("run `tollgate migrate`"), "{}", gateway.log());
    assert_eq!(limit(&gateway, "/", "t"), 20);
    assert!(world.command(&["migrate"]).contains("applied 0001 rules"));
    world.postgres.sql(
        "ALTER TABLE rate_limit_rule ADD COLUMN future bigint NOT NULL DEFAULT 1;
         CREATE TABLE zones (id bigint);
         INSERT INTO _sqlx_migrations VALUES (9, 'of the future', now(), true, '', 0);
         INSERT INTO rate_limit_rule (tenant_id, route_id, capacity, refill_per_second) VALUES ('t','*',9,1)",
    );
    eventually("the row", || (limit(&gateway, "/", "t") == 9).then_some(()));
    assert_eq!(world.command(&["migrate"]), "the database is at migration 0009\n");
}

/// A row for any route is passed over on a route that costs more than it can ever hold; a row for just that
/// route is skipped and named.
#[test]
fn a_row_that_could_never_pass_holds_nobody_up() {
    let world = World::new();
    let config = world.config("", "").replace("upstream: u}\nrules", "upstream: u, cost: 10}\nrules");
    let gateway = Gateway::start(&on(&world.redis), &config);
    world.postgres.sql(
        "INSERT INTO rate_limit_rule (tenant_id, route_id, capacity, refill_per_second) VALUES ('t','*',7,1), ('u','other',8,1)",
    );
    soon("where it fits", &7, || limit(&gateway, "/orders", "t"));
    assert_eq!((limit(&gateway, "/", "t"), limit(&gateway, "/", "u")), (20, 20));
    assert_eq!(gateway.metric("tollgate_rules_skipped"), 1);
}

/// A failover has lost the newest commits, and given their transaction ids to others: all is read anew.
#[test]
fn lost_commits_are_noticed() {
    let world = World::new();
    let gateway = world.gateway();
    world.postgres.sql("INSERT INTO rate_limit_rule (tenant_id, route_id, capacity, refill_per_second) VALUES ('t','*',100,1)");
    soon("the row", &100, || limit(&gateway, "/", "t"));
    // As if it had never been, without a word.
    world.postgres.sql(
        "SET session_replication_role = replica; DELETE FROM rate_limit_rule; DELETE FROM rule_changes; DELETE FROM rule_versions;
         SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'tollgate'",
    );
    soon("without it", &20, || limit(&gateway, "/", "t"));
}

/// More changes than a look takes are read as a whole.
#[test]
fn a_large_change_is_read_as_a_whole() {
    let world = World::new();
    let gateway = world.gateway();
    world.postgres.sql(
        "INSERT INTO rate_limit_rule (tenant_id, route_id, capacity, refill_per_second) SELECT 't' || n, '*', 1000 + n, 1 FROM generate_series(1, 25000) n",
    );
    eventually("all of them", || (gateway.metric("tollgate_rules") == 25_000).then_some(()));
    assert_eq!((limit(&gateway, "/", "t1"), limit(&gateway, "/", "t25000")), (1_001, 26_000));
}

/// Who may only write rules writes history all the same, and cannot put something else in its place.
#[test]
fn history_is_not_for_everybody() {
    let world = World::new();
    let gateway = world.gateway();
    world.postgres.sql(
        "CREATE ROLE clerk; GRANT SELECT, INSERT ON rate_limit_rule TO clerk; SET ROLE clerk;
         CREATE TEMP TABLE rule_changes (id int); CREATE TEMP TABLE rule_versions (id int);
         INSERT INTO rate_limit_rule (tenant_id, route_id, capacity, refill_per_second) VALUES ('t','*',34,1)",
    );
    soon("the row", &34, || limit(&gateway, "/", "t"));
    let forged = world.postgres.try_sql(
        "SET ROLE clerk; CREATE TEMP TABLE fake (id text);
         CREATE TRIGGER forge AFTER INSERT ON fake REFERENCING NEW TABLE AS new_rows FOR EACH STATEMENT EXECUTE FUNCTION public.tollgate_log()",
    );
    assert!(forged.unwrap_err().contains("permission denied"));
}
