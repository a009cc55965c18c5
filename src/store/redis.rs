//! Buckets in Redis, decided there by one atomic script.
//!
//! Requests do not talk to Redis themselves. They queue; a driver takes who waits, at most
//! [`script::MOST_CHECKS`] checks at a time, and sends them as one call (a flight). One flight is in
//! the air at a time, so what arrives meanwhile travels together, and a lone request leaves at once.

mod connection;
mod flights;
mod heartbeat;
pub mod script;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use thiserror::Error;
use tokio::sync::{mpsc, oneshot};
use tokio::time::Instant;

use self::flights::{Flights, Waiting};
pub use self::heartbeat::Heartbeat;
use super::{Store, StoreFault};
use crate::metrics::StoreMetrics;
use crate::rule::{Checks, Verdicts};

/// Requests that may wait at once; beyond it a request is told so at once.
const LONGEST_QUEUE: usize = 2 * 1024;

/// A Redis, as requests see it.
#[derive(Debug)]
pub struct RedisStore {
    queue: mpsc::Sender<Waiting>,
    up: Arc<AtomicBool>,
}

/// The part of a [`RedisStore`] that does the work; runs until the process ends.
pub struct Driver(Flights);

/// Why an address is no Redis.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("no Redis address: {0}")]
pub struct AddressError(String);

impl RedisStore {
    /// A store on the Redis at `url`, which is not connected before its driver runs. The driver keeps
    /// `heartbeat` going, if there is one.
    pub fn new(
        url: &str,
        timeout: Duration,
        heartbeat: Option<Heartbeat>,
        metrics: StoreMetrics,
    ) -> Result<(Self, Driver), AddressError> {
        let client = connection::client(url).map_err(|error| AddressError(error.to_string()))?;
        let (queue, waiting) = mpsc::channel(LONGEST_QUEUE);
        let up = Arc::new(AtomicBool::new(false));
        let flights = Flights::new(client, waiting, Arc::clone(&up), timeout, heartbeat, metrics);
        Ok((Self { queue, up }, Driver(flights)))
    }

    /// Whether `url` is an address that a store can be made of.
    pub fn check_url(url: &str) -> Result<(), AddressError> {
        connection::client(url).map(drop).map_err(|error| AddressError(error.to_string()))
    }
}

impl Driver {
    /// Connects, flies, reconnects. To be spawned on the runtime of the proxy: on another one each
    /// call pays for waking a thread.
    pub async fn run(self) {
        self.0.run().await;
    }
}

#[async_trait]
impl Store for RedisStore {
    async fn acquire(&self, checks: &Checks) -> Result<Verdicts, StoreFault> {
        if !self.is_up() {
            return Err(StoreFault::Down);
        }
        let (reply, answer) = oneshot::channel();
        let waiting = Waiting { checks: checks.clone(), since: Instant::now(), reply };
        self.queue.try_send(waiting).map_err(|_| StoreFault::QueueFull)?;
        answer.await.unwrap_or(Err(StoreFault::Down))
    }

    fn is_up(&self) -> bool {
        self.up.load(Ordering::Acquire)
    }
}
