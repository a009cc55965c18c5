//! The rules in the form in which they are looked up: by tenant, then by route.
//!
//! Maps are persistent: a copy shares all that has not changed, so that a hundred new rows among half a
//! million cost a hundred. A copy is changed while the old one is being read.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use foldhash::fast::RandomState;

use crate::book::{Holder, KeyRecord, RowId, TenantRecord};
use crate::clock::Timestamp;
use crate::config::Terms;
use crate::config::fault::Place;
use crate::key::{Hasher, KeyHash, Part};
use crate::route::RouteId;

/// A persistent map. Its keys are names that the operator wrote: no client can choose them to collide.
type Map<K, V> = rpds::HashTrieMap<K, V, archery::ArcTK, RandomState>;

/// Where a rule comes from. In this order they stand before each other where two are for the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Origin {
    /// A row of the database.
    Database(RowId),
    /// The configuration file.
    File(Place),
    /// It is the default.
    Default,
}

/// One rule in force, or next in line.
#[derive(Debug)]
pub struct Entry {
    /// Where it comes from.
    pub origin: Origin,
    /// What it says.
    pub terms: Arc<Terms>,
    hits: AtomicU64,
}

impl Entry {
    /// An entry that nobody has met yet.
    pub fn new(origin: Origin, terms: Arc<Terms>) -> Self {
        Self { origin, terms, hits: AtomicU64::new(0) }
    }

    /// Notes that it holds a request.
    pub fn hit(&self) {
        self.hits.fetch_add(1, Ordering::Relaxed);
    }

    /// Requests that it has held, as far as this process has seen.
    pub fn hits(&self) -> u64 {
        self.hits.load(Ordering::Relaxed)
    }
}

/// What one holder has, the nearest first: for a route before for any, database before file.
#[derive(Clone, Debug, Default)]
pub struct Held(Vec<(Option<RouteId>, Arc<Entry>)>);

impl Held {
    /// A row for any route is not for one that costs more than it can ever hold.
    fn find(&self, route: RouteId, cost: u64, now: Timestamp) -> Option<&Arc<Entry>> {
        let fits = |wanted| {
            move |(on, entry): &&(Option<RouteId>, Arc<Entry>)| {
                *on == wanted && entry.terms.are_valid(now) && cost <= entry.terms.largest_cost()
            }
        };
        let own = self.0.iter().find(fits(Some(route)));
        own.or_else(|| self.0.iter().find(fits(None))).map(|(_, entry)| entry)
    }

    fn put(&mut self, route: Option<RouteId>, entry: Entry) {
        self.0.push((route, Arc::new(entry)));
        self.0.sort_by_key(|(route, entry)| (route.is_none(), *route, entry.origin));
    }

    fn remove(&mut self, origin: Origin) -> bool {
        let before = self.0.len();
        self.0.retain(|(_, entry)| entry.origin != origin);
        self.0.len() < before
    }

    /// All of them, those in front before those behind them.
    pub fn all(&self) -> &[(Option<RouteId>, Arc<Entry>)] {
        &self.0
    }
}

/// A tenant that a rule or the database names.
#[derive(Clone, Debug)]
pub struct Tenant {
    /// Its name as a part of keys.
    pub part: Part,
    /// Whether its requests are turned away.
    pub suspended: bool,
    /// Its plan.
    pub plan: Option<Arc<str>>,
    /// Its own rules.
    pub own: Held,
    /// Whether the database knows it beside its rules.
    recorded: bool,
}

/// All rules.
#[derive(Clone, Debug)]
pub struct Rules {
    default: Arc<Entry>,
    anyone: Held,
    plans: Map<Arc<str>, Held>,
    tenants: Map<Arc<str>, Tenant>,
    keys: Map<KeyHash, Arc<str>>,
    rows: usize,
}

impl Rules {
    /// No rules but `default`.
    pub fn new(default: Terms) -> Self {
        Self {
            default: Arc::new(Entry::new(Origin::Default, Arc::new(default))),
            anyone: Held::default(),
            plans: Map::new_with_hasher_and_ptr_kind(RandomState::default()),
            tenants: Map::new_with_hasher_and_ptr_kind(RandomState::default()),
            keys: Map::new_with_hasher_and_ptr_kind(RandomState::default()),
            rows: 0,
        }
    }

    /// (tenant, route) > (tenant, any route) > (plan, route) > (plan, any route) > (route) > default.
    pub fn find<'r>(
        &'r self,
        route: RouteId,
        cost: u64,
        tenant: Option<&'r Tenant>,
        now: Timestamp,
    ) -> &'r Arc<Entry> {
        let own = tenant.and_then(|tenant| tenant.own.find(route, cost, now));
        let plan = || self.plans.get(tenant?.plan.as_ref()?)?.find(route, cost, now);
        own.or_else(plan).or_else(|| self.anyone.find(route, cost, now)).unwrap_or(&self.default)
    }

    /// What is known of a tenant.
    pub fn tenant(&self, name: &str) -> Option<&Tenant> {
        self.tenants.get(name)
    }

    /// The tenant that a key belongs to.
    pub fn key(&self, hash: &KeyHash) -> Option<&Arc<str>> {
        self.keys.get(hash)
    }

    /// How many rows there are.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// The default, what any tenant is held to, plans and tenants.
    #[expect(clippy::type_complexity, reason = "a list of lists, for those who list")]
    pub fn all(
        &self,
    ) -> (&Entry, &Held, impl Iterator<Item = (&Arc<str>, &Held)>, impl Iterator<Item = (&Arc<str>, &Tenant)>)
    {
        (&self.default, &self.anyone, self.plans.iter(), self.tenants.iter())
    }

    /// Where the row comes from that is first for just this holder and route, if there is one.
    pub fn origin(&self, holder: &Holder, route: Option<RouteId>) -> Option<Origin> {
        let held = match holder {
            Holder::Anyone => &self.anyone,
            Holder::Plan(name) => self.plans.get(name)?,
            Holder::Tenant(name) => &self.tenants.get(name)?.own,
        };
        held.0.iter().find(|(on, _)| *on == route).map(|(_, entry)| entry.origin)
    }

    /// Adds a row.
    pub fn put(&mut self, holder: &Holder, route: Option<RouteId>, entry: Entry, hasher: &Hasher) {
        self.rows += 1;
        match holder {
            Holder::Anyone => self.anyone.put(route, entry),
            Holder::Plan(name) => {
                if let Some(held) = self.plans.get_mut(name) {
                    held.put(route, entry);
                } else {
                    let mut held = Held::default();
                    held.put(route, entry);
                    self.plans.insert_mut(Arc::clone(name), held);
                }
            }
            Holder::Tenant(name) => self.change_tenant(name, hasher, |tenant| tenant.own.put(route, entry)),
        }
    }

    /// Takes a row away, if it is there.
    pub fn remove(&mut self, holder: &Holder, origin: Origin, hasher: &Hasher) {
        let mut removed = false;
        match holder {
            Holder::Anyone => removed = self.anyone.remove(origin),
            Holder::Plan(name) => {
                if let Some(held) = self.plans.get_mut(name) {
                    removed = held.remove(origin);
                    if held.0.is_empty() {
                        self.plans.remove_mut(name);
                    }
                }
            }
            Holder::Tenant(name) => {
                self.change_tenant(name, hasher, |tenant| removed = tenant.own.remove(origin));
            }
        }
        self.rows -= usize::from(removed);
    }

    /// Notes what the database knows of a tenant.
    pub fn record(&mut self, name: &Arc<str>, record: Option<&TenantRecord>, hasher: &Hasher) {
        self.change_tenant(name, hasher, |tenant| {
            tenant.recorded = record.is_some();
            tenant.plan = record.and_then(|record| record.plan.clone());
            tenant.suspended = record.is_some_and(|record| record.suspended);
        });
    }

    /// Adds a key.
    pub fn add_key(&mut self, key: &KeyRecord) {
        self.keys.insert_mut(key.hash, Arc::clone(&key.tenant));
    }

    /// Takes a key away.
    pub fn remove_key(&mut self, key: &KeyRecord) {
        self.keys.remove_mut(&key.hash);
    }

    fn change_tenant(&mut self, name: &Arc<str>, hasher: &Hasher, change: impl FnOnce(&mut Tenant)) {
        if let Some(tenant) = self.tenants.get_mut(name) {
            change(tenant);
            if !tenant.recorded && tenant.own.0.is_empty() {
                self.tenants.remove_mut(name);
            }
            return;
        }
        let mut tenant = Tenant {
            part: Part::known(name.as_bytes(), hasher),
            suspended: false,
            plan: None,
            own: Held::default(),
            recorded: false,
        };
        change(&mut tenant);
        if tenant.recorded || !tenant.own.0.is_empty() {
            self.tenants.insert_mut(Arc::clone(name), tenant);
        }
    }
}
