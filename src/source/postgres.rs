//! A PostgreSQL with rules, plans, tenants and API keys.
//!
//! Everything is asked by the simple protocol, without prepared statements, in one transaction a time, so
//! that a pooler in transaction mode stands in nobody's way. Numbers come as text and are read here: one
//! bad row is one bad row, and not the end of the reading.

pub mod feed;
mod read;
pub mod schema;
pub mod write;

use std::str::FromStr as _;
use std::time::Duration;

use sqlx::postgres::{PgConnectOptions, PgConnection, PgDatabaseError, PgPool, PgPoolOptions, PgRow};
use sqlx::{ConnectOptions as _, Connection as _, Executor as _};
use thiserror::Error;

pub(super) use self::read::columns;
pub use self::read::{RawRow, Table, change};
use crate::config::Secret;

/// How long a connection may take to come about.
const CONNECT_WITHIN: Duration = Duration::from_secs(5);

/// Why the database gives no rules.
#[derive(Debug, Error)]
pub enum DatabaseError {
    /// The address is none.
    #[error("no PostgreSQL address: {0}")]
    Address(String),
    /// The tables are not there.
    #[error("the database lacks tables or columns of this version (run `tollgate migrate`): {0}")]
    NotMigrated(String),
    /// The database or the way to it fails.
    #[error("{0}")]
    Failed(String),
    /// It takes too long.
    #[error("no answer within {0:?}")]
    Late(Duration),
    /// Something is asked for that is not there.
    #[error("{0}")]
    NotFound(String),
    /// It has changed since it was read.
    #[error("the rule is not as it is expected to be: {0}")]
    Changed(String),
    /// A value that the tables do not take.
    #[error("{0}")]
    Invalid(String),
}

impl From<sqlx::Error> for DatabaseError {
    fn from(error: sqlx::Error) -> Self {
        let Some(told) =
            error.as_database_error().and_then(|error| error.try_downcast_ref::<PgDatabaseError>())
        else {
            return Self::Failed(error.to_string());
        };
        let text = told.message().to_owned();
        match told.code() {
            // Undefined table or function.
            "42P01" | "42883" | "42703" => Self::NotMigrated(text),
            // `tollgate_rollback` found no such version.
            "P0002" => Self::NotFound(text),
            code if ["21", "22", "23"].iter().any(|class| code.starts_with(class)) => Self::Invalid(text),
            _ => Self::Failed(text),
        }
    }
}

/// Whether `url` is an address of a PostgreSQL.
pub fn check_url(url: &Secret) -> Result<(), DatabaseError> {
    options(url).map(drop)
}

fn options(url: &Secret) -> Result<PgConnectOptions, DatabaseError> {
    let options =
        PgConnectOptions::from_str(&url.0).map_err(|error| DatabaseError::Address(error.to_string()))?;
    // A pooler refuses parameters that it does not know.
    let options = options.application_name("tollgate").extra_float_digits(None).statement_cache_capacity(0);
    Ok(options.disable_statement_logging())
}

/// Connects once, to know whether it can be done, and if not why.
async fn reach(options: &PgConnectOptions) -> Result<(), DatabaseError> {
    let place = match options.get_socket() {
        Some(socket) => socket.display().to_string(),
        None => format!("{}:{}", options.get_host(), options.get_port()),
    };
    let late = DatabaseError::Failed(format!("cannot connect to {place} within {CONNECT_WITHIN:?}"));
    let connected = tokio::time::timeout(CONNECT_WITHIN, PgConnection::connect_with(options)).await;
    match connected.map_err(|_| late)? {
        Ok(connection) => Ok(connection.close().await?),
        Err(error) => Err(DatabaseError::Failed(format!("cannot connect to {place}: {error}"))),
    }
}

/// A pool of at most `most` connections, none of which exists before it is needed. To be made where a
/// runtime runs.
fn pool(url: &Secret, most: u32) -> Result<PgPool, DatabaseError> {
    let pool = PgPoolOptions::new().max_connections(most).acquire_timeout(CONNECT_WITHIN);
    Ok(pool.connect_lazy_with(options(url)?))
}

/// The rows of a query, by the simple protocol.
async fn all(connection: &mut PgConnection, sql: &str) -> Result<Vec<PgRow>, DatabaseError> {
    Ok(connection.fetch_all(sql).await?)
}

/// Runs a statement; the number of rows that it has touched.
async fn run(connection: &mut PgConnection, sql: &str) -> Result<u64, DatabaseError> {
    Ok(connection.execute(sql).await?.rows_affected())
}

/// Text as SQL takes it.
fn quoted(text: &str) -> String {
    // A NUL can be in no text of PostgreSQL. With E the meaning of a backslash is not left to a setting.
    format!(" E'{}'", text.replace('\0', "").replace('\\', "\\\\").replace('\'', "''"))
}
