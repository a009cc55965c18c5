//! All valid routes and rules at one revision; immutable. A request loads one and keeps it to its end.
//!
//! Looking up the checks of a request allocates nothing but the key of its bucket.

use std::collections::HashMap;

use smallvec::smallvec;

use crate::config::fault::{Fault, Place};
use crate::config::{Config, OnStoreFailure, Row};
use crate::identity::Identity;
use crate::key::{Hasher, Key, Part};
use crate::limit::Limit;
use crate::route::{Route, RouteId, RouteTable};
use crate::rule::{Check, Checks, Demand, RuleId};

/// Routes, rules and identity at one revision.
#[derive(Debug)]
pub struct Snapshot {
    /// Which change of the configuration this is, from 1.
    pub revision: u64,
    /// The routes.
    pub routes: RouteTable,
    /// How requests name their tenant.
    pub identity: Identity,
    rules: Rules,
    hasher: Hasher,
    key_prefix: Box<str>,
}

/// The rules, in the form in which they are looked up. Rows share their numbers: 500,000 rows have
/// few different limits, and a row is 8 bytes.
#[derive(Debug, Default)]
struct Rules {
    numbers: Vec<Numbers>,
    tenants: HashMap<Box<str>, TenantRules>,
    /// By route: what holds any tenant there that has no row of its own.
    any_tenant: Vec<NumbersId>,
    rows: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Numbers {
    limit: Limit,
    on_store_failure: Option<OnStoreFailure>,
}

type NumbersId = u32;

#[derive(Debug)]
struct TenantRules {
    part: Part,
    any_route: Option<NumbersId>,
    by_route: Vec<(RouteId, NumbersId)>,
}

impl Snapshot {
    /// Checks how the parts of a configuration fit together, and builds the snapshot of it.
    ///
    /// # Errors
    /// Every fault, in the order of the file.
    pub fn build(config: &Config, revision: u64) -> Result<Self, Vec<Fault>> {
        let mut faults = Vec::new();
        let hasher = Hasher::new(config.identity.hash_secret.0.as_bytes());
        let routes = RouteTable::build(
            &config.routes,
            &config.upstreams,
            config.rules.on_store_failure,
            &hasher,
            &mut faults,
        );
        let rules = Rules::build(config, &routes, &hasher, &mut faults);
        if !faults.is_empty() {
            faults.sort();
            return Err(faults);
        }
        let identity = Identity::new(&config.identity);
        Ok(Self { revision, routes, identity, rules, hasher, key_prefix: config.store.key_prefix.clone() })
    }

    /// The checks of a request of `tenant` on `route`.
    pub fn checks(&self, route: RouteId, tenant: &[u8]) -> Checks {
        let known = std::str::from_utf8(tenant).ok().and_then(|name| self.rules.tenants.get(name));
        let numbers = self.rules.numbers_for(route, known);
        let route = self.routes.get(route);
        if !route.tenant_rule {
            return Checks::new();
        }
        let key = match known {
            Some(known) => self.key(&known.part, route),
            None if tenant == crate::identity::ANONYMOUS => {
                self.key(&Part::known(tenant, &self.hasher), route)
            }
            None => self.key(&self.hasher.part(tenant), route),
        };
        smallvec![Check {
            rule: RuleId::TENANT,
            key,
            limit: numbers.limit,
            cost: route.cost,
            demand: Demand::Take,
            on_store_failure: numbers.on_store_failure.unwrap_or(route.on_store_failure),
        }]
    }

    /// How many rows the rules have.
    pub fn rows(&self) -> usize {
        self.rules.rows
    }

    fn key(&self, tenant: &Part, route: &Route) -> Key {
        Key::tenant_route(&self.key_prefix, tenant, &route.part)
    }
}

impl Rules {
    fn build(config: &Config, routes: &RouteTable, hasher: &Hasher, faults: &mut Vec<Fault>) -> Self {
        let mut building = Building {
            route_ids: routes
                .all()
                .iter()
                .enumerate()
                .filter_map(|(index, route)| Some((&*route.id, RouteId::from_index(index)?)))
                .collect(),
            seen: HashMap::with_capacity(config.rules.rows.len()),
            numbers: HashMap::new(),
            rules: Self { tenants: HashMap::with_capacity(config.rules.rows.len() / 4), ..Self::default() },
            hasher,
            faults,
        };
        let default = building.number(Numbers { limit: config.rules.default.value, on_store_failure: None });
        building.rules.any_tenant = vec![default; routes.all().len()];
        for (index, row) in config.rules.rows.iter().enumerate() {
            building.add(index, row);
        }
        building.check_costs(config, routes);
        building.rules.rows = config.rules.rows.len();
        building.rules
    }

    /// (tenant, route) > (tenant, any route) > (route) > default.
    fn numbers_for(&self, route: RouteId, tenant: Option<&TenantRules>) -> &Numbers {
        let own = tenant.and_then(|tenant| {
            let on_route = tenant.by_route.iter().find(|(id, _)| *id == route).map(|(_, numbers)| *numbers);
            on_route.or(tenant.any_route)
        });
        let id = own.or_else(|| self.any_tenant.get(route.index()).copied()).unwrap_or(0);
        // Entry 0 is the default; every id was given out by `build`.
        self.numbers.get(id as usize).unwrap_or(&self.numbers[0])
    }
}

struct Building<'a> {
    route_ids: HashMap<&'a str, RouteId>,
    seen: HashMap<(Option<&'a str>, Option<RouteId>), Place>,
    numbers: HashMap<Numbers, NumbersId>,
    rules: Rules,
    hasher: &'a Hasher,
    faults: &'a mut Vec<Fault>,
}

impl<'a> Building<'a> {
    fn number(&mut self, numbers: Numbers) -> NumbersId {
        *self.numbers.entry(numbers).or_insert_with(|| {
            self.rules.numbers.push(numbers);
            self.rules.numbers.len() as NumbersId - 1
        })
    }

    fn add(&mut self, index: usize, row: &'a Row) {
        let route = match &row.route {
            None => None,
            Some(written) => match self.route_ids.get(&*written.value) {
                Some(id) => Some(*id),
                None => {
                    let message = format!("there is no route with the id `{}`", written.value);
                    self.faults.push(Fault::new(
                        written.place,
                        format!("rules.rows[{index}].route"),
                        message,
                    ));
                    return;
                }
            },
        };
        if let Some(first) = self.seen.insert((row.tenant.as_deref(), route), row.place) {
            let message = format!("a second row for the same tenant and route; the first one is at {first}");
            self.faults.push(Fault::new(row.place, format!("rules.rows[{index}]"), message));
            return;
        }
        let numbers = self.number(Numbers { limit: row.limit.value, on_store_failure: row.on_store_failure });
        match (&row.tenant, route) {
            (None, Some(route)) => self.rules.any_tenant[route.index()] = numbers,
            (None, None) => {}
            (Some(tenant), route) => {
                let hasher = self.hasher;
                let tenant = self.rules.tenants.entry(tenant.clone()).or_insert_with(|| TenantRules {
                    part: Part::known(tenant.as_bytes(), hasher),
                    any_route: None,
                    by_route: Vec::new(),
                });
                match route {
                    Some(route) => tenant.by_route.push((route, numbers)),
                    None => tenant.any_route = Some(numbers),
                }
            }
        }
    }

    /// A cost above the capacity could never pass: a fault here, not a refusal for ever.
    fn check_costs(&mut self, config: &Config, routes: &RouteTable) {
        let expensive: Vec<(usize, &Route)> = routes
            .all()
            .iter()
            .enumerate()
            .filter(|(_, route)| route.cost > 1 && route.tenant_rule)
            .collect();
        for (index, route) in expensive {
            let Some(id) = RouteId::from_index(index) else { continue };
            let too_dear = |capacity: u64| {
                (route.cost > capacity).then(|| {
                    format!(
                        "{capacity} is below the cost {} of the route `{}`: it could never pass",
                        route.cost, route.id
                    )
                })
            };
            let mut any_tenant_row = false;
            for (row_index, row) in config.rules.rows.iter().enumerate() {
                let here = row.route.as_ref().map(|written| *written.value == *route.id);
                any_tenant_row |= row.tenant.is_none() && here == Some(true);
                let own_row = || {
                    let tenant = row.tenant.as_deref().and_then(|tenant| self.rules.tenants.get(tenant));
                    tenant.is_some_and(|tenant| tenant.by_route.iter().any(|(route, _)| *route == id))
                };
                let applies = here.unwrap_or_else(|| !own_row());
                if let Some(message) = too_dear(row.limit.value.capacity()).filter(|_| applies) {
                    let field = format!("rules.rows[{row_index}].capacity");
                    self.faults.push(Fault::new(row.limit.place, field, message));
                }
            }
            let default = &config.rules.default;
            if let Some(message) = too_dear(default.value.capacity()).filter(|_| !any_tenant_row) {
                let place =
                    config.routes.get(index.wrapping_sub(1)).map_or(default.place, |route| route.cost.place);
                self.faults.push(Fault::new(
                    place,
                    format!("routes[{}].cost", index - 1),
                    format!("rules.default.capacity {message}"),
                ));
            }
        }
    }
}

#[cfg(test)]
mod tests;
