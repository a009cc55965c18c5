//! The last good rules of a database, on disk, for a start while it is away.
//!
//! One JSON array a line: a head, the rows as the database writes them, and an end that tells how many
//! there are, so that half a file is not taken for a whole one. Written beside the old one and moved
//! into its place.

use std::fs::{self, File, OpenOptions};
use std::io::{self, BufRead as _, BufReader, BufWriter, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};
use thiserror::Error;

use super::postgres::{self, RawRow, Table};
use crate::book::{Book, Change};
use crate::config::Database;
use crate::key::hex;

/// What the first line begins with.
const MAGIC: &str = "tollgate rules 1";

/// Why there are no rules on disk.
#[derive(Debug, Error)]
pub enum CacheError {
    /// The system says no.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// What the system says.
        source: io::Error,
    },
    /// It is no file of rules, or not a whole one.
    #[error("{}:{line}: {reason}", path.display())]
    Malformed {
        /// The file.
        path: PathBuf,
        /// The line.
        line: usize,
        /// What is wrong.
        reason: String,
    },
}

/// Writes all of `book`.
pub fn write(database: &Database, book: &Book) -> Result<(), CacheError> {
    let path = &database.cache;
    let failed = |source| CacheError::Io { path: path.clone(), source };
    // Gateways on one machine may share the folder, and must not share the draft.
    let mut draft = path.clone().into_os_string();
    draft.push(format!(".{}", std::process::id()));
    let draft = PathBuf::from(draft);
    let result = write_to(&draft, database, book).and_then(|()| fs::rename(&draft, path));
    if result.is_err() {
        // It may not even be there.
        let _ = fs::remove_file(&draft);
    }
    result.map_err(failed)
}

fn write_to(draft: &Path, database: &Database, book: &Book) -> io::Result<()> {
    // Hashes of keys and names of tenants are for nobody else.
    let file = OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(draft)?;
    let mut out = BufWriter::with_capacity(1 << 16, file);
    writeln!(out, "{}", json!([MAGIC, fingerprint(database), book.version]))?;
    let mut count = 0u64;
    let tenants =
        book.tenants.iter().map(|(name, record)| Change::Tenant(name.clone(), Some(record.clone())));
    let rows = book.rows.iter().map(|(id, row)| Change::Row(*id, Some(row.clone())));
    let keys = book.keys.iter().map(|(id, key)| Change::Key(*id, Some(key.clone())));
    for (table, columns) in tenants.chain(rows).chain(keys).filter_map(|change| postgres::columns(&change)) {
        let line: Vec<Option<&str>> =
            std::iter::once(Some(table.name())).chain(columns.iter().map(Option::as_deref)).collect();
        serde_json::to_writer(&mut out, &line)?;
        out.write_all(b"\n")?;
        count += 1;
    }
    writeln!(out, "{}", json!(["end", count]))?;
    out.into_inner().map_err(io::IntoInnerError::into_error)?.sync_all()
}

/// Reads what [`write()`] has written for the same database.
pub fn read(database: &Database) -> Result<Book, CacheError> {
    let path = &database.cache;
    let file = File::open(path).map_err(|source| CacheError::Io { path: path.clone(), source })?;
    let mut book = Book::default();
    let mut count = 0u64;
    for (index, line) in BufReader::with_capacity(1 << 16, file).lines().enumerate() {
        let malformed = |reason: &str| CacheError::Malformed {
            path: path.clone(),
            line: index + 1,
            reason: reason.into(),
        };
        let line = line.map_err(|source| CacheError::Io { path: path.clone(), source })?;
        if index == 0 {
            let head: Value = serde_json::from_str(&line).map_err(|_| malformed("not a file of rules"))?;
            if head[0] != MAGIC {
                return Err(malformed("not a file of rules of this version"));
            }
            if head[1] != *fingerprint(database) {
                return Err(malformed("the rules of another database"));
            }
            book.version = head[2].as_i64().unwrap_or(0);
            continue;
        }
        if line.starts_with("[\"end\"") {
            let end: Value = serde_json::from_str(&line).map_err(|_| malformed("not an end"))?;
            return if end[1] == count { Ok(book) } else { Err(malformed("rows are missing")) };
        }
        let mut columns: RawRow = serde_json::from_str(&line).map_err(|_| malformed("not a row"))?;
        let name = if columns.is_empty() { None } else { columns.remove(0) };
        let table = Table::ALL.into_iter().find(|table| name.as_deref() == Some(table.name()));
        let table = table.ok_or_else(|| malformed("a row of no known table"))?;
        let change = postgres::change(table, &columns).map_err(|reason| malformed(&reason))?;
        book.apply(&change);
        count += 1;
    }
    Err(CacheError::Malformed { path: path.clone(), line: 0, reason: "the end is missing".into() })
}

/// Which database it is, without its password.
fn fingerprint(database: &Database) -> String {
    let url = &database.url.value.0;
    let (scheme, rest) = url.split_once("://").unwrap_or(("", url));
    let place = rest.rsplit_once('@').map_or(rest, |(_, place)| place);
    let place = place.split('?').next().unwrap_or_default();
    let digest = Sha256::digest(format!("{scheme}://{place}"));
    hex(&digest[..8])
}
