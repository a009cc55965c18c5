//! The configuration: from YAML as it was written to values as they are meant.
//!
//! Reading never stops at the first fault. What refers to something else (a route to its upstream,
//! a row to its route) is checked by [`crate::snapshot`], which knows both ends.

mod decode;
pub mod env;
pub mod fault;
mod fields;
mod rows;
mod rules;
mod split;
mod warnings;
mod yaml;

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use ipnet::IpNet;

use fault::{Fault, Place, Placed};
use fields::Reading;
use yaml::Node;

pub use self::rules::{
    Database, Exempt, KeySource, MissingValue, Mode, NamedRule, OnStoreFailure, Priced, Row, Rules, Terms,
};

use crate::limit::token_bucket::TokenBucket;

/// The JSON Schema of the configuration, as `tollgate schema` prints it.
pub const SCHEMA: &str = include_str!("config/schema.json");

/// Everything an operator can say.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    /// Threads for traffic; one per core if not given.
    pub threads: Option<usize>,
    /// How long requests in flight may go on after SIGTERM.
    pub drain: Duration,
    /// Where traffic comes in.
    pub listeners: Vec<Listener>,
    /// The admin listener.
    pub admin: Admin,
    /// Where buckets live.
    pub store: Store,
    /// How many gateways share the limits; `None` is `auto`.
    pub gateways: Option<u32>,
    /// Who a request belongs to.
    pub identity: Identity,
    /// Where traffic goes.
    pub upstreams: Vec<Upstream>,
    /// What goes where.
    pub routes: Vec<Route>,
    /// What is promised to whom.
    pub rules: Rules,
    /// When a key is hot, and what is taken of it in advance.
    pub hot_keys: HotKeys,
    /// Whose pages in browsers may read what the gateway itself answers.
    pub cors: Cors,
    /// Which families of rate limit headers responses carry.
    pub headers: Headers,
    /// What is logged.
    pub log: Log,
    /// Ids of routes and names of rules that have faults themselves: who refers to one of them is not wrong.
    pub unread: Vec<Box<str>>,
    /// What was read but does nothing, or is unwise; told by `check` and at the start.
    pub warnings: Vec<Fault>,
}

/// One address for traffic.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Listener {
    /// The address to bind.
    pub address: Placed<SocketAddr>,
    /// Certificates and their keys, if TLS is spoken here; the first one is for clients that ask for no name, or for
    /// one that none is for.
    pub tls: Vec<Placed<Certificate>>,
    /// Whether each connection begins with a PROXY protocol header.
    pub proxy_protocol: bool,
}

/// A certificate chain and its key, as PEM files.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Certificate {
    /// The chain.
    pub cert: PathBuf,
    /// The key.
    pub key: PathBuf,
}

/// The admin listener.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Admin {
    /// The address to bind.
    pub address: Placed<SocketAddr>,
    /// The bearer token for writes; without one there are no writes.
    pub token: Option<Secret>,
}

/// A text that must not be shown.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(pub String);

impl std::fmt::Debug for Secret {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Secret")
    }
}

/// Where buckets live.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Store {
    /// Redis, or only the memory of this process.
    pub redis: Option<Redis>,
    /// The most buckets kept in the memory of this process, as the store or as the fallback.
    pub max_keys: usize,
    /// The first part of every key.
    pub key_prefix: Box<str>,
    /// When calls to Redis stop for a while.
    pub breaker: Breaker,
}

/// When calls to a store node stop for a while.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Breaker {
    /// Failures in a thousand calls of ten seconds.
    pub failure_permille: u32,
    /// Failures in a row.
    pub consecutive_failures: u32,
    /// The first pause.
    pub open_for: Duration,
    /// Failures nearer to each other than this are one: the deadline of a call.
    pub apart: Duration,
}

/// Redis: one, several, or a cluster.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Redis {
    /// Where.
    pub servers: Servers,
    /// Who the gateway is there, if the addresses do not say it.
    pub login: Login,
    /// The number of the database, if the address does not say it.
    pub database: Option<u32>,
    /// How TLS is spoken, if otherwise than with the authorities of the system.
    pub tls: Option<Placed<RedisTls>>,
    /// The most that one call may take.
    pub timeout: Duration,
}

/// Where Redis is. Each address is `redis://...`, `rediss://...` or `unix://...`, and may hold a password.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Servers {
    /// There.
    One(Placed<Secret>),
    /// Where Sentinels say.
    Sentinel {
        /// The name they know the master by.
        master: Box<str>,
        /// The Sentinels.
        nodes: Vec<Placed<Secret>>,
        /// Who the gateway is to them.
        login: Login,
    },
    /// A cluster, which some of its nodes lead to.
    Cluster(Vec<Placed<Secret>>),
}

/// A user and a password, as far as they are given.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Login {
    /// The name; `default` if there is only a password.
    pub user: Option<Box<str>>,
    /// The password.
    pub password: Option<Secret>,
}

/// Files for TLS, in PEM.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RedisTls {
    /// The authorities that are trusted, in the place of those of the system.
    pub ca: Option<PathBuf>,
    /// Who the gateway is.
    pub client: Option<Certificate>,
}

impl Servers {
    /// The addresses as they are written, of which there is at least one.
    pub fn addresses(&self) -> &[Placed<Secret>] {
        match self {
            Self::One(address) => std::slice::from_ref(address),
            Self::Sentinel { nodes, .. } | Self::Cluster(nodes) => nodes,
        }
    }

    /// The field that they are written in.
    pub const fn field(&self) -> &'static str {
        match self {
            Self::One(_) => "store.redis.url",
            Self::Sentinel { .. } => "store.redis.sentinel.nodes",
            Self::Cluster(_) => "store.redis.cluster",
        }
    }
}

impl Redis {
    /// One Redis at `url`, without further ado.
    pub fn at(url: &str, timeout: Duration) -> Self {
        let url = Placed { value: Secret(url.into()), place: Place::default() };
        Self { servers: Servers::One(url), login: Login::default(), database: None, tls: None, timeout }
    }
}

/// Who a request belongs to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Identity {
    /// Who is believed when he says where a request comes from.
    pub client_address: ClientAddress,
    /// The header that names the tenant.
    pub tenant_header: Box<str>,
    /// What happens without it: refused, or held to the rules of the tenant `anonymous`.
    pub missing: Missing,
    /// Whether the header is a key to be looked up, or the tenant itself.
    pub keys: Placed<Keys>,
    /// The key of the hashes that stand for unknown values.
    pub hash_secret: Secret,
    /// The one before, under which API keys are still known.
    pub previous_hash_secret: Option<Secret>,
}

/// How the address of a client is found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClientAddress {
    /// Proxies in front of the gateway, whose word on the address counts.
    pub trusted_proxies: Vec<IpNet>,
    /// The header that they write it into: `X-Forwarded-For` or `Forwarded`.
    pub header: http::HeaderName,
    /// Bits of an IPv6 address that name a client.
    pub ipv6_prefix: u8,
}

impl Default for ClientAddress {
    fn default() -> Self {
        Self {
            trusted_proxies: Vec::new(),
            header: http::HeaderName::from_static("x-forwarded-for"),
            ipv6_prefix: 64,
        }
    }
}

/// What happens to a request that names no tenant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Missing {
    /// 401.
    Reject,
    /// It belongs to the tenant `anonymous`.
    Anonymous,
}

/// What the header of [`Identity`] holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Keys {
    /// The tenant's name.
    Plain,
    /// An API key whose keyed hash the database knows.
    Lookup,
}

/// Servers that serve the same.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Upstream {
    /// Its name.
    pub name: Placed<Box<str>>,
    /// `host:port` of each server.
    pub servers: Vec<Placed<Box<str>>>,
    /// How long a connection may take.
    pub connect_timeout: Duration,
    /// How long a server may be silent.
    pub read_timeout: Duration,
}

/// Host, path and methods to an upstream and its rules.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Route {
    /// Its position in the list as it is written.
    pub position: usize,
    /// Its id.
    pub id: Placed<Box<str>>,
    /// Only for this host, if given; `*.example.com` for every host below.
    pub host: Option<Placed<Box<str>>>,
    /// The path pattern.
    pub path: Placed<Box<str>>,
    /// Only for these methods, if any.
    pub methods: Vec<Box<str>>,
    /// Where it goes.
    pub upstream: Placed<Box<str>>,
    /// What a request takes.
    pub cost: Placed<u64>,
    /// Where that is told, if not only here.
    pub priced: Option<Priced>,
    /// Whether the tenant's own rule applies.
    pub tenant_rule: bool,
    /// The named rules that apply as well.
    pub rules: Vec<Placed<Box<str>>>,
    /// What happens when the store fails; the default of the rules if not given.
    pub on_store_failure: Option<OnStoreFailure>,
}

/// Whose pages in browsers may read what the gateway itself answers. What upstreams answer is theirs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Cors {
    /// Origins such as `https://app.example.com`; `*` is any.
    pub origins: Vec<Box<str>>,
}

/// When a key is hot, and what is taken of it in advance.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HotKeys {
    /// Requests in a window from which on a key is hot on a gateway.
    pub threshold: u64,
    /// The window: a second at least.
    pub window: Duration,
    /// What all gateways together may hold of a key, in millionths of its capacity, or of what it earns in
    /// a second if that is more. 0 is no leases.
    pub epsilon_ppm: u32,
    /// For how long the tokens of a lease are to last, if they may be so many.
    pub lease_for: Duration,
}

/// Which families of headers responses carry beside `X-RateLimit-Remaining`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Headers {
    /// `X-RateLimit-Limit`, `-Reset`.
    pub x_ratelimit: bool,
    /// `RateLimit-Limit`, `-Remaining`, `-Reset`.
    pub ratelimit_legacy: bool,
    /// `RateLimit-Policy`, `RateLimit` of draft-ietf-httpapi-ratelimit-headers-11.
    pub ratelimit_draft: bool,
}

/// What is logged.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Log {
    /// From which level on.
    pub level: Level,
    /// The share of requests that the access log tells, from 0 to 1.
    pub access_sample: f64,
    /// The form of the log.
    pub format: LogFormat,
}

/// Levels of the log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Level {
    /// Only what needs somebody now.
    Error,
    /// And what will.
    Warn,
    /// And what happens.
    Info,
    /// And how.
    Debug,
}

/// Forms of the log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogFormat {
    /// One JSON object a line.
    Json,
    /// For people.
    Text,
}

/// Reads a configuration. `Err` has every fault, in the order of the file.
///
/// # Errors
/// Whatever is not as [`SCHEMA`] says, each with its place and what was expected.
pub fn read(text: &str, lookup: env::Lookup<'_>) -> Result<Config, Vec<Fault>> {
    let (config, mut faults) = read_all(text, lookup);
    faults.sort();
    match config {
        Some(config) if faults.is_empty() => Ok(config),
        _ => Err(faults),
    }
}

/// Reads as much of a configuration as can be read, so that more faults can be found in it.
pub fn read_all(text: &str, lookup: env::Lookup<'_>) -> (Option<Config>, Vec<Fault>) {
    // What is wrong is told by the plain way.
    rows::in_parts(text, lookup).unwrap_or_else(|| rows::at_once(text, lookup))
}

/// The configuration below `root`; `rows` have been read on the way.
fn understand(root: &Node<'_>, rows: Vec<Row>, mut reading: Reading<'_>) -> (Option<Config>, Vec<Fault>) {
    let mut config = decode::config(root, rows, &mut reading);
    for listener in &config.listeners {
        let (address, admin) = (listener.address, config.admin.address);
        if overlap(address.value, admin.value) {
            let message = format!("{} is listened on for traffic as well, at {}", admin.value, address.place);
            reading.fault(admin.place, "admin.address", message);
        }
    }
    if config.identity.keys.value == Keys::Lookup && config.rules.database.is_none() {
        let message = "`lookup` needs a database: set rules.database.url";
        reading.fault(config.identity.keys.place, "identity.tenant.keys", message);
    }
    let warnings = warnings::of(&config);
    config.warnings.extend(warnings);
    (Some(config), reading.faults)
}

/// Whether one of two sockets would take what the other listens for. `[::]` listens for IPv4 as well.
fn overlap(a: SocketAddr, b: SocketAddr) -> bool {
    let takes = |all: SocketAddr, one: SocketAddr| {
        all.ip().is_unspecified() && (all.is_ipv6() || one.ip().to_canonical().is_ipv4())
    };
    let zone = |address: SocketAddr| match address {
        SocketAddr::V4(_) => 0,
        SocketAddr::V6(address) => address.scope_id(),
    };
    let same = a.ip().to_canonical() == b.ip().to_canonical() && zone(a) == zone(b);
    a.port() == b.port() && (same || takes(a, b) || takes(b, a))
}

/// Reads rows alone: a list of them, or a mapping with `rows`. `Err` has every fault.
///
/// # Errors
/// Whatever is not as [`SCHEMA`] says of `rules.rows`.
pub fn read_rows(text: &str, lookup: env::Lookup<'_>) -> Result<Vec<Row>, Vec<Fault>> {
    let mut faults = Vec::new();
    let mut ignore = |_, _: &mut Vec<Fault>| {};
    let mut nothing = yaml::Streamed::new(&["no list is handed over"], &mut ignore);
    let root = yaml::parse(text, 0, &mut nothing, &mut faults);
    let mut reading = Reading { faults, lookup };
    let rows = root.map(|root| decode::rows_alone(&root, &mut reading)).unwrap_or_default();
    let mut faults = reading.faults;
    if rows.is_empty() && faults.is_empty() {
        faults.push(Fault::new(Place { line: 1, column: 1 }, "", "expected a list of rows"));
    }
    faults.sort();
    if faults.is_empty() { Ok(rows) } else { Err(faults) }
}

/// The limit that holds where nothing else does: capacity 20, refill 10 per second.
pub fn built_in_default() -> TokenBucket {
    decode::built_in_default()
}

#[cfg(test)]
mod tests;
