//! Looks a deployment over, for `tollgate doctor`: what could make limits untrue, or slow.

use std::time::Duration;

use redis::{Client, RedisError, Value};

use super::access::{Access, Address, Reach};
use super::cluster::slots_at;
use super::connection::{Connection, Kind, dial, too_late};
use super::info::Info;
use super::script::Flight;
use super::sentinel::master;
use super::slots::{COUNT, Shard, slot_of};
use crate::clock::{Clock as _, SystemClock};
use crate::config::{self, Servers};
use crate::key::{Hasher, Key, Part};
use crate::limit::concurrency::Concurrency;
use crate::limit::fixed_window::FixedWindow;
use crate::limit::sliding_log::SlidingLog;
use crate::limit::sliding_window::SlidingWindow;
use crate::limit::{Limit, Outcome};
use crate::rule::{Check, Checks, Demand};
use crate::store::StoreFault;

/// The most that one thing may take to find out.
const ANSWER_WITHIN: Duration = Duration::from_secs(2);

/// Calls of the script whose time is taken, one after the other.
const TIMED_CALLS: usize = 200;

/// Buckets by which memory is measured. Their names are as long as usual ones, and they expire within seconds.
const MEASURED_BUCKETS: usize = 4_096;

/// How many names are tried for one in a slot that a node has.
const MOST_TRIES: u32 = 100_000;

/// Calls that are sent together.
const AT_ONCE: usize = 64;

/// Clocks of two nodes further apart than this are told: a failover steps from one to the other.
const CLOCKS_APART: Duration = Duration::from_millis(100);

/// How grave a finding is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Level {
    /// As it should be.
    Good,
    /// Limits hold, but not always.
    Warning,
    /// It does not work.
    Fault,
}

/// One thing that was looked at.
#[derive(Clone, Debug)]
pub struct Finding {
    /// Where: a node, or the whole.
    pub node: String,
    /// How grave it is.
    pub level: Level,
    /// What was found, and what to do.
    pub text: String,
}

/// What is looked for, and what was found.
struct Examination<'c> {
    config: &'c config::Redis,
    prefix: &'c str,
    /// Whether buckets may be written.
    writes: bool,
    clock: SystemClock,
    findings: Vec<Finding>,
}

/// Looks over what `config` names. With `writes` it makes some thousand buckets, which expire within seconds.
pub async fn examine(config: &config::Redis, prefix: &str, writes: bool) -> Vec<Finding> {
    let clock = SystemClock::start();
    let mut examination = Examination { config, prefix, writes, clock, findings: Vec::new() };
    match Reach::of(config) {
        Ok(reach) => examination.all(&reach).await,
        Err(error) => examination.fault("configuration", error.to_string()),
    }
    examination.findings
}

impl Examination<'_> {
    async fn all(&mut self, reach: &Reach) {
        let nodes = match &self.config.servers {
            Servers::One(_) => reach.addresses.iter().map(|address| (address.clone(), None)).collect(),
            Servers::Sentinel { master, .. } => self.sentinels(reach, master).await,
            Servers::Cluster(_) => self.cluster(reach).await,
        };
        let mut clocks = Vec::new();
        for (address, shard) in &nodes {
            if let Some(offset) = self.node(&reach.access, address, shard.as_ref()).await {
                clocks.push((address.to_string(), offset));
            }
        }
        self.clocks(&clocks);
    }

    /// Where the Sentinels say that the master is.
    async fn sentinels(&mut self, reach: &Reach, master: &str) -> Vec<(Address, Option<Shard>)> {
        let mut named: Vec<Address> = Vec::new();
        for address in &reach.addresses {
            let at = format!("Sentinel {address}");
            match within(named_by(&reach.sentinels, address, master)).await {
                Ok((node, others)) => {
                    let text = format!("{master} is {node}; it knows {others} other Sentinels");
                    if others < 2 {
                        self.warn(&at, format!("{text}: three are needed to agree on a failover"));
                    } else {
                        self.good(&at, text);
                    }
                    if !named.contains(&node) {
                        named.push(node);
                    }
                }
                Err(error) => self.fault(&at, error.to_string()),
            }
        }
        if named.len() > 1 {
            self.warn(
                "Sentinels",
                "they do not agree on the master: a failover is going on, or one is cut off".into(),
            );
        }
        named.into_iter().map(|address| (address, None)).collect()
    }

    /// The masters of a cluster.
    async fn cluster(&mut self, reach: &Reach) -> Vec<(Address, Option<Shard>)> {
        let mut known = None;
        for address in &reach.addresses {
            match within(slots_at(&reach.access, address)).await {
                Ok(shards) => known = known.or(Some(shards)),
                Err(error) => self.fault(&address.to_string(), error.to_string()),
            }
        }
        let Some(shards) = known else { return Vec::new() };
        let with_a_node: usize =
            shards.iter().flat_map(|shard| &shard.slots).map(ExactSizeIterator::len).sum();
        if with_a_node == COUNT {
            self.good("cluster", format!("all {COUNT} slots on {} masters", shards.len()));
        } else {
            let text = format!(
                "{} of {COUNT} slots have no node: their keys cannot be decided",
                COUNT - with_a_node
            );
            self.fault("cluster", text);
        }
        for shard in shards.iter().filter(|shard| shard.replicas.is_empty()) {
            let text = "no replica: if it dies, its keys are decided by on_store_failure until it is back";
            self.warn(&shard.master.to_string(), text.into());
        }
        shards.into_iter().map(|shard| (shard.master.clone(), Some(shard))).collect()
    }

    /// One node that has buckets; how far its clock is from ours, in microseconds.
    async fn node(&mut self, access: &Access, address: &Address, shard: Option<&Shard>) -> Option<i64> {
        let at = address.to_string();
        let kind = if shard.is_some() { Kind::Member } else { Kind::Single };
        let client = match access.client(address) {
            Ok(client) => client,
            Err(error) => return self.give_up(&at, error.to_string()),
        };
        let connection = match Connection::open(&client, "tollgate-doctor", kind).await {
            Ok(connection) => connection,
            Err(error) => return self.give_up(&at, error.to_string()),
        };
        match info(&client).await {
            Ok(info) => {
                self.version(&at, &info);
                self.eviction(&at, &info);
                self.persistence(&at, &info);
            }
            Err(error) => {
                self.warn(
                    &at,
                    format!("INFO is refused, so eviction and persistence are not known: {error}"),
                );
            }
        }
        let offset = self.offset(&at, &client).await;
        if self.writes {
            let tenant = self.tenant(shard, 0);
            if self.rights(&at, &connection, &tenant).await {
                self.gateways(&at, &connection, shard).await;
                self.latency(&at, &connection, &self.key(&tenant)).await;
                self.memory(&at, &connection, &client, shard).await;
            }
        }
        offset
    }

    fn version(&mut self, at: &str, info: &Info) {
        let name = if info.has("valkey_version") { "Valkey" } else { "Redis" };
        let version = info.text("valkey_version").or(info.text("redis_version")).unwrap_or("?");
        let (role, mode) = (info.text("role").unwrap_or("?"), info.text("redis_mode").unwrap_or("?"));
        self.good(at, format!("{name} {version}, {role}, {mode}"));
    }

    fn eviction(&mut self, at: &str, info: &Info) {
        let policy = info.policy();
        let most = info.number("maxmemory").unwrap_or(0);
        if policy != "noeviction" {
            let text = format!(
                "maxmemory-policy is {policy}: what is evicted counts as not taken, so more than the limit is \
                 admitted; use noeviction, and no cache beside it"
            );
            self.warn(at, text);
        } else if most == 0 {
            self.good(at, "noeviction, and no maxmemory".into());
        } else {
            let used = info.number("used_memory").unwrap_or(0);
            let text = format!("noeviction, {} of {} MiB used", used >> 20, most >> 20);
            if used * 10 > most * 8 {
                self.warn(at, format!("{text}: a full Redis decides nothing"));
            } else {
                self.good(at, text);
            }
        }
        if info.evicted() > 0 {
            self.warn(at, format!("{} keys were evicted since it began", info.evicted()));
        }
    }

    fn persistence(&mut self, at: &str, info: &Info) {
        let replicas = info.number("connected_slaves").unwrap_or(0);
        let aof = info.text("aof_enabled") == Some("1");
        let saves = if aof { "append-only file" } else { "no append-only file" };
        let text = format!("{saves}, {replicas} replicas");
        if aof || replicas > 0 {
            self.good(at, text);
        } else {
            self.warn(at, format!("{text}: after a crash what was taken lately counts as not taken, one capacity a key at most"));
        }
    }

    async fn offset(&mut self, at: &str, client: &Client) -> Option<i64> {
        let ask = async {
            let mut connection = dial(client).await?;
            // The first answer waits for the connection to warm up.
            let _: (i64, i64) = redis::cmd("TIME").query_async(&mut connection).await?;
            let before = self.clock.now();
            let (seconds, micros): (i64, i64) = redis::cmd("TIME").query_async(&mut connection).await?;
            let after = self.clock.now();
            let trip = after.micros_since(before);
            let here = i64::try_from(before.as_micros() + trip / 2).unwrap_or(i64::MAX);
            Ok::<_, RedisError>((seconds * 1_000_000 + micros - here, trip))
        };
        match within(ask).await {
            Ok((offset, trip)) => {
                self.good(
                    at,
                    format!(
                        "clock {} from this machine's, {} there and back",
                        millis(offset),
                        millis_of(trip)
                    ),
                );
                Some(offset)
            }
            Err(error) => self.give_up(at, format!("TIME: {error}")),
        }
    }

    fn clocks(&mut self, clocks: &[(String, i64)]) {
        let (Some(first), Some(last)) =
            (clocks.iter().min_by_key(|clock| clock.1), clocks.iter().max_by_key(|clock| clock.1))
        else {
            return;
        };
        let apart = Duration::from_micros(last.1.abs_diff(first.1));
        if apart > CLOCKS_APART {
            let text = format!(
                "the clocks of {} and {} are {apart:.1?} apart: keys that move from one to the other gain or wait that long",
                first.0, last.0
            );
            self.warn("clocks", text);
        } else if clocks.len() > 1 {
            self.good("clocks", format!("all nodes within {apart:.1?}"));
        }
    }

    /// Whether the script may do all that it does.
    async fn rights(&mut self, at: &str, connection: &Connection, tenant: &Part) -> bool {
        for check in of_every_kind(self.prefix, tenant) {
            match ask(connection, check.clone()).await {
                Ok(_) => {}
                Err(fault) => {
                    let text = format!("{} of a {}: {fault}", label(check.demand), check.limit.algorithm());
                    self.fault(at, format!("{text}; docs/redis.md has the rights that are needed"));
                    return false;
                }
            }
        }
        self.good(at, "the script may do all that it has to".into());
        true
    }

    /// How many gateways are counted, where the key of their heartbeats is.
    async fn gateways(&mut self, at: &str, connection: &Connection, shard: Option<&Shard>) {
        let key = Key::internal(self.prefix, "gateways");
        let slot = slot_of(key.as_str());
        if shard.is_some_and(|shard| !shard.has(slot)) {
            return;
        }
        let mut count = redis::cmd("EVAL");
        count.arg("return redis.call('ZCARD', KEYS[1])").arg(1).arg(key.as_str());
        match within(connection.send(&count)).await {
            Ok(Value::Int(live)) => self.good(at, format!("{live} gateways are counted")),
            Ok(other) => self.fault(at, format!("the count of gateways is {other:?}")),
            Err(error) => self.fault(at, format!("gateways cannot be counted: {error}")),
        }
    }

    async fn latency(&mut self, at: &str, connection: &Connection, key: &Key) {
        let mut times = Vec::with_capacity(TIMED_CALLS);
        for _ in 0..TIMED_CALLS {
            let asked = self.clock.now();
            if let Err(fault) = ask(connection, bucket(key.clone())).await {
                return self.fault(at, format!("the script: {fault}"));
            }
            times.push(Duration::from_micros(self.clock.now().micros_since(asked)));
        }
        times.sort_unstable();
        let (half, most) = (times[TIMED_CALLS / 2], times[TIMED_CALLS * 99 / 100]);
        let text = format!(
            "a decision takes {half:.2?} (p50), {most:.2?} (p99) of {:.0?} allowed",
            self.config.timeout
        );
        if most * 2 > self.config.timeout {
            self.warn(at, format!("{text}: some will be decided without it"));
        } else {
            self.good(at, text);
        }
    }

    /// Bytes of one bucket, by those of some thousand.
    async fn memory(&mut self, at: &str, connection: &Connection, client: &Client, shard: Option<&Shard>) {
        let keys: Vec<Key> =
            (1..).map(|number| self.key(&self.tenant(shard, number))).take(MEASURED_BUCKETS).collect();
        let used = async || info(client).await.ok()?.used_by_keys();
        let before = used().await;
        // Twice: what is left then is no whole number any more, as in use.
        for keys in [&keys, &keys].into_iter().flat_map(|keys| keys.chunks(AT_ONCE)) {
            let flights: Vec<Flight> = keys.iter().map(|key| flight(bucket(key.clone()))).collect();
            let calls: Vec<_> = flights.iter().map(|flight| (flight, false)).collect();
            if let Err(error) = connection.call(&calls).await {
                return self.fault(at, format!("the script: {error}"));
            }
        }
        if let (Some(before), Some(after)) = (before, used().await) {
            let each = after.saturating_sub(before) / MEASURED_BUCKETS as u64;
            self.good(at, format!("{each} bytes per bucket, all in ({MEASURED_BUCKETS} measured)"));
        }
    }

    /// One of many tenants that nobody is, in a slot that the node has.
    fn tenant(&self, shard: Option<&Shard>, number: usize) -> Part {
        let hasher = Hasher::new(b"");
        let tenant = |other: u32| Part::known(format!("doctor-{number:06}-{other}").as_bytes(), &hasher);
        let is_there = |tenant: &Part| {
            let slot = slot_of(self.key(tenant).as_str());
            shard.is_none_or(|shard| shard.has(slot))
        };
        (0..MOST_TRIES).map(tenant).find(is_there).unwrap_or_else(|| tenant(MOST_TRIES))
    }

    fn key(&self, tenant: &Part) -> Key {
        Key::tenant_route(self.prefix, tenant, &Part::known(b"doctor", &Hasher::new(b"")))
    }

    fn good(&mut self, node: &str, text: String) {
        self.findings.push(Finding { node: node.into(), level: Level::Good, text });
    }

    fn warn(&mut self, node: &str, text: String) {
        self.findings.push(Finding { node: node.into(), level: Level::Warning, text });
    }

    fn fault(&mut self, node: &str, text: String) {
        self.findings.push(Finding { node: node.into(), level: Level::Fault, text });
    }

    fn give_up<T>(&mut self, node: &str, text: String) -> Option<T> {
        self.fault(node, text);
        None
    }
}

async fn info(client: &Client) -> Result<Info, RedisError> {
    within(async { Info::ask(&mut dial(client).await?).await }).await
}

async fn named_by(access: &Access, address: &Address, name: &str) -> Result<(Address, u64), RedisError> {
    let mut connection = dial(&access.client(address)?).await?;
    master(&mut connection, name).await.map(|told| (told.address, told.other_sentinels))
}

async fn within<T>(work: impl Future<Output = Result<T, RedisError>>) -> Result<T, RedisError> {
    tokio::time::timeout(ANSWER_WITHIN, work).await.unwrap_or_else(|_| Err(too_late()))
}

fn flight(check: Check) -> Flight {
    let mut flight = Flight::new();
    let checks: Checks = std::iter::once(check).collect();
    flight.board(checks);
    flight
}

async fn ask(connection: &Connection, check: Check) -> Result<Outcome, StoreFault> {
    let flight = flight(check);
    let calls = [(&flight, false)];
    let call = connection.call(&calls);
    let replies = tokio::time::timeout(ANSWER_WITHIN, call).await.map_err(|_| StoreFault::Timeout)?;
    let reply = replies.and_then(|mut replies| replies.remove(0));
    let reply = reply.map_err(|error| StoreFault::Refused(error.to_string()))?;
    let mut answers = flight.answers(&reply);
    answers.remove(0).map(|verdicts| verdicts[0].outcome)
}

/// A bucket like that of a tenant; by default it is full again after two seconds.
fn bucket(key: Key) -> Check {
    Check::own(key, Limit::TokenBucket(config::built_in_default()), 1, Demand::Take)
}

/// All algorithms, asked for all that there is to ask of them.
fn of_every_kind(prefix: &str, tenant: &Part) -> Vec<Check> {
    const SECOND: u64 = 1_000_000;
    let key = |algorithm: &str| Key::named(prefix, std::slice::from_ref(tenant), "doctor", algorithm);
    let bucket = bucket(key("token_bucket")).limit;
    let limits = [
        bucket,
        Limit::FixedWindow(FixedWindow { limit: 2, window: SECOND }),
        Limit::SlidingWindow(SlidingWindow { limit: 2, window: SECOND }),
        Limit::SlidingLog(SlidingLog { limit: 2, window: SECOND }),
        Limit::Concurrency(Concurrency { limit: 2, hold: SECOND }),
    ];
    let demands = [
        Demand::Take,
        Demand::Take,
        Demand::Take,
        Demand::Renew,
        Demand::Return,
        Demand::Debit,
        Demand::Lease,
    ];
    let of = |limit: Limit| {
        let key = key(limit.algorithm());
        let is_bucket = matches!(limit, Limit::TokenBucket(_));
        let asked = demands.into_iter().filter(move |demand| *demand != Demand::Lease || is_bucket);
        asked.zip(1..).map(move |(demand, number)| Check {
            permit: if matches!(demand, Demand::Renew | Demand::Return) { 1 } else { number },
            ..Check::own(key.clone(), limit, 1, demand)
        })
    };
    limits.into_iter().flat_map(of).collect()
}

const fn label(demand: Demand) -> &'static str {
    match demand {
        Demand::Renew => "renewing",
        Demand::Return => "giving back",
        Demand::Debit => "a debit",
        Demand::Lease => "a lease",
        Demand::Take | Demand::Shadow | Demand::Peek | Demand::Watch => "taking",
    }
}

fn millis(micros: i64) -> String {
    let sign = if micros < 0 { "-" } else { "+" };
    format!("{sign}{}", millis_of(micros.unsigned_abs()))
}

fn millis_of(micros: u64) -> String {
    format!("{:.1} ms", Duration::from_micros(micros).as_secs_f64() * 1e3)
}
