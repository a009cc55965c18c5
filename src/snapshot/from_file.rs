//! The rules of the configuration file.

use std::collections::HashSet;
use std::sync::Arc;

use super::rules::{Entry, Origin, Rules};
use crate::book::Holder;
use crate::config::fault::Fault;
use crate::config::{Config, Row, Terms};
use crate::key::Hasher;
use crate::route::{self, Route, RouteId, RouteTable};

/// Default and rows of the file; notes what is wrong with them.
pub(super) fn rules(config: &Config, routes: &RouteTable, hasher: &Hasher, faults: &mut Vec<Fault>) -> Rules {
    let mut building = Building {
        routes,
        rows_on: HashSet::new(),
        rules: Rules::new(Terms::of(config.rules.default.value)),
        unread: config.unread.iter().map(|id| &**id).collect(),
        hasher,
        faults,
    };
    for (index, row) in config.rules.rows.iter().enumerate() {
        building.add(index, row);
    }
    building.check_costs(config, routes);
    building.rules
}

/// Notes the exempt paths that no request can have, for paths are compared in normal form.
pub(super) fn exempt_paths(config: &Config, faults: &mut Vec<Fault>) {
    for (index, path) in config.rules.exempt.paths.iter().enumerate() {
        if let Err(message) = route::expect_normal(&path.value) {
            faults.push(Fault::new(path.place, format!("rules.exempt.paths[{index}]"), message));
        }
    }
}

struct Building<'a> {
    routes: &'a RouteTable,
    /// Tenants and routes with a row for just them, where a route costs more than one token.
    rows_on: HashSet<(&'a str, RouteId)>,
    rules: Rules,
    /// Routes that could not be read.
    unread: HashSet<&'a str>,
    hasher: &'a Hasher,
    faults: &'a mut Vec<Fault>,
}

impl<'a> Building<'a> {
    fn add(&mut self, index: usize, row: &'a Row) {
        let route = match &row.route {
            None => None,
            Some(written) => match self.routes.id_of(&written.value) {
                Some(id) => Some(id),
                None if self.unread.contains(&*written.value) => return,
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
        let holder = match (&row.tenant, &row.plan) {
            (Some(tenant), _) => Holder::Tenant(Arc::clone(tenant)),
            (None, Some(plan)) => Holder::Plan(Arc::clone(plan)),
            (None, None) => Holder::Anyone,
        };
        if let Some(Origin::File(first)) = self.rules.origin(&holder, route) {
            let message = format!("a second row for the same tenant and route; the first one is at {first}");
            self.faults.push(Fault::new(row.place, format!("rules.rows[{index}]"), message));
            return;
        }
        if let (Some(tenant), Some(route)) = (&row.tenant, route)
            && self.routes.get(route).cost > 1
        {
            self.rows_on.insert((tenant, route));
        }
        let terms = Arc::clone(&row.terms.value);
        self.rules.put(&holder, route, Entry::new(Origin::File(row.place), terms), self.hasher);
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
                any_tenant_row |= row.tenant.is_none() && row.plan.is_none() && here == Some(true);
                let own_row =
                    || row.tenant.as_deref().is_some_and(|tenant| self.rows_on.contains(&(tenant, id)));
                let applies = here.unwrap_or_else(|| !own_row());
                if let Some(message) = too_dear(row.terms.value.largest_cost()).filter(|_| applies) {
                    let field = format!("rules.rows[{row_index}].capacity");
                    self.faults.push(Fault::new(row.terms.place, field, message));
                }
            }
            let default = &config.rules.default;
            if let Some(message) = too_dear(default.value.capacity()).filter(|_| !any_tenant_row) {
                // The route of requests that match no other is not written anywhere, and costs 1.
                let Some(written) = config.routes.get(index.wrapping_sub(1)) else { continue };
                let field = format!("routes[{}].cost", written.position);
                let message = format!("rules.default.capacity {message}");
                self.faults.push(Fault::new(written.cost.place, field, message));
            }
        }
    }
}
