//! One connection to a node, with the script on the other side.

use std::collections::HashMap;
use std::time::Duration;

use redis::aio::MultiplexedConnection;
use redis::{AsyncConnectionConfig, Client, Cmd, ErrorKind, Pipeline, RedisError, ServerErrorKind, Value};
use thiserror::Error;

use super::info::Info;
use super::script;

/// The most that connecting may take, the script included. Nobody waits for it: requests are
/// decided without the store meanwhile.
const CONNECT_WITHIN: Duration = Duration::from_secs(1);

/// The oldest version that the scripts are tested on.
const OLDEST: (u32, u32) = (6, 2);

/// What a node is expected to be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// A Redis of its own, or the master that Sentinels name.
    Single,
    /// A node of a cluster.
    Member,
}

/// Why there is no connection.
#[derive(Debug, Error)]
pub(super) enum OpenError {
    /// It did not come about, or was refused.
    #[error(transparent)]
    Redis(#[from] RedisError),
    /// What answers there follows another one, and takes no writes.
    #[error("READONLY it is a replica")]
    Replica,
    /// What answers there can never do.
    #[error("{0}")]
    Unfit(String),
}

/// A connection, and the hash under which the script is known there.
pub(super) struct Connection {
    connection: MultiplexedConnection,
    sha: String,
}

impl Connection {
    /// Connects, looks who answers, and loads the script.
    pub(super) async fn open(client: &Client, name: &str, kind: Kind) -> Result<Self, OpenError> {
        let open = async {
            let mut connection = dial(client).await?;
            // Before anything else: of who has no password Redis takes no script of this length, but ends the
            // connection without a word.
            examine(&hello(&mut connection, name).await?, kind)?;
            let sha = load(&mut connection).await?;
            let opened = Self { connection, sha };
            // For nobody: what cannot run it is found out here, and the first request meets what has run once.
            opened.send(&script::Flight::new().command(&opened.sha)).await?;
            Ok(opened)
        };
        tokio::time::timeout(CONNECT_WITHIN, open).await.unwrap_or_else(|_| Err(too_late().into()))
    }

    /// Calls the script by its hash, once for each flight, all of them in one write; after ASKING, if so.
    pub(super) async fn call(
        &self,
        flights: &[(&script::Flight, bool)],
    ) -> Result<Vec<Result<Value, RedisError>>, RedisError> {
        if let [(flight, false)] = flights {
            return Ok(vec![self.send(&flight.command(&self.sha)).await]);
        }
        let (mut pipeline, mut asking) = (Pipeline::with_capacity(flights.len()), Vec::new());
        for (flight, asks) in flights {
            if *asks {
                asking.push(pipeline.len());
                pipeline.cmd("ASKING");
            }
            pipeline.add_command(flight.command(&self.sha));
        }
        let replies = self.connection.clone().send_packed_commands(&pipeline, 0, pipeline.len()).await?;
        let of_calls = replies.into_iter().enumerate().filter(|(position, _)| !asking.contains(position));
        Ok(of_calls.map(|(_, reply)| answered(reply)).collect())
    }

    /// Sends one command.
    pub(super) async fn send(&self, command: &Cmd) -> Result<Value, RedisError> {
        answered(self.connection.clone().send_packed_command(command).await?)
    }

    /// What the node says of itself. Who may not ask is not told: that is no reason not to work.
    pub(super) async fn info(&self) -> Option<Info> {
        Info::ask(&mut self.connection.clone()).await.ok()
    }

    /// Loads the script again, after Redis has said that it does not know it.
    pub(super) async fn reload(&mut self) -> Result<(), RedisError> {
        self.sha = load(&mut self.connection).await?;
        Ok(())
    }
}

/// A connection on which nothing was said yet but who we are.
pub(super) async fn dial(client: &Client) -> Result<MultiplexedConnection, RedisError> {
    // The deadline of a call is kept by who makes it, not here.
    let config =
        AsyncConnectionConfig::new().set_connection_timeout(Some(CONNECT_WITHIN)).set_response_timeout(None);
    client.get_multiplexed_async_connection_with_config(&config).await
}

pub(super) fn too_late() -> RedisError {
    RedisError::from((ErrorKind::Io, "no answer within a second"))
}

/// An error that Redis answered comes as a value.
fn answered(reply: Value) -> Result<Value, RedisError> {
    match reply {
        Value::ServerError(error) => Err(error.into()),
        reply => Ok(reply),
    }
}

/// Who answers. The name is what `CLIENT LIST` shows; HELLO takes it without asking for a permission.
async fn hello(
    connection: &mut MultiplexedConnection,
    name: &str,
) -> Result<HashMap<String, Value>, OpenError> {
    let mut hello = redis::cmd("HELLO");
    hello.arg(2).arg("SETNAME").arg(name);
    match hello.query_async(connection).await {
        Err(error) if error.detail().is_some_and(|detail| detail.contains("unknown command")) => {
            Err(OpenError::Unfit(too_old("what answers there does not know HELLO")))
        }
        reply => Ok(reply?),
    }
}

fn examine(told: &HashMap<String, Value>, kind: Kind) -> Result<(), OpenError> {
    let text = |field: &str| match told.get(field) {
        Some(Value::BulkString(text)) => String::from_utf8_lossy(text).into_owned(),
        Some(Value::SimpleString(text)) => text.clone(),
        _ => String::new(),
    };
    let version = text("version");
    let mut numbers = version.split('.').map(|number| number.parse().unwrap_or(0));
    if (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0)) < OLDEST {
        return Err(OpenError::Unfit(too_old(&format!("this is {} {version}", text("server")))));
    }
    match (kind, &*text("mode")) {
        (_, "sentinel") => {
            Err(OpenError::Unfit("this is a Sentinel: name it in store.redis.sentinel.nodes".into()))
        }
        (Kind::Single, "cluster") => {
            Err(OpenError::Unfit("this is a node of a cluster: name it in store.redis.cluster".into()))
        }
        (Kind::Member, "standalone") => {
            Err(OpenError::Unfit("this is no node of a cluster: name it in store.redis.url".into()))
        }
        // A replica of a cluster says itself where to go.
        (Kind::Single, _) if text("role") != "master" => Err(OpenError::Replica),
        _ => Ok(()),
    }
}

fn too_old(what: &str) -> String {
    format!("{what}: the scripts need Redis {}.{} or newer, or Valkey", OLDEST.0, OLDEST.1)
}

async fn load(connection: &mut MultiplexedConnection) -> Result<String, RedisError> {
    let mut command = Cmd::new();
    command.arg("SCRIPT").arg("LOAD").arg(script::SOURCE);
    command.query_async(connection).await
}

/// What an error of a server is about, where it is more than a refusal.
pub(super) fn server_error(error: &RedisError) -> Option<ServerErrorKind> {
    match error.kind() {
        ErrorKind::Server(kind) => Some(kind),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn told(server: &str, version: &str, mode: &str, role: &str) -> HashMap<String, Value> {
        let fields = [("server", server), ("version", version), ("mode", mode), ("role", role)];
        fields.map(|(field, text)| (field.into(), Value::BulkString(text.into()))).into()
    }

    #[test]
    fn what_cannot_do_is_told() {
        let examined = |version: &str, mode: &str, role: &str, kind| {
            examine(&told("redis", version, mode, role), kind).map_err(|error| error.to_string())
        };
        for version in ["6.2.14", "7.0.15", "8.0.0", "10.1.0"] {
            assert_eq!(examined(version, "standalone", "master", Kind::Single), Ok(()));
            assert_eq!(examined(version, "cluster", "slave", Kind::Member), Ok(()));
        }
        for version in ["6.0.16", "5.0.3", "", "nonsense"] {
            let refused = examined(version, "standalone", "master", Kind::Single).unwrap_err();
            assert!(refused.contains("need Redis 6.2 or newer"), "{refused}");
        }
        let refused = |mode, role, kind| examined("7.0.15", mode, role, kind).unwrap_err();
        assert!(refused("cluster", "master", Kind::Single).contains("store.redis.cluster"));
        assert!(refused("standalone", "master", Kind::Member).contains("store.redis.url"));
        assert!(refused("sentinel", "sentinel", Kind::Single).contains("store.redis.sentinel"));
        assert_eq!(refused("standalone", "replica", Kind::Single), "READONLY it is a replica");
    }
}
