//! Buckets in Redis, decided there by one atomic script.
//!
//! Requests do not talk to Redis themselves. They queue; the driver of a node takes who waits, at most
//! [`script::MOST_CHECKS`] checks at a time, and sends them as one call (a flight), or in a cluster as one
//! call for each slot. They are in the air together, and nothing else is: what arrives meanwhile travels
//! together, and a lone request leaves at once.

mod access;
mod board;
mod cluster;
mod connection;
mod deadline;
pub mod examine;
mod flights;
mod heartbeat;
mod info;
mod node;
pub mod script;
mod sentinel;
mod slots;

use std::sync::{Arc, OnceLock};

use arc_swap::ArcSwap;
use async_trait::async_trait;
use tokio::sync::Notify;
use tokio::time::Instant;

pub use self::access::AccessError;
use self::access::Reach;
use self::cluster::Cluster;
use self::connection::Kind;
use self::flights::Flights;
pub use self::heartbeat::Heartbeat;
use self::node::{NoVerdict, Node, Shared};
use self::sentinel::Sentinels;
use super::{NodeId, Store, StoreFault};
use crate::config::{self, Servers};
use crate::key::Key;
use crate::metrics::StoreMetrics;
use crate::rule::{Checks, Verdicts};

/// Redis, as requests see it.
#[derive(Debug)]
pub struct RedisStore {
    nodes: Nodes,
    shared: Arc<Shared>,
    sentinels: Option<Arc<Sentinels>>,
}

#[derive(Debug)]
enum Nodes {
    One(Arc<Node>),
    Cluster(Arc<Cluster>),
}

/// The part of a [`RedisStore`] that does the work; runs until the process ends.
pub struct Driver {
    shared: Arc<Shared>,
    work: Work,
}

enum Work {
    One(Flights),
    Sentinel(Flights, Arc<Sentinels>, Arc<Node>),
    Cluster(Arc<Cluster>),
}

impl RedisStore {
    /// A store on the Redis of `config`, which is not connected before its driver runs. The driver keeps
    /// `heartbeat` going, if there is one. On the other side its connections are called `name`.
    pub fn new(
        config: &config::Redis,
        name: &str,
        heartbeat: Option<Heartbeat>,
        metrics: StoreMetrics,
    ) -> Result<(Self, Driver), AccessError> {
        let Reach { addresses, access, sentinels } = Reach::of(config)?;
        let is_cluster = matches!(config.servers, Servers::Cluster(_));
        let shared = Arc::new(Shared {
            access: ArcSwap::from_pointee(access),
            name: name.into(),
            kind: if is_cluster { Kind::Member } else { Kind::Single },
            timeout: config.timeout,
            heartbeat,
            metrics,
            trouble: Notify::new(),
            unfit: Arc::new(OnceLock::new()),
        });
        let sentinels = match &config.servers {
            Servers::Sentinel { master, .. } => {
                Some(Arc::new(Sentinels::new(master, addresses.clone(), sentinels)))
            }
            _ => None,
        };
        let (nodes, work) = if is_cluster {
            let cluster = Arc::new(Cluster::new(addresses, Arc::clone(&shared)));
            (Nodes::Cluster(Arc::clone(&cluster)), Work::Cluster(cluster))
        } else {
            let address = addresses.into_iter().next().filter(|_| sentinels.is_none());
            let (node, flights) = Node::new(&shared, NodeId::ONLY, address);
            let node = Arc::new(node);
            let work = match &sentinels {
                Some(sentinels) => Work::Sentinel(flights, Arc::clone(sentinels), Arc::clone(&node)),
                None => Work::One(flights),
            };
            (Nodes::One(node), work)
        };
        let driver = Driver { shared: Arc::clone(&shared), work };
        Ok((Self { nodes, shared, sentinels }, driver))
    }

    /// Whether `config` says how a Redis can be reached; its files are read.
    pub fn check(config: &config::Redis) -> Result<(), AccessError> {
        Reach::of(config).map(drop)
    }

    /// What of `config` a running store cannot change.
    pub fn place(config: &config::Redis) -> Option<impl PartialEq + use<>> {
        let Reach { addresses, access, .. } = Reach::of(config).ok()?;
        let (kind, master) = match &config.servers {
            Servers::One(_) => ("url", None),
            Servers::Sentinel { master, .. } => ("sentinel", Some(master.clone())),
            Servers::Cluster(_) => ("cluster", None),
        };
        Some((kind, master, addresses, access.database(), access.is_tls(), config.timeout))
    }

    /// From the next connection on, `config` says who the gateway is, and how TLS is spoken.
    pub fn change_access(&self, config: &config::Redis) -> Result<(), AccessError> {
        let Reach { access, sentinels, .. } = Reach::of(config)?;
        let access = access.at_the_place_of(&self.shared.access.load());
        self.shared.access.store(Arc::new(access));
        if let Some(known) = &self.sentinels {
            known.access.store(Arc::new(sentinels));
        }
        Ok(())
    }
}

impl Driver {
    /// Connects, flies, reconnects. To be spawned on the runtime of the proxy: on another one each
    /// call pays for waking a thread.
    pub async fn run(self) {
        let shared = self.shared;
        match self.work {
            Work::One(flights) => flights.run().await,
            Work::Sentinel(flights, sentinels, node) => {
                tokio::select! {
                    () = flights.run() => {}
                    () = sentinels.watch(&node, &shared) => {}
                }
            }
            Work::Cluster(cluster) => cluster.watch().await,
        }
    }

    /// Where it is told, once it has been found out, why what answers can never be a store.
    pub fn unfit(&self) -> Arc<OnceLock<String>> {
        Arc::clone(&self.shared.unfit)
    }
}

#[async_trait]
impl Store for RedisStore {
    async fn acquire(&self, checks: &Checks) -> Result<Verdicts, StoreFault> {
        match &self.nodes {
            Nodes::One(node) => node.ask(checks, 0, false, Instant::now()).await.map_err(|told| match told {
                NoVerdict::Fault(fault) => fault,
                NoVerdict::Moved(_) | NoVerdict::Ask(_) => StoreFault::Refused("MOVED".into()),
            }),
            Nodes::Cluster(cluster) => {
                let Some(check) = checks.first() else { return Ok(Verdicts::new()) };
                cluster.ask(checks, self.slot_of(&check.key)).await
            }
        }
    }

    fn is_up(&self) -> bool {
        match &self.nodes {
            Nodes::One(node) => node.is_up(),
            Nodes::Cluster(cluster) => cluster.is_up(),
        }
    }

    fn slot_of(&self, key: &Key) -> u16 {
        match &self.nodes {
            Nodes::One(_) => 0,
            Nodes::Cluster(_) => slots::slot_of(key.as_str()),
        }
    }

    fn node_of(&self, slot: u16) -> NodeId {
        match &self.nodes {
            Nodes::One(_) => NodeId::ONLY,
            Nodes::Cluster(cluster) => cluster.node_of(slot),
        }
    }

    fn nodes(&self) -> Vec<NodeId> {
        match &self.nodes {
            Nodes::One(_) => vec![NodeId::ONLY],
            Nodes::Cluster(cluster) => cluster.nodes().iter().map(|node| node.id).collect(),
        }
    }

    fn describe(&self) -> Vec<super::Node> {
        match &self.nodes {
            Nodes::One(node) => vec![node.describe()],
            Nodes::Cluster(cluster) => cluster.nodes().iter().map(|node| node.describe()).collect(),
        }
    }

    fn is_node_up(&self, id: NodeId) -> bool {
        match &self.nodes {
            Nodes::One(node) => node.is_up(),
            Nodes::Cluster(cluster) => cluster.nodes().iter().any(|node| node.id == id && node.is_up()),
        }
    }
}
