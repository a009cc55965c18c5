//! Gateways whose rules come from a PostgreSQL.

use std::process::{Command, Output};
use std::thread;
use std::time::{Duration, Instant};

use super::gateway::{TOKEN, on};
use super::{Connection, Gateway, Postgres, Redis, Response, Upstream};

/// A change must be in force after this time. On an idle machine it takes some milliseconds.
const SOON: Duration = Duration::from_secs(1);

pub struct World {
    pub postgres: Postgres,
    pub redis: Redis,
    upstream: Upstream,
    pub folder: tempfile::TempDir,
}

impl World {
    pub fn new() -> Self {
        Self::on(Postgres::start())
    }

    pub fn on(postgres: Postgres) -> Self {
        let (redis, upstream) = (Redis::start(), Upstream::start());
        Self { postgres, redis, upstream, folder: tempfile::tempdir().unwrap() }
    }

    /// Routes `create-order` and `other`, the database, and `rules`; `identity` stands at the top.
    pub fn config(&self, identity: &str, rules: &str) -> String {
        format!(
            "{identity}\nupstreams: {{u: {{servers: [127.0.0.1:{}]}}}}
routes:
  - {{id: create-order, match: {{path: /orders}}, upstream: u}}
  - {{id: other, match: {{path: /*}}, upstream: u}}
rules:
  database: {{url: '{}', cache: '{}'}}
{rules}\n",
            self.upstream.port,
            self.postgres.url(),
            self.folder.path().join("cache").display()
        )
    }

    pub fn gateway(&self) -> Gateway {
        Gateway::start(&on(&self.redis), &self.config("", ""))
    }

    /// `tollgate` with these arguments.
    pub fn tollgate(&self, arguments: &[&str]) -> Output {
        let config = self.postgres.config(self.folder.path());
        Command::new(env!("CARGO_BIN_EXE_tollgate"))
            .args(arguments)
            .arg("--config")
            .arg(config)
            .output()
            .unwrap()
    }

    #[track_caller]
    pub fn command(&self, arguments: &[&str]) -> String {
        let output = self.tollgate(arguments);
        assert!(output.status.success(), "{arguments:?}: {output:?}");
        String::from_utf8(output.stdout).unwrap()
    }
}

impl World {
    /// Waits until a gateway serves all that the database has.
    #[track_caller]
    pub fn caught_up(&self, gateway: &Gateway) {
        let newest =
            self.postgres.sql("SELECT coalesce(max(version), 0) FROM rule_versions").parse().unwrap();
        soon("the newest version", &newest, || gateway.metric("tollgate_rules_version"));
    }
}

/// The limit that a tenant is told.
pub fn limit(gateway: &Gateway, path: &str, tenant: &str) -> u64 {
    gateway.get(path, tenant).number("x-ratelimit-limit")
}

/// Waits until something is so; fails if that takes longer than [`SOON`].
#[track_caller]
pub fn soon<T: PartialEq + std::fmt::Debug>(what: &str, expected: &T, mut probe: impl FnMut() -> T) {
    let started = Instant::now();
    loop {
        let found = probe();
        if found == *expected {
            return;
        }
        assert!(started.elapsed() < SOON, "{what}: {found:?}, expected {expected:?}");
        thread::sleep(Duration::from_millis(5));
    }
}

pub fn admin(gateway: &Gateway, method: &str, path: &str, headers: &str, body: &str) -> Response {
    let headers = format!("Authorization: Bearer {TOKEN}\r\n{headers}");
    Connection::open(gateway.admin).admin(method, path, &headers, body)
}
