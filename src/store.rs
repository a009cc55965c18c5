//! Where buckets live. One trait, two stores; `tests/contract.rs` holds both to the same answers.

pub mod memory;
pub mod redis;

use std::fmt::Debug;

use async_trait::async_trait;
use thiserror::Error;

use crate::rule::{Checks, Verdicts};

/// Where buckets live.
#[async_trait]
pub trait Store: Debug + Send + Sync {
    /// Decides all checks of one request, and takes from all of their buckets or from none.
    ///
    /// # Errors
    /// When there is no decision. Whether anything was taken is then unknown, so the call must not
    /// be repeated.
    async fn acquire(&self, checks: &Checks) -> Result<Verdicts, StoreFault>;

    /// Whether calls are being answered, as far as is known without making one.
    fn is_up(&self) -> bool;
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
        }
    }

    /// Whether the store may have done all the same what it was asked for.
    pub const fn may_have_run(&self) -> bool {
        matches!(self, Self::Timeout | Self::Io(_) | Self::BadReply(_))
    }

    /// Whether it tells of the store as a whole, and not of one key.
    pub const fn is_of_the_node(&self) -> bool {
        !matches!(self, Self::WrongType(_))
    }
}

/// What kind of refusal a text begins with, from a closed set.
fn refusal(text: &str) -> &'static str {
    const KINDS: [(&str, &str); 9] = [
        ("READONLY", "readonly"),
        ("LOADING", "loading"),
        ("MASTERDOWN", "masterdown"),
        ("OOM", "oom"),
        ("BUSY", "busy"),
        ("NOAUTH", "noauth"),
        ("WRONGPASS", "noauth"),
        ("NOPERM", "noperm"),
        ("NOREPLICAS", "noreplicas"),
    ];
    KINDS.iter().find(|(word, _)| text.starts_with(word)).map_or("refused", |(_, kind)| kind)
}
