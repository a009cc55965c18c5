//! Redis: where it is, who the gateway is there, and how it is spoken to.

use std::path::PathBuf;
use std::time::Duration;

use crate::config::fault::Placed;
use crate::config::fields::{Reading, join, placed};
use crate::config::yaml::Node;
use crate::config::{Certificate, Login, Redis, RedisTls, Secret, Servers, Store};

/// The most that one call to Redis may take, unless `store.redis.timeout` says otherwise.
pub(super) const TIMEOUT: Duration = Duration::from_millis(5);

/// What an address may begin with.
const SCHEMES: [&str; 3] = ["redis://", "rediss://", "unix://"];

pub(super) fn redis_of(node: &Node<'_>, r: &mut Reading<'_>, store: &mut Store) {
    let [url, cluster, sentinel, user, password, database, tls, timeout, key_prefix] = r.fields(
        node,
        "store.redis",
        ["url", "cluster", "sentinel", "user", "password", "database", "tls", "timeout", "key_prefix"],
    );
    if let Some(prefix) = key_prefix.and_then(|node| key_prefix_of(node, r)) {
        store.key_prefix = prefix;
    }
    let timeout = timeout.and_then(|node| r.some_time(node, "store.redis.timeout")).unwrap_or(TIMEOUT);
    store.breaker.apart = timeout;
    let login = login_of(user, password, "store.redis", r);
    let clustered = cluster.is_some();
    let database = database.and_then(|node| database_of(node, clustered, r));
    let tls = tls.map(|node| placed(node, tls_of(node, r)));
    let given = [(url, "url"), (cluster, "cluster"), (sentinel, "sentinel")];
    let mut given = given.into_iter().filter_map(|(node, name)| Some((node?, name)));
    let servers = match (given.next(), given.next()) {
        (None, _) => {
            r.fault(node.place, "store.redis", "expected one of `url`, `cluster` and `sentinel` in it");
            None
        }
        (Some((_, first)), Some((second, name))) => {
            let field = join("store.redis", name);
            r.fault(second.place, &field, format!("expected only one of `{first}` and `{name}`"));
            None
        }
        (Some((node, "url")), None) => address_of(node, "store.redis.url", r).map(Servers::One),
        (Some((node, "cluster")), None) => addresses_of(node, "store.redis.cluster", r).map(Servers::Cluster),
        (Some((node, _)), None) => sentinel_of(node, r),
    };
    if let (Some(tls), Some(servers)) = (&tls, &servers)
        && !servers.addresses()[0].value.0.starts_with("rediss://")
    {
        r.fault(tls.place, "store.redis.tls", "expected addresses that begin with rediss:// beside it");
    }
    if let Some(servers) = servers {
        store.redis = Some(Redis { servers, login, database, tls, timeout });
    }
}

fn sentinel_of(node: &Node<'_>, r: &mut Reading<'_>) -> Option<Servers> {
    let field = "store.redis.sentinel";
    let [master, nodes, user, password] = r.fields(node, field, ["master", "nodes", "user", "password"]);
    let login = login_of(user, password, field, r);
    let master = r.required(node, &join(field, "master"), master);
    let master = master.and_then(|node| r.name(node, "store.redis.sentinel.master"));
    let nodes = r.required(node, &join(field, "nodes"), nodes);
    let nodes = nodes.and_then(|node| addresses_of(node, "store.redis.sentinel.nodes", r));
    Some(Servers::Sentinel { master: master?, nodes: nodes?, login })
}

fn addresses_of(node: &Node<'_>, field: &str, r: &mut Reading<'_>) -> Option<Vec<Placed<Secret>>> {
    let items = r.list(node, field);
    if items.is_empty() {
        r.fault(node.place, field, "expected at least one address");
    }
    let mut all = Vec::new();
    for (index, item) in items.iter().enumerate() {
        all.push(address_of(item, &format!("{field}[{index}]"), r)?);
    }
    let secure = |address: &Placed<Secret>| address.value.0.starts_with("rediss://");
    if let Some(other) = all.iter().find(|address| secure(address) != secure(&all[0])) {
        r.fault(other.place, field, "expected either all or none of them to begin with rediss://");
    }
    (!all.is_empty()).then_some(all)
}

/// An address as `redis://host:port`, also where only `host:port` is written. The text may hold a password, so
/// it is never shown.
fn address_of(node: &Node<'_>, field: &str, r: &mut Reading<'_>) -> Option<Placed<Secret>> {
    let text = r.text(node, field)?;
    let is_bare =
        !text.contains("://") && text.rsplit_once(':').is_some_and(|(_, port)| port.parse::<u16>().is_ok());
    if is_bare && !text.contains('@') {
        return Some(placed(node, Secret(format!("redis://{text}"))));
    }
    if SCHEMES.iter().any(|scheme| text.starts_with(scheme)) {
        return Some(placed(node, Secret(text.into_owned())));
    }
    r.fault(node.place, field, "expected redis://host:port, rediss://host:port or unix://path");
    None
}

fn login_of(user: Option<&Node<'_>>, password: Option<&Node<'_>>, field: &str, r: &mut Reading<'_>) -> Login {
    if let (Some(user), None) = (user, password) {
        r.fault(user.place, &join(field, "user"), "expected `password` beside it");
    }
    // An empty one is none: what an environment does not set.
    let mut text = |node: Option<&Node<'_>>, name| {
        let text = r.text(node?, &join(field, name))?.into_owned();
        (!text.is_empty()).then_some(text)
    };
    Login { user: text(user, "user").map(Into::into), password: text(password, "password").map(Secret) }
}

fn database_of(node: &Node<'_>, clustered: bool, r: &mut Reading<'_>) -> Option<u32> {
    let field = "store.redis.database";
    let number = r.whole(node, field)?;
    match u32::try_from(number) {
        Ok(0) if clustered => Some(0),
        Ok(_) if clustered => {
            r.fault(node.place, field, "expected none: a cluster has only database 0");
            None
        }
        Ok(number) if number <= 1_000_000 => Some(number),
        _ => {
            r.fault(node.place, field, format!("expected a number from 0 to 1000000, got {number}"));
            None
        }
    }
}

fn tls_of(node: &Node<'_>, r: &mut Reading<'_>) -> RedisTls {
    let field = "store.redis.tls";
    let [ca, cert, key] = r.fields(node, field, ["ca", "cert", "key"]);
    for (there, missing, name) in [(cert, key, "key"), (key, cert, "cert")] {
        if let (Some(node), None) = (there, missing) {
            r.fault(node.place, field, format!("expected `{name}` beside it"));
        }
    }
    let mut path = |node: Option<&Node<'_>>, name| {
        let node = node?;
        r.text(node, &join(field, name)).map(|text| PathBuf::from(text.into_owned()))
    };
    let (ca, cert, key) = (path(ca, "ca"), path(cert, "cert"), path(key, "key"));
    RedisTls { ca, client: cert.zip(key).map(|(cert, key)| Certificate { cert, key }) }
}

fn key_prefix_of(node: &Node<'_>, r: &mut Reading<'_>) -> Option<Box<str>> {
    let prefix = r.name(node, "store.redis.key_prefix")?;
    let is_plain = prefix.bytes().all(|b| b.is_ascii_alphanumeric() || b"._-:".contains(&b));
    if is_plain && prefix.len() <= 32 {
        return Some(prefix);
    }
    let message = "expected at most 32 letters, digits and . _ - :";
    r.fault(node.place, "store.redis.key_prefix", message);
    None
}
