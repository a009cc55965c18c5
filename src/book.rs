//! What a database says of tenants, plans, rules and keys: all rows, also those that cannot be served
//! (yet), each under its id, so that a change of one row touches nothing else.

use std::collections::HashSet;
use std::hash::Hash;
use std::sync::Arc;

use rpds::HashTrieMapSync as Map;

use crate::config::Terms;
use crate::key::KeyHash;

/// A row by its table and id.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum RowId {
    /// Of `rate_limit_rule`.
    Rule(i64),
    /// Of `plan_rules`.
    Plan(i64),
}

/// Whom a row is for.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Holder {
    /// One tenant.
    Tenant(Arc<str>),
    /// The tenants of a plan.
    Plan(Arc<str>),
    /// Any tenant.
    Anyone,
}

/// One row.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BookRow {
    /// Whom it is for.
    pub holder: Holder,
    /// On which route; any if none.
    pub route: Option<Arc<str>>,
    /// What it says, or why that means nothing.
    pub terms: Result<Arc<Terms>, Arc<str>>,
}

/// What is known of a tenant beside its rules.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TenantRecord {
    /// Its plan.
    pub plan: Option<Arc<str>>,
    /// Whether its requests are turned away.
    pub suspended: bool,
}

/// An API key that opens the door.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeyRecord {
    /// Its keyed hash.
    pub hash: KeyHash,
    /// Whose it is.
    pub tenant: Arc<str>,
}

/// One thing that is otherwise than before; `None` is gone.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Change {
    /// A row.
    Row(RowId, Option<BookRow>),
    /// A tenant.
    Tenant(Arc<str>, Option<TenantRecord>),
    /// A key by its id.
    Key(i64, Option<KeyRecord>),
}

/// Everything at one version.
#[derive(Debug, Default)]
pub struct Book {
    /// The newest version of the database that is in it.
    pub version: i64,
    /// The rows.
    pub rows: Map<RowId, BookRow>,
    /// The tenants.
    pub tenants: Map<Arc<str>, TenantRecord>,
    /// The keys that are not revoked.
    pub keys: Map<i64, KeyRecord>,
    interned: Interned,
}

/// Names and terms that many rows share.
#[derive(Debug, Default)]
struct Interned {
    names: HashSet<Arc<str>>,
    terms: HashSet<Arc<Terms>>,
}

impl Book {
    /// The same to be read. Its maps are shared, so this costs nothing.
    #[must_use]
    pub fn copy(&self) -> Self {
        Self {
            version: self.version,
            rows: self.rows.clone(),
            tenants: self.tenants.clone(),
            keys: self.keys.clone(),
            interned: Interned::default(),
        }
    }

    /// The one copy of a name.
    fn name(&mut self, name: &str) -> Arc<str> {
        if let Some(known) = self.interned.names.get(name) {
            return Arc::clone(known);
        }
        let name: Arc<str> = name.into();
        if self.interned.names.len() == self.interned.names.capacity() {
            self.interned.names.retain(|name| Arc::strong_count(name) > 1);
        }
        self.interned.names.insert(Arc::clone(&name));
        name
    }

    /// The one copy of terms.
    fn terms(&mut self, terms: &Arc<Terms>) -> Arc<Terms> {
        if let Some(known) = self.interned.terms.get(terms) {
            return Arc::clone(known);
        }
        // What no row has any more is let go where a set would have to grow.
        if self.interned.terms.len() == self.interned.terms.capacity() {
            self.interned.terms.retain(|terms| Arc::strong_count(terms) > 1);
        }
        self.interned.terms.insert(Arc::clone(terms));
        Arc::clone(terms)
    }

    /// A row made of the copies that all rows share.
    fn shared(&mut self, row: &BookRow) -> BookRow {
        let holder = match &row.holder {
            Holder::Tenant(name) => Holder::Tenant(self.name(name)),
            Holder::Plan(name) => Holder::Plan(self.name(name)),
            Holder::Anyone => Holder::Anyone,
        };
        let route = row.route.as_ref().map(|route| self.name(route));
        let terms = match &row.terms {
            Ok(terms) => Ok(self.terms(terms)),
            Err(reason) => Err(Arc::clone(reason)),
        };
        BookRow { holder, route, terms }
    }

    /// Notes a change; gives what it takes away: the same kind of change with what was there before.
    pub fn apply(&mut self, change: &Change) -> Change {
        match change {
            Change::Row(id, row) => {
                let row = row.as_ref().map(|row| self.shared(row));
                Change::Row(*id, replace(&mut self.rows, *id, row))
            }
            Change::Tenant(name, record) => {
                Change::Tenant(Arc::clone(name), replace(&mut self.tenants, Arc::clone(name), record.clone()))
            }
            Change::Key(id, key) => Change::Key(*id, replace(&mut self.keys, *id, key.clone())),
        }
    }
}

fn replace<K: Hash + Eq, V: Clone>(map: &mut Map<K, V>, key: K, value: Option<V>) -> Option<V> {
    let old = map.get(&key).cloned();
    match value {
        Some(value) => map.insert_mut(key, value),
        None => drop(map.remove_mut(&key)),
    }
    old
}
