//! Sentinels: they are asked once a second, and whenever the node is in trouble, where the master is.

use std::collections::HashMap;
use std::time::Duration;

use arc_swap::ArcSwap;
use futures_util::future::join_all;
use redis::aio::MultiplexedConnection;
use redis::{ErrorKind, RedisError};

use super::access::{Access, Address};
use super::connection::{dial, too_late};
use super::node::{Node, Shared};

/// How often they are asked.
const EVERY: Duration = Duration::from_secs(1);

/// How soon after one question the next one may come.
const AT_MOST_EVERY: Duration = Duration::from_millis(100);

/// How long one of them may take to answer.
const ANSWER_WITHIN: Duration = Duration::from_millis(500);

/// The Sentinels of one master.
pub(super) struct Sentinels {
    /// The name of the master.
    master: Box<str>,
    /// Where they are.
    addresses: Vec<Address>,
    /// How they are spoken to.
    pub(super) access: ArcSwap<Access>,
}

/// What one of them says of the master.
pub(super) struct Master {
    pub(super) address: Address,
    /// Its term: each failover begins another one.
    epoch: u64,
    pub(super) other_sentinels: u64,
}

impl Sentinels {
    /// The Sentinels at `addresses`, for the master they know as `master`.
    pub(super) fn new(master: &str, addresses: Vec<Address>, access: Access) -> Self {
        Self { master: master.into(), addresses, access: ArcSwap::from_pointee(access) }
    }

    /// Sends `node` where the master is, until the process ends.
    pub(super) async fn watch(&self, node: &Node, shared: &Shared) {
        let mut connections: Vec<Option<MultiplexedConnection>> = vec![None; self.addresses.len()];
        let (mut told_of_trouble, mut term) = (false, 0);
        loop {
            let answers =
                join_all(self.addresses.iter().zip(&mut connections).map(|(address, connection)| {
                    let ask = self.ask(address, connection);
                    async move {
                        tokio::time::timeout(ANSWER_WITHIN, ask).await.unwrap_or_else(|_| Err(too_late()))
                    }
                }));
            let (mut newest, mut error): (Option<Master>, _) = (None, None);
            let answers = answers.await;
            let answered = answers.iter().filter(|answer| answer.is_ok()).count();
            for answer in answers {
                match answer {
                    // One that was cut off from the others still names the master of an earlier term.
                    Ok(named) if newest.as_ref().is_none_or(|newest| newest.epoch < named.epoch) => {
                        newest = Some(named);
                    }
                    Ok(_) => {}
                    Err(told) => error = Some(told),
                }
            }
            match (newest, error) {
                // A few of them that tell of an earlier term are cut off from the others.
                (Some(Master { epoch, .. }), _) if epoch < term && answered * 2 <= self.addresses.len() => {}
                (Some(Master { address, epoch, .. }), _) => {
                    (told_of_trouble, term) = (false, epoch);
                    if node.go_to(&address) {
                        tracing::info!(%address, master = &*self.master, "the Sentinels name the master");
                    }
                }
                (None, Some(error)) => {
                    node.state.in_trouble(Some(format!("no Sentinel names {}: {error}", self.master)));
                    if !told_of_trouble {
                        told_of_trouble = true;
                        tracing::warn!(%error, master = &*self.master, "no Sentinel names the master");
                    }
                }
                (None, None) => {}
            }
            tokio::time::sleep(AT_MOST_EVERY).await;
            let _ = tokio::time::timeout(EVERY, shared.trouble.notified()).await;
        }
    }

    /// Asks one of them, on the connection there is, or on a new one.
    async fn ask(
        &self,
        address: &Address,
        connection: &mut Option<MultiplexedConnection>,
    ) -> Result<Master, RedisError> {
        let mut known = match connection.take() {
            Some(known) => known,
            None => dial(&self.access.load().client(address)?).await?,
        };
        let told = master(&mut known, &self.master).await?;
        *connection = Some(known);
        Ok(told)
    }
}

/// Asks a Sentinel about its master of that name.
pub(super) async fn master(connection: &mut MultiplexedConnection, name: &str) -> Result<Master, RedisError> {
    let mut ask = redis::cmd("SENTINEL");
    ask.arg("MASTER").arg(name);
    let told: HashMap<String, String> = ask.query_async(connection).await?;
    let number = |field: &str| told.get(field).and_then(|text| text.parse::<u64>().ok());
    let port = number("port").and_then(|port| u16::try_from(port).ok());
    let (Some(host), Some(port)) = (told.get("ip"), port) else {
        return Err(RedisError::from((ErrorKind::UnexpectedReturnType, "a master without an address")));
    };
    Ok(Master {
        address: Address::tcp(host, port),
        epoch: number("config-epoch").unwrap_or(0),
        other_sentinels: number("num-other-sentinels").unwrap_or(0),
    })
}

impl std::fmt::Debug for Sentinels {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Sentinels").field("master", &self.master).finish_non_exhaustive()
    }
}
