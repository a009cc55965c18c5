//! A gateway as a process: the built binary, with a configuration of its own.

use std::fs;
use std::net::TcpStream;
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};

use super::{Redis, Response, Upstream, eventually, free_port, get};

pub const TOKEN: &str = "test-token";

pub struct Gateway {
    pub port: u16,
    pub admin: u16,
    child: Child,
    folder: tempfile::TempDir,
    head: String,
}

impl Gateway {
    /// A gateway on `store` (the text after `store:`) with `rest` (routes, rules ...) as its
    /// configuration.
    pub fn start(store: &str, rest: &str) -> Self {
        Self::start_with(store, rest, &[])
    }

    /// [`Gateway::start`] with environment variables.
    pub fn start_with(store: &str, rest: &str, env: &[(&str, &str)]) -> Self {
        Self::start_listening("", store, rest, env)
    }

    /// [`Gateway::start_with`], with more of its listener (`, tls: ...`).
    pub fn start_listening(listener: &str, store: &str, rest: &str, env: &[(&str, &str)]) -> Self {
        let (port, admin) = (free_port(), free_port());
        let head = format!(
            "threads: 2\nlisteners: [{{address: 127.0.0.1:{port}{listener}}}]\nadmin: {{address: 127.0.0.1:{admin}, token: {TOKEN}}}\nstore: {store}\n"
        );
        let folder = tempfile::tempdir().unwrap();
        let config = folder.path().join("tollgate.yaml");
        fs::write(&config, format!("{head}{rest}")).unwrap();
        let log = fs::File::create(folder.path().join("log")).unwrap();
        let child = Command::new(env!("CARGO_BIN_EXE_tollgate"))
            .args(["serve", "--config"])
            .arg(&config)
            .envs(env.iter().copied())
            .stdout(log.try_clone().unwrap())
            .stderr(log)
            .stdin(Stdio::null())
            .spawn()
            .unwrap();
        let mut gateway = Self { port, admin, child, folder, head };
        gateway.wait();
        gateway
    }

    fn wait(&mut self) {
        let (port, admin) = (self.port, self.admin);
        let deadline = std::time::Instant::now() + std::time::Duration::from_secs(20);
        loop {
            let ended = self.child.try_wait().unwrap();
            let late = std::time::Instant::now() > deadline;
            assert!(ended.is_none() && !late, "the gateway did not start: {}", self.log());
            let listens = |port| TcpStream::connect(("127.0.0.1", port)).is_ok();
            if listens(admin) && listens(port) && get(admin, "/readyz", "").status == 200 {
                return;
            }
            std::thread::sleep(std::time::Duration::from_millis(10));
        }
    }

    /// Replaces all but the listeners and the store in the file.
    pub fn write(&self, rest: &str) {
        // In one step, as it should be done: a reload may read at any moment.
        let new = self.folder.path().join("new");
        fs::write(&new, format!("{}{rest}", self.head)).unwrap();
        fs::rename(new, self.config()).unwrap();
    }

    /// [`Gateway::write`] with another store, too.
    pub fn write_store(&mut self, store: &str, rest: &str) {
        let before = self.head.find("store: ").unwrap();
        self.head = format!("{}store: {store}\n", &self.head[..before]);
        self.write(rest);
    }

    pub fn config(&self) -> PathBuf {
        self.folder.path().join("tollgate.yaml")
    }

    pub fn log(&self) -> String {
        fs::read_to_string(self.folder.path().join("log")).unwrap()
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    pub fn signal(&self, name: &str) {
        let status = Command::new("kill").args(["-s", name, &self.pid().to_string()]).status().unwrap();
        assert!(status.success());
    }

    pub fn is_running(&mut self) -> bool {
        self.child.try_wait().unwrap().is_none()
    }

    /// Waits for the end of the process.
    pub fn wait_for_end(&mut self) -> ExitStatus {
        eventually("the end of the gateway", || self.child.try_wait().unwrap())
    }

    /// SIGHUP, and waits until the reload was applied or rejected.
    pub fn reload(&self) {
        let before = self.reloads();
        self.signal("HUP");
        eventually("a reload", || (self.reloads() > before).then_some(()));
    }

    fn reloads(&self) -> u64 {
        self.metric("tollgate_config_reloads_total{outcome=\"applied\"}")
            + self.metric("tollgate_config_reloads_total{outcome=\"rejected\"}")
    }

    /// The value of one time series; 0 if there is none.
    pub fn metric(&self, series: &str) -> u64 {
        let metrics = get(self.admin, "/metrics", "").body;
        let line = metrics.lines().find_map(|line| line.strip_prefix(series)?.strip_prefix(' '));
        line.map_or(0, |value| value.parse::<f64>().unwrap() as u64)
    }

    #[track_caller]
    pub fn get(&self, path: &str, key: &str) -> Response {
        get(self.port, path, key)
    }
}

impl Drop for Gateway {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        if std::thread::panicking() {
            eprintln!("log of the gateway on {}:\n{}", self.port, self.log());
        }
    }
}

/// `store:` for a Redis. The deadline is long: on a busy machine a test must not meet the fallback
/// unless it means to.
pub fn on(redis: &Redis) -> String {
    format!("{{redis: {{url: '{}', timeout: 5s}}}}", redis.url())
}

/// One route for every path, to `upstream`, with these rules.
pub fn everything_to(upstream: &Upstream, rules: &str) -> String {
    format!(
        "upstreams: {{u: {{servers: [127.0.0.1:{}]}}}}\nroutes: [{{id: all, match: {{path: /*}}, upstream: u}}]\nrules:\n{rules}\nheaders: [x-ratelimit, ratelimit-legacy, ratelimit-draft]\n",
        upstream.port
    )
}
