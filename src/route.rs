//! Routes: host, path pattern and methods to an upstream and its rules.
//!
//! The nearest route wins: an exact host before `*.suffix` (longest first) before any host; then a
//! pattern for the whole path before `/*`, deeper ones first; then a literal segment before `{name}`.
//! A route that does not take the method is passed over, so a wider one may still match. HEAD counts
//! as GET.

pub mod host;
pub mod path;

use std::collections::HashMap;

use matchit::{InsertError, Router};

use crate::config::fault::Fault;
use crate::config::{self, OnStoreFailure, Priced};
use crate::key::{Hasher, Part};

/// A route by its number; 0 is the route `default` of requests that match no other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RouteId(u16);

impl RouteId {
    /// Where requests are charged that match no route.
    pub const UNMATCHED: Self = Self(0);

    /// The number, for tables with one entry per route.
    pub const fn index(self) -> usize {
        self.0 as usize
    }

    /// The route at `index` of such a table.
    pub fn from_index(index: usize) -> Option<Self> {
        u16::try_from(index).ok().map(Self)
    }
}

/// A valid route.
#[derive(Clone, Debug)]
pub struct Route {
    /// Its id.
    pub id: Box<str>,
    /// Its id as a part of keys.
    pub part: Part,
    /// Which upstream, by its position in the configuration; none for [`RouteId::UNMATCHED`].
    pub upstream: Option<usize>,
    /// Tokens that a request takes.
    pub cost: u64,
    /// Where that is told, if not only here.
    pub priced: Option<Priced>,
    /// Whether the tenant's own rule applies.
    pub tenant_rule: bool,
    /// What decides when the store does not, unless a row says otherwise.
    pub on_store_failure: OnStoreFailure,
}

/// All routes, ready to be matched.
#[derive(Debug)]
pub struct RouteTable {
    routes: Vec<Route>,
    hosts: HashMap<Box<str>, Methods>,
    suffixes: Vec<(Box<str>, Methods)>,
    any_host: Methods,
    ids: HashMap<Box<str>, RouteId>,
}

/// The paths of each method that some route names, and of all other methods.
#[derive(Debug, Default)]
struct Methods {
    named: Vec<(Box<str>, Paths)>,
    other: Paths,
}

/// Patterns for whole paths, and `/*` patterns by depth, the deepest first.
#[derive(Debug, Default)]
struct Paths {
    whole: Router<RouteId>,
    below: Vec<(usize, Router<RouteId>)>,
}

impl RouteTable {
    /// Checks and compiles the routes; notes what is wrong with them.
    pub fn build(
        written: &[config::Route],
        upstreams: &[config::Upstream],
        on_store_failure: OnStoreFailure,
        hasher: &Hasher,
        faults: &mut Vec<Fault>,
    ) -> Self {
        let mut routes = vec![Route {
            id: "default".into(),
            part: Part::known(b"default", hasher),
            upstream: None,
            cost: 1,
            priced: None,
            tenant_rule: true,
            on_store_failure,
        }];
        let mut groups: HashMap<Option<&str>, Vec<(RouteId, usize)>> = HashMap::new();
        for (index, route) in written.iter().enumerate() {
            let field = |name: &str| format!("routes[{}].{name}", route.position);
            if let Some(first) = written[..index].iter().find(|other| other.id.value == route.id.value) {
                let message =
                    format!("`{}` is already the id of the route at {}", route.id.value, first.id.place);
                faults.push(Fault::new(route.id.place, field("id"), message));
            }
            let upstream = upstreams.iter().position(|upstream| upstream.name.value == route.upstream.value);
            if upstream.is_none() {
                let message = format!("there is no upstream named `{}`", route.upstream.value);
                faults.push(Fault::new(route.upstream.place, field("upstream"), message));
            }
            let Some(id) = RouteId::from_index(routes.len()) else {
                faults.push(Fault::new(route.id.place, field("id"), "there are more than 65535 routes"));
                break;
            };
            if let Some(host) = &route.host
                && !is_host_pattern(&host.value)
            {
                let message = format!(
                    "expected a host such as api.example.com or *.example.com, without a port, got `{}`",
                    host.value
                );
                faults.push(Fault::new(host.place, field("match.host"), message));
            }
            groups.entry(route.host.as_ref().map(|host| &*host.value)).or_default().push((id, index));
            routes.push(Route {
                id: route.id.value.clone(),
                part: Part::known(route.id.value.as_bytes(), hasher),
                upstream,
                cost: route.cost.value,
                priced: route.priced.clone(),
                tenant_rule: route.tenant_rule,
                on_store_failure: route.on_store_failure.unwrap_or(on_store_failure),
            });
        }
        let numbered = routes.iter().enumerate();
        let ids = numbered.filter_map(|(index, route)| Some((route.id.clone(), RouteId::from_index(index)?)));
        let ids = ids.collect();
        let mut table =
            Self { ids, routes, hosts: HashMap::new(), suffixes: Vec::new(), any_host: Methods::default() };
        let mut groups: Vec<_> = groups.into_iter().collect();
        groups.sort_by_key(|(_, routes)| routes[0].1);
        for (host, routes) in groups {
            let methods = Methods::build(&routes, written, faults);
            match host {
                None => table.any_host = methods,
                Some(host) => match host.strip_prefix('*') {
                    Some(suffix) => table.suffixes.push((suffix.into(), methods)),
                    None => drop(table.hosts.insert(host.into(), methods)),
                },
            }
        }
        table.suffixes.sort_by_key(|(suffix, _)| std::cmp::Reverse(suffix.len()));
        table
    }

    /// The route of a request; `host` in lower case and without port, `path` in normal form.
    pub fn find(&self, host: &str, method: &str, path: &str) -> RouteId {
        let exact = self.hosts.get(host).and_then(|methods| methods.find(method, path));
        exact
            .or_else(|| {
                let mut fitting = self.suffixes.iter().filter(|(suffix, _)| host.ends_with(&**suffix));
                fitting.find_map(|(_, methods)| methods.find(method, path))
            })
            .or_else(|| self.any_host.find(method, path))
            .unwrap_or(RouteId::UNMATCHED)
    }

    /// The route of that number.
    pub fn get(&self, id: RouteId) -> &Route {
        // Numbers are only given out by `build`, so the fall back to `default` is never taken.
        self.routes.get(id.index()).unwrap_or(&self.routes[0])
    }

    /// The route with that id.
    pub fn id_of(&self, id: &str) -> Option<RouteId> {
        self.ids.get(id).copied()
    }

    /// All routes, [`RouteId::UNMATCHED`] first.
    pub fn all(&self) -> &[Route] {
        &self.routes
    }
}

impl Methods {
    fn build(routes: &[(RouteId, usize)], written: &[config::Route], faults: &mut Vec<Fault>) -> Self {
        let mut names: Vec<&str> =
            routes.iter().flat_map(|(_, index)| written[*index].methods.iter().map(|name| &**name)).collect();
        names.sort_unstable();
        names.dedup();
        let mut reported = Vec::new();
        let mut paths = |method: Option<&str>| {
            let takes =
                |index: usize, name: &str| written[index].methods.iter().any(|taken| **taken == *name);
            let taking = routes.iter().filter(|(_, index)| {
                written[*index].methods.is_empty() || method.is_some_and(|name| takes(*index, name))
            });
            let mut paths = Paths::build(taking.copied(), written, &mut reported, faults);
            if method == Some("HEAD") {
                // Beside the routes that name HEAD: those for GET, where they do not stand in the way.
                for (id, index) in routes.iter().filter(|(_, index)| takes(*index, "GET")) {
                    let _ =
                        paths.insert(&written[*index].path.value, *id, *index, written, &mut HashMap::new());
                }
                paths.sort();
            }
            paths
        };
        Self {
            named: names.iter().map(|name| ((*name).into(), paths(Some(name)))).collect(),
            other: paths(None),
        }
    }

    fn find(&self, method: &str, path: &str) -> Option<RouteId> {
        let method = if method == "HEAD" && !self.names("HEAD") { "GET" } else { method };
        // Upstreams there are that take `post` for POST.
        let named = self.named.iter().find(|(name, _)| name.eq_ignore_ascii_case(method));
        named.map_or(&self.other, |(_, paths)| paths).find(path)
    }

    fn names(&self, method: &str) -> bool {
        self.named.iter().any(|(name, _)| **name == *method)
    }
}

impl Paths {
    fn build(
        routes: impl Iterator<Item = (RouteId, usize)>,
        written: &[config::Route],
        reported: &mut Vec<usize>,
        faults: &mut Vec<Fault>,
    ) -> Self {
        let mut paths = Self::default();
        let mut owners: HashMap<String, usize> = HashMap::new();
        for (id, index) in routes {
            let config::Route { path, position, .. } = &written[index];
            let Err(message) = paths.insert(&path.value, id, index, written, &mut owners) else { continue };
            // The same route stands in the paths of several methods, and is wrong in each.
            if !reported.contains(&index) {
                reported.push(index);
                faults.push(Fault::new(path.place, format!("routes[{position}].match.path"), message));
            }
        }
        paths.sort();
        paths
    }

    /// The deepest `/*` patterns first.
    fn sort(&mut self) {
        self.below.sort_by_key(|(depth, _)| std::cmp::Reverse(*depth));
    }

    fn insert(
        &mut self,
        path: &str,
        id: RouteId,
        index: usize,
        written: &[config::Route],
        owners: &mut HashMap<String, usize>,
    ) -> Result<(), String> {
        let pattern = router_pattern(path)?;
        let router =
            if path.ends_with('*') { self.below(path.matches('/').count()) } else { &mut self.whole };
        match router.insert(pattern.clone(), id) {
            Ok(()) => {}
            Err(InsertError::Conflict { with }) => {
                let other = owners.get(&with).map_or("another", |other| &*written[*other].id.value);
                return Err(format!("matches the same requests as the route `{other}`"));
            }
            Err(error) => return Err(format!("is no path pattern: {error}")),
        }
        if let Some(prefix) = path.strip_suffix('*') {
            // `/items/*` also takes `/items/` itself; it cannot conflict where the pattern did not.
            let _ = router.insert(prefix, id);
        }
        owners.insert(pattern, index);
        Ok(())
    }

    /// The `/*` patterns of one depth: at one depth none of them hides another.
    fn below(&mut self, depth: usize) -> &mut Router<RouteId> {
        let index = self.below.iter().position(|(known, _)| *known == depth).unwrap_or_else(|| {
            self.below.push((depth, Router::new()));
            self.below.len() - 1
        });
        &mut self.below[index].1
    }

    fn find(&self, path: &str) -> Option<RouteId> {
        let routers = std::iter::once(&self.whole).chain(self.below.iter().map(|(_, router)| router));
        routers.into_iter().find_map(|router| router.at(path).ok().map(|found| *found.value))
    }
}

/// Whether requests can have this host, or one below it.
fn is_host_pattern(written: &str) -> bool {
    let name = written.strip_prefix("*.").unwrap_or(written);
    host::normalise(name).is_some_and(|normal| normal == name)
}

/// A path pattern as the router writes it, or what is wrong with it.
fn router_pattern(written: &str) -> Result<String, String> {
    if !written.starts_with('/') {
        return Err(format!("expected a path such as /orders, /orders/{{id}} or /items/*, got `{written}`"));
    }
    let literal = written.strip_suffix("/*").unwrap_or(written);
    if literal.contains('*') {
        return Err("`*` may only stand alone as the last segment, as in /items/*".into());
    }
    expect_normal(&literal.replace(['{', '}'], ""))?;
    Ok(match written.strip_suffix('*') {
        Some(prefix) => format!("{prefix}{{*rest}}"),
        None => written.to_owned(),
    })
}

/// Whether requests can have this path, or what is wrong with it.
pub fn expect_normal(written: &str) -> Result<(), String> {
    if let Some(end) = written.find(['?', '#']) {
        return Err(format!("can never match: a path ends before `{}`", &written[end..=end]));
    }
    match path::normalise(written) {
        Ok(normal) if *normal == *written => Ok(()),
        Ok(normal) => Err(format!("can never match: requests are matched in normal form, here `{normal}`")),
        Err(error) => Err(error.to_string()),
    }
}

#[cfg(test)]
mod tests;
