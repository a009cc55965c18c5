use super::*;

const ROUTES: &str =
    "upstreams: {u: {servers: [127.0.0.1:1]}}\nroutes: [{id: r, match: {path: /}, upstream: u}]\n";

fn faults(text: &str) -> Vec<String> {
    read(text, &|_| None).map(drop).unwrap_err().iter().map(ToString::to_string).collect()
}

fn good(text: &str) -> Config {
    read(&format!("{ROUTES}{text}"), &|_| None).unwrap_or_else(|faults| panic!("{faults:?}"))
}

#[test]
fn the_shipped_configuration_is_good() {
    let text = include_str!("../../conf/tollgate.yaml");
    let config = read(text, &|_| None).unwrap();
    assert_eq!(config.routes.len(), 2);
    assert_eq!(config.store.redis.unwrap().timeout, Duration::from_millis(5));
    assert_eq!(config.rules.default.value.capacity(), 20);
}

#[test]
fn defaults() {
    let config = good("");
    assert_eq!(config.listeners[0].address.value.to_string(), "0.0.0.0:8080");
    assert_eq!(config.admin.address.value.to_string(), "127.0.0.1:9090");
    assert_eq!((config.store.redis, config.admin.token), (None, None));
    assert_eq!(
        (config.rules.default.value.capacity(), config.rules.default.value.fill_micros()),
        (20, 2_000_000)
    );
}

#[test]
fn every_fault_at_once_with_its_place() {
    let text = "
listeners: [{address: nonsense}, {adress: 1}]
store: {redis: {url: http://x, timeout: fast}}
routes:
  - {id: a, match: {path: /}, upstream: u, cost: -1}
  - {match: {}, upstream: u}
rules:
  default: {capacity: .nan, refill_per_second: -5}
  rows:
    - {tenant: t, capacity: 0, refill_per_second: 1}
    - {tenant: t, capacity: 9007199254740993, refill_per_second: 1}
heders: []
";
    let faults = faults(text);
    for expect in [
        "2:23: listeners[0].address: expected an address",
        "2:34: listeners[1].address: is missing",
        "2:35: listeners[1]: unknown key `adress`; did you mean `address`?",
        "3:22: store.redis.url: expected redis://host:port, rediss://host:port or unix://path",
        "3:41: store.redis.timeout: expected a duration such as 5ms, 30s or 1m, got `fast`",
        "5:50: routes[0].cost: expected a whole number such as 100, got `-1`",
        "6:5: routes[1].id: is missing",
        "6:13: routes[1].match.path: is missing",
        "8:23: rules.default.capacity: expected a whole number such as 100, got `.nan`",
        "8:48: rules.default.refill_per_second: expected a rate such as",
        "10:29: rules.rows[0].capacity: must be at least 1",
        "11:29: rules.rows[1].capacity: must be at most 9007199254740992 (2^53)",
        "12:1: unknown key `heders`; did you mean `headers`?",
    ] {
        assert!(faults.iter().any(|fault| fault.starts_with(expect)), "{expect}\nnot in {faults:#?}");
    }
    assert_eq!(faults.len(), 13, "{faults:#?}");
}

#[test]
fn yaml_faults() {
    for (text, expect) in [
        ("", "1:1: the file is empty"),
        ("a: [1", "1:4: not YAML"),
        ("a: b: c", "1:5: not YAML"),
        ("--- {}\n--- {}", "2:1: expected one document"),
        ("routes: 1\nroutes: 2", "2:1: duplicate key `routes`, first written at 1:1"),
        ("? [a]\n: b", "1:3: a key must be a plain word"),
        ("store: !x memory", "tags such as `!x` mean nothing here"),
        ("- a", "1:1: expected a mapping, got a list"),
        ("store: *x", "1:8: not YAML"),
        ("store: &x [*x]", "1:12: an alias to a value that contains it"),
    ] {
        let faults = faults(text);
        assert!(faults.iter().any(|fault| fault.contains(expect)), "{text:?}: {faults:?}");
    }
}

/// A "billion laughs" and 200,000 nested lists end quickly, in a fault.
#[test]
fn hostile_yaml_is_bounded() {
    let mut laughs = String::from("a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n");
    for level in 1..12 {
        let before = level - 1;
        laughs += &format!("a{level}: &a{level} [{}]\n", vec![format!("*a{before}"); 10].join(", "));
    }
    assert!(faults(&laughs).iter().any(|fault| fault.contains("aliases add more than")));
    let deep = "[".repeat(200_000);
    assert!(!faults(&deep).is_empty());
    let deep: String = (0..5_000).map(|depth| format!("{}a:\n", " ".repeat(depth % 3_000))).collect();
    assert!(!faults(&deep).is_empty());
}

#[test]
fn the_environment() {
    let text =
        format!("{ROUTES}admin: {{token: '${{TOKEN}}'}}\nstore: {{redis: {{url: '${{URL:-redis://h:1}}'}}}}");
    let config = read(&text, &|name| (name == "TOKEN").then(|| "t0p".into())).unwrap();
    assert_eq!(config.admin.token, Some(Secret("t0p".into())));
    assert_eq!(config.store.redis.unwrap().servers.addresses()[0].value.0, "redis://h:1");
    assert!(faults(&text)[0].contains("admin.token: the environment variable TOKEN is not set"));
    let number =
        format!("{ROUTES}rules: {{default: {{capacity: '${{N:-30}}', refill_per_second: '${{R:-5/m}}'}}}}");
    assert_eq!(read(&number, &|_| None).unwrap().rules.default.value.capacity(), 30);
}

/// A word means the same whether it stands there or comes from the environment.
#[test]
fn words_from_the_environment() {
    let config = good(
        "threads: '${T:-auto}'\nstore: '${S:-memory}'\ncluster: {gateways: '${G:-auto}'}\n\
         rules: {rows: [{tenant: '${X:-*}', route: r, capacity: 5, refill_per_second: 1}]}",
    );
    assert_eq!((config.threads, config.store.redis, config.gateways), (None, None, None));
    assert_eq!(config.rules.rows[0].tenant, None);
    for text in ["threads: '${T}'", "store: '${S}'", "cluster: {gateways: '${G}'}"] {
        assert_eq!(faults(&format!("{ROUTES}{text}")).len(), 1, "{text}");
    }
}

#[test]
fn two_sockets_cannot_share_a_port() {
    for (traffic, admin, is_fault) in [
        ("0.0.0.0:8080", "127.0.0.1:8080", true),
        ("127.0.0.1:8080", "0.0.0.0:8080", true),
        ("'[::]:8080'", "127.0.0.1:8080", true),
        ("127.0.0.2:8080", "127.0.0.1:8080", false),
        ("0.0.0.0:8080", "127.0.0.1:8081", false),
    ] {
        let text = format!("{ROUTES}listeners: [{{address: {traffic}}}]\nadmin: {{address: {admin}}}");
        assert_eq!(read(&text, &|_| None).is_err(), is_fault, "{traffic} {admin}");
    }
}

/// B035, B085: what is written is what counts, whatever the order; a row never widens by a fault.
#[test]
fn a_row_that_cannot_be_read_is_a_fault_and_no_wider_row() {
    for row in [
        "{tenant: '', capacity: 5, refill_per_second: 1}",
        "{tenant: ~, route: r, capacity: 5, refill_per_second: 1}",
        "{capacity: 5, refill_per_second: 1}",
    ] {
        assert!(!faults(&format!("{ROUTES}rules: {{rows: [{row}]}}")).is_empty(), "{row}");
    }
}

#[test]
fn what_does_nothing_yet_is_said() {
    let config = good("cluster: {gateways: 4, region: {name: hn}}\n");
    assert_eq!(config.gateways, Some(4));
    let fields: Vec<&str> = config.warnings.iter().map(|warning| &*warning.field).collect();
    assert_eq!(fields, ["cluster.region"]);
}

/// B085: a row that holds nobody is told of.
#[test]
fn what_never_holds_anybody_is_said() {
    let text = "upstreams: {u: {servers: [127.0.0.1:9001]}}
routes: [{id: r, match: {path: /r}, upstream: u}, {id: off, match: {path: /off}, upstream: u, tenant_rule: \"off\"}]
rules:
  exempt: {tenants: [e]}
  rows:
    - {tenant: a, route: off, capacity: 5, refill_per_second: 1}
    - {tenant: a, route: r, capacity: 5, refill_per_second: 1}
    - {tenant: e, capacity: 5, refill_per_second: 1}
    - {plan: p, route: r, capacity: 5, refill_per_second: 1}
";
    let fields = |text: &str| -> Vec<String> {
        let config = read(text, &|_| None).unwrap();
        config.warnings.iter().map(|warning| warning.field.clone()).collect()
    };
    assert_eq!(fields(text), ["rules.rows[0]", "rules.rows[2]", "rules.rows[3]"]);
    let with_database = text.replace("  exempt", "  database: {url: \"postgres://localhost/x\"}\n  exempt");
    assert_eq!(fields(&with_database), ["rules.rows[0]", "rules.rows[2]"]);
}

/// B125: an exact path is one spelling of many.
#[test]
fn a_login_that_another_spelling_goes_around_is_said() {
    let warnings = |login: &str, rest: &str| -> Vec<String> {
        let text = format!(
            "upstreams: {{u: {{servers: [127.0.0.1:9001]}}}}
routes: [{{id: login, match: {{path: {login}}}, upstream: u, rules: [tries]}}, {{id: rest, {rest}, upstream: u}}]
rules: {{named: [{{name: tries, key: [client_address], limit: {{fixed_window: {{limit: 9, window: 1h}}}}}}]}}
"
        );
        read(&text, &|_| None).unwrap().warnings.iter().map(|warning| warning.message.clone()).collect()
    };
    assert!(warnings("/a/login", "match: {path: /*}")[0].starts_with("`/a/login/`, `/a/login.json`"));
    assert_eq!(warnings("/a/Login", "match: {path: /a/*}").len(), 1);
    for (login, rest) in [
        ("/a/login", "match: {path: /b/*}"),
        ("/a/login", "match: {path: /*}, rules: [tries]"),
        ("/a/login", "match: {path: /*, host: other.test}"),
        ("/a/orders", "match: {path: /*}"),
        ("/a/login, methods: [POST]", "match: {path: /*, methods: [GET]}"),
        ("/a/login", "match: {path: /*}, upstream: u}, {id: near, match: {path: /a/*}, rules: [tries]"),
        ("/login/*", "match: {path: /*}"),
    ] {
        assert_eq!(warnings(login, rest), Vec::<String>::new(), "{login} {rest}");
    }
}

#[test]
fn hot_keys_as_written_and_by_default() {
    let hot_keys = good("").hot_keys;
    assert_eq!((hot_keys.threshold, hot_keys.epsilon_ppm), (100, 50_000));
    assert_eq!(hot_keys.lease_for, std::time::Duration::from_millis(100));
    let hot_keys = good("hot_keys: {threshold: 3000/m, window: 2s, epsilon: 0.01, lease_for: 50ms}").hot_keys;
    assert_eq!((hot_keys.threshold, hot_keys.epsilon_ppm), (100, 10_000));
    for wrong in
        ["window: 999ms", "lease_for: 1ms", "lease_for: 2s", "epsilon: 1.1", "threshold: 0", "size: 1"]
    {
        assert_eq!(faults(&format!("{ROUTES}hot_keys: {{{wrong}}}")).len(), 1, "{wrong}");
    }
}

#[test]
fn shards_are_within_bounds() {
    let row = |fields: &str| {
        format!("{ROUTES}rules: {{rows: [{{tenant: a, capacity: 10, refill_per_second: 1, {fields}}}]}}")
    };
    assert_eq!(read(&row("shards: 10"), &|_| None).unwrap().rules.rows[0].terms.value.shards, 10);
    for wrong in
        ["shards: 0", "shards: 65", "shards: 11", "shards: 2, candidate: {capacity: 5, refill_per_second: 1}"]
    {
        assert_eq!(faults(&row(wrong)).len(), 1, "{wrong}");
    }
}

#[test]
fn secrets_are_not_shown() {
    let config = good(
        "store: {redis: {url: 'redis://:hunter2@h:1', password: hunter2}}\nadmin: {token: hunter2}\nidentity: {hash_secret: hunter2}",
    );
    assert!(!format!("{config:?}").contains("hunter2"));
    let wrong = format!("{ROUTES}store: {{redis: {{url: 'http://:hunter2@h:1'}}}}");
    assert!(!faults(&wrong).join("\n").contains("hunter2"));
}

/// What is wrong with one of many rows is told with its own place, beside what is wrong with the file.
#[test]
fn rows_are_told_apart_however_many_there_are() {
    let row = |number: usize| format!("    - {{tenant: t{number}, capacity: 1, refill_per_second: 1}}\n");
    let rows: String = (0..1_000).map(row).collect();
    assert_eq!(good(&format!("rules:\n  rows:\n{rows}")).rules.rows.len(), 1_000);

    let bad = rows.replace("{tenant: t700, capacity: 1,", "{tenant: t700, capacity: none,");
    assert_eq!(
        faults(&format!("rules:\n  rows:\n{bad}listeners: [\n")),
        [
            "703:32: rules.rows[700].capacity: expected a whole number such as 100, got `none`",
            "1003:12: not YAML: unclosed bracket '['",
        ]
    );
}
