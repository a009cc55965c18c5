//! Rules from a real PostgreSQL, while gateways run.

use std::process::{Command, Output};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use crate::harness::gateway::{TOKEN, on};
use crate::harness::{Connection, Gateway, Postgres, Redis, Response, Upstream, eventually, get};

/// A change must be in force after this time. On an idle machine it takes some milliseconds.
const SOON: Duration = Duration::from_secs(1);

struct World {
    postgres: Postgres,
    redis: Redis,
    upstream: Upstream,
    folder: tempfile::TempDir,
}

impl World {
    fn new() -> Self {
        Self::on(Postgres::start())
    }

    fn on(postgres: Postgres) -> Self {
        let (redis, upstream) = (Redis::start(), Upstream::start());
        Self { postgres, redis, upstream, folder: tempfile::tempdir().unwrap() }
    }

    /// Routes `create-order` and `other`, the database, and `rules`; `identity` stands at the top.
    fn config(&self, identity: &str, rules: &str) -> String {
        format!(
            "{identity}\nupstreams: {{u: {{servers: [127.0.0.1:{}]}}}}
routes:
  - {{id: create-order, match: {{path: /orders}}, upstream: u}}
  - {{id: other, match: {{path: /*}}, upstream: u}}
rules:
  database: {{url: '{}', cache: '{}'}}
{rules}\n",
            self.upstream.port,
            self.postgres.url(),
            self.folder.path().join("cache").display()
        )
    }

    fn gateway(&self) -> Gateway {
        Gateway::start(&on(&self.redis), &self.config("", ""))
    }

    /// `tollgate` with these arguments.
    fn tollgate(&self, arguments: &[&str]) -> Output {
        let config = self.postgres.config(self.folder.path());
        Command::new(env!("CARGO_BIN_EXE_tollgate"))
            .args(arguments)
            .arg("--config")
            .arg(config)
            .output()
            .unwrap()
    }

    #[track_caller]
    fn command(&self, arguments: &[&str]) -> String {
        let output = self.tollgate(arguments);
        assert!(output.status.success(), "{arguments:?}: {output:?}");
        String::from_utf8(output.stdout).unwrap()
    }
}

/// The limit that a tenant is told.
fn limit(gateway: &Gateway, path: &str, tenant: &str) -> u64 {
    gateway.get(path, tenant).number("x-ratelimit-limit")
}

/// Waits until something is so; fails if that takes longer than [`SOON`].
#[track_caller]
fn soon<T: PartialEq + std::fmt::Debug>(what: &str, expected: &T, mut probe: impl FnMut() -> T) {
    let started = Instant::now();
    loop {
        let found = probe();
        if found == *expected {
            return;
        }
        assert!(started.elapsed() < SOON, "{what}: {found:?}, expected {expected:?}");
        thread::sleep(Duration::from_millis(5));
    }
}

fn admin(gateway: &Gateway, method: &str, path: &str, headers: &str, body: &str) -> Response {
    let headers = format!("Authorization: Bearer {TOKEN}\r\n{headers}");
    Connection::open(gateway.admin).admin(method, path, &headers, body)
}

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
    thread::scope(|scope| {
        for gateway in &gateways {
            let changed = &world;
            scope.spawn(move || {
                soon("version 1", &1, || version(gateway));
                let mut connection = Connection::open(gateway.port);
                let started = Instant::now();
                while version(gateway) < 2 {
                    connection.ask("GET", "/", "t");
                    assert!(started.elapsed() < Duration::from_secs(10), "never came");
                }
                for _ in 0..50 {
                    assert_eq!(connection.ask("GET", "/", "t").number("x-ratelimit-limit"), 3);
                }
                let _ = changed;
            });
        }
        thread::sleep(Duration::from_millis(500));
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
        thread::sleep(Duration::from_millis(300));
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
         UPDATE rate_limit_rule SET valid_until = 'infinity', valid_from = '-infinity' WHERE tenant_id = 'good'",
    );
    soon("the good one", &31, || limit(&gateway, "/", "good"));
    assert_eq!(gateway.metric("tollgate_rules_skipped"), 8);
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
    ] {
        assert!(reasons.iter().any(|reason| reason == expected), "{expected} is not in {reasons:?}");
    }
    assert!(gateway.log().contains("no-such-route"));
    assert_eq!(limit(&gateway, "/", "a"), 20);
    // A route that comes makes the row right.
    gateway.write(&world.config("", "").replace("id: other", "id: no-such-route"));
    gateway.reload();
    soon("with its route", &5, || limit(&gateway, "/", "a"));
    assert_eq!(gateway.metric("tollgate_rules_skipped"), 7);
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
    thread::sleep(Duration::from_secs(2));
    let age = || get(gateway.admin, "/api/v1/status", "").json()["database"]["age_seconds"].as_u64().unwrap();
    assert!(age() >= 1);
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
        thread::sleep(Duration::from_millis(300));
        world.postgres.kill();
        thread::sleep(Duration::from_secs(1));
        world.postgres.restart();
        thread::sleep(Duration::from_millis(500));
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
        "ALTER TABLE rate_limit_rule ADD COLUMN shards bigint NOT NULL DEFAULT 1;
         CREATE TABLE zones (id bigint);
         INSERT INTO _sqlx_migrations VALUES (9, 'of the future', now(), true, '', 0);
         INSERT INTO rate_limit_rule (tenant_id, route_id, capacity, refill_per_second) VALUES ('t','*',9,1)",
    );
    eventually("the row", || (limit(&gateway, "/", "t") == 9).then_some(()));
    assert_eq!(world.command(&["migrate"]), "the database is at migration 0009\n");
}

#[test]
fn shadow_off_candidates_and_shares_of_subjects() {
    let world = World::new();
    world.postgres.sql(
        "INSERT INTO rate_limit_rule (tenant_id, route_id, capacity, refill_per_second, per_seconds, mode) VALUES
           ('shadow','*',2,1,3600,'shadow'), ('off','*',2,1,3600,'off');
         INSERT INTO rate_limit_rule (tenant_id, route_id, capacity, refill_per_second, per_seconds, candidate_capacity,
           candidate_refill_per_second, candidate_per_seconds) VALUES ('smaller','*',5,1,3600,3,1,3600), ('larger','*',2,1,3600,4,1,3600)",
    );
    let gateway = world.gateway();
    let decisions = |outcome: &str| {
        gateway.metric(&format!("tollgate_decisions_total{{basis=\"store\",outcome=\"{outcome}\",route=\"other\",rule=\"default\"}}"))
    };
    let statuses = |tenant: &str, count: usize| -> Vec<u16> {
        let mut connection = Connection::open(gateway.port);
        (0..count).map(|_| connection.ask("GET", "/", tenant).status).collect()
    };
    assert_eq!(statuses("shadow", 6), [200; 6]);
    assert_eq!((decisions("admitted"), decisions("would_refuse"), decisions("refused")), (2, 4, 0));
    assert_eq!(statuses("off", 6), [200; 6]);
    // Each request takes its cost once from the live bucket, and once from that of the candidate.
    let disagreements = |says: &str| {
        gateway.metric(&format!(
            "tollgate_candidate_disagreements_total{{candidate=\"{says}\",route=\"other\"}}"
        ))
    };
    assert_eq!(statuses("smaller", 6), [200, 200, 200, 200, 200, 429]);
    assert_eq!((disagreements("refuses"), disagreements("admits")), (2, 0));
    assert_eq!(statuses("larger", 6), [200, 200, 429, 429, 429, 429]);
    assert_eq!((disagreements("refuses"), disagreements("admits")), (2, 2));
    assert_eq!(
        world.redis.command::<Vec<String>>(&["HMGET", "rl:{larger}:other:candidate", "tokens"]).len(),
        1
    );

    // Ten per cent of the subjects are refused: the same ones on both gateways and after a restart.
    world.postgres.sql(
        "DELETE FROM rate_limit_rule;
         INSERT INTO rate_limit_rule (tenant_id, route_id, capacity, refill_per_second, per_seconds, enforce_percent)
           VALUES ('*','other',1,1,3600,10)",
    );
    soon("the share", &1, || limit(&gateway, "/", "nobody"));
    let refused = |gateway: &Gateway, from: usize, to: usize| -> Vec<usize> {
        let mut connection = Connection::open(gateway.port);
        (from..to)
            .filter(|subject| {
                let tenant = format!("subject-{subject}");
                connection.ask("GET", "/", &tenant);
                connection.ask("GET", "/", &tenant).status == 429
            })
            .collect()
    };
    let first = refused(&gateway, 0, 1_000);
    assert!((70..=130).contains(&first.len()), "{}", first.len());
    drop(gateway);
    assert_eq!(refused(&world.gateway(), 0, 1_000), first);
}

#[test]
fn versions_by_command() {
    let world = World::new();
    let gateway = world.gateway();
    let set = |arguments: &[&str]| world.command(&[&["rules", "set"], arguments].concat());
    assert_eq!(
        set(&["--tenant", "a", "--route", "create-order", "--capacity", "10", "--refill-per-second", "5/m"]),
        "version 1\n"
    );
    assert_eq!(
        set(&["--plan", "pro", "--capacity", "30", "--refill-per-second", "10", "--mode", "shadow"]),
        "version 2\n"
    );
    assert_eq!(
        set(&["--plan", "pro", "--capacity", "30", "--refill-per-second", "10", "--mode", "shadow"]),
        "nothing changes\n"
    );
    assert_eq!(set(&["--tenant", "*", "--capacity", "9", "--refill-per-second", "9"]), "version 3\n");
    soon("the default of the database", &9, || limit(&gateway, "/", "nobody"));
    let list = "- {tenant: \"*\", route: \"*\", capacity: 9, refill_per_second: 9}
- {tenant: a, route: create-order, capacity: 10, refill_per_second: \"1/12s\"}
- {plan: pro, route: \"*\", capacity: 30, refill_per_second: 10, mode: shadow}\n";
    assert_eq!(world.command(&["rules", "list"]), list);
    assert_eq!(world.command(&["rules", "list", "--tenant", "a"]).lines().count(), 1);

    // A bad version, and one command to undo it.
    world.postgres.sql("UPDATE rate_limit_rule SET capacity = 1; DELETE FROM plan_rules");
    soon("the bad version", &1, || limit(&gateway, "/orders", "a"));
    let diff = world.command(&["rules", "diff", "3", "4"]);
    assert_eq!(diff.lines().filter(|line| line.starts_with('-')).count(), 3, "{diff}");
    assert_eq!(diff.lines().filter(|line| line.starts_with('+')).count(), 2, "{diff}");
    assert_eq!(world.command(&["rules", "rollback", "3"]), "version 5\n");
    soon("as it was", &10, || limit(&gateway, "/orders", "a"));
    assert_eq!(world.command(&["rules", "list"]), list);
    assert_eq!(world.command(&["rules", "diff", "3", "5"]), "");
    let versions = world.command(&["rules", "versions"]);
    assert!(versions.lines().next().unwrap().contains("rollback to 3"), "{versions}");
    assert_eq!(versions.lines().count(), 5);
    assert_eq!(world.command(&["rules", "rollback", "5"]), "nothing changes\n");

    // Out and in again.
    let file = world.folder.path().join("rules.yaml");
    std::fs::write(&file, world.command(&["rules", "export"])).unwrap();
    assert_eq!(
        world.command(&["rules", "delete", "--tenant", "a", "--route", "create-order"]),
        "version 6\n"
    );
    soon("without it", &9, || limit(&gateway, "/orders", "a"));
    assert_eq!(world.command(&["rules", "import", file.to_str().unwrap()]), "version 7\n");
    assert_eq!(world.command(&["rules", "list"]), list);

    for (arguments, expected) in [
        (&["rules", "rollback", "99"][..], "there is no version 99"),
        (&["rules", "diff", "0", "99"], "there is no version 99"),
        (&["rules", "delete", "--tenant", "zz"], "there is no rule for zz on *"),
        (
            &["rules", "set", "--tenant", "a", "--capacity", "0", "--refill-per-second", "1"],
            "capacity: must be at least 1",
        ),
        (
            &[
                "rules",
                "set",
                "--tenant",
                "a",
                "--capacity",
                "1",
                "--refill-per-second",
                "1",
                "--mode",
                "maybe",
            ],
            "mode: expected one of enforce, shadow, off",
        ),
        (&["rules", "import", "no-such-file"], "cannot read no-such-file"),
    ] {
        let output = world.tollgate(arguments);
        let told = String::from_utf8(output.stderr).unwrap();
        assert!(!output.status.success() && told.contains(expected), "{arguments:?}: {told}");
    }
}

#[test]
fn the_admin_api_reads_and_writes() {
    let world = World::new();
    let gateway = Gateway::start(
        &on(&world.redis),
        &world.config("", "  rows: [{tenant: a, route: create-order, capacity: 11, refill_per_second: 1}]"),
    );
    let path = "/api/v1/rules/a/create-order";
    let write = |method: &str, headers: &str, body: &str| admin(&gateway, method, path, headers, body);
    assert_eq!(Connection::open(gateway.admin).admin("PUT", path, "", "{}").status, 401);
    assert_eq!(get(gateway.admin, path, "").status, 404);
    assert_eq!(limit(&gateway, "/orders", "a"), 11);

    let put = write("PUT", "", "{\"capacity\": 50, \"refill_per_second\": \"5/m\"}");
    assert_eq!(put.status, 200, "{put:?}");
    let etag = put.header("etag").unwrap().to_owned();
    soon("the database stands before the file", &50, || limit(&gateway, "/orders", "a"));
    // Both are listed, with where they come from.
    let rules = get(gateway.admin, "/api/v1/rules?tenant=a", "").json();
    let rules: Vec<_> = rules["rules"]
        .as_array()
        .unwrap()
        .iter()
        .map(|rule| {
            (
                rule["origin"].as_str().unwrap(),
                rule["active"].as_bool().unwrap(),
                rule["hits"].as_u64().unwrap() > 0,
            )
        })
        .collect();
    assert_eq!(rules, [("database", true, true), ("file", false, true)]);

    let other =
        write("PUT", &format!("If-Match: {etag}\r\n"), "{\"capacity\": 60, \"refill_per_second\": 1}");
    assert_eq!(other.status, 200);
    let late = write("PUT", &format!("If-Match: {etag}\r\n"), "{\"capacity\": 70, \"refill_per_second\": 1}");
    assert_eq!(late.status, 412, "{late:?}");
    assert_eq!(write("DELETE", &format!("If-Match: {etag}\r\n"), "").status, 412);
    assert_eq!(get(gateway.admin, path, "").json()["capacity"], 60);
    for (body, expected) in [
        ("{\"capacity\": 0, \"refill_per_second\": 1}", "capacity: must be at least 1"),
        ("{\"capacity\": 1, \"refill_per_second\": -1}", "refill_per_second: expected a rate"),
        ("{\"capacity\": 1, \"refill_per_second\": 1, \"capasity\": 1}", "did you mean `capacity`?"),
        (
            "{\"tenant\": \"b\", \"capacity\": 1, \"refill_per_second\": 1}",
            "tenant: is not the one of the address",
        ),
        ("[]", "expected an object"),
        ("{", "not JSON"),
    ] {
        let refused = write("PUT", "", body);
        assert!(refused.status == 422 && refused.body.contains(expected), "{body}: {refused:?}");
    }
    assert_eq!(write("PATCH", "", "").status, 405);

    let versions = get(gateway.admin, "/api/v1/versions", "").json();
    assert_eq!(versions["versions"].as_array().unwrap().len(), 2);
    assert!(versions["versions"][0]["who"].as_str().unwrap().starts_with("admin API, 127.0.0.1"));
    let diff = get(gateway.admin, "/api/v1/versions/diff?from=1&to=2", "").json();
    assert_eq!(
        (&diff["changes"][0]["before"]["capacity"], &diff["changes"][0]["after"]["capacity"]),
        (&50.into(), &60.into())
    );
    assert_eq!(get(gateway.admin, "/api/v1/versions/diff?from=1", "").status, 422);
    assert_eq!(admin(&gateway, "POST", "/api/v1/versions/1/rollback", "", "").json()["version"], 3);
    soon("rolled back", &50, || limit(&gateway, "/orders", "a"));
    assert_eq!(admin(&gateway, "POST", "/api/v1/versions/77/rollback", "", "").status, 404);

    let rows = "rows: [{tenant: \"b's \\\\ shop\", route: other, capacity: 5, refill_per_second: 1}, {plan: p, capacity: 6, refill_per_second: 1}]";
    assert_eq!(admin(&gateway, "POST", "/api/v1/rules/import", "", rows).json()["version"], 4);
    soon("quotes are no end", &5, || limit(&gateway, "/", "b's \\ shop"));
    assert_eq!(get(gateway.admin, "/api/v1/rules/export", "").json()["rows"].as_array().unwrap().len(), 3);
    assert_eq!(get(gateway.admin, "/api/v1/rules/b's%20%5C%20shop/other", "").json()["capacity"], 5);
    assert_eq!(write("DELETE", "If-Match: *\r\n", "").status, 200);
    soon("back to the file", &11, || limit(&gateway, "/orders", "a"));
    assert!(gateway.log().contains("\"target\":\"audit\""));
}

/// Without a database the API says so, and lists what the file says.
#[test]
fn the_admin_api_without_a_database() {
    let upstream = Upstream::start();
    let gateway = Gateway::start(
        "memory",
        &crate::harness::gateway::everything_to(
            &upstream,
            "  rows: [{tenant: a, capacity: 5, refill_per_second: 1}]",
        ),
    );
    let rules = get(gateway.admin, "/api/v1/rules", "").json();
    let origins: Vec<_> =
        rules["rules"].as_array().unwrap().iter().map(|rule| rule["origin"].as_str().unwrap()).collect();
    assert_eq!(origins, ["default", "file"]);
    assert_eq!(admin(&gateway, "PUT", "/api/v1/rules/a/all", "", "{}").status, 409);
    assert_eq!(get(gateway.admin, "/api/v1/versions", "").status, 409);
}

/// Plans are defaults for their tenants; a suspended tenant is turned away.
#[test]
fn plans_and_suspended_tenants() {
    let world = World::new();
    let gateway = world.gateway();
    world.postgres.sql(
        "INSERT INTO plan_rules (plan, route_id, capacity, refill_per_second) VALUES ('pro','*',300,1), ('pro','create-order',301,1), ('free','*',3,1);
         INSERT INTO tenants (id, plan, status) VALUES ('t','pro','active'), ('u','free','active'), ('v',NULL,'active')",
    );
    soon("the plan", &300, || limit(&gateway, "/", "t"));
    assert_eq!(
        (limit(&gateway, "/orders", "t"), limit(&gateway, "/", "u"), limit(&gateway, "/", "v")),
        (301, 3, 20)
    );
    world.postgres.sql("UPDATE tenants SET plan = 'free' WHERE id = 't'");
    soon("another plan", &3, || limit(&gateway, "/", "t"));
    world.postgres.sql("INSERT INTO rate_limit_rule (tenant_id, route_id, capacity, refill_per_second) VALUES ('t','*',77,1)");
    soon("a row of its own", &77, || limit(&gateway, "/", "t"));
    world.postgres.sql("UPDATE tenants SET status = 'suspended' WHERE id = 't'");
    soon("suspended", &403, || gateway.get("/", "t").status);
    let refusal = gateway.get("/", "t");
    assert_eq!(refusal.number("x-ratelimit-remaining"), 0);
    assert_eq!(refusal.json()["status"], 403);
    assert_eq!(gateway.get("/", "u").status, 200);
    world.postgres.sql("UPDATE tenants SET status = 'active'");
    soon("active again", &200, || gateway.get("/", "t").status);
}

/// Keys are looked up by their keyed hash; unknown and revoked ones get 401. No key is stored or logged.
#[test]
fn api_keys() {
    let world = World::new();
    let identity = "identity: {tenant: {keys: lookup}, hash_secret: s3cret}";
    let gateway = Gateway::start(&on(&world.redis), &world.config(identity, ""));
    let config = world.folder.path().join("keys.yaml");
    std::fs::write(&config, world.config(identity, "")).unwrap();
    let keys = |arguments: &[&str]| -> String {
        let output = Command::new(env!("CARGO_BIN_EXE_tollgate"))
            .arg("keys")
            .args(arguments)
            .arg("--config")
            .arg(&config)
            .output()
            .unwrap();
        assert!(output.status.success(), "{output:?}");
        String::from_utf8(output.stdout).unwrap().trim().to_owned()
    };
    assert_eq!(gateway.get("/", "shop-a").status, 401, "a name is no key");
    let (first, second) = (
        keys(&["create", "--tenant", "shop-a", "--note", "of the web shop"]),
        keys(&["create", "--tenant", "shop-a"]),
    );
    assert_ne!(first, second);
    soon("the key", &200, || gateway.get("/", &first).status);
    soon("the other key", &200, || gateway.get("/", &second).status);
    // Both are the one tenant, in one bucket.
    assert_eq!(world.redis.keys(), ["rl:{shop-a}:other"]);
    assert_eq!(gateway.get("/", "tg_unknown").status, 401);
    assert!(gateway.get("/", "tg_unknown").header("www-authenticate").is_some());
    assert_eq!(keys(&["revoke", "1"]), "key 1 is revoked");
    soon("revoked", &401, || gateway.get("/", &first).status);
    assert_eq!(gateway.get("/", &second).status, 200);
    let list = keys(&["list"]);
    assert!(list.contains("revoked 20") && list.contains("of the web shop"), "{list}");
    // The hash is what the design says, so that SQL can make one as well.
    let hash = world.postgres.sql("SELECT encode(key_hash, 'hex') FROM api_keys WHERE id = 2");
    let hasher = tollgate::key::Hasher::new(b"s3cret");
    let expected: String =
        hasher.key_hash(second.as_bytes()).iter().map(|byte| format!("{byte:02x}")).collect();
    assert_eq!(hash, expected);
    let everything = world.postgres.sql("SELECT (SELECT string_agg(k::text, '') FROM api_keys k) || (SELECT string_agg(c::text, '') FROM rule_changes c) || (SELECT string_agg(v::text, '') FROM rule_versions v)");
    let log = gateway.log();
    for key in [&first, &second] {
        assert!(!everything.contains(&**key) && !log.contains(&**key));
    }
    // A rollback of rules brings no revoked key back.
    world.command(&["rules", "rollback", "1"]);
    thread::sleep(Duration::from_millis(200));
    assert_eq!(gateway.get("/", &first).status, 401);
}

/// A raise for a time: while it lasts it stands before the row behind it.
#[test]
fn a_raise_for_a_time() {
    let world = World::new();
    let gateway = world.gateway();
    world.postgres.sql(
        "INSERT INTO rate_limit_rule (tenant_id, route_id, capacity, refill_per_second) VALUES ('t','*',50,1);
         INSERT INTO rate_limit_rule (tenant_id, route_id, capacity, refill_per_second, valid_from, valid_until)
           VALUES ('t','create-order',500,1, now() + '1 second', now() + '3 seconds')",
    );
    soon("before its time", &50, || limit(&gateway, "/orders", "t"));
    eventually("its time", || (limit(&gateway, "/orders", "t") == 500).then_some(()));
    eventually("its end", || (limit(&gateway, "/orders", "t") == 50).then_some(()));
}

/// B119: a request that is refused by one bucket takes nothing from the others; and each request is
/// counted once, however many checks it has (B115).
#[test]
fn one_request_is_counted_once() {
    let world = World::new();
    world.postgres.sql(
        "INSERT INTO rate_limit_rule (tenant_id, route_id, capacity, refill_per_second, per_seconds, candidate_capacity, candidate_refill_per_second, candidate_per_seconds)
           VALUES ('t','*',5,1,3600,100,1,3600)",
    );
    let gateway = Arc::new(world.gateway());
    let mut connection = Connection::open(gateway.port);
    for _ in 0..5 {
        connection.ask("GET", "/", "t");
    }
    let tokens =
        |key: &str| world.redis.command::<Vec<Option<String>>>(&["HMGET", key, "tokens"])[0].clone().unwrap();
    assert!(tokens("rl:{t}:other").starts_with("0.0"), "{}", tokens("rl:{t}:other"));
    assert!(tokens("rl:{t}:other:candidate").starts_with("95"), "{}", tokens("rl:{t}:other:candidate"));
    let metrics = get(gateway.admin, "/metrics", "").body;
    let decisions: f64 = metrics
        .lines()
        .filter_map(|line| {
            line.strip_prefix("tollgate_decisions_total")?.rsplit(' ').next()?.parse::<f64>().ok()
        })
        .sum();
    assert!((decisions - 5.0).abs() < f64::EPSILON, "{decisions}");
}
