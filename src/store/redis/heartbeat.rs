//! How many gateways live: each says so once a second in Redis, and hears how many did lately.

use std::sync::Arc;
use std::time::Duration;

use redis::{Cmd, Value};
use tokio::time::Instant;

use super::slots::slot_of;
use crate::clock::{Clock, Timestamp};
use crate::gateways::{GONE_AFTER, Gateways};
use crate::key::Key;

/// The script of one heartbeat.
const SOURCE: &str = include_str!("../../../lua/heartbeat.lua");

/// How often a gateway says that it lives.
pub(super) const EVERY: Duration = Duration::from_secs(1);

/// How long after a new connection the count may only grow. After an outage the first gateway to come
/// back would be the only one, and take the whole limit for its share.
const SETTLES_WITHIN: Duration = Duration::from_secs(10);

/// One gateway's heartbeat.
#[derive(Debug)]
pub struct Heartbeat {
    key: Key,
    id: Box<str>,
    live: Arc<Gateways>,
    clock: Arc<dyn Clock>,
}

impl Heartbeat {
    /// The heartbeat of the gateway `id`, among those that share `prefix`; tells the count to `live`.
    pub fn new(prefix: &str, id: &str, live: Arc<Gateways>, clock: Arc<dyn Clock>) -> Self {
        Self { key: Key::internal(prefix, "gateways"), id: id.into(), live, clock }
    }

    /// The slot of the key they are counted in.
    pub(super) fn slot(&self) -> u16 {
        slot_of(self.key.as_str())
    }

    /// The call. By its source, not by a hash: once a second that costs nothing, and needs no reload.
    pub(super) fn command(&self) -> Cmd {
        let mut command = redis::cmd("EVAL");
        let gone_after = u64::try_from(GONE_AFTER.as_millis()).unwrap_or(u64::MAX);
        command.arg(SOURCE).arg(1).arg(self.key.as_str()).arg(&*self.id).arg(gone_after);
        command
    }

    /// Whether no count was told yet.
    pub(super) fn was_never_heard(&self) -> bool {
        !self.live.is_known()
    }

    /// What time it is, to be told when the answer comes.
    pub(super) fn now(&self) -> Timestamp {
        self.clock.now()
    }

    /// Notes the count that was answered to a call of `sent`, on a connection that has been there since
    /// `connected`.
    pub(super) fn heard(&self, reply: &Value, sent: Timestamp, connected: Instant) -> u32 {
        let known = self.live.count();
        let Value::Int(count) = reply else { return known };
        let mut count = u32::try_from(*count).unwrap_or(1).max(1);
        if count < known && connected.elapsed() <= SETTLES_WITHIN {
            count = known;
        }
        self.live.heard(count, sent, self.clock.now());
        count
    }
}
