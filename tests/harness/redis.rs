//! A Redis of its own for each test: a Testcontainers `redis:7` where a Docker engine answers and has
//! that image, else a `redis-server` process. Both on a port of their own, both gone with the test.

use std::process::{Child, Command, Stdio};

use testcontainers::core::{IntoContainerPort as _, WaitFor};
use testcontainers::runners::SyncRunner as _;
use testcontainers::{Container, GenericImage};

use super::{docker_has, eventually, free_port};

/// The configuration of a process, in its folder.
const FILE: &str = "node.conf";

pub struct Redis {
    pub port: u16,
    server: Server,
}

enum Server {
    Process { child: Child, folder: tempfile::TempDir, program: String, arguments: Vec<String> },
    Container { _container: Box<Container<GenericImage>> },
}

impl Redis {
    pub fn start() -> Self {
        if docker_has("redis:7") { Self::container() } else { Self::process() }
    }

    fn container() -> Self {
        let image = GenericImage::new("redis", "7")
            .with_exposed_port(6379.tcp())
            .with_wait_for(WaitFor::message_on_stdout("Ready to accept connections"));
        let container = image.start().expect("a container of redis:7");
        let port = container.get_host_port_ipv4(6379.tcp()).expect("its port");
        Self { port, server: Server::Container { _container: Box::new(container) } }
    }

    /// A process in any case: for tests that kill it and start it again on the same port.
    pub fn process() -> Self {
        Self::with(&["--enable-debug-command", "yes"])
    }

    /// A process with these arguments.
    pub fn with(arguments: &[&str]) -> Self {
        let redis = Self::of("redis-server", arguments);
        redis.wait();
        redis
    }

    /// A process of one of the servers that `scripts/other-servers` fetches.
    pub fn other(name: &str) -> Self {
        let folder = std::env::var("TOLLGATE_TEST_SERVERS").unwrap_or_else(|_| {
            let cache = std::env::var("XDG_CACHE_HOME");
            let cache = cache.unwrap_or_else(|_| format!("{}/.cache", std::env::var("HOME").unwrap()));
            format!("{cache}/tollgate-servers")
        });
        let redis = Self::of(&format!("{folder}/{name}"), &[]);
        redis.wait();
        redis
    }

    /// A process of `program`, which may not answer yet.
    pub fn of(program: &str, arguments: &[&str]) -> Self {
        Self::of_file(program, "", arguments)
    }

    /// [`Redis::of`], with what only a file can say.
    pub fn of_file(program: &str, text: &str, arguments: &[&str]) -> Self {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join(FILE), text).unwrap();
        let port = free_port();
        let arguments: Vec<String> = arguments.iter().copied().map(String::from).collect();
        let child = spawn(program, port, folder.path(), &arguments);
        Self { port, server: Server::Process { child, folder, program: program.into(), arguments } }
    }

    pub fn wait(&self) {
        eventually("an answer of Redis", || {
            let mut connection = self.client().get_connection().ok()?;
            ::redis::cmd("PING").query::<String>(&mut connection).ok()
        });
    }

    /// Ends the process at once, without saving anything.
    pub fn kill(&mut self) {
        let Server::Process { child, .. } = &mut self.server else { panic!("only a process can be killed") };
        child.kill().unwrap();
        child.wait().unwrap();
    }

    /// Sends it a signal.
    pub fn signal(&self, name: &str) {
        let Server::Process { child, .. } = &self.server else { panic!("only a process can be signalled") };
        let status = Command::new("kill").args(["-s", name, &child.id().to_string()]).status().unwrap();
        assert!(status.success());
    }

    /// Starts it again on the same port: with what was saved, or empty.
    pub fn restart(&mut self) {
        self.restart_with(&[]);
        self.wait();
    }

    /// [`Redis::restart`] with more arguments, without waiting for it.
    pub fn restart_with(&mut self, more: &[&str]) {
        let Server::Process { child, folder, program, arguments } = &mut self.server else {
            panic!("only a process can be restarted")
        };
        let arguments: Vec<String> =
            arguments.iter().cloned().chain(more.iter().copied().map(String::from)).collect();
        *child = spawn(program, self.port, folder.path(), &arguments);
    }

    pub fn url(&self) -> String {
        format!("redis://127.0.0.1:{}", self.port)
    }

    pub fn client(&self) -> ::redis::Client {
        ::redis::Client::open(self.url()).unwrap()
    }

    /// Runs one command.
    pub fn command<T: ::redis::FromRedisValue>(&self, words: &[&str]) -> T {
        let mut connection = self.client().get_connection().unwrap();
        let mut command = ::redis::cmd(words[0]);
        command.arg(&words[1..]);
        command.query(&mut connection).unwrap_or_else(|error| panic!("{words:?}: {error}"))
    }

    /// The keys of all buckets.
    pub fn keys(&self) -> Vec<String> {
        let mut keys: Vec<String> = self.command(&["KEYS", "*"]);
        keys.retain(|key| !key.starts_with("tollgate:{rl}:"));
        keys.sort();
        keys
    }
}

impl Drop for Redis {
    fn drop(&mut self) {
        if let Server::Process { child, .. } = &mut self.server {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

fn spawn(program: &str, port: u16, folder: &std::path::Path, arguments: &[String]) -> Child {
    Command::new(program)
        .arg(FILE)
        .args(["--port", &port.to_string(), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"])
        .args(arguments)
        .current_dir(folder)
        .stdout(Stdio::null())
        .spawn()
        .unwrap_or_else(|error| panic!("{program}: {error}; ./test installs it"))
}
