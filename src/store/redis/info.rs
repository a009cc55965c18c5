//! What a node says of itself in INFO.

use std::collections::HashMap;

use redis::RedisError;
use redis::aio::MultiplexedConnection;

/// The fields of INFO.
pub(super) struct Info(HashMap<String, String>);

impl Info {
    /// Asks for them.
    pub(super) async fn ask(connection: &mut MultiplexedConnection) -> Result<Self, RedisError> {
        let text: String = redis::cmd("INFO").query_async(connection).await?;
        Ok(Self::read(&text))
    }

    fn read(text: &str) -> Self {
        let fields = text.lines().filter_map(|line| line.split_once(':'));
        Self(fields.map(|(field, value)| (field.into(), value.trim().into())).collect())
    }

    pub(super) fn has(&self, field: &str) -> bool {
        self.0.contains_key(field)
    }

    pub(super) fn text(&self, field: &str) -> Option<&str> {
        self.0.get(field).map(String::as_str)
    }

    pub(super) fn number(&self, field: &str) -> Option<u64> {
        self.text(field)?.parse().ok()
    }

    /// The policy by which keys are evicted, whether there is a reason to now or not.
    pub(super) fn policy(&self) -> &str {
        self.text("maxmemory_policy").unwrap_or("noeviction")
    }

    /// The policy by which buckets may be evicted, if they may: what is evicted counts as not taken.
    pub(super) fn evicts(&self) -> Option<&str> {
        let is_bounded = self.number("maxmemory").is_some_and(|bytes| bytes > 0);
        Some(self.policy()).filter(|policy| is_bounded && *policy != "noeviction")
    }

    /// Keys that were evicted since it began.
    pub(super) fn evicted(&self) -> u64 {
        self.number("evicted_keys").unwrap_or(0)
    }

    /// What is used, less what is kept for clients and replicas: that grows with what is written, not with what is
    /// kept.
    pub(super) fn used_by_keys(&self) -> Option<u64> {
        let of = |field| self.number(field).unwrap_or(0);
        let for_replicas = self
            .number("mem_total_replication_buffers")
            .unwrap_or_else(|| of("mem_replication_backlog") + of("mem_clients_slaves"));
        Some(self.number("used_memory")?.saturating_sub(for_replicas + of("mem_clients_normal")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn evictions_are_seen() {
        let told = |policy, most| {
            Info::read(&format!(
                "# Memory\r\nmaxmemory:{most}\r\nmaxmemory_policy:{policy}\r\nevicted_keys:7\r\n"
            ))
        };
        let info = told("allkeys-lru", 1);
        assert_eq!((info.evicts(), info.evicted()), (Some("allkeys-lru"), 7));
        assert_eq!(told("allkeys-lru", 0).evicts(), None);
        assert_eq!(told("noeviction", 1).evicts(), None);
        let nothing = Info::read("nonsense");
        assert_eq!((nothing.evicts(), nothing.evicted(), nothing.used_by_keys()), (None, 0, None));
    }
}
