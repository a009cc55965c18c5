//! All rules once, and then what has changed.
//!
//! One connection listens and asks. Changes are found in `rule_changes` by transaction: all that were
//! not finished when the last look was taken (`xmin` of its snapshot) are looked at again, in whatever
//! order they end. A row is read as it is now, so to read it twice does no harm.

use std::collections::HashSet;
use std::time::Duration;

use sqlx::postgres::{PgConnectOptions, PgConnection, PgListener, PgPoolOptions};
use sqlx::{Acquire as _, Executor as _, Row as _};

use super::read::{self, Table};
use super::{CONNECT_WITHIN, DatabaseError, options};
use crate::book::{Book, Change};
use crate::config::Database;

/// What the trigger of the tables notifies.
const CHANNEL: &str = "tollgate_rules";

/// How long a look for changes may take.
const LOOK_WITHIN: Duration = Duration::from_secs(10);

/// How long a whole load may take.
const LOAD_WITHIN: Duration = Duration::from_secs(60);

/// More changes than this are read as a whole.
const MOST_CHANGES: usize = 20_000;

/// Reads the rules of one database.
#[derive(Debug)]
pub struct Feed {
    options: PgConnectOptions,
    refresh: Duration,
    listener: Option<PgListener>,
    /// Transactions from here on may be news. 0: nothing has been read yet.
    horizon: u64,
    /// Changes from the horizon on that have been read.
    seen: HashSet<i64>,
}

/// What is new.
#[derive(Debug)]
pub enum News {
    /// All there is.
    Whole(Book),
    /// Changes since the last news, and the version they lead to.
    Changes(Vec<Change>, i64),
}

impl Feed {
    /// A feed of `database`, which is not connected yet.
    pub fn new(database: &Database) -> Result<Self, DatabaseError> {
        Ok(Self {
            options: options(&database.url.value)?,
            refresh: database.refresh,
            listener: None,
            horizon: 0,
            seen: HashSet::new(),
        })
    }

    /// Connects if need be, and reads: everything at first or if `whole`, else what has changed.
    pub async fn read(&mut self, whole: bool) -> Result<News, DatabaseError> {
        let within = if whole || self.horizon == 0 { LOAD_WITHIN } else { LOOK_WITHIN };
        let result = tokio::time::timeout(within, self.try_read(whole)).await;
        let result = result.unwrap_or(Err(DatabaseError::Late(within)));
        if result.is_err() {
            self.disconnect();
        }
        result
    }

    /// Waits for a notification, for the time of the next look, or for the end of the connection.
    pub async fn wait(&mut self) {
        let Some(listener) = &mut self.listener else { return };
        let told = tokio::time::timeout(self.refresh, listener.try_recv()).await;
        match told {
            Ok(Ok(Some(_))) => while listener.next_buffered().is_some() {},
            Err(_) => {}
            Ok(Ok(None) | Err(_)) => self.disconnect(),
        }
    }

    /// Lets go of the connection; the next reading makes a new one.
    pub fn disconnect(&mut self) {
        self.listener = None;
    }

    async fn try_read(&mut self, whole: bool) -> Result<News, DatabaseError> {
        if self.listener.is_none() {
            // A pool of its own each time: an old connection may hang, and would hold the only place.
            let pool = PgPoolOptions::new()
                .max_connections(1)
                .max_lifetime(None)
                .idle_timeout(None)
                .acquire_timeout(CONNECT_WITHIN)
                .connect_lazy_with(self.options.clone());
            let mut listener = PgListener::connect_with(&pool).await?;
            listener.eager_reconnect(false);
            listener.ignore_pool_close_event(true);
            // Before anything is read: a change meanwhile is told of.
            listener.listen(CHANNEL).await?;
            self.listener = Some(listener);
        }
        let Some(listener) = &mut self.listener else { return Err(DatabaseError::Late(LOOK_WITHIN)) };
        let mut transaction = listener.begin().await?;
        super::run(&mut transaction, "SET TRANSACTION ISOLATION LEVEL REPEATABLE READ READ ONLY").await?;
        let now = Now::read(&mut transaction).await?;
        // Numbers that run backwards are those of another cluster.
        let known = !whole && self.horizon != 0 && now.xmin >= self.horizon;
        let (mut changes, mut seen) = (Some(Vec::new()), HashSet::new());
        if known {
            let all = changes_since(&mut transaction, self.horizon).await?;
            let new: Vec<_> = all.iter().filter(|change| !self.seen.contains(&change.id)).collect();
            changes =
                if new.len() > MOST_CHANGES { None } else { Some(read_rows(&mut transaction, &new).await?) };
            seen = all.iter().map(|change| change.id).collect();
        }
        let news = match changes.filter(|_| known) {
            Some(changes) => News::Changes(changes, now.version),
            None => {
                let mut book = Book::default();
                book.version = now.version;
                for table in Table::ALL {
                    load(&mut transaction, table, &mut book).await?;
                }
                seen =
                    changes_since(&mut transaction, now.xmin).await?.iter().map(|change| change.id).collect();
                News::Whole(book)
            }
        };
        transaction.commit().await?;
        (self.horizon, self.seen) = (now.xmin, seen);
        Ok(news)
    }
}

/// Where the database is.
struct Now {
    xmin: u64,
    version: i64,
}

impl Now {
    async fn read(connection: &mut PgConnection) -> Result<Self, DatabaseError> {
        let sql = "SELECT pg_snapshot_xmin(pg_current_snapshot())::text,
                   (SELECT coalesce(max(version), 0) FROM rule_versions)::text";
        let row = connection.fetch_one(sql).await?;
        let number = |index| -> Result<String, DatabaseError> { Ok(row.try_get::<String, _>(index)?) };
        let bad = |_| DatabaseError::Failed("a transaction id that is no number".into());
        Ok(Self { xmin: number(0)?.parse().map_err(bad)?, version: number(1)?.parse().map_err(bad)? })
    }
}

/// One changed row.
struct Changed {
    id: i64,
    table: Table,
    row: String,
}

async fn changes_since(connection: &mut PgConnection, xid: u64) -> Result<Vec<Changed>, DatabaseError> {
    let sql = format!(
        "SELECT id, source, row_id FROM rule_changes
         WHERE xid >= '{xid}'::xid8 AND xid < pg_snapshot_xmax(pg_current_snapshot())"
    );
    let mut changes = Vec::new();
    for row in super::all(connection, &sql).await? {
        let source: String = row.try_get(1)?;
        // A newer schema may have tables that this version knows nothing of.
        let Some(table) = Table::ALL.into_iter().find(|table| table.name() == source) else { continue };
        changes.push(Changed { id: row.try_get(0)?, table, row: row.try_get(2)? });
    }
    Ok(changes)
}

/// The rows that have changed, as they are now.
async fn read_rows(connection: &mut PgConnection, news: &[&Changed]) -> Result<Vec<Change>, DatabaseError> {
    let mut changes = Vec::new();
    for table in Table::ALL {
        let mut ids: HashSet<&str> =
            news.iter().filter(|change| change.table == table).map(|change| &*change.row).collect();
        if ids.is_empty() {
            continue;
        }
        let list = ids.iter().map(|id| super::quoted(id)).collect::<Vec<_>>().join(",");
        let sql = format!("{} WHERE id IN ({list})", table.select());
        for row in super::all(connection, &sql).await? {
            let row = read::raw(&row)?;
            if let Some(Some(id)) = row.first() {
                ids.remove(&**id);
            }
            changes.push(read::change(table, &row)?);
        }
        changes.extend(ids.into_iter().filter_map(|id| read::gone(table, id)));
    }
    Ok(changes)
}

async fn load(connection: &mut PgConnection, table: Table, book: &mut Book) -> Result<(), DatabaseError> {
    use futures_util::TryStreamExt as _;
    let sql = table.select();
    let mut rows = connection.fetch(&*sql);
    while let Some(row) = rows.try_next().await? {
        book.apply(&read::change(table, &read::raw(&row)?)?);
    }
    Ok(())
}
