//! A cluster: which node has which slot, kept true while shards fail over, slots move, and nodes come and go.
//!
//! A shard keeps its node (queue, driver, and the breaker that stands in front of it) over a failover: what
//! changes is where its driver connects to.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use arc_swap::ArcSwap;
use redis::{ErrorKind, RedisError};
use tokio::runtime::Handle;
use tokio::time::Instant;

use super::access::{Access, Address};
use super::connection::{dial, too_late};
use super::node::{NoVerdict, Node, Shared};
use super::slots::{COUNT, Known, Shard, heirs, shards};
use crate::rule::{Checks, Verdicts};
use crate::store::{NodeId, StoreFault};

/// How often the cluster is asked who has what, if nothing calls for it.
const EVERY: Duration = Duration::from_secs(10);

/// How soon after one question the next one may come; doubled, up to the last, while they bring no news.
const FIRST_PAUSE: Duration = Duration::from_millis(250);
const LAST_PAUSE: Duration = Duration::from_millis(500);

/// How long one node may take to answer.
const ANSWER_WITHIN: Duration = Duration::from_millis(500);

/// How often a request follows from one node to the next.
const MOST_HOPS: u32 = 5;

/// No member, in the table of slots.
const NOBODY: u16 = u16::MAX;

/// The nodes of a cluster, as requests see them.
pub(super) struct Cluster {
    map: ArcSwap<Map>,
    /// Who changes the map holds this.
    changing: Mutex<()>,
    seeds: Vec<Address>,
    shared: Arc<Shared>,
    /// Where drivers run: the runtime of the proxy.
    runtime: OnceLock<Handle>,
}

/// Who has what.
#[derive(Clone)]
struct Map {
    /// For each slot the position of its member.
    slots: Box<[u16]>,
    members: Vec<Member>,
}

/// A shard.
#[derive(Clone)]
struct Member {
    node: Arc<Node>,
    replicas: Vec<Address>,
}

impl Map {
    fn member(&self, slot: u16) -> Option<&Member> {
        self.members.get(usize::from(*self.slots.get(usize::from(slot))?))
    }

    fn position(&self, address: &Address) -> Option<usize> {
        self.members.iter().position(|member| member.node.address().as_ref() == Some(address))
    }

    /// The smallest number that no member has.
    fn free_id(&self) -> NodeId {
        let mut ids = (0..NodeId::MOST).map(NodeId::new);
        let taken = |id: &NodeId| self.members.iter().any(|member| member.node.id == *id);
        ids.find(|id| !taken(id)).unwrap_or(NodeId::new(NodeId::MOST))
    }
}

impl Cluster {
    /// A cluster to which `seeds` lead; empty before [`Cluster::watch`] has heard of its nodes.
    pub(super) fn new(seeds: Vec<Address>, shared: Arc<Shared>) -> Self {
        let map = Map { slots: vec![NOBODY; COUNT].into(), members: Vec::new() };
        Self {
            map: ArcSwap::from_pointee(map),
            changing: Mutex::default(),
            seeds,
            shared,
            runtime: OnceLock::new(),
        }
    }

    /// The node that has a slot.
    pub(super) fn node_of(&self, slot: u16) -> NodeId {
        self.map.load().member(slot).map_or(NodeId::NOBODY, |member| member.node.id)
    }

    /// All nodes.
    pub(super) fn nodes(&self) -> Vec<Arc<Node>> {
        self.map.load().members.iter().map(|member| Arc::clone(&member.node)).collect()
    }

    /// Whether every slot has a node that answers.
    pub(super) fn is_up(&self) -> bool {
        let map = self.map.load();
        let all_up = map.members.iter().all(|member| member.node.is_up());
        all_up && !map.slots.contains(&NOBODY)
    }

    /// Asks the node that has `slot`, or the one that it names. A node that names another one has done nothing.
    pub(super) async fn ask(&self, checks: &Checks, slot: u16) -> Result<Verdicts, StoreFault> {
        let node = self.map.load().member(slot).map(|member| Arc::clone(&member.node));
        let mut node = node.ok_or(StoreFault::Down)?;
        let (mut asking, since) = (false, Instant::now());
        for hop in 0..MOST_HOPS {
            match node.ask(checks, slot, asking, since).await {
                Ok(verdicts) => return Ok(verdicts),
                Err(NoVerdict::Fault(fault @ StoreFault::Apart)) => return Err(fault),
                // The one that sent us away has answered: it must not pay for the other.
                Err(NoVerdict::Fault(fault)) if hop > 0 => return Err(StoreFault::Elsewhere(fault.into())),
                Err(NoVerdict::Fault(fault)) => return Err(fault),
                Err(NoVerdict::Moved(to)) => (node, asking) = (self.moved(slot, &to), false),
                Err(NoVerdict::Ask(to)) => (node, asking) = (self.guest(&to), true),
            }
        }
        Err(StoreFault::Refused("MOVED from node to node".into()))
    }

    /// Keeps the map true until the process ends.
    pub(super) async fn watch(&self) {
        let _ = self.runtime.set(Handle::current());
        let (mut pause, mut turn, mut told) = (FIRST_PAUSE, 0usize, false);
        loop {
            let before = self.map.load_full();
            let heard = self.refresh(turn).await;
            let news = !Arc::ptr_eq(&before, &self.map.load_full());
            if let Err(error) = &heard
                && !told
            {
                tracing::warn!(%error, "no node tells who has which slot, trying again");
            }
            told = heard.is_err();
            // While a node is away, its shard may fail over at any moment.
            let is_well = heard.is_ok() && self.is_up();
            if is_well {
                let _ = tokio::time::timeout(EVERY, self.shared.trouble.notified()).await;
            }
            pause = if news || is_well { FIRST_PAUSE } else { (pause * 2).min(LAST_PAUSE) };
            // Another one is asked the next time: this one may have been cut off from the others.
            turn = turn.wrapping_add(1);
            tokio::time::sleep(pause).await;
        }
    }

    /// Asks one node after the other who has what, until one says so. Those that answer come first, and each
    /// time another one of them.
    async fn refresh(&self, turn: usize) -> Result<(), RedisError> {
        let map = self.map.load_full();
        let (mut up, down): (Vec<_>, Vec<_>) = map.members.iter().partition(|member| member.node.is_up());
        let first = turn % up.len().max(1);
        up.rotate_left(first);
        let masters = up.iter().chain(&down).filter_map(|member| member.node.address());
        let replicas = map.members.iter().flat_map(|member| member.replicas.iter().cloned());
        let mut last = too_late();
        for address in masters.chain(replicas).chain(self.seeds.iter().cloned()) {
            let asked = tokio::time::timeout(ANSWER_WITHIN, self.slots_at(&address)).await;
            match asked.unwrap_or_else(|_| Err(too_late())) {
                Ok(shards) => {
                    self.apply(&shards);
                    return Ok(());
                }
                Err(error) => last = error,
            }
        }
        Err(last)
    }

    async fn slots_at(&self, address: &Address) -> Result<Vec<Shard>, RedisError> {
        let access = self.shared.access.load_full();
        slots_at(&access, address).await.inspect_err(|error| {
            if error.detail().is_some_and(|detail| detail.contains("cluster support disabled")) {
                let why = format!("{address} is no node of a cluster: name it in store.redis.url");
                let _ = self.shared.unfit.set(why);
            }
        })
    }

    /// Puts what a node says in the place of what was known.
    fn apply(&self, shards: &[Shard]) {
        let _changing = self.changing();
        let old = self.map.load();
        let known = old
            .members
            .iter()
            .map(|member| Known { master: member.node.address(), replicas: member.replicas.clone() });
        let known: Vec<_> = known.collect();
        let heirs = heirs(&known, shards);
        // Who has no slots yet but was asked for some lately is about to get them.
        let is_guest = |position: &usize| {
            !heirs.contains(&Some(*position))
                && old.members[*position].node.state.asked.swap(false, Ordering::Relaxed)
        };
        let guests: Vec<_> = (0..old.members.len()).filter(is_guest).collect();
        let stay = heirs.iter().flatten().chain(&guests).map(|position| old.members[*position].clone());
        let mut map = Map { slots: vec![NOBODY; COUNT].into(), members: stay.collect() };
        for (shard, heir) in shards.iter().zip(&heirs) {
            let kept = heir.and_then(|heir| {
                map.members.iter().position(|member| Arc::ptr_eq(&member.node, &old.members[heir].node))
            });
            let position = kept.unwrap_or_else(|| self.add(&mut map, &shard.master));
            let member = &mut map.members[position];
            member.node.go_to(&shard.master);
            member.replicas.clone_from(&shard.replicas);
            for slots in &shard.slots {
                map.slots[usize::from(*slots.start())..=usize::from(*slots.end())].fill(position as u16);
            }
        }
        let unchanged = map.slots == old.slots
            && map.members.len() == old.members.len()
            && map
                .members
                .iter()
                .zip(&old.members)
                .all(|(new, old)| Arc::ptr_eq(&new.node, &old.node) && new.replicas == old.replicas);
        if !unchanged {
            let without = map.slots.iter().filter(|slot| **slot == NOBODY).count();
            tracing::info!(shards = shards.len(), slots_without_a_node = without, "the cluster has changed");
            self.serve(map);
        }
    }

    /// The node that has `slot` from now on, as the one that had it says.
    fn moved(&self, slot: u16, to: &Address) -> Arc<Node> {
        self.shared.trouble.notify_one();
        let _changing = self.changing();
        let known = self.map.load();
        let owner = known.member(slot).map(|member| (Arc::clone(&member.node), member.replicas.contains(to)));
        // Somebody has heard of it earlier.
        if let Some((owner, _)) = &owner
            && owner.address().as_ref() == Some(to)
        {
            return Arc::clone(owner);
        }
        let mut map = Map::clone(&known);
        match (map.position(to), owner) {
            (Some(position), _) => {
                let node = Arc::clone(&map.members[position].node);
                map.slots[usize::from(slot)] = position as u16;
                self.serve(map);
                node
            }
            // It has followed the one that had the slot: it has all of them now.
            (None, Some((owner, true))) => {
                owner.go_to(to);
                owner
            }
            (None, _) => {
                let position = self.add(&mut map, to);
                let node = Arc::clone(&map.members[position].node);
                map.slots[usize::from(slot)] = position as u16;
                self.serve(map);
                node
            }
        }
    }

    /// The node at `to`, to which slots are on their way.
    fn guest(&self, to: &Address) -> Arc<Node> {
        let known = |map: &Map| map.position(to).map(|position| Arc::clone(&map.members[position].node));
        let node = known(&self.map.load()).unwrap_or_else(|| {
            let _changing = self.changing();
            let mut map = Map::clone(&self.map.load());
            known(&map).unwrap_or_else(|| {
                let position = self.add(&mut map, to);
                let node = Arc::clone(&map.members[position].node);
                self.serve(map);
                node
            })
        });
        node.state.asked.store(true, Ordering::Relaxed);
        node
    }

    /// One more member, without slots as yet, whose driver begins to connect.
    fn add(&self, map: &mut Map, address: &Address) -> usize {
        let (node, flights) = Node::new(&self.shared, map.free_id(), Some(address.clone()));
        if let Some(runtime) = self.runtime.get() {
            runtime.spawn(flights.run());
        }
        map.members.push(Member { node: Arc::new(node), replicas: Vec::new() });
        map.members.len() - 1
    }

    /// Serves `map`, and tells who has the key of the heartbeats.
    fn serve(&self, map: Map) {
        let beats = self.shared.heartbeat.as_ref().and_then(|heartbeat| map.member(heartbeat.slot()));
        for member in &map.members {
            let is_it = beats.is_some_and(|beats| Arc::ptr_eq(&beats.node, &member.node));
            member.node.state.beats.store(is_it, Ordering::Relaxed);
        }
        self.map.store(Arc::new(map));
    }

    fn changing(&self) -> MutexGuard<'_, ()> {
        self.changing.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Asks the node at `address` who has what.
pub(super) async fn slots_at(access: &Access, address: &Address) -> Result<Vec<Shard>, RedisError> {
    let mut connection = dial(&access.client(address)?).await?;
    let reply = redis::cmd("CLUSTER").arg("SLOTS").query_async(&mut connection).await?;
    // One that was taken out of its cluster knows of no slots.
    let told = shards(&reply, address).filter(|shards| !shards.is_empty());
    told.ok_or_else(|| RedisError::from((ErrorKind::UnexpectedReturnType, "no node with slots")))
}

impl std::fmt::Debug for Cluster {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Cluster").field("seeds", &self.seeds).finish_non_exhaustive()
    }
}
