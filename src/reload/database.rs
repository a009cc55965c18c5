//! The rules of a database: what is new of them is served at once, and kept on disk.

use std::sync::{Mutex, PoisonError};

use serde_json::{Value, json};
use tokio::sync::Notify;

use super::Reloader;
use crate::book::Change;
use crate::clock::Timestamp;
use crate::config::{self, Keys};
use crate::proxy::Live;
use crate::snapshot::Skipped;
use crate::source::cache;
use crate::source::postgres::DatabaseError;
use crate::source::postgres::feed::News;

/// Rows that cannot be served are logged up to this number at once; the API names all.
const MOST_LOGGED: usize = 20;

/// How long after it was written the file of the last good rules is left alone.
const WRITE_EVERY_MICROS: u64 = 5_000_000;

/// What is known of the database.
#[derive(Debug)]
pub(super) struct State {
    settings: Option<config::Database>,
    pub(super) reread: Notify,
    health: Mutex<Health>,
}

#[derive(Debug, Default)]
struct Health {
    /// When it was last found to have nothing newer.
    fresh_at: Option<Timestamp>,
    error: Option<String>,
    /// The version that is served; none if nothing was ever read.
    version: Option<i64>,
    /// Since when it is waited for.
    started_at: Option<Timestamp>,
    /// Whether the file on disk is older than what is served.
    unsaved: bool,
    saved_at: Timestamp,
}

impl State {
    pub(super) fn new(settings: Option<config::Database>) -> Self {
        Self { settings, reread: Notify::new(), health: Mutex::default() }
    }

    fn health(&self) -> std::sync::MutexGuard<'_, Health> {
        self.health.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Reloader {
    /// Serves what is new.
    pub fn news(&self, news: News, now: Timestamp) {
        let mut book = self.book.lock().unwrap_or_else(PoisonError::into_inner);
        let old = self.live.load();
        let (what, authors) = match news {
            News::Changes(news) if news.changes.is_empty() => {
                book.version = news.version;
                (None, news.authors)
            }
            News::Changes(news) => {
                let snapshot = old.snapshot.with_changes(&mut book, &news.changes);
                book.version = news.version;
                self.serve(old.with_rules(snapshot), Some(&news.changes));
                (Some(news.changes.len()), news.authors)
            }
            News::Whole(whole) => {
                let snapshot = old.snapshot.with_book(&whole);
                *book = whole;
                self.serve(old.with_rules(snapshot), None);
                (Some(book.rows.size()), Vec::new())
            }
        };
        let version = book.version;
        drop(book);
        let mut health = self.database.health();
        let was_away = health.error.take().is_some() || health.fresh_at.is_none();
        health.fresh_at = Some(now);
        health.unsaved |= what.is_some();
        health.version = Some(version);
        drop(health);
        for (version, who, what) in authors {
            tracing::info!(target: "audit", version, who, what, "rules changed");
        }
        self.metrics.rules.connected.set(1);
        self.metrics.rules.version.set(version);
        self.metrics.rules.refreshes.with_label_values(&["applied"]).inc();
        if let Some(rows) = what {
            tracing::info!(version, rows, "rules read from the database");
        } else if was_away {
            tracing::info!(version, "the database of rules answers, nothing is new");
        }
    }

    /// Begins with the last good rules of the database, kept on disk, while it is away.
    pub fn begin_without_database(&self, error: &DatabaseError) {
        self.database_failed(error);
        let Some(settings) = &self.database.settings else { return };
        match cache::read(settings) {
            Ok(kept) => {
                tracing::error!(version = kept.version, rows = kept.rows.size(), file = %settings.cache.display(),
                    "beginning with the last good rules, kept on disk");
                let mut book = self.book.lock().unwrap_or_else(PoisonError::into_inner);
                self.metrics.rules.version.set(kept.version);
                self.database.health().version = Some(kept.version);
                let live = self.live.load();
                self.serve(live.with_rules(live.snapshot.with_book(&kept)), None);
                *book = kept;
            }
            Err(no_rules) => {
                tracing::error!(%no_rules, "none are kept on disk either: beginning with the file alone");
            }
        }
    }

    /// Notes that the database does not answer. The last good rules go on.
    pub fn database_failed(&self, error: &DatabaseError) {
        self.metrics.rules.connected.set(0);
        self.metrics.rules.refreshes.with_label_values(&["failed"]).inc();
        let text = error.to_string();
        let mut health = self.database.health();
        if health.error.as_ref() != Some(&text) {
            tracing::error!(error = text, "no rules from the database, the last good ones go on");
            health.error = Some(text);
        }
    }

    /// Writes the rules to disk, if they are newer than what is there and it is time.
    pub fn keep_on_disk(&self, now: Timestamp) {
        let Some(settings) = &self.database.settings else { return };
        {
            let mut health = self.database.health();
            if !health.unsaved || now.micros_since(health.saved_at) < WRITE_EVERY_MICROS {
                return;
            }
            (health.unsaved, health.saved_at) = (false, now);
        }
        let book = self.book.lock().unwrap_or_else(PoisonError::into_inner).copy();
        if let Err(error) = cache::write(settings, &book) {
            self.database.health().unsaved = true;
            tracing::warn!(%error, "the rules are not kept on disk: a start without the database would have none");
        }
    }

    /// Until somebody wants the database to be read as a whole.
    pub async fn reread_wanted(&self) {
        self.database.reread.notified().await;
    }

    /// The database as the status page shows it; `null` without one.
    pub fn database_status(&self, now: Timestamp) -> Value {
        if self.database.settings.is_none() {
            return Value::Null;
        }
        let mut health = self.database.health();
        let waits_since = *health.started_at.get_or_insert(now);
        let age = now.micros_since(health.fresh_at.unwrap_or(waits_since)) / 1_000_000;
        self.metrics.rules.age_seconds.set(i64::try_from(age).unwrap_or(i64::MAX));
        json!({
            "up": health.error.is_none(),
            "error": health.error,
            "version": health.version,
            "age_seconds": age,
        })
    }

    /// Whether the database answered last, or there is none.
    pub fn database_is_up(&self) -> bool {
        self.database.health().error.is_none()
    }

    /// Whether requests can be told apart: false where keys are looked up and none were ever read.
    pub fn has_keys(&self) -> bool {
        self.live.load().snapshot.keys == Keys::Plain || self.database.health().version.is_some()
    }

    /// The address of the database, if there is one.
    pub fn database_settings(&self) -> Option<&config::Database> {
        self.database.settings.as_ref()
    }

    /// Puts `live` in the place of what is served; `changes` have led to it, if it is not wholly new.
    pub(super) fn serve(&self, live: Live, changes: Option<&[Change]>) {
        let snapshot = &live.snapshot;
        let number = |count: usize| i64::try_from(count).unwrap_or(i64::MAX);
        self.metrics.rules.rows.set(number(snapshot.rows()));
        self.metrics.rules.skipped.set(number(snapshot.skipped.size()));
        self.metrics.revision.set(i64::try_from(snapshot.revision).unwrap_or(i64::MAX));
        match changes {
            None => snapshot.skipped.values().take(MOST_LOGGED).for_each(|skipped| tell(skipped)),
            Some(changes) => {
                let bad = changes.iter().filter_map(|change| match change {
                    Change::Row(id, _) => snapshot.skipped.get(id),
                    Change::Tenant(..) | Change::Key(..) => None,
                });
                bad.take(MOST_LOGGED).for_each(|skipped| tell(skipped));
            }
        }
        self.swap(live);
    }
}

fn tell(skipped: &Skipped) {
    let Skipped { id, holder, route, reason } = skipped;
    tracing::error!(row = ?id, ?holder, ?route, reason = &**reason,
        "a rule of the database cannot be served and is skipped");
}
