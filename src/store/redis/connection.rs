//! One connection to Redis, with the script on the other side.

use std::collections::HashMap;
use std::time::Duration;

use redis::aio::MultiplexedConnection;
use redis::io::tcp::TcpSettings;
use redis::{AsyncConnectionConfig, Client, Cmd, ErrorKind, IntoConnectionInfo, RedisError, Value};

use super::script;

/// The most that connecting may take, the script included. Nobody waits for it: requests are
/// decided without the store meanwhile.
const CONNECT_WITHIN: Duration = Duration::from_secs(1);

/// A client for `url`. Without NODELAY the single small write of a flight could wait for the ACK of
/// the one before.
pub(super) fn client(url: &str) -> Result<Client, RedisError> {
    let info = url.into_connection_info()?;
    Client::open(info.set_tcp_settings(TcpSettings::default().set_nodelay(true)))
}

/// A connection, and the hash under which the script is known there.
pub(super) struct Connection {
    connection: MultiplexedConnection,
    sha: String,
}

impl Connection {
    /// Connects and loads the script.
    pub(super) async fn open(client: &Client) -> Result<Self, RedisError> {
        let open = async {
            // The deadline of a call is kept by the flight, not here.
            let config = AsyncConnectionConfig::new()
                .set_connection_timeout(Some(CONNECT_WITHIN))
                .set_response_timeout(None);
            let mut connection = client.get_multiplexed_async_connection_with_config(&config).await?;
            // Of who has no password Redis takes no script of this length: it ends the connection without a word.
            redis::cmd("PING").exec_async(&mut connection).await?;
            let sha = load(&mut connection).await?;
            warn_of_eviction(&mut connection).await;
            Ok(Self { connection, sha })
        };
        match tokio::time::timeout(CONNECT_WITHIN, open).await {
            Ok(opened) => opened,
            Err(_) => Err(RedisError::from((ErrorKind::Io, "no connection within a second"))),
        }
    }

    /// Calls the script by its hash.
    pub(super) async fn call(&mut self, flight: &script::Flight) -> Result<Value, RedisError> {
        self.send(&flight.command(&self.sha)).await
    }

    /// Sends one command.
    pub(super) async fn send(&self, command: &Cmd) -> Result<Value, RedisError> {
        match self.connection.clone().send_packed_command(command).await? {
            // An error that Redis answered comes as a value.
            Value::ServerError(error) => Err(error.into()),
            reply => Ok(reply),
        }
    }

    /// Loads the script again, after Redis has said that it does not know it.
    pub(super) async fn reload(&mut self) -> Result<(), RedisError> {
        self.sha = load(&mut self.connection).await?;
        Ok(())
    }
}

/// A Redis that may evict keys forgets what was taken, and so gives out more than the limit. Who may not
/// be asked for its configuration is not: that is no reason not to work.
async fn warn_of_eviction(connection: &mut MultiplexedConnection) {
    let mut ask = Cmd::new();
    ask.arg("CONFIG").arg("GET").arg("maxmemory*");
    let Ok(settings) = ask.query_async::<HashMap<String, String>>(connection).await else { return };
    let policy = settings.get("maxmemory-policy").map_or("noeviction", String::as_str);
    let bounded = settings.get("maxmemory").is_some_and(|bytes| bytes != "0");
    if bounded && policy != "noeviction" {
        tracing::warn!(
            policy,
            "Redis may evict buckets, which gives out more than the limit: use noeviction"
        );
    }
}

async fn load(connection: &mut MultiplexedConnection) -> Result<String, RedisError> {
    let mut command = Cmd::new();
    command.arg("SCRIPT").arg("LOAD").arg(script::SOURCE);
    command.query_async(connection).await
}
