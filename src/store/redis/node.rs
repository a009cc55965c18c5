//! One node as requests see it: a queue in front of its driver.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use arc_swap::ArcSwap;
use tokio::sync::{Notify, mpsc, oneshot, watch};
use tokio::time::Instant;

use super::access::{Access, Address};
use super::connection::Kind;
use super::flights::Flights;
use super::heartbeat::Heartbeat;
use crate::metrics::StoreMetrics;
use crate::rule::{Checks, Verdicts};
use crate::store::{self, NodeId, StoreFault};

/// Requests that may wait at once for one node; beyond it a request is told so at once.
pub(super) const LONGEST_QUEUE: usize = 2 * 1024;

/// What all nodes of a store have in common.
pub(super) struct Shared {
    pub(super) access: ArcSwap<Access>,
    /// What connections call themselves.
    pub(super) name: String,
    pub(super) kind: Kind,
    pub(super) timeout: Duration,
    pub(super) heartbeat: Option<Heartbeat>,
    pub(super) metrics: StoreMetrics,
    /// Told when a node is lost or sends others away: it may be time to look who has what now.
    pub(super) trouble: Notify,
    /// Why what answers can never do, once that has been found out.
    pub(super) unfit: Arc<OnceLock<String>>,
}

/// What a driver tells of its node.
#[derive(Debug, Default)]
pub(super) struct State {
    pub(super) up: AtomicBool,
    /// Whether the key of the heartbeats is here.
    pub(super) beats: AtomicBool,
    /// Whether requests were sent here lately by a node that is moving their slot here.
    pub(super) asked: AtomicBool,
    /// Keys that the node has evicted.
    pub(super) evicted: AtomicU64,
    trouble: Mutex<Option<String>>,
}

impl State {
    /// Notes why there is no connection.
    pub(super) fn in_trouble(&self, why: Option<String>) {
        *self.trouble.lock().unwrap_or_else(PoisonError::into_inner) = why;
    }
}

/// A node, as requests see it. Its driver ends when it is dropped.
#[derive(Debug)]
pub(super) struct Node {
    pub(super) id: NodeId,
    queue: mpsc::Sender<Waiting>,
    target: watch::Sender<Option<Address>>,
    pub(super) state: Arc<State>,
}

/// One request that waits for its answer.
#[derive(Debug)]
pub(super) struct Waiting {
    pub(super) checks: Checks,
    pub(super) slot: u16,
    /// Whether it was sent here by a node that is moving its slot here.
    pub(super) asking: bool,
    pub(super) since: Instant,
    pub(super) reply: oneshot::Sender<Result<Verdicts, NoVerdict>>,
}

/// Why a node gave no verdicts.
#[derive(Clone, Debug)]
pub(super) enum NoVerdict {
    /// It could not.
    Fault(StoreFault),
    /// The slot is at another one.
    Moved(Address),
    /// The key is at another one already, to which its slot is being moved.
    Ask(Address),
}

impl From<StoreFault> for NoVerdict {
    fn from(fault: StoreFault) -> Self {
        Self::Fault(fault)
    }
}

impl Node {
    /// A node at `address`, if that is known already, and what drives it.
    pub(super) fn new(shared: &Arc<Shared>, id: NodeId, address: Option<Address>) -> (Self, Flights) {
        let (queue, waiting) = mpsc::channel(LONGEST_QUEUE);
        let (target, address) = watch::channel(address);
        // Of several, one has the key of the heartbeats.
        let beats = AtomicBool::new(shared.kind == Kind::Single);
        let state = Arc::new(State { beats, ..State::default() });
        let flights = Flights::new(Arc::clone(shared), Arc::clone(&state), address, waiting);
        (Self { id, queue, target, state }, flights)
    }

    /// Asks for verdicts on checks whose keys share `slot`, for somebody who waits since then.
    pub(super) async fn ask(
        &self,
        checks: &Checks,
        slot: u16,
        asking: bool,
        since: Instant,
    ) -> Result<Verdicts, NoVerdict> {
        if !self.is_up() {
            return Err(StoreFault::Down.into());
        }
        let (reply, answer) = oneshot::channel();
        let waiting = Waiting { checks: checks.clone(), slot, asking, since, reply };
        self.queue.try_send(waiting).map_err(|_| StoreFault::QueueFull)?;
        answer.await.unwrap_or(Err(StoreFault::Down.into()))
    }

    pub(super) fn is_up(&self) -> bool {
        self.state.up.load(Ordering::Acquire)
    }

    /// Where it is, as far as is known.
    pub(super) fn address(&self) -> Option<Address> {
        self.target.borrow().clone()
    }

    /// What it is and holds is elsewhere now: its driver goes there. Tells whether that is news.
    pub(super) fn go_to(&self, address: &Address) -> bool {
        self.target.send_if_modified(|target| {
            let moves = target.as_ref() != Some(address);
            if moves {
                *target = Some(address.clone());
            }
            moves
        })
    }

    /// For those who run it.
    pub(super) fn describe(&self) -> store::Node {
        let up = self.is_up();
        let trouble = self.state.trouble.lock().unwrap_or_else(PoisonError::into_inner).clone();
        store::Node {
            id: self.id,
            address: self.address().map_or_else(|| "not known yet".into(), |address| address.to_string()),
            up,
            trouble: trouble.filter(|_| !up),
            evicted: self.state.evicted.load(Ordering::Relaxed),
        }
    }
}

impl std::fmt::Debug for Shared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Shared").field("name", &self.name).field("kind", &self.kind).finish_non_exhaustive()
    }
}
