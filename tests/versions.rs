//! Changes of rules by command and over the admin API, and the versions that they make.

use crate::harness::gateway::on;
use crate::harness::world::{World, admin, limit, soon};
use crate::harness::{Connection, Gateway, Upstream, get};

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
    // Over a migration, too.
    world.postgres.sql("ALTER TABLE rate_limit_rule ADD COLUMN future bigint NOT NULL DEFAULT 1; DELETE FROM rate_limit_rule");
    assert_eq!(world.command(&["rules", "rollback", "5"]), "version 7\n");
    assert_eq!(world.command(&["rules", "list"]), list);

    // Out and in again.
    let file = world.folder.path().join("rules.yaml");
    std::fs::write(&file, world.command(&["rules", "export"])).unwrap();
    assert_eq!(
        world.command(&["rules", "delete", "--tenant", "a", "--route", "create-order"]),
        "version 8\n"
    );
    soon("without it", &9, || limit(&gateway, "/orders", "a"));
    assert_eq!(world.command(&["rules", "import", file.to_str().unwrap()]), "version 9\n");
    assert_eq!(world.command(&["rules", "list"]), list);

    let nobody = world.folder.path().join("nobody.yaml");
    std::fs::write(&nobody, "- {capacity: 1, refill_per_second: 1}").unwrap();
    let typo = world.tollgate(&[
        "rules",
        "set",
        "--tenant",
        "a",
        "--route",
        "ordres",
        "--capacity",
        "1",
        "--refill-per-second",
        "1",
    ]);
    assert!(typo.status.success() && String::from_utf8(typo.stderr).unwrap().contains("no route `ordres`"));
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
        (&["rules", "import", nobody.to_str().unwrap()], "expected a tenant, a plan or a route; * is any"),
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
        (
            "{\"capacity\": 1, \"refill_per_second\": 1, \"capacity\": 1000000}",
            "`capacity` is there twice at line 1",
        ),
    ] {
        let refused = write("PUT", "", body);
        assert!(refused.status == 422 && refused.body.contains(expected), "{body}: {refused:?}");
    }
    let patched = write("PATCH", "", "");
    assert_eq!((patched.status, patched.header("allow")), (405, Some("GET, HEAD, PUT, DELETE")));
    let unknown =
        |method, path| admin(&gateway, method, path, "", "{\"capacity\": 1, \"refill_per_second\": 1}");
    let refused = unknown("PUT", "/api/v1/rules/a/no-such-route");
    assert!(
        refused.status == 422 && refused.body.contains("no route with the id `no-such-route`"),
        "{refused:?}"
    );
    assert_eq!(
        unknown("PUT", "/api/v1/rules/%ff/create-order").status,
        400,
        "no tenant is a replacement character"
    );
    let good = "{\"capacity\": 60, \"refill_per_second\": 1}";
    let etag = get(gateway.admin, path, "").header("etag").unwrap().to_owned();
    assert_eq!(write("PUT", &format!("If-Match: \"x\", {etag}\r\n"), good).status, 200, "one of a list");
    assert_eq!(get(gateway.admin, path, "").header("etag"), Some(&*etag), "nothing has changed");
    assert_eq!(write("PUT", "If-None-Match: *\r\n", good).status, 412, "it is there already");
    assert_eq!(write("DELETE", "If-None-Match: *\r\n", "").status, 412);
    assert_eq!(write("GET", &format!("If-None-Match: {etag}\r\n"), "").status, 200);
    let plan = admin(
        &gateway,
        "PUT",
        "/api/v1/rules/*/create-order",
        "",
        "{\"plan\": \"pro\", \"capacity\": 1, \"refill_per_second\": 1}",
    );
    assert!(plan.status == 422 && plan.body.contains("plan: the address names a tenant"), "{plan:?}");
    let raise = write(
        "PUT",
        "",
        "{\"capacity\": 600, \"refill_per_second\": 1, \"valid_until\": \"2099-01-01T00:00:00Z\"}",
    );
    assert!(raise.status == 422 && raise.body.contains("would be lost"), "{raise:?}");
    assert_eq!(admin(&gateway, "PUT", "/api/v1/rules/new/other", "If-None-Match: *\r\n", good).status, 200);
    assert_eq!(admin(&gateway, "DELETE", "/api/v1/rules/new/other", "", "").status, 200);

    let versions = get(gateway.admin, "/api/v1/versions", "").json();
    assert_eq!(versions["versions"].as_array().unwrap().len(), 4);
    assert!(versions["versions"][0]["who"].as_str().unwrap().starts_with("admin API, 127.0.0.1"));
    let diff = get(gateway.admin, "/api/v1/versions/diff?from=1&to=2", "").json();
    assert_eq!(
        (&diff["changes"][0]["before"]["capacity"], &diff["changes"][0]["after"]["capacity"]),
        (&50.into(), &60.into())
    );
    assert_eq!(get(gateway.admin, "/api/v1/versions/diff?from=1", "").status, 422);
    assert_eq!(admin(&gateway, "POST", "/api/v1/versions/1/rollback", "", "").json()["version"], 5);
    soon("rolled back", &50, || limit(&gateway, "/orders", "a"));
    assert_eq!(admin(&gateway, "POST", "/api/v1/versions/77/rollback", "", "").status, 404);

    let rows = "rows: [{tenant: \"b's \\\\ shop\", route: other, capacity: 5, refill_per_second: 1}, {plan: p, capacity: 6, refill_per_second: 1}]";
    assert_eq!(admin(&gateway, "POST", "/api/v1/rules/import", "", rows).json()["version"], 6);
    let twice = "[{tenant: b, capacity: 5, refill_per_second: 1}, {tenant: b, route: '*', capacity: 6, refill_per_second: 1}]";
    let twice = admin(&gateway, "POST", "/api/v1/rules/import", "", twice);
    assert!(twice.status == 422 && twice.body.contains("1:50: a second row for the same"), "{twice:?}");
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
