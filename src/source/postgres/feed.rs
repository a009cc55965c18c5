//! All rules once, and then what has changed.
//!
//! One connection listens and asks. Changes are found in `rule_changes` by transaction: all that the
//! snapshot of the last look did not see, in whatever order they ended. A row is read as it is now, so
//! to read it twice does no harm.

use std::collections::HashSet;
use std::time::Duration;

use sqlx::postgres::{PgConnectOptions, PgConnection, PgListener, PgPoolOptions, PgRow};
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

/// All that one transaction reads is of one moment.
const CONSISTENT: &str = "SET TRANSACTION ISOLATION LEVEL REPEATABLE READ READ ONLY";

/// More changes than this are read as a whole.
const MOST_CHANGES: usize = 20_000;

/// Reads the rules of one database.
#[derive(Debug)]
pub struct Feed {
    options: PgConnectOptions,
    refresh: Duration,
    listen: bool,
    listener: Option<PgListener>,
    /// What has been read; nothing yet if none.
    seen: Option<Seen>,
}

/// How far the database has been read.
#[derive(Debug)]
struct Seen {
    /// The snapshot of the last look, as PostgreSQL writes it.
    snapshot: String,
    /// Which server it was, and since when it runs: another one may count its transactions otherwise.
    server: String,
    /// The oldest transaction that it did not see the end of.
    xmin: u64,
    /// The newest change that was read, and its transaction: if it is there no more, a failover has lost it,
    /// and transaction ids have been given out again.
    newest: Option<(i64, String)>,
}

/// What is new.
#[derive(Debug)]
pub enum News {
    /// All there is.
    Whole(Book),
    /// Changes since the last news.
    Changes(Changes),
}

/// What has changed.
#[derive(Debug)]
pub struct Changes {
    /// The changes.
    pub changes: Vec<Change>,
    /// The version they lead to.
    pub version: i64,
    /// Who has made them: version, who and what.
    pub authors: Vec<(i64, String, String)>,
}

impl Feed {
    /// A feed of `database`, which is not connected yet.
    pub fn new(database: &Database) -> Result<Self, DatabaseError> {
        Ok(Self {
            options: options(&database.url.value)?,
            refresh: database.refresh,
            listen: database.listen,
            listener: None,
            seen: None,
        })
    }

    /// Connects if need be, and reads: everything at first or if `whole`, else what has changed.
    pub async fn read(&mut self, whole: bool) -> Result<News, DatabaseError> {
        let mut result = Ok(None);
        if !whole && self.seen.is_some() {
            result = in_time(LOOK_WITHIN, self.look()).await;
        }
        // At first, or too much has changed, or it is another database.
        if matches!(result, Ok(None)) {
            result = in_time(LOAD_WITHIN, self.load()).await.map(Some);
        }
        if result.is_err() {
            self.disconnect();
        }
        result?.ok_or(DatabaseError::Late(LOOK_WITHIN))
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

    /// What has changed; `None` if all must be read.
    async fn look(&mut self) -> Result<Option<News>, DatabaseError> {
        let mut transaction =
            connected(&mut self.listener, &self.options, self.listen).await?.begin().await?;
        super::run(&mut transaction, CONSISTENT).await?;
        let now = Now::read(&mut transaction).await?;
        let Some(seen) = &self.seen else { return Ok(None) };
        if now.server != seen.server
            || now.xmin < seen.xmin
            || !is_there(&mut transaction, seen.newest.as_ref()).await?
        {
            return Ok(None);
        }
        let news = changes_since(&mut transaction, seen).await?;
        if news.len() > MOST_CHANGES {
            return Ok(None);
        }
        let changes = read_rows(&mut transaction, &news).await?;
        let authors = authors(&mut transaction, &news).await?;
        transaction.commit().await?;
        let newest = news.iter().max_by_key(|change| change.id).map(|change| (change.id, change.xid.clone()));
        let newest = newest.max(seen.newest.clone());
        self.seen = Some(Seen { snapshot: now.snapshot, server: now.server, xmin: now.xmin, newest });
        Ok(Some(News::Changes(Changes { changes, version: now.version, authors })))
    }

    /// All there is.
    async fn load(&mut self) -> Result<News, DatabaseError> {
        let mut transaction =
            connected(&mut self.listener, &self.options, self.listen).await?.begin().await?;
        super::run(&mut transaction, CONSISTENT).await?;
        let now = Now::read(&mut transaction).await?;
        let mut book = Book::default();
        book.version = now.version;
        for table in Table::ALL {
            load(&mut transaction, table, &mut book).await?;
        }
        let sql = "SELECT id, xid::text FROM rule_changes ORDER BY id DESC LIMIT 1";
        let newest = super::all(&mut transaction, sql).await?.pop();
        let newest =
            newest.map(|row| Ok::<_, sqlx::Error>((row.try_get(0)?, row.try_get(1)?))).transpose()?;
        transaction.commit().await?;
        self.seen = Some(Seen { snapshot: now.snapshot, server: now.server, xmin: now.xmin, newest });
        Ok(News::Whole(book))
    }
}

/// The connection, made if need be.
async fn connected<'l>(
    listener: &'l mut Option<PgListener>,
    options: &PgConnectOptions,
    listen: bool,
) -> Result<&'l mut PgListener, DatabaseError> {
    if listener.is_none() {
        // A pool would try again and again until its time is over, and not tell why.
        super::reach(options).await?;
        // A pool of its own each time: an old connection may hang, and would hold the only place.
        let pool = PgPoolOptions::new()
            .max_connections(1)
            .max_lifetime(None)
            .idle_timeout(None)
            .acquire_timeout(CONNECT_WITHIN)
            .connect_lazy_with(options.clone());
        let mut new = PgListener::connect_with(&pool).await?;
        new.eager_reconnect(false);
        new.ignore_pool_close_event(true);
        // Before anything is read: a change meanwhile is told of.
        if listen {
            new.listen(CHANNEL).await?;
        }
        *listener = Some(new);
    }
    listener.as_mut().ok_or(DatabaseError::Late(CONNECT_WITHIN))
}

async fn in_time<T>(
    within: Duration,
    work: impl Future<Output = Result<T, DatabaseError>>,
) -> Result<T, DatabaseError> {
    tokio::time::timeout(within, work).await.unwrap_or(Err(DatabaseError::Late(within)))
}

/// Where the database is.
struct Now {
    snapshot: String,
    server: String,
    xmin: u64,
    version: i64,
}

impl Now {
    async fn read(connection: &mut PgConnection) -> Result<Self, DatabaseError> {
        let sql = "SELECT pg_current_snapshot()::text, pg_snapshot_xmin(pg_current_snapshot())::text,
                   (SELECT coalesce(max(version), 0) FROM rule_versions), pg_postmaster_start_time()::text";
        let row = connection.fetch_one(sql).await?;
        let xmin: String = row.try_get(1)?;
        let bad = |_| DatabaseError::Failed("a transaction id that is no number".into());
        let xmin = xmin.parse().map_err(bad)?;
        Ok(Self { snapshot: row.try_get(0)?, server: row.try_get(3)?, xmin, version: row.try_get(2)? })
    }
}

/// One changed row.
struct Changed {
    id: i64,
    xid: String,
    version: i64,
    table: Table,
    row: String,
}

/// Whether a change that was read is still there, as it was.
async fn is_there(
    connection: &mut PgConnection,
    change: Option<&(i64, String)>,
) -> Result<bool, DatabaseError> {
    let Some((id, xid)) = change else { return Ok(true) };
    let sql = format!("SELECT FROM rule_changes WHERE id = {id} AND xid::text = {}", super::quoted(xid));
    Ok(!super::all(connection, &sql).await?.is_empty())
}

async fn changes_since(connection: &mut PgConnection, seen: &Seen) -> Result<Vec<Changed>, DatabaseError> {
    let sql = format!(
        "SELECT id, xid::text, version, source, row_id FROM rule_changes
         WHERE xid >= '{}'::xid8 AND NOT pg_visible_in_snapshot(xid, {}::pg_snapshot)
           AND xid < pg_snapshot_xmax(pg_current_snapshot()) AND source IN ({})
         LIMIT {}",
        seen.xmin,
        super::quoted(&seen.snapshot),
        // A newer schema may have tables that this version knows nothing of.
        Table::ALL.map(|table| super::quoted(table.name())).join(","),
        MOST_CHANGES + 1
    );
    let mut changes = Vec::new();
    for row in super::all(connection, &sql).await? {
        let source: String = row.try_get(3)?;
        let Some(table) = Table::ALL.into_iter().find(|table| table.name() == source) else { continue };
        changes.push(Changed {
            id: row.try_get(0)?,
            xid: row.try_get(1)?,
            version: row.try_get(2)?,
            table,
            row: row.try_get(4)?,
        });
    }
    Ok(changes)
}

/// Who has made the versions that changes belong to.
async fn authors(
    connection: &mut PgConnection,
    news: &[Changed],
) -> Result<Vec<(i64, String, String)>, DatabaseError> {
    let versions: HashSet<i64> = news.iter().map(|change| change.version).collect();
    if versions.is_empty() {
        return Ok(Vec::new());
    }
    let list = versions.iter().map(i64::to_string).collect::<Vec<_>>().join(",");
    let sql = format!(
        "SELECT version, who, coalesce(what, '') FROM rule_versions WHERE version IN ({list}) ORDER BY version"
    );
    let rows = super::all(connection, &sql).await?;
    let author = |row: &PgRow| Ok((row.try_get(0)?, row.try_get(1)?, row.try_get(2)?));
    Ok(rows.iter().map(author).collect::<Result<_, sqlx::Error>>()?)
}

/// The rows that have changed, as they are now.
async fn read_rows(connection: &mut PgConnection, news: &[Changed]) -> Result<Vec<Change>, DatabaseError> {
    let mut changes = Vec::new();
    for table in Table::ALL {
        let mut ids: HashSet<&str> =
            news.iter().filter(|change| change.table == table).map(|change| &*change.row).collect();
        // An id that is none, in a forged entry, is not asked for.
        ids.retain(|id| table == Table::Tenants || id.parse::<i64>().is_ok());
        if ids.is_empty() {
            continue;
        }
        let list = ids.iter().map(|id| super::quoted(id)).collect::<Vec<_>>().join(",");
        let sql = format!("{} WHERE id IN ({list})", table.select());
        for row in super::all(connection, &sql).await? {
            let row = read::raw(&row)?;
            let Some(Some(id)) = row.first() else { continue };
            ids.remove(&**id);
            // What was served of a row that makes no sense any more is gone.
            changes.extend(understood(table, &row).or_else(|| read::gone(table, id)));
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
        if let Some(change) = understood(table, &read::raw(&row)?) {
            book.apply(&change);
        }
    }
    Ok(())
}

/// What a row says; one that is nobody's is told of, and left.
fn understood(table: Table, row: &read::RawRow) -> Option<Change> {
    read::change(table, row).inspect_err(|reason| tracing::error!(reason, "skipped")).ok()
}
