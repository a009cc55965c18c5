//! API keys: by their hashes alone.

use serde_json::{Value, json};
use sqlx::{Acquire as _, Executor as _, Row as _};

use super::super::{DatabaseError, all, quoted, run};
use super::{Author, Writer, begin};
use crate::key::{KeyHash, hex};

impl Writer {
    /// Adds an API key by its hash; gives its id.
    pub async fn add_key(
        &self,
        hash: &KeyHash,
        tenant: &str,
        note: Option<&str>,
        author: &Author<'_>,
    ) -> Result<i64, DatabaseError> {
        let mut connection = self.connection().await?;
        let mut transaction = begin(&mut connection, author).await?;
        let hex = hex(hash);
        let sql = format!(
            "INSERT INTO api_keys (key_hash, tenant, note) VALUES (decode('{hex}', 'hex'), {}, {}) RETURNING id",
            quoted(tenant),
            note.map_or("NULL".into(), quoted)
        );
        let id = transaction.fetch_one(&*sql).await?.try_get(0)?;
        transaction.commit().await?;
        Ok(id)
    }

    /// Revokes an API key.
    pub async fn revoke_key(&self, id: i64, author: &Author<'_>) -> Result<(), DatabaseError> {
        let mut connection = self.connection().await?;
        let mut transaction = begin(&mut connection, author).await?;
        let sql = format!("UPDATE api_keys SET revoked_at = now() WHERE id = {id} AND revoked_at IS NULL");
        if run(&mut transaction, &sql).await? == 0 {
            return Err(DatabaseError::NotFound(format!("there is no key {id} that is not revoked")));
        }
        transaction.commit().await?;
        Ok(())
    }

    /// All API keys, without their hashes.
    pub async fn keys(&self) -> Result<Vec<Value>, DatabaseError> {
        let sql = "SELECT id, tenant, note, to_char(created_at AT TIME ZONE 'UTC', 'YYYY-MM-DD\"T\"HH24:MI:SS\"Z\"'),
                   to_char(revoked_at AT TIME ZONE 'UTC', 'YYYY-MM-DD\"T\"HH24:MI:SS\"Z\"') FROM api_keys ORDER BY id";
        let mut connection = self.connection().await?;
        let mut transaction = connection.begin().await?;
        let mut keys = Vec::new();
        for row in all(&mut transaction, sql).await? {
            keys.push(json!({
                "id": row.try_get::<i64, _>(0)?,
                "tenant": row.try_get::<String, _>(1)?,
                "note": row.try_get::<Option<String>, _>(2)?,
                "created_at": row.try_get::<String, _>(3)?,
                "revoked_at": row.try_get::<Option<String>, _>(4)?,
            }));
        }
        Ok(keys)
    }
}
