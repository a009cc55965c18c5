//! A PostgreSQL of its own for each test: a Testcontainers `postgres:16` where a Docker engine answers and
//! has that image, else a `postgres` process. Both on a port of their own, both gone with the test.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use testcontainers::core::{IntoContainerPort as _, WaitFor};
use testcontainers::runners::SyncRunner as _;
use testcontainers::{Container, GenericImage, ImageExt as _};

use super::{docker_has, eventually, free_port};

pub struct Postgres {
    pub port: u16,
    server: Server,
}

enum Server {
    Process { child: Child, folder: tempfile::TempDir },
    Container { _container: Box<Container<GenericImage>> },
}

impl Postgres {
    /// A database with Tollgate's tables.
    pub fn start() -> Self {
        let postgres = Self::empty();
        postgres.migrate();
        postgres
    }

    /// A database without tables.
    pub fn empty() -> Self {
        if docker_has("postgres:16") { Self::container() } else { Self::process() }
    }

    fn container() -> Self {
        let image = GenericImage::new("postgres", "16")
            .with_exposed_port(5432.tcp())
            .with_wait_for(WaitFor::message_on_stderr("ready to accept connections"))
            .with_env_var("POSTGRES_PASSWORD", "test");
        let container = image.start().expect("a container of postgres:16");
        let port = container.get_host_port_ipv4(5432.tcp()).expect("its port");
        let postgres = Self { port, server: Server::Container { _container: Box::new(container) } };
        postgres.wait();
        postgres
    }

    /// A process in any case: for tests that kill it and start it again on the same port.
    pub fn process() -> Self {
        let folder = tempfile::tempdir().unwrap();
        // Another user has to come through.
        fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o755)).unwrap();
        let data = folder.path().join("data");
        fs::create_dir(&data).unwrap();
        if is_root() {
            run(Command::new("chown").arg("postgres").arg(&data));
        }
        let initdb = as_postgres("initdb")
            .arg("-D")
            .arg(&data)
            .args(["-A", "trust", "-U", "postgres", "--no-sync"])
            .output();
        let initdb = initdb.expect("initdb is installed (./test installs it)");
        assert!(initdb.status.success(), "{initdb:?}");
        let port = free_port();
        let child = spawn(port, &data);
        let postgres = Self { port, server: Server::Process { child, folder } };
        postgres.wait();
        postgres
    }

    fn wait(&self) {
        eventually("an answer of PostgreSQL", || self.try_sql("SELECT 1").ok());
    }

    /// Ends the process at once.
    pub fn kill(&mut self) {
        let Server::Process { child, .. } = &mut self.server else { panic!("only a process can be killed") };
        child.kill().unwrap();
        child.wait().unwrap();
    }

    /// Starts it again on the same port.
    pub fn restart(&mut self) {
        let port = self.port;
        let Server::Process { child, folder } = &mut self.server else {
            panic!("only a process can be restarted")
        };
        let data = folder.path().join("data");
        // Those that served connections may still be ending, and hold its memory until then.
        *child = eventually("PostgreSQL again", || {
            let mut child = spawn(port, &data);
            for _ in 0..20 {
                std::thread::sleep(std::time::Duration::from_millis(50));
                if child.try_wait().unwrap().is_some() {
                    return None;
                }
            }
            Some(child)
        });
        self.wait();
    }

    pub fn url(&self) -> String {
        format!("postgres://postgres:test@127.0.0.1:{}/postgres", self.port)
    }

    /// Runs SQL with psql; what it prints.
    #[track_caller]
    pub fn sql(&self, sql: &str) -> String {
        self.try_sql(sql).unwrap_or_else(|error| panic!("{sql}: {error}"))
    }

    pub fn try_sql(&self, sql: &str) -> Result<String, String> {
        let output = Command::new("psql")
            .args([&self.url(), "-qAtX", "-v", "ON_ERROR_STOP=1", "-c", sql])
            .output()
            .expect("psql is installed (./test installs it)");
        if output.status.success() {
            Ok(String::from_utf8(output.stdout).unwrap().trim().to_owned())
        } else {
            Err(String::from_utf8(output.stderr).unwrap())
        }
    }

    fn migrate(&self) {
        let folder = tempfile::tempdir().unwrap();
        let config = self.config(folder.path());
        let output =
            Command::new(env!("CARGO_BIN_EXE_tollgate")).args(["migrate", "--config"]).arg(&config).output();
        let output = output.unwrap();
        assert!(output.status.success(), "{output:?}");
    }

    /// A configuration for commands that only need the database.
    pub fn config(&self, folder: &Path) -> PathBuf {
        let config = folder.join("database.yaml");
        let text = format!(
            "upstreams: {{u: {{servers: [127.0.0.1:1]}}}}\nroutes: [{{id: all, match: {{path: /*}}, upstream: u}}]\nrules: {{database: {{url: '{}'}}}}\n",
            self.url()
        );
        fs::write(&config, text).unwrap();
        config
    }
}

impl Drop for Postgres {
    fn drop(&mut self) {
        if let Server::Process { child, .. } = &mut self.server {
            // SIGQUIT: at once, with all that serve connections.
            let _ = Command::new("kill").args(["-s", "QUIT", &child.id().to_string()]).status();
            let _ = child.wait();
        }
    }
}

fn spawn(port: u16, data: &Path) -> Child {
    as_postgres("postgres")
        .arg("-D")
        .arg(data)
        .args(["-p", &port.to_string(), "-k", "", "-c", "listen_addresses=127.0.0.1", "-c", "fsync=off"])
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .expect("postgres is installed (./test installs it)")
}

fn is_root() -> bool {
    let id = Command::new("id").arg("-u").output().unwrap();
    id.stdout.trim_ascii() == b"0"
}

/// A program of the newest PostgreSQL here; it does not run as root.
fn as_postgres(program: &str) -> Command {
    let mut versions: Vec<PathBuf> = fs::read_dir("/usr/lib/postgresql")
        .map(|folder| folder.filter_map(|entry| Some(entry.ok()?.path().join("bin"))).collect())
        .unwrap_or_default();
    versions.sort();
    let path = versions.pop().map_or(PathBuf::from(program), |folder| folder.join(program));
    if !is_root() {
        return Command::new(path);
    }
    // It becomes that program, so that a signal reaches it.
    let mut command = Command::new("setpriv");
    command.args(["--reuid=postgres", "--regid=postgres", "--clear-groups"]).arg(path);
    command
}

fn run(command: &mut Command) {
    assert!(command.status().unwrap().success(), "{command:?}");
}
