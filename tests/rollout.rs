//! What a row can say beside its limit: modes, shares, candidates, times, plans, keys.

use std::process::Command;
use std::sync::Arc;

use crate::harness::gateway::on;
use crate::harness::world::{World, limit, soon};
use crate::harness::{Connection, Gateway, eventually, get};

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
    let tokens = |key: &str| tokens(key).parse::<f64>().unwrap();
    assert!((0.0..0.1).contains(&tokens("rl:{t}:other")), "{}", tokens("rl:{t}:other"));
    assert!((95.0..95.1).contains(&tokens("rl:{t}:other:candidate")), "{}", tokens("rl:{t}:other:candidate"));
    let metrics = get(gateway.admin, "/metrics", "").body;
    let decisions: f64 = metrics
        .lines()
        .filter_map(|line| {
            line.strip_prefix("tollgate_decisions_total")?.rsplit(' ').next()?.parse::<f64>().ok()
        })
        .sum();
    assert!((decisions - 5.0).abs() < f64::EPSILON, "{decisions}");
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
    // A key that is replaced by a row of its own in one transaction is known throughout.
    world.postgres.sql(
        "BEGIN; CREATE TEMP TABLE moved ON COMMIT DROP AS SELECT key_hash, tenant FROM api_keys WHERE id = 2;
         DELETE FROM api_keys WHERE id = 2; INSERT INTO api_keys (key_hash, tenant) SELECT * FROM moved; COMMIT",
    );
    world.caught_up(&gateway);
    assert_eq!(gateway.get("/", &second).status, 200);
    // A rollback of rules brings no revoked key back.
    world.command(&["rules", "rollback", "1"]);
    world.caught_up(&gateway);
    assert_eq!(gateway.get("/", &first).status, 401);
}
