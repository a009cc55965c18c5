//! The tables: `migrations/`, in the binary.

use std::borrow::Cow;

use sqlx::migrate::{Migrate as _, MigrateError, Migration, MigrationType, Migrator};
use sqlx::{Connection as _, PgConnection};

use super::{DatabaseError, options};
use crate::config::Secret;

/// Each migration: its number, its name, its text.
const MIGRATIONS: [(i64, &str, &str); 2] = [
    (1, "rules", include_str!("../../../migrations/0001_rules.sql")),
    (2, "shards", include_str!("../../../migrations/0002_shards.sql")),
];

/// What [`migrate`] has done.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Migrated {
    /// Migrations that were applied now.
    pub applied: Vec<String>,
    /// The newest migration that the database has, also one that this version does not know.
    pub newest: i64,
}

/// Brings the tables of a database up to date. A database that is newer than this version stays as it is.
pub async fn migrate(url: &Secret) -> Result<Migrated, DatabaseError> {
    let mut connection = PgConnection::connect_with(&options(url)?).await?;
    let migrations = MIGRATIONS.map(|(version, name, sql)| {
        Migration::new(version, name.into(), MigrationType::Simple, sql.into(), false)
    });
    let migrator =
        Migrator { migrations: Cow::Owned(migrations.into()), ignore_missing: true, ..Migrator::DEFAULT };
    let failed = |error: MigrateError| DatabaseError::Failed(error.to_string());
    connection.ensure_migrations_table().await.map_err(failed)?;
    let before = connection.list_applied_migrations().await.map_err(failed)?;
    migrator.run(&mut connection).await.map_err(failed)?;
    let after = connection.list_applied_migrations().await.map_err(failed)?;
    let is_new = |version: i64| before.iter().all(|applied| applied.version != version);
    let applied = MIGRATIONS.iter().filter(|(version, ..)| is_new(*version));
    Ok(Migrated {
        applied: applied.map(|(version, name, _)| format!("{version:04} {name}")).collect(),
        newest: after.iter().map(|applied| applied.version).max().unwrap_or(0),
    })
}
