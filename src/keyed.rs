//! A map by key behind several locks, for what each request looks at.

use std::hash::BuildHasher as _;
use std::sync::{Mutex, MutexGuard, PoisonError};

use foldhash::fast::RandomState;
use indexmap::IndexMap;

use crate::key::Key;

/// Locks that keys spread over.
pub const LOCKS: usize = 16;

/// The part of a [`Keyed`] behind one lock.
pub type Part<V> = IndexMap<Key, V, RandomState>;

/// A map by key. What is in it is never half written, so a panic elsewhere does no harm.
#[derive(Debug)]
pub struct Keyed<V> {
    parts: [Mutex<Part<V>>; LOCKS],
    hasher: RandomState,
}

impl<V> Default for Keyed<V> {
    fn default() -> Self {
        Self { parts: std::array::from_fn(|_| Mutex::default()), hasher: RandomState::default() }
    }
}

impl<V> Keyed<V> {
    /// The part that has `key`, if any has, locked.
    pub fn of(&self, key: &Key) -> MutexGuard<'_, Part<V>> {
        // The map inside takes its own bits of a hash.
        lock(&self.parts[(self.hasher.hash_one(key) >> 32) as usize % LOCKS])
    }

    /// All parts, one after the other.
    pub fn all(&self) -> impl Iterator<Item = MutexGuard<'_, Part<V>>> {
        self.parts.iter().map(lock)
    }

    /// How many keys there are.
    pub fn len(&self) -> usize {
        self.all().map(|part| part.len()).sum()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.all().all(|part| part.is_empty())
    }
}

fn lock<V>(part: &Mutex<V>) -> MutexGuard<'_, V> {
    part.lock().unwrap_or_else(PoisonError::into_inner)
}
