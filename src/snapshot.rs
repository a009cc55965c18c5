//! All valid routes and rules at one revision; immutable. A request loads one and keeps it to its end.
//!
//! Looking up the checks of a request allocates nothing but the key of its bucket.

mod from_file;
mod named;
pub mod rules;

use std::borrow::Cow;
use std::net::IpAddr;
use std::sync::Arc;

use rpds::HashTrieMapSync as Map;
use smallvec::smallvec;

pub use self::named::{Asked, ValueFault};
use self::named::{Hands, Named};
use self::rules::{Entry, Origin, Rules, Tenant};
use crate::book::{Book, BookRow, Change, Holder, RowId};
use crate::clock::Timestamp;
use crate::config::fault::Fault;
use crate::config::{ClientAddress, Config, Exempt, Keys, Mode, OnStoreFailure, Terms};
use crate::identity::client_address::contains;
use crate::identity::{Claim, Identity, IdentityError};
use crate::key::{Hasher, Key, Part, fnv1a};
use crate::limit::Limit;
use crate::route::{Route, RouteId, RouteTable};
use crate::rule::{Check, Checks, Demand, RuleId, Verdicts};

/// Routes, rules and identity at one revision.
#[derive(Clone, Debug)]
pub struct Snapshot {
    /// Which change of configuration or rules this is, from 1.
    pub revision: u64,
    /// The routes.
    pub routes: Arc<RouteTable>,
    /// How requests name their tenant.
    pub identity: Identity,
    /// The rules.
    pub rules: Rules,
    /// Rows of the database that cannot be served.
    pub skipped: Map<RowId, Arc<Skipped>>,
    /// The rules of the file alone: what a whole load of the database begins with.
    from_file: Rules,
    /// Whether requests name their tenant, or a key of it.
    pub keys: Keys,
    named: Arc<Vec<Vec<Arc<Named>>>>,
    exempt: Arc<Exempt>,
    /// The hasher under the secret before this one.
    previous: Option<Hasher>,
    client_address: Arc<ClientAddress>,
    hasher: Hasher,
    key_prefix: Box<str>,
}

/// A row of the database that cannot be served, and why.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Skipped {
    /// Which row.
    pub id: RowId,
    /// Whom it is for.
    pub holder: Holder,
    /// On which route.
    pub route: Option<Arc<str>>,
    /// What is wrong with it.
    pub reason: Arc<str>,
}

/// Whose a request is.
#[derive(Debug)]
pub struct Subject<'s> {
    name: Cow<'s, [u8]>,
    known: Option<&'s Tenant>,
    /// What the request has said of it: the name, or the key.
    claimed: Cow<'s, [u8]>,
}

impl Snapshot {
    /// Checks how the parts of a configuration fit together, and builds the snapshot of it and of what a
    /// database says.
    ///
    /// # Errors
    /// Every fault of the file, in its order. Rows of the database that cannot be served are skipped.
    pub fn build(config: &Config, book: &Book, revision: u64) -> Result<Self, Vec<Fault>> {
        let mut faults = Vec::new();
        let hasher = Hasher::new(config.identity.hash_secret.0.as_bytes());
        let routes = RouteTable::build(
            &config.routes,
            &config.upstreams,
            config.rules.on_store_failure,
            &hasher,
            &mut faults,
        );
        let from_file = from_file::rules(config, &routes, &hasher, &mut faults);
        let named = named::rules(config, &mut faults);
        from_file::exempt_paths(config, &mut faults);
        if !faults.is_empty() {
            faults.sort();
            return Err(faults);
        }
        let mut snapshot = Self {
            revision,
            routes: Arc::new(routes),
            identity: Identity::new(&config.identity),
            rules: from_file.clone(),
            skipped: Map::new_sync(),
            from_file,
            keys: config.identity.keys.value,
            named: Arc::new(named),
            exempt: Arc::new(config.rules.exempt.clone()),
            previous: config
                .identity
                .previous_hash_secret
                .as_ref()
                .map(|secret| Hasher::new(secret.0.as_bytes())),
            client_address: Arc::new(config.identity.client_address.clone()),
            hasher,
            key_prefix: config.store.key_prefix.clone(),
        };
        snapshot.put_book(book);
        Ok(snapshot)
    }

    /// This snapshot with another database behind it.
    #[must_use]
    pub fn with_book(&self, book: &Book) -> Self {
        let mut snapshot = Self {
            revision: self.revision + 1,
            rules: self.from_file.clone(),
            skipped: Map::new_sync(),
            ..self.clone()
        };
        snapshot.put_book(book);
        snapshot
    }

    /// This snapshot after `changes`, which `book` takes note of.
    #[must_use]
    pub fn with_changes(&self, book: &mut Book, changes: &[Change]) -> Self {
        let mut snapshot = Self { revision: self.revision + 1, ..self.clone() };
        // First all that goes, then all that comes: what one row gives up another one may have taken over.
        for change in changes {
            match book.apply(change) {
                Change::Row(id, Some(old)) => {
                    snapshot.rules.remove(&old.holder, Origin::Database(id), &self.hasher);
                    snapshot.skipped.remove_mut(&id);
                }
                Change::Key(_, Some(old)) => snapshot.rules.remove_key(&old),
                Change::Row(_, None) | Change::Key(_, None) | Change::Tenant(..) => {}
            }
        }
        for change in changes {
            match change {
                Change::Row(id, Some(row)) => snapshot.put_row(*id, row),
                Change::Key(_, Some(key)) => snapshot.rules.add_key(key),
                Change::Tenant(name, record) => snapshot.rules.record(name, record.as_ref(), &self.hasher),
                Change::Row(_, None) | Change::Key(_, None) => {}
            }
        }
        snapshot
    }

    fn put_book(&mut self, book: &Book) {
        for (name, record) in book.tenants.iter() {
            self.rules.record(name, Some(record), &self.hasher);
        }
        for (id, row) in book.rows.iter() {
            self.put_row(*id, row);
        }
        book.keys.values().for_each(|key| self.rules.add_key(key));
    }

    /// Puts a row of the database among the rules, or among the skipped ones.
    fn put_row(&mut self, id: RowId, row: &BookRow) {
        match self.served(row) {
            Ok((route, entry)) => {
                let entry = Entry::new(Origin::Database(id), entry);
                self.rules.put(&row.holder, route, entry, &self.hasher);
            }
            Err(reason) => {
                let (holder, route) = (row.holder.clone(), row.route.clone());
                self.skipped.insert_mut(id, Arc::new(Skipped { id, holder, route, reason }));
            }
        }
    }

    /// A row as it can be served.
    fn served(&self, row: &BookRow) -> Result<(Option<RouteId>, Arc<Terms>), Arc<str>> {
        let terms = row.terms.clone()?;
        Ok((self.route_of_row(row.route.as_deref(), &terms)?, terms))
    }

    /// The route of a row that has these terms on the route with this id; any route if `None`.
    ///
    /// # Errors
    /// Why no row could be served there.
    pub fn route_of_row(&self, name: Option<&str>, terms: &Terms) -> Result<Option<RouteId>, String> {
        let Some(name) = name else { return Ok(None) };
        let id = self.routes.id_of(name).ok_or_else(|| format!("there is no route with the id `{name}`"))?;
        let (cost, capacity) = (self.routes.get(id).cost, terms.largest_cost());
        if cost > capacity {
            return Err(format!("the capacity {capacity} is below the cost {cost} of the route `{name}`"));
        }
        Ok(Some(id))
    }

    /// Whose a request with these headers is.
    pub fn subject<'s>(&'s self, headers: &'s http::HeaderMap) -> Result<Subject<'s>, IdentityError> {
        let (name, claimed) = match self.identity.claim(headers)? {
            Claim::Anonymous => (crate::identity::ANONYMOUS, &b""[..]),
            Claim::Named(name) if self.keys == Keys::Plain => (name, name),
            Claim::Named(key) => {
                let under = |hasher: &Hasher| self.rules.key(&hasher.key_hash(key));
                let tenant = under(&self.hasher).or_else(|| self.previous.as_ref().and_then(under));
                (tenant.ok_or_else(|| self.identity.unknown())?.as_bytes(), key)
            }
        };
        let subject = Subject { claimed: Cow::Borrowed(claimed), ..self.tenant(name) };
        if subject.known.is_some_and(|tenant| tenant.suspended) {
            return Err(IdentityError::Suspended);
        }
        Ok(subject)
    }

    /// The subject of requests of the tenant `name`.
    pub fn tenant<'s>(&'s self, name: impl Into<Cow<'s, [u8]>>) -> Subject<'s> {
        let name = name.into();
        let known = std::str::from_utf8(&name).ok().and_then(|name| self.rules.tenant(name));
        Subject { claimed: name.clone(), name, known }
    }

    /// The address of the client of a request that came from `peer`.
    pub fn client(&self, peer: IpAddr, headers: &http::HeaderMap) -> IpAddr {
        self.client_address.find(peer, headers)
    }

    /// Whether `peer` is a proxy whose word on addresses counts.
    pub fn trusts_proxy(&self, peer: IpAddr) -> bool {
        self.client_address.trusts(peer.to_canonical())
    }

    /// The checks of a request of `subject` on `route` at `now`: the tenant's own rule, what is tried beside it, and
    /// the named rules of the route.
    ///
    /// # Errors
    /// When a rule rejects requests without a value that it is keyed by; `note_missing` is told of every rule that
    /// has found none.
    pub fn checks(
        &self,
        route: RouteId,
        subject: &Subject<'_>,
        asked: &Asked<'_>,
        now: Timestamp,
        note_missing: &mut dyn FnMut(&RuleId),
    ) -> Result<Checks, ValueFault> {
        let mut checks = self.tenant_checks(route, subject, asked.cost, now);
        let named = self.named.get(route.index()).map(Vec::as_slice).unwrap_or_default();
        if !named.is_empty() {
            let mut hands = Hands {
                prefix: &self.key_prefix,
                hasher: &self.hasher,
                client_address: &self.client_address,
                tenant: self.tenant_part(subject),
                route: self.routes.get(route).part.clone(),
                note_missing,
            };
            for rule in named {
                checks.extend(rule.check(&mut hands, subject, asked, now)?);
            }
        }
        Ok(checks)
    }

    /// Whether a request is exempt from all rules, whoever it says it is.
    pub fn exempts(&self, method: &str, headers: &http::HeaderMap, path: &str) -> bool {
        let is_preflight = || {
            method == "OPTIONS"
                && headers.contains_key(http::header::ORIGIN)
                && headers.contains_key(http::header::ACCESS_CONTROL_REQUEST_METHOD)
        };
        self.exempt.preflight && is_preflight()
            || self.exempt.paths.iter().any(|exempt| *exempt.value == *path)
    }

    /// Whether the requests of a tenant, or from an address, are exempt from all rules.
    pub fn exempts_client(&self, subject: &Subject<'_>, client: IpAddr) -> bool {
        contains(&self.exempt.networks, client)
            || self.exempt.tenants.iter().any(|exempt| exempt.as_bytes() == &*subject.name)
    }

    /// What is to be charged after a response with this status on `route`: what was only looked at before, and the
    /// difference to the true cost, where the response tells it. `turn` is whose it was among shards.
    pub fn charges(
        &self,
        route: RouteId,
        (checks, verdicts): (&Checks, &Verdicts),
        turn: usize,
        status: u16,
        settled: Option<u64>,
    ) -> Checks {
        let named = self.named.get(route.index()).map(Vec::as_slice).unwrap_or_default();
        let mut charges = Checks::new();
        for (check, verdict) in checks.iter().zip(verdicts) {
            let rule = named.iter().find(|named| named.is(&check.rule));
            let mut charge = |cost, demand| charges.push(Check { cost, demand, ..check.on_shard(turn) });
            match check.demand {
                Demand::Peek | Demand::Watch if rule.is_some_and(|rule| rule.counts(status)) => {
                    charge(check.cost, Demand::Debit);
                }
                Demand::Take | Demand::Shadow
                    if verdict.is_allowed() && rule.is_none_or(|rule| rule.takes_the_cost()) =>
                {
                    match settled {
                        Some(cost) if cost > check.cost => charge(cost - check.cost, Demand::Debit),
                        // Into a window that is over nothing can be given back.
                        Some(cost) if cost < check.cost && check.limit.takes_back() => {
                            charge(check.cost - cost, Demand::Return);
                        }
                        _ => {}
                    }
                }
                _ => {}
            }
        }
        charges
    }

    fn tenant_checks(&self, route: RouteId, subject: &Subject<'_>, cost: u64, now: Timestamp) -> Checks {
        let (id, route) = (route, self.routes.get(route));
        if !route.tenant_rule {
            return Checks::new();
        }
        let entry = self.rules.find(id, route.cost, subject.known, now);
        let terms = &entry.terms;
        entry.hit();
        if terms.mode == Mode::Off {
            return Checks::new();
        }
        let enforced = terms.mode == Mode::Enforce && is_among(&subject.name, terms.enforce_percent);
        let check = Check {
            rule: RuleId::TENANT,
            key: self.bucket(subject, route),
            limit: Limit::TokenBucket(terms.limit),
            shards: terms.shards,
            permit: 0,
            cost,
            demand: if enforced { Demand::Take } else { Demand::Shadow },
            on_store_failure: terms.on_store_failure.unwrap_or(route.on_store_failure),
        };
        let Some(limit) = terms.candidate else { return smallvec![check] };
        let candidate = Check {
            rule: RuleId::CANDIDATE,
            key: check.key.of_candidate(),
            limit: Limit::TokenBucket(limit),
            demand: Demand::Shadow,
            on_store_failure: OnStoreFailure::Local,
            ..check.clone()
        };
        smallvec![check, candidate]
    }

    fn bucket(&self, subject: &Subject<'_>, route: &Route) -> Key {
        match subject.known {
            Some(tenant) => Key::tenant_route(&self.key_prefix, &tenant.part, &route.part),
            None => Key::tenant_route(&self.key_prefix, &self.tenant_part(subject), &route.part),
        }
    }

    fn tenant_part(&self, subject: &Subject<'_>) -> Part {
        match subject.known {
            Some(tenant) => tenant.part.clone(),
            // What came from the table of keys, or from nobody, is no client's word.
            None if self.keys == Keys::Lookup || *subject.name == *crate::identity::ANONYMOUS => {
                Part::known(&subject.name, &self.hasher)
            }
            None => self.hasher.part(&subject.name),
        }
    }

    /// How many rows the rules have.
    pub fn rows(&self) -> usize {
        self.rules.rows()
    }
}

/// Whether a subject is among the first `percent` of all: the same ones on every gateway, and still so
/// when the share grows.
fn is_among(subject: &[u8], percent: u8) -> bool {
    if percent >= 100 {
        return true;
    }
    // A last mix, for the high bits of the hash hardly differ between short names.
    let hash = fnv1a(subject);
    let hash = (hash ^ (hash >> 33)).wrapping_mul(0xFF51_AFD7_ED55_8CCD);
    (hash ^ (hash >> 33)) % 10_000 < u64::from(percent) * 100
}

#[cfg(test)]
mod tests;
