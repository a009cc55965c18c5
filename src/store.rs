//! Where buckets live. One trait, two stores; `tests/contract.rs` holds both to the same answers.

pub mod memory;
pub mod redis;

use std::fmt::Debug;

use async_trait::async_trait;
use thiserror::Error;

use crate::key::Key;
use crate::rule::{Checks, Verdicts};

/// Where buckets live: on one node, or in slots that are spread over several.
#[async_trait]
pub trait Store: Debug + Send + Sync {
    /// Decides all checks of one request, whose keys share a slot, and takes from all of their buckets or from
    /// none.
    ///
    /// # Errors
    /// When there is no decision. Whether anything was taken is then unknown, so the call must not
    /// be repeated.
    async fn acquire(&self, checks: &Checks) -> Result<Verdicts, StoreFault>;

    /// Whether calls are being answered by every node, as far as is known without making one.
    fn is_up(&self) -> bool;

    /// The slot of a key: what shares one can be decided in one call.
    fn slot_of(&self, _key: &Key) -> u16 {
        0
    }

    /// The node that has a slot now.
    fn node_of(&self, _slot: u16) -> NodeId {
        NodeId::ONLY
    }

    /// The nodes that there are now.
    fn nodes(&self) -> Vec<NodeId> {
        vec![NodeId::ONLY]
    }

    /// [`Store::is_up`] of one node.
    fn is_node_up(&self, _node: NodeId) -> bool {
        self.is_up()
    }

    /// What is known of the nodes, where there are some.
    fn describe(&self) -> Vec<Node> {
        Vec::new()
    }
}

/// A node of a store. The number of one that has gone may be given to another.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct NodeId(u16);

impl NodeId {
    /// The node of a store that has only one.
    pub const ONLY: Self = Self(0);

    /// Of a slot that no node is known to have.
    pub const NOBODY: Self = Self(Self::MOST as u16 - 1);

    /// One more than the largest number.
    pub const MOST: usize = 1_024;

    /// The node with this number; those beyond the last one share it.
    pub const fn new(number: usize) -> Self {
        let last = Self::MOST - 2;
        Self(if number < last { number as u16 } else { last as u16 })
    }

    /// The one with this [`NodeId::index`].
    pub const fn at(index: usize) -> Self {
        Self(index as u16)
    }

    /// Its number.
    pub const fn index(self) -> usize {
        self.0 as usize
    }
}

/// What is known of a node, for those who run it.
#[derive(Clone, Debug)]
pub struct Node {
    /// Which one.
    pub id: NodeId,
    /// Where it is: host and port, or a path. Never with a password.
    pub address: String,
    /// Whether it answers.
    pub up: bool,
    /// Why there is no connection, or why it gives no decisions; `None` if all is well.
    pub trouble: Option<String>,
    /// Keys that it has evicted to make room, as it said last.
    pub evicted: u64,
}

/// Why a store gave no decision.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum StoreFault {
    /// Not connected, or not answering: no call was made.
    #[error("the store is not connected")]
    Down,
    /// No answer within the deadline.
    #[error("the store did not answer within the deadline")]
    Timeout,
    /// The time was up before its turn came: no call was made.
    #[error("the store was too busy with others for the deadline")]
    Waited,
    /// Too many requests are waiting already.
    #[error("too many requests wait for the store")]
    QueueFull,
    /// The connection broke.
    #[error("the connection to the store broke: {0}")]
    Io(String),
    /// The store answered that it cannot.
    #[error("the store refused the call: {0}")]
    Refused(String),
    /// A key holds something that is no bucket of ours.
    #[error("a key holds what is no bucket: {0}")]
    WrongType(String),
    /// Its keys are being moved to another node, and cannot be decided in one call meanwhile: nothing was done.
    #[error("the keys are being moved")]
    Apart,
    /// Another node than the one that has the slot was asked in its name, and could not.
    #[error("the node that the slot is moving to: {0}")]
    Elsewhere(Box<StoreFault>),
    /// The answer does not have the shape of an answer.
    #[error("the store answered what was not asked: {0}")]
    BadReply(String),
}

impl StoreFault {
    /// The label in metrics.
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Down => "down",
            Self::Timeout => "timeout",
            Self::Waited => "waited",
            Self::QueueFull => "queue_full",
            Self::Io(_) => "io",
            Self::Refused(text) => refusal(text),
            Self::WrongType(_) => "wrong_type",
            Self::BadReply(_) => "bad_reply",
            Self::Apart => "apart",
            Self::Elsewhere(fault) => fault.kind(),
        }
    }

    /// Whether the store may have done all the same what it was asked for.
    pub fn may_have_run(&self) -> bool {
        match self {
            Self::Elsewhere(fault) => fault.may_have_run(),
            fault => matches!(fault, Self::Timeout | Self::Io(_) | Self::BadReply(_)),
        }
    }

    /// Whether it tells of the node that was asked, and not of one key or of another node.
    pub const fn is_of_the_node(&self) -> bool {
        !matches!(self, Self::WrongType(_) | Self::Apart | Self::Elsewhere(_))
    }
}

/// What kind of refusal a text begins with, from a closed set.
fn refusal(text: &str) -> &'static str {
    const KINDS: [(&str, &str); 12] = [
        ("READONLY", "readonly"),
        ("LOADING", "loading"),
        ("MASTERDOWN", "masterdown"),
        ("OOM", "oom"),
        ("BUSY", "busy"),
        ("NOAUTH", "noauth"),
        ("WRONGPASS", "noauth"),
        ("NOPERM", "noperm"),
        ("NOREPLICAS", "noreplicas"),
        ("CLUSTERDOWN", "clusterdown"),
        ("MOVED", "moved"),
        ("ASK", "moved"),
    ];
    let known = KINDS.iter().find(|(word, _)| text.starts_with(word)).map(|(_, kind)| *kind);
    // What a command inside of the script may not do has no code.
    let may_not = || text.contains("user executing the script").then_some("noperm");
    known.or_else(may_not).unwrap_or("refused")
}
