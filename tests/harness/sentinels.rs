//! A master with a replica, and three Sentinels that watch over them.

use super::{Redis, eventually};

/// What the Sentinels call the master.
pub const MASTER: &str = "limits";

pub struct Sentinels {
    pub data: [Redis; 2],
    pub sentinels: Vec<Redis>,
}

impl Sentinels {
    pub fn start() -> Self {
        let master = Redis::with(&["--repl-diskless-sync-delay", "0"]);
        let port = master.port.to_string();
        let replica = Redis::with(&["--repl-diskless-sync-delay", "0", "--replicaof", "127.0.0.1", &port]);
        let sentinels: Vec<Redis> = (0..3).map(|_| sentinel(&port)).collect();
        for sentinel in &sentinels {
            eventually("a Sentinel that knows all others", || {
                let told: Vec<String> = sentinel.command(&["SENTINEL", "MASTER", MASTER]);
                let number = |field: &str| {
                    let position = told.iter().position(|word| word == field).unwrap();
                    told[position + 1].parse::<u32>().unwrap()
                };
                (number("num-slaves") == 1 && number("num-other-sentinels") == 2).then_some(())
            });
        }
        Self { data: [master, replica], sentinels }
    }

    /// `store:` for it.
    pub fn store(&self) -> String {
        let nodes: Vec<String> = self.sentinels.iter().map(Redis::url).collect();
        format!(
            "{{redis: {{sentinel: {{master: {MASTER}, nodes: ['{}']}}, timeout: 40ms}}, breaker: {{open_for: 200ms}}}}",
            nodes.join("', '")
        )
    }

    /// The position of the one that takes writes.
    pub fn master(&self) -> Option<usize> {
        let is_master = |node: &Redis| {
            let mut connection = node.client().get_connection().ok()?;
            let role: String = ::redis::cmd("INFO").arg("replication").query(&mut connection).ok()?;
            role.contains("role:master").then_some(())
        };
        self.data.iter().position(|node| is_master(node).is_some())
    }
}

fn sentinel(port: &str) -> Redis {
    let text = format!(
        "sentinel monitor {MASTER} 127.0.0.1 {port} 2
sentinel down-after-milliseconds {MASTER} 1000
sentinel failover-timeout {MASTER} 5000
"
    );
    let sentinel = Redis::of_file("redis-server", &text, &["--sentinel"]);
    sentinel.wait();
    sentinel
}
