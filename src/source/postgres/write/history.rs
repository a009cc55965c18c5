//! Versions: what has changed, between which, and back.

use serde_json::{Value, json};
use sqlx::{Acquire as _, Row as _};

use super::super::{DatabaseError, all, run};
use super::{Author, Writer, begin, finish};

impl Writer {
    /// The newest versions.
    pub async fn versions(&self, most: u32) -> Result<Vec<Value>, DatabaseError> {
        let sql = format!(
            "SELECT version, to_char(at AT TIME ZONE 'UTC', 'YYYY-MM-DD\"T\"HH24:MI:SS\"Z\"'), who, what,
                    (SELECT count(*) FROM rule_changes c WHERE c.version = v.version)
             FROM rule_versions v ORDER BY version DESC LIMIT {most}"
        );
        let mut connection = self.connection().await?;
        let mut transaction = connection.begin().await?;
        let mut versions = Vec::new();
        for row in all(&mut transaction, &sql).await? {
            versions.push(json!({
                "version": row.try_get::<i64, _>(0)?,
                "at": row.try_get::<String, _>(1)?,
                "who": row.try_get::<String, _>(2)?,
                "what": row.try_get::<Option<String>, _>(3)?,
                "changes": row.try_get::<i64, _>(4)?,
            }));
        }
        Ok(versions)
    }

    /// What is different at version `to` from version `from`, row by row.
    pub async fn diff(&self, from: i64, to: i64) -> Result<Vec<Value>, DatabaseError> {
        let (low, high) = (from.min(to), from.max(to));
        let mut connection = self.connection().await?;
        let mut transaction = connection.begin().await?;
        for version in [low, high] {
            let sql = format!("SELECT 1 FROM rule_versions WHERE version = {version}");
            if version != 0 && all(&mut transaction, &sql).await?.is_empty() {
                return Err(DatabaseError::NotFound(format!("there is no version {version}")));
            }
        }
        let sql = format!(
            "SELECT source, row_id, (array_agg(before ORDER BY id))[1]::text, (array_agg(after ORDER BY id DESC))[1]::text
             FROM rule_changes WHERE version > {low} AND version <= {high} GROUP BY source, row_id ORDER BY min(id)"
        );
        let mut changes = Vec::new();
        for row in all(&mut transaction, &sql).await? {
            let side = |index| -> Result<Value, DatabaseError> {
                let text: Option<String> = row.try_get(index)?;
                let mut value = text.and_then(|text| serde_json::from_str(&text).ok()).unwrap_or(Value::Null);
                if let Some(fields) = value.as_object_mut() {
                    fields.retain(|name, _| !matches!(&**name, "updated_at" | "key_hash"));
                    fields.retain(|_, value| !value.is_null());
                }
                Ok(value)
            };
            let (before, after) = if from <= to { (side(2)?, side(3)?) } else { (side(3)?, side(2)?) };
            if before != after {
                let (table, id): (String, String) = (row.try_get(0)?, row.try_get(1)?);
                changes.push(json!({ "table": table, "id": id, "before": before, "after": after }));
            }
        }
        Ok(changes)
    }

    /// Puts the rules back to what they were at `version`: a version itself. None if nothing changes.
    pub async fn rollback(&self, version: i64, author: &Author<'_>) -> Result<Option<i64>, DatabaseError> {
        let mut connection = self.connection().await?;
        let mut transaction = begin(&mut connection, author).await?;
        run(&mut transaction, &format!("SELECT tollgate_rollback({version})")).await?;
        finish(transaction).await
    }
}
