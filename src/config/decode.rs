//! Each section of the file, read into what it means. One function a section, in the order of the
//! file that `conf/tollgate.yaml` shows.

use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

use super::fault::{Fault, Placed};
use super::fields::{Reading, join, placed};
use super::yaml::{Kind, Node};
use super::{
    Admin, Breaker, Certificate, Config, Headers, Identity, Level, Listener, Log, LogFormat, Missing,
    OnStoreFailure, Redis, Route, Row, Rules, Secret, Store, Upstream,
};
use crate::limit::Limit;
use crate::limit::rate::Rate;
use crate::limit::token_bucket::{TokenBucket, TokenBucketError};

/// Buckets in memory unless `store.memory.max_keys` says otherwise: about 80 MB when full.
const MAX_KEYS: u64 = 500_000;

/// The most that one call to Redis may take, unless `store.redis.timeout` says otherwise.
const REDIS_TIMEOUT: Duration = Duration::from_millis(5);

const ON_STORE_FAILURE: [(&str, OnStoreFailure); 3] =
    [("local", OnStoreFailure::Local), ("allow", OnStoreFailure::Allow), ("deny", OnStoreFailure::Deny)];

pub(super) fn config(root: &Node<'_>, r: &mut Reading<'_>) -> Config {
    let [
        threads,
        drain,
        listeners,
        admin,
        store,
        cluster,
        identity,
        upstreams,
        routes,
        rules,
        hot_keys,
        headers,
        log,
    ] = r.fields(
        root,
        "",
        [
            "threads",
            "drain",
            "listeners",
            "admin",
            "store",
            "cluster",
            "identity",
            "upstreams",
            "routes",
            "rules",
            "hot_keys",
            "headers",
            "log",
        ],
    );
    let mut warnings = Vec::new();
    let store = store_of(store, r);
    let gateways = cluster.and_then(|node| gateways_of(node, r, &mut warnings));
    Config {
        threads: threads.and_then(|node| threads_of(node, r)),
        drain: drain.and_then(|node| r.duration(node, "drain")).unwrap_or(Duration::from_secs(30)),
        listeners: listeners_of(root, listeners, r),
        admin: admin_of(root, admin, r),
        store,
        gateways,
        identity: identity_of(identity, r, &mut warnings),
        upstreams: upstreams.map(|node| upstreams_of(node, r)).unwrap_or_default(),
        routes: routes_of(root, routes, r),
        rules: rules_of(root, rules, r),
        headers: headers_of(headers, r),
        log: log_of(log, r),
        warnings: {
            if let Some(node) = hot_keys {
                hot_keys_of(node, r, &mut warnings);
            }
            warnings
        },
    }
}

/// A key that is read and checked, but that nothing acts on yet: said aloud, never silently.
fn no_effect_yet(warnings: &mut Vec<Fault>, node: &Node<'_>, field: &str) {
    warnings.push(Fault::new(node.place, field, "is read, but this version does not act on it yet"));
}

fn threads_of(node: &Node<'_>, r: &mut Reading<'_>) -> Option<usize> {
    if matches!(&node.kind, Kind::Scalar { text, .. } if text == "auto") {
        return None;
    }
    let threads = r.whole(node, "threads")?;
    if !(1..=1024).contains(&threads) {
        r.fault(node.place, "threads", format!("expected auto or a number from 1 to 1024, got {threads}"));
        return None;
    }
    usize::try_from(threads).ok()
}

fn address(node: &Node<'_>, field: &str, r: &mut Reading<'_>) -> Option<Placed<SocketAddr>> {
    let text = r.text(node, field)?;
    match text.parse() {
        Ok(address) => Some(placed(node, address)),
        Err(_) => {
            let message =
                format!("expected an address such as 0.0.0.0:8080 or [::]:8080, got {}", node.describe());
            r.fault(node.place, field, message);
            None
        }
    }
}

fn listeners_of(root: &Node<'_>, node: Option<&Node<'_>>, r: &mut Reading<'_>) -> Vec<Listener> {
    let Some(node) = node else {
        let address = Placed { value: SocketAddr::from((Ipv4Addr::UNSPECIFIED, 8080)), place: root.place };
        return vec![Listener { address, tls: None }];
    };
    let items = r.list(node, "listeners");
    if items.is_empty() && matches!(node.kind, Kind::Sequence(_)) {
        r.fault(node.place, "listeners", "expected at least one listener");
    }
    let mut listeners: Vec<Listener> = Vec::new();
    for (index, item) in items.iter().enumerate() {
        let field = format!("listeners[{index}]");
        let [address_node, tls] = r.fields(item, &field, ["address", "tls"]);
        let address_field = join(&field, "address");
        let address_node = r.required(item, &address_field, address_node);
        let tls = tls.and_then(|node| certificate_of(node, &join(&field, "tls"), r));
        let Some(address) = address_node.and_then(|node| address(node, &address_field, r)) else { continue };
        if listeners.iter().any(|other| other.address.value == address.value && address.value.port() != 0) {
            r.fault(address.place, &address_field, format!("{} is listened on twice", address.value));
        }
        listeners.push(Listener { address, tls });
    }
    listeners
}

fn certificate_of(node: &Node<'_>, field: &str, r: &mut Reading<'_>) -> Option<Certificate> {
    let [certificates] = r.fields(node, field, ["certificates"]);
    let field = join(field, "certificates");
    let certificates = r.required(node, &field, certificates)?;
    let [only] = r.list(certificates, &field) else {
        r.fault(
            certificates.place,
            &field,
            "expected one certificate (this version serves one per listener)",
        );
        return None;
    };
    let field = format!("{field}[0]");
    let [cert, key] = r.fields(only, &field, ["cert", "key"]);
    let cert = r.required(only, &join(&field, "cert"), cert);
    let key = r.required(only, &join(&field, "key"), key);
    let cert = r.name(cert?, &join(&field, "cert"));
    let key = r.name(key?, &join(&field, "key"));
    Some(Certificate { cert: PathBuf::from(&*cert?), key: PathBuf::from(&*key?) })
}

fn admin_of(root: &Node<'_>, node: Option<&Node<'_>>, r: &mut Reading<'_>) -> Admin {
    let default = Placed { value: SocketAddr::from((Ipv4Addr::LOCALHOST, 9090)), place: root.place };
    let Some(node) = node else { return Admin { address: default, token: None } };
    let [address_node, token] = r.fields(node, "admin", ["address", "token"]);
    let token = token.and_then(|node| r.text(node, "admin.token")).filter(|token| !token.is_empty());
    Admin {
        address: address_node.and_then(|node| address(node, "admin.address", r)).unwrap_or(default),
        token: token.map(|token| Secret(token.into_owned())),
    }
}

fn store_of(node: Option<&Node<'_>>, r: &mut Reading<'_>) -> Store {
    let breaker = Breaker {
        failure_permille: 500,
        consecutive_failures: 10,
        open_for: Duration::from_secs(1),
        apart: REDIS_TIMEOUT,
    };
    let mut store = Store { redis: None, max_keys: MAX_KEYS as usize, key_prefix: "rl".into(), breaker };
    let Some(node) = node else { return store };
    if let Kind::Scalar { text, .. } = &node.kind {
        if text != "memory" {
            let message = format!("expected `memory`, or a mapping with `redis:`; got {}", node.describe());
            r.fault(node.place, "store", message);
        }
        return store;
    }
    let [memory, redis, breaker] = r.fields(node, "store", ["memory", "redis", "breaker"]);
    if memory.is_none() && redis.is_none() {
        r.fault(node.place, "store", "expected `memory` or `redis` in it");
    }
    if let Some(node) = memory {
        let [max_keys] = r.fields(node, "store.memory", ["max_keys"]);
        if let Some((node, keys)) =
            max_keys.and_then(|node| Some((node, r.whole(node, "store.memory.max_keys")?)))
        {
            if (1..=1_000_000_000).contains(&keys) {
                store.max_keys = keys as usize;
            } else {
                let message = format!("expected a number from 1 to 1000000000, got {keys}");
                r.fault(node.place, "store.memory.max_keys", message);
            }
        }
    }
    if let Some(node) = breaker {
        breaker_of(node, r, &mut store.breaker);
    }
    if let Some(node) = redis {
        redis_of(node, r, &mut store);
    }
    store
}

fn breaker_of(node: &Node<'_>, r: &mut Reading<'_>, breaker: &mut Breaker) {
    let [ratio, consecutive, open_for] =
        r.fields(node, "store.breaker", ["failure_ratio", "consecutive_failures", "open_for"]);
    if let Some((node, ratio)) =
        ratio.and_then(|node| Some((node, r.fraction(node, "store.breaker.failure_ratio")?)))
    {
        #[expect(clippy::cast_sign_loss, reason = "a fraction is not negative")]
        let permille = (ratio * 1_000.0).round() as u32;
        if permille == 0 {
            r.fault(
                node.place,
                "store.breaker.failure_ratio",
                "expected more than 0: else every call would open it",
            );
        }
        breaker.failure_permille = permille;
    }
    if let Some(node) = consecutive {
        let field = "store.breaker.consecutive_failures";
        match r.whole(node, field).map(u32::try_from) {
            Some(Ok(failures @ 1..)) => breaker.consecutive_failures = failures,
            Some(_) => r.fault(node.place, field, "expected a number from 1 to 4294967295"),
            None => {}
        }
    }
    if let Some(node) = open_for {
        match r.duration(node, "store.breaker.open_for") {
            Some(pause) if !pause.is_zero() => breaker.open_for = pause,
            Some(_) => r.fault(node.place, "store.breaker.open_for", "expected at least 1ms"),
            None => {}
        }
    }
}

fn redis_of(node: &Node<'_>, r: &mut Reading<'_>, store: &mut Store) {
    let [url, timeout, key_prefix, cluster, sentinel] =
        r.fields(node, "store.redis", ["url", "timeout", "key_prefix", "cluster", "sentinel"]);
    for (node, field) in [(cluster, "store.redis.cluster"), (sentinel, "store.redis.sentinel")] {
        if let Some(node) = node {
            r.fault(node.place, field, "is not available in this version; give one server with `url`");
        }
    }
    if let Some(node) = key_prefix {
        let name = r.name(node, "store.redis.key_prefix");
        match name {
            Some(name)
                if name.bytes().all(|b| b.is_ascii_alphanumeric() || b"._-:".contains(&b))
                    && name.len() <= 32 =>
            {
                store.key_prefix = name;
            }
            Some(_) => r.fault(
                node.place,
                "store.redis.key_prefix",
                "expected at most 32 letters, digits and . _ - :",
            ),
            None => {}
        }
    }
    let timeout = timeout
        .and_then(|node| {
            let timeout = r.duration(node, "store.redis.timeout")?;
            if timeout.is_zero() {
                r.fault(node.place, "store.redis.timeout", "expected at least 1ms");
            }
            Some(timeout)
        })
        .unwrap_or(REDIS_TIMEOUT);
    store.breaker.apart = timeout;
    let url_node =
        if cluster.or(sentinel).is_some() { url } else { r.required(node, "store.redis.url", url) };
    let Some(url_node) = url_node else { return };
    let Some(url) = r.text(url_node, "store.redis.url") else { return };
    if !url.starts_with("redis://") && !url.starts_with("unix://") {
        let what =
            if url.starts_with("rediss://") { "TLS to Redis is not available in this version: " } else { "" };
        // The text itself may hold a password, so it is not shown.
        r.fault(
            url_node.place,
            "store.redis.url",
            format!("{what}expected redis://host:port or unix://path"),
        );
        return;
    }
    store.redis = Some(Redis { url: placed(url_node, Secret(url.into_owned())), timeout });
}

fn gateways_of(node: &Node<'_>, r: &mut Reading<'_>, warnings: &mut Vec<Fault>) -> Option<u32> {
    let [gateways, region] = r.fields(node, "cluster", ["gateways", "region"]);
    if let Some(node) = region {
        let [name, shares] = r.fields(node, "cluster.region", ["name", "shares"]);
        name.map(|node| r.name(node, "cluster.region.name"));
        for (key, share) in shares.map(|node| r.entries(node, "cluster.region.shares")).unwrap_or_default() {
            r.fraction(share, &join("cluster.region.shares", &key.text));
        }
        no_effect_yet(warnings, node, "cluster.region");
    }
    let node = gateways?;
    if matches!(&node.kind, Kind::Scalar { text, .. } if text == "auto") {
        return None;
    }
    let number = r.whole(node, "cluster.gateways")?;
    if !(1..=100_000).contains(&number) {
        r.fault(
            node.place,
            "cluster.gateways",
            format!("expected auto or a number from 1 to 100000, got {number}"),
        );
        return None;
    }
    u32::try_from(number).ok()
}

fn identity_of(node: Option<&Node<'_>>, r: &mut Reading<'_>, warnings: &mut Vec<Fault>) -> Identity {
    let mut identity = Identity {
        tenant_header: "X-Api-Key".into(),
        missing: Missing::Reject,
        hash_secret: Secret(String::new()),
    };
    let Some(node) = node else { return identity };
    let [tenant, client_address, hash_secret] =
        r.fields(node, "identity", ["tenant", "client_address", "hash_secret"]);
    if let Some(node) = tenant {
        let [header, missing, keys] = r.fields(node, "identity.tenant", ["header", "missing", "keys"]);
        if let Some(node) = header {
            let field = "identity.tenant.header";
            match r.name(node, field) {
                Some(name) if http::HeaderName::from_bytes(name.as_bytes()).is_ok() => {
                    identity.tenant_header = name;
                }
                Some(_) => {
                    r.fault(node.place, field, format!("expected a header name, got {}", node.describe()));
                }
                None => {}
            }
        }
        let words = [("reject", Missing::Reject), ("anonymous", Missing::Anonymous)];
        if let Some(missing) = missing.and_then(|node| r.one_of(node, "identity.tenant.missing", &words)) {
            identity.missing = missing;
        }
        if let Some(node) = keys {
            let lookup = r.one_of(node, "identity.tenant.keys", &[("plain", false), ("lookup", true)]);
            if lookup == Some(true) {
                r.fault(node.place, "identity.tenant.keys", "`lookup` is not available in this version");
            }
        }
    }
    if let Some(node) = client_address {
        client_address_of(node, r);
        no_effect_yet(warnings, node, "identity.client_address");
    }
    if let Some(secret) = hash_secret.and_then(|node| r.text(node, "identity.hash_secret")) {
        identity.hash_secret = Secret(secret.into_owned());
    }
    identity
}

fn client_address_of(node: &Node<'_>, r: &mut Reading<'_>) {
    let field = "identity.client_address";
    let [trusted, header, prefix] = r.fields(node, field, ["trusted_proxies", "header", "ipv6_prefix"]);
    for item in
        trusted.map(|node| r.list(node, "identity.client_address.trusted_proxies")).unwrap_or_default()
    {
        r.name(item, "identity.client_address.trusted_proxies");
    }
    header.map(|node| r.name(node, "identity.client_address.header"));
    if let Some(node) = prefix {
        let bits = r.whole(node, "identity.client_address.ipv6_prefix");
        if bits.is_some_and(|bits| bits > 128) {
            r.fault(node.place, "identity.client_address.ipv6_prefix", "expected at most 128");
        }
    }
}

fn upstreams_of(node: &Node<'_>, r: &mut Reading<'_>) -> Vec<Upstream> {
    let mut upstreams = Vec::new();
    for (name, node) in r.entries(node, "upstreams") {
        let field = join("upstreams", &name.text);
        let [servers, connect, read] = r.fields(node, &field, ["servers", "connect_timeout", "read_timeout"]);
        let servers_field = join(&field, "servers");
        let servers = r.required(node, &servers_field, servers);
        upstreams.push(Upstream {
            name: Placed { value: name.text.as_ref().into(), place: name.place },
            servers: servers.map(|node| servers_of(node, &servers_field, r)).unwrap_or_default(),
            connect_timeout: connect
                .and_then(|node| r.duration(node, &join(&field, "connect_timeout")))
                .unwrap_or(Duration::from_secs(2)),
            read_timeout: read
                .and_then(|node| r.duration(node, &join(&field, "read_timeout")))
                .unwrap_or(Duration::from_secs(60)),
        });
    }
    upstreams
}

fn servers_of(node: &Node<'_>, field: &str, r: &mut Reading<'_>) -> Vec<Placed<Box<str>>> {
    let items = r.list(node, field);
    if items.is_empty() && matches!(node.kind, Kind::Sequence(_)) {
        r.fault(node.place, field, "expected at least one server");
    }
    let mut servers = Vec::new();
    for (index, item) in items.iter().enumerate() {
        let field = format!("{field}[{index}]");
        let Some(text) = r.name(item, &field) else { continue };
        let port = text.rsplit_once(':').and_then(|(host, port)| Some((host, port.parse::<u16>().ok()?)));
        match port {
            Some((host, port)) if port > 0 && !host.is_empty() && !host.contains('/') => {
                servers.push(placed(item, text));
            }
            _ => r.fault(item.place, &field, format!("expected host:port, got {}", item.describe())),
        }
    }
    servers
}

fn routes_of(root: &Node<'_>, node: Option<&Node<'_>>, r: &mut Reading<'_>) -> Vec<Route> {
    let Some(node) = r.required(root, "routes", node) else { return Vec::new() };
    let items = r.list(node, "routes");
    if items.is_empty() && matches!(node.kind, Kind::Sequence(_)) {
        r.fault(node.place, "routes", "expected at least one route");
    }
    items
        .iter()
        .enumerate()
        .filter_map(|(index, item)| route_of(item, &format!("routes[{index}]"), r))
        .collect()
}

fn route_of(item: &Node<'_>, field: &str, r: &mut Reading<'_>) -> Option<Route> {
    let [id, matches, upstream, cost, tenant_rule, rules, on_store_failure] = r.fields(
        item,
        field,
        ["id", "match", "upstream", "cost", "tenant_rule", "rules", "on_store_failure"],
    );
    let id = r.required(item, &join(field, "id"), id).and_then(|node| route_id(node, &join(field, "id"), r));
    let matches = r.required(item, &join(field, "match"), matches);
    let matches = matches.and_then(|node| match_of(node, &join(field, "match"), r));
    let upstream = r.required(item, &join(field, "upstream"), upstream);
    let upstream = upstream.and_then(|node| Some(placed(node, r.name(node, &join(field, "upstream"))?)));
    let cost = cost.and_then(|node| Some(placed(node, r.whole(node, &join(field, "cost"))?)));
    let tenant_rule = tenant_rule
        .and_then(|node| r.one_of(node, &join(field, "tenant_rule"), &[("on", true), ("off", false)]))
        .unwrap_or(true);
    for (index, node) in
        rules.map(|node| r.list(node, &join(field, "rules"))).unwrap_or_default().iter().enumerate()
    {
        let field = format!("{field}.rules[{index}]");
        if let Some(name) = r.name(node, &field) {
            r.fault(node.place, &field, format!("there is no rule named `{name}` in rules.named"));
        }
    }
    let on_store_failure =
        on_store_failure.and_then(|node| r.one_of(node, &join(field, "on_store_failure"), &ON_STORE_FAILURE));
    let (host, path, methods) = matches?;
    Some(Route {
        cost: cost.unwrap_or(Placed { value: 1, place: item.place }),
        id: id?,
        host,
        path,
        methods,
        upstream: upstream?,
        tenant_rule,
        on_store_failure,
    })
}

fn route_id(node: &Node<'_>, field: &str, r: &mut Reading<'_>) -> Option<Placed<Box<str>>> {
    let id = r.name(node, field)?;
    if &*id == "default" {
        r.fault(
            node.place,
            field,
            "`default` is the route of requests that match no other; choose another id",
        );
    }
    Some(placed(node, id))
}

type Match = (Option<Box<str>>, Placed<Box<str>>, Vec<Box<str>>);

fn match_of(node: &Node<'_>, field: &str, r: &mut Reading<'_>) -> Option<Match> {
    let [host, path, methods] = r.fields(node, field, ["host", "path", "methods"]);
    let host =
        host.and_then(|node| r.name(node, &join(field, "host"))).map(|host| host.to_ascii_lowercase().into());
    let methods_field = join(field, "methods");
    let mut names: Vec<Box<str>> = Vec::new();
    for item in methods.map(|node| r.list(node, &methods_field)).unwrap_or_default() {
        let Some(name) = r.name(item, &methods_field) else { continue };
        if name.bytes().all(|byte| byte.is_ascii_uppercase() || byte == b'-') {
            names.push(name);
        } else {
            r.fault(
                item.place,
                &methods_field,
                format!("expected a method such as GET, got {}", item.describe()),
            );
        }
    }
    if let Some(node) = methods.filter(|node| matches!(&node.kind, Kind::Sequence(items) if items.is_empty()))
    {
        r.fault(node.place, &methods_field, "expected at least one method; leave it out for all");
    }
    let path_field = join(field, "path");
    let path = r.required(node, &path_field, path)?;
    Some((host, placed(path, r.name(path, &path_field)?), names))
}

fn rules_of(root: &Node<'_>, node: Option<&Node<'_>>, r: &mut Reading<'_>) -> Rules {
    let mut rules = Rules {
        default: Placed { value: built_in_default(), place: root.place },
        on_store_failure: OnStoreFailure::Local,
        rows: Vec::new(),
    };
    let Some(node) = node else { return rules };
    let [default, on_store_failure, rows, named, database] =
        r.fields(node, "rules", ["default", "on_store_failure", "rows", "named", "database"]);
    if let Some(node) = default {
        let [capacity, rate] = r.fields(node, "rules.default", ["capacity", "refill_per_second"]);
        if let Some(limit) = limit_of(node, capacity, rate, "rules.default", r) {
            rules.default = limit;
        }
    }
    if let Some(word) =
        on_store_failure.and_then(|node| r.one_of(node, "rules.on_store_failure", &ON_STORE_FAILURE))
    {
        rules.on_store_failure = word;
    }
    for (index, item) in named.map(|node| r.list(node, "rules.named")).unwrap_or_default().iter().enumerate()
    {
        r.fault(
            item.place,
            &format!("rules.named[{index}]"),
            "named rules are not available in this version",
        );
    }
    if let Some(node) = database {
        database_of(node, r);
    }
    if let Some(node) = rows {
        let items = r.list(node, "rules.rows");
        rules.rows.reserve(items.len());
        for (index, item) in items.iter().enumerate() {
            rules.rows.extend(row_of(item, index, r));
        }
    }
    rules
}

/// DESIGN's default: capacity 20, refill 10 per second.
pub(super) fn built_in_default() -> Limit {
    match Rate::per_second(10).map(|rate| TokenBucket::new(20, rate)) {
        Ok(Ok(bucket)) => Limit::TokenBucket(bucket),
        _ => unreachable!("20 tokens at 10 per second make a bucket"),
    }
}

fn database_of(node: &Node<'_>, r: &mut Reading<'_>) {
    let [url, refresh] = r.fields(node, "rules.database", ["url", "refresh"]);
    refresh.map(|node| r.duration(node, "rules.database.refresh"));
    let Some(node) = url else { return };
    if r.text(node, "rules.database.url").is_some_and(|url| !url.is_empty()) {
        r.fault(node.place, "rules.database.url", "rules from a database are not available in this version");
    }
}

fn row_of(item: &Node<'_>, index: usize, r: &mut Reading<'_>) -> Option<Row> {
    // The path of a row is only needed for a fault; with 500,000 rows its text would cost more than
    // the row itself, so a row without faults is read with a short one.
    let before = r.faults.len();
    let row = row_fields(item, "", r);
    for fault in &mut r.faults[before..] {
        let row = format!("rules.rows[{index}]");
        fault.field = if fault.field.is_empty() { row } else { join(&row, &fault.field) };
    }
    row
}

fn row_fields(item: &Node<'_>, field: &str, r: &mut Reading<'_>) -> Option<Row> {
    let [tenant, route, capacity, rate, on_store_failure] =
        r.fields(item, field, ["tenant", "route", "capacity", "refill_per_second", "on_store_failure"]);
    let any = |node: &&Node<'_>| !matches!(&node.kind, Kind::Scalar { text, .. } if text == "*");
    let tenant = tenant.filter(any).map(|node| r.name(node, "tenant"));
    let route = route.filter(any).map(|node| Some(placed(node, r.name(node, "route")?)));
    let limit = limit_of(item, capacity, rate, field, r);
    if tenant.is_none() && route.is_none() {
        r.fault(item.place, field, "names neither a tenant nor a route; for all of both set rules.default");
    }
    let on_store_failure =
        on_store_failure.and_then(|node| r.one_of(node, "on_store_failure", &ON_STORE_FAILURE));
    // `Some(None)` is a name that was written but could not be read: such a row must not widen.
    if tenant == Some(None) || route == Some(None) {
        return None;
    }
    Some(Row {
        place: item.place,
        tenant: tenant.flatten(),
        route: route.flatten(),
        limit: limit?,
        on_store_failure,
    })
}

fn limit_of(
    parent: &Node<'_>,
    capacity: Option<&Node<'_>>,
    rate: Option<&Node<'_>>,
    field: &str,
    r: &mut Reading<'_>,
) -> Option<Placed<Limit>> {
    let capacity_node = r.required(parent, &join(field, "capacity"), capacity);
    let rate_node = r.required(parent, &join(field, "refill_per_second"), rate);
    let capacity = capacity_node.and_then(|node| r.whole(node, &join(field, "capacity")));
    let rate = rate_node.and_then(|node| r.parsed::<Rate>(node, &join(field, "refill_per_second")));
    let (capacity_node, rate_node) = (capacity_node?, rate_node?);
    match TokenBucket::new(capacity?, rate?) {
        Ok(bucket) => Some(placed(capacity_node, Limit::TokenBucket(bucket))),
        Err(error @ TokenBucketError::RateTooFine) => {
            r.fault(rate_node.place, &join(field, "refill_per_second"), error.to_string());
            None
        }
        Err(error) => {
            let message = format!("{error}, got {}", capacity_node.describe());
            r.fault(capacity_node.place, &join(field, "capacity"), message);
            None
        }
    }
}

fn hot_keys_of(node: &Node<'_>, r: &mut Reading<'_>, warnings: &mut Vec<Fault>) {
    let [threshold, epsilon, lease_for] = r.fields(node, "hot_keys", ["threshold", "epsilon", "lease_for"]);
    threshold.map(|node| r.parsed::<Rate>(node, "hot_keys.threshold"));
    epsilon.map(|node| r.fraction(node, "hot_keys.epsilon"));
    lease_for.map(|node| r.duration(node, "hot_keys.lease_for"));
    no_effect_yet(warnings, node, "hot_keys");
}

fn headers_of(node: Option<&Node<'_>>, r: &mut Reading<'_>) -> Headers {
    let Some(node) = node else {
        return Headers { x_ratelimit: true, ratelimit_legacy: false, ratelimit_draft: true };
    };
    let mut headers = Headers { x_ratelimit: false, ratelimit_legacy: false, ratelimit_draft: false };
    for (index, item) in r.list(node, "headers").iter().enumerate() {
        let words = [("x-ratelimit", 0), ("ratelimit-legacy", 1), ("ratelimit-draft", 2)];
        match r.one_of(item, &format!("headers[{index}]"), &words) {
            Some(0) => headers.x_ratelimit = true,
            Some(1) => headers.ratelimit_legacy = true,
            Some(_) => headers.ratelimit_draft = true,
            None => {}
        }
    }
    headers
}

fn log_of(node: Option<&Node<'_>>, r: &mut Reading<'_>) -> Log {
    let mut log = Log { level: Level::Info, access_sample: 0.0, format: LogFormat::Json };
    let Some(node) = node else { return log };
    let [level, access] = r.fields(node, "log", ["level", "access"]);
    let levels =
        [("error", Level::Error), ("warn", Level::Warn), ("info", Level::Info), ("debug", Level::Debug)];
    if let Some(level) = level.and_then(|node| r.one_of(node, "log.level", &levels)) {
        log.level = level;
    }
    let Some(node) = access else { return log };
    let [format, sample] = r.fields(node, "log.access", ["format", "sample"]);
    let formats = [("json", LogFormat::Json), ("text", LogFormat::Text)];
    if let Some(format) = format.and_then(|node| r.one_of(node, "log.access.format", &formats)) {
        log.format = format;
    }
    log.access_sample = sample.and_then(|node| r.fraction(node, "log.access.sample")).unwrap_or(1.0);
    log
}
