//! Each section of the file, read into what it means. One function a section, in the order of the
//! file that `conf/tollgate.yaml` shows.

mod named;
mod redis;
mod routing;
mod rules;
mod store;

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

use ipnet::IpNet;

use self::routing::{routes_of, upstreams_of};
use self::rules::rules_of;
pub(super) use self::rules::{built_in_default, row, rows_alone};
use self::store::{gateways_of, hot_keys_of, store_of};
use super::fault::{Fault, Placed};
use super::fields::{Reading, join, placed};
use super::yaml::{Kind, Node};
use super::{
    Admin, Certificate, ClientAddress, Config, Cors, Headers, Identity, Keys, Level, Listener, Log,
    LogFormat, Missing, OnStoreFailure, Row, Secret, overlap,
};

const ON_STORE_FAILURE: [(&str, OnStoreFailure); 3] =
    [("local", OnStoreFailure::Local), ("allow", OnStoreFailure::Allow), ("deny", OnStoreFailure::Deny)];

/// The configuration below `root`; `rows` have been read on the way.
pub(super) fn config(root: &Node<'_>, rows: Vec<Row>, r: &mut Reading<'_>) -> Config {
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
        cors,
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
            "cors",
            "headers",
            "log",
        ],
    );
    let (mut warnings, mut unread) = (Vec::new(), Vec::new());
    let store = store_of(store, r);
    let (identity_place, identity) = (identity.unwrap_or(root).place, identity_of(root, identity, r));
    if store.redis.is_some() && identity.hash_secret.0.is_empty() {
        let message =
            "is empty: unknown keys are hashed with a public secret, so who can read Redis can test guesses";
        warnings.push(Fault::new(identity_place, "identity.hash_secret", message));
    }
    let gateways = cluster.and_then(|node| gateways_of(node, r, &mut warnings));
    Config {
        threads: threads.and_then(|node| threads_of(node, r)),
        drain: drain.and_then(|node| r.duration(node, "drain")).unwrap_or(Duration::from_secs(30)),
        listeners: listeners_of(root, listeners, &identity.client_address.trusted_proxies, r),
        admin: admin_of(root, admin, r),
        store,
        gateways,
        identity,
        upstreams: upstreams.map(|node| upstreams_of(node, r)).unwrap_or_default(),
        routes: routes_of(root, routes, &mut unread, r),
        rules: rules_of(root, rules, rows, &mut unread, r),
        cors: cors.map(|node| cors_of(node, r)).unwrap_or_default(),
        headers: headers_of(headers, r),
        log: log_of(log, r),
        hot_keys: hot_keys_of(hot_keys, r),
        unread,
        warnings,
    }
}

/// A key that is read and checked, but that nothing acts on yet: said aloud, never silently.
fn no_effect_yet(warnings: &mut Vec<Fault>, node: &Node<'_>, field: &str) {
    warnings.push(Fault::new(node.place, field, "is read, but this version does not act on it yet"));
}

fn threads_of(node: &Node<'_>, r: &mut Reading<'_>) -> Option<usize> {
    if r.is_word(node, "auto") {
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
        Ok(address) if SocketAddr::port(&address) == 0 => {
            r.fault(node.place, field, "expected a port from 1 to 65535: nobody is told which one 0 becomes");
            None
        }
        Ok(address) => Some(placed(node, address)),
        Err(_) => {
            let message =
                format!("expected an address such as 0.0.0.0:8080 or [::]:8080, got {}", node.describe());
            r.fault(node.place, field, message);
            None
        }
    }
}

fn listeners_of(
    root: &Node<'_>,
    node: Option<&Node<'_>>,
    trusted: &[IpNet],
    r: &mut Reading<'_>,
) -> Vec<Listener> {
    let Some(node) = node else {
        let address = Placed { value: SocketAddr::from((Ipv4Addr::UNSPECIFIED, 8080)), place: root.place };
        return vec![Listener { address, tls: Vec::new(), proxy_protocol: false }];
    };
    let items = r.list(node, "listeners");
    if items.is_empty() && matches!(node.kind, Kind::Sequence(_)) {
        r.fault(node.place, "listeners", "expected at least one listener");
    }
    let mut listeners: Vec<Listener> = Vec::new();
    for (index, item) in items.iter().enumerate() {
        let field = format!("listeners[{index}]");
        let [address_node, tls, proxied] = r.fields(item, &field, ["address", "tls", "proxy_protocol"]);
        let address_field = join(&field, "address");
        let address_node = r.required(item, &address_field, address_node);
        let tls = tls.map(|node| certificates_of(node, &join(&field, "tls"), r)).unwrap_or_default();
        let words = [("true", true), ("false", false)];
        let proxied = proxied.and_then(|node| {
            let is_on = r.one_of(node, &join(&field, "proxy_protocol"), &words)?;
            if is_on && trusted.is_empty() {
                let message = "expected identity.client_address.trusted_proxies: those who may send it";
                r.fault(node.place, &join(&field, "proxy_protocol"), message);
            }
            Some(is_on)
        });
        let Some(address) = address_node.and_then(|node| address(node, &address_field, r)) else { continue };
        if let Some(other) = listeners.iter().find(|other| overlap(other.address.value, address.value)) {
            let message = format!("{} is listened on twice: see {}", address.value, other.address.place);
            r.fault(address.place, &address_field, message);
        }
        listeners.push(Listener { address, tls, proxy_protocol: proxied.unwrap_or(false) });
    }
    listeners
}

fn certificates_of(node: &Node<'_>, field: &str, r: &mut Reading<'_>) -> Vec<Placed<Certificate>> {
    let [list] = r.fields(node, field, ["certificates"]);
    let field = join(field, "certificates");
    let Some(list) = r.required(node, &field, list) else { return Vec::new() };
    let items = r.list(list, &field);
    if items.is_empty() && matches!(list.kind, Kind::Sequence(_)) {
        r.fault(list.place, &field, "expected at least one certificate");
    }
    let numbered = items.iter().enumerate();
    numbered.filter_map(|(index, item)| certificate_of(item, &format!("{field}[{index}]"), r)).collect()
}

fn certificate_of(node: &Node<'_>, field: &str, r: &mut Reading<'_>) -> Option<Placed<Certificate>> {
    let [cert, key] = r.fields(node, field, ["cert", "key"]);
    let cert = r.required(node, &join(field, "cert"), cert);
    let key = r.required(node, &join(field, "key"), key);
    let cert = r.name(cert?, &join(field, "cert"));
    let key = r.name(key?, &join(field, "key"));
    Some(placed(node, Certificate { cert: PathBuf::from(&*cert?), key: PathBuf::from(&*key?) }))
}

fn admin_of(root: &Node<'_>, node: Option<&Node<'_>>, r: &mut Reading<'_>) -> Admin {
    let default = Placed { value: SocketAddr::from((Ipv4Addr::LOCALHOST, 9090)), place: root.place };
    let Some(node) = node else { return Admin { address: default, token: None } };
    let [address_node, token] = r.fields(node, "admin", ["address", "token"]);
    let token = token.and_then(|node| r.text(node, "admin.token"));
    Admin {
        address: address_node.and_then(|node| address(node, "admin.address", r)).unwrap_or(default),
        // As a header has it: without blanks around it, such as the end of the line of a secret's file.
        token: token.map(|token| token.trim().to_owned()).filter(|token| !token.is_empty()).map(Secret),
    }
}

fn identity_of(root: &Node<'_>, node: Option<&Node<'_>>, r: &mut Reading<'_>) -> Identity {
    let mut identity = Identity {
        tenant_header: "X-Api-Key".into(),
        missing: Missing::Reject,
        keys: Placed { value: Keys::Plain, place: root.place },
        hash_secret: Secret(String::new()),
        previous_hash_secret: None,
        client_address: ClientAddress::default(),
    };
    let Some(node) = node else { return identity };
    let [tenant, client_address, hash_secret, previous] =
        r.fields(node, "identity", ["tenant", "client_address", "hash_secret", "previous_hash_secret"]);
    let previous = previous.and_then(|node| r.text(node, "identity.previous_hash_secret"));
    identity.previous_hash_secret =
        previous.filter(|secret| !secret.is_empty()).map(|secret| Secret(secret.into_owned()));
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
            let words = [("plain", Keys::Plain), ("lookup", Keys::Lookup)];
            if let Some(keys) = r.one_of(node, "identity.tenant.keys", &words) {
                identity.keys = placed(node, keys);
            }
        }
    }
    if let Some(node) = client_address {
        identity.client_address = client_address_of(node, r);
    }
    if let Some(secret) = hash_secret.and_then(|node| r.text(node, "identity.hash_secret")) {
        identity.hash_secret = Secret(secret.into_owned());
    }
    identity
}

fn client_address_of(node: &Node<'_>, r: &mut Reading<'_>) -> ClientAddress {
    let field = "identity.client_address";
    let mut found = ClientAddress::default();
    let [trusted, header, prefix] = r.fields(node, field, ["trusted_proxies", "header", "ipv6_prefix"]);
    let field = join(field, "trusted_proxies");
    for (index, item) in trusted.map(|node| r.list(node, &field)).unwrap_or_default().iter().enumerate() {
        found.trusted_proxies.extend(network(item, &format!("{field}[{index}]"), r));
    }
    if let Some(node) = header {
        let name = r.name(node, "identity.client_address.header").map(|name| name.to_ascii_lowercase());
        match name.as_deref() {
            Some("x-forwarded-for") | None => {}
            Some("forwarded") => found.header = http::header::FORWARDED,
            Some(_) => {
                let message = format!("expected X-Forwarded-For or Forwarded, got {}", node.describe());
                r.fault(node.place, "identity.client_address.header", message);
            }
        }
    }
    if let Some(node) = prefix {
        match r.whole(node, "identity.client_address.ipv6_prefix") {
            Some(bits @ 1..=128) => found.ipv6_prefix = bits as u8,
            Some(_) => r.fault(node.place, "identity.client_address.ipv6_prefix", "expected 1 to 128"),
            None => {}
        }
    }
    found
}

/// A network such as `10.0.0.0/8`, or one address.
pub(super) fn network(node: &Node<'_>, field: &str, r: &mut Reading<'_>) -> Option<IpNet> {
    let text = r.name(node, field)?;
    let network = text.parse().ok().or_else(|| text.parse::<IpAddr>().ok().map(IpNet::from)).map(canonical);
    if network.is_none() {
        let message = format!("expected an address or a network such as 10.0.0.0/8, got {}", node.describe());
        r.fault(node.place, field, message);
    }
    network
}

/// A network of IPv4 addresses that is written as one of IPv6 (`::ffff:10.0.0.0/104`): clients are not.
fn canonical(network: IpNet) -> IpNet {
    let IpNet::V6(mapped) = network else { return network };
    let bits = mapped.prefix_len().checked_sub(96);
    let inner = bits.zip(mapped.addr().to_ipv4_mapped());
    inner.and_then(|(bits, address)| IpNet::new(address.into(), bits).ok()).unwrap_or(network)
}

fn cors_of(node: &Node<'_>, r: &mut Reading<'_>) -> Cors {
    let [origins] = r.fields(node, "cors", ["origins"]);
    let mut cors = Cors::default();
    for (index, item) in
        origins.map(|node| r.list(node, "cors.origins")).unwrap_or_default().iter().enumerate()
    {
        let field = format!("cors.origins[{index}]");
        let Some(origin) = r.name(item, &field) else { continue };
        if &*origin == "*" || is_origin(&origin) {
            cors.origins.push(origin);
        } else {
            let message = format!(
                "expected an origin as browsers send it, such as https://app.example.com, or *, got {}",
                item.describe()
            );
            r.fault(item.place, &field, message);
        }
    }
    cors
}

/// Whether browsers may send it: lower case, no path, not even a slash, and no port that goes without saying.
fn is_origin(text: &str) -> bool {
    let (host, default_port) = match (text.strip_prefix("https://"), text.strip_prefix("http://")) {
        (Some(host), _) => (host, ":443"),
        (_, Some(host)) => (host, ":80"),
        _ => return false,
    };
    let plain = |byte: u8| {
        byte.is_ascii_lowercase()
            || byte.is_ascii_digit()
            || matches!(byte, b'.' | b'-' | b'_' | b':' | b'[' | b']')
    };
    !host.is_empty() && !host.ends_with(default_port) && host.bytes().all(plain)
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
