//! A Redis Cluster of its own for a test: processes on ports that nobody else has.

use std::process::Command;
use std::time::{Duration, Instant};

use super::{Redis, eventually, free_port};

/// How long a master may be silent before another takes its place, in ms.
pub const NODE_TIMEOUT: u64 = 2_000;

pub struct Cluster {
    pub nodes: Vec<Redis>,
}

impl Cluster {
    /// Three masters, each with a replica.
    pub fn start() -> Self {
        let cluster = Self { nodes: (0..6).map(|_| node()).collect() };
        let addresses = cluster.nodes.iter().map(address).collect::<Vec<_>>();
        let mut create = vec!["create"];
        create.extend(addresses.iter().map(String::as_str));
        create.extend(["--cluster-replicas", "1", "--cluster-yes"]);
        Self::manage(&create);
        cluster.settle();
        // A failover needs a replica that has followed its master once.
        for node in &cluster.nodes {
            eventually("its replica", || {
                let role: String = node.command(&["INFO", "replication"]);
                (role.contains("role:master") && role.contains("state=online")
                    || role.contains("master_link_status:up"))
                .then_some(())
            });
        }
        cluster
    }

    /// What the gateway is told of it.
    pub fn store(&self, more: &str) -> String {
        let nodes: Vec<String> = self.nodes.iter().take(3).map(Redis::url).collect();
        format!(
            "{{redis: {{cluster: ['{}'], timeout: 40ms{more}}}, breaker: {{open_for: 200ms}}}}",
            nodes.join("', '")
        )
    }

    /// `redis-cli --cluster` with these words.
    pub fn manage(words: &[&str]) -> String {
        let output = Command::new("redis-cli").arg("--cluster").args(words).output().unwrap();
        let told = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(output.status.success(), "{words:?}: {told}");
        told
    }

    /// Waits until all nodes agree that all is well.
    pub fn settle(&self) {
        eventually("a cluster that is well", || {
            let is_well = |node: &Redis| {
                let info: String = node.command(&["CLUSTER", "INFO"]);
                info.contains("cluster_state:ok") && info.contains("cluster_slots_ok:16384")
            };
            self.nodes.iter().all(is_well).then_some(())
        });
        let any = address(&self.nodes[0]);
        eventually("nodes that agree", || {
            let output = Command::new("redis-cli").args(["--cluster", "check", &any]).output().unwrap();
            output.status.success().then_some(())
        });
    }

    /// One more node, empty: its position.
    pub fn add(&mut self) -> usize {
        let new = node();
        Self::manage(&["add-node", &address(&new), &address(&self.nodes[0])]);
        self.nodes.push(new);
        let id = self.id(self.nodes.len() - 1);
        for node in &self.nodes {
            eventually("the new node is known", || {
                node.command::<String>(&["CLUSTER", "NODES"]).contains(&id).then_some(())
            });
        }
        // Until it says so it takes no keys.
        self.settle();
        self.nodes.len() - 1
    }

    /// One more replica of a master, in step with it: its position.
    pub fn add_replica(&mut self, master: usize) -> usize {
        let new = node();
        let id = self.id(master);
        let words = [
            "add-node",
            &address(&new),
            &address(&self.nodes[master]),
            "--cluster-slave",
            "--cluster-master-id",
            &id,
        ];
        Self::manage(&words);
        self.nodes.push(new);
        let new = self.nodes.len() - 1;
        eventually("a replica in step", || {
            let info: String = self.nodes[new].command(&["INFO", "replication"]);
            info.contains("master_link_status:up").then_some(())
        });
        self.settle();
        new
    }

    /// Makes a replica the master of its shard. Others vote on it, who may not have heard of a new one yet.
    pub fn fail_over_to(&self, replica: usize) {
        let mut asked: Option<Instant> = None;
        eventually("a failover", || {
            if asked.is_none_or(|asked| asked.elapsed() > Duration::from_secs(6)) {
                let _: String = self.nodes[replica].command(&["CLUSTER", "FAILOVER"]);
                asked = Some(Instant::now());
            }
            let masters = self.masters();
            (masters.contains(&replica) && masters.len() == 3).then_some(())
        });
    }

    /// Takes a node that has no slots out of the cluster.
    pub fn remove(&mut self, index: usize) {
        let (other, id) = (address(&self.nodes[(index + 1) % self.nodes.len()]), self.id(index));
        // Not before the other one has heard that it has no slots any more.
        eventually("a node that may go", || {
            let output =
                Command::new("redis-cli").args(["--cluster", "del-node", &other, &id]).output().unwrap();
            output.status.success().then_some(())
        });
        self.nodes.remove(index);
    }

    /// Moves slots from one master to another.
    pub fn reshard(&self, from: usize, to: usize, slots: usize) {
        let (from, to, slots) = (self.id(from), self.id(to), slots.to_string());
        self.settle();
        let any = address(&self.nodes[0]);
        let words = [
            "reshard",
            &any,
            "--cluster-from",
            &from,
            "--cluster-to",
            &to,
            "--cluster-slots",
            &slots,
            "--cluster-yes",
        ];
        Self::manage(&words);
    }

    pub fn id(&self, index: usize) -> String {
        self.nodes[index].command(&["CLUSTER", "MYID"])
    }

    /// The positions of the masters that have slots.
    pub fn masters(&self) -> Vec<usize> {
        let is_master = |index: &usize| {
            let nodes: String = self.nodes[*index].command(&["CLUSTER", "NODES"]);
            nodes.lines().any(|line| line.contains("myself,master") && line.split(' ').count() > 8)
        };
        (0..self.nodes.len()).filter(is_master).collect()
    }

    /// The position of a replica of a master.
    pub fn replica_of(&self, master: usize) -> usize {
        let id = self.id(master);
        let follows = |index: &usize| {
            let nodes: String = self.nodes[*index].command(&["CLUSTER", "NODES"]);
            nodes.lines().any(|line| line.contains("myself,slave") && line.contains(&id))
        };
        (0..self.nodes.len()).find(follows).expect("a replica")
    }

    /// The position of the master that has a key.
    pub fn master_of(&self, key: &str) -> usize {
        let slot: u64 = self.nodes[0].command(&["CLUSTER", "KEYSLOT", key]);
        let masters = self.masters();
        let has = |index: &usize| {
            let nodes: String = self.nodes[*index].command(&["CLUSTER", "NODES"]);
            let own = nodes.lines().find(|line| line.contains("myself")).unwrap().to_owned();
            own.split(' ').skip(8).any(|range| {
                let (first, last) = range.split_once('-').unwrap_or((range, range));
                matches!((first.parse::<u64>(), last.parse::<u64>()), (Ok(first), Ok(last)) if (first..=last).contains(&slot))
            })
        };
        masters.into_iter().find(has).expect("somebody has the slot")
    }
}

fn address(node: &Redis) -> String {
    format!("127.0.0.1:{}", node.port)
}

fn node() -> Redis {
    let (bus, timeout) = (free_port().to_string(), NODE_TIMEOUT.to_string());
    Redis::with(&[
        "--cluster-enabled",
        "yes",
        "--cluster-port",
        &bus,
        "--cluster-node-timeout",
        &timeout,
        "--repl-diskless-sync-delay",
        "0",
        // A replica stays with the master that a test gave it.
        "--cluster-allow-replica-migration",
        "no",
    ])
}
