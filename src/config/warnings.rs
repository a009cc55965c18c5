//! What is no fault, and still not what somebody will have meant.

use std::collections::HashSet;

use super::fault::Fault;
use super::{Config, Route, Row};

/// The most rows that are warned about.
const MOST_ROWS: usize = 100;

/// The last segments of paths where guesses are counted.
const LOGINS: [&str; 10] =
    ["login", "signin", "sign-in", "auth", "token", "otp", "password", "reset", "register", "signup"];

/// All of it; who has faults as well is told those alone.
pub(super) fn of(config: &Config) -> Vec<Fault> {
    let mut all = idle_rules(config);
    all.extend(idle_rows(config));
    all.extend(open_logins(config));
    all
}

/// Named rules that no route has.
fn idle_rules(config: &Config) -> Vec<Fault> {
    let idle = |name: &str| !config.routes.iter().any(|route| has(route, name));
    let rules = config.rules.named.iter().map(|rule| &rule.name).filter(|name| idle(&name.value));
    rules
        .map(|name| {
            let message = format!("no route has `{}` in its rules: it never holds anybody", name.value);
            Fault::new(name.place, "rules.named", message)
        })
        .collect()
}

/// Rows that hold nobody.
fn idle_rows(config: &Config) -> Vec<Fault> {
    let off: HashSet<&str> =
        config.routes.iter().filter(|route| !route.tenant_rule).map(|route| &*route.id.value).collect();
    let exempt: HashSet<&str> = config.rules.exempt.tenants.iter().map(|tenant| &**tenant).collect();
    let why_idle = |row: &Row| {
        let route = row.route.as_ref().map(|route| &*route.value);
        if route.is_some_and(|route| off.contains(route)) {
            Some("the route has `tenant_rule: off`: this row never holds anybody")
        } else if row.tenant.as_deref().is_some_and(|tenant| exempt.contains(tenant)) {
            Some("the tenant is in rules.exempt.tenants: this row never holds it")
        } else if row.plan.is_some() && config.rules.database.is_none() {
            Some("who has which plan the database tells, and there is none: this row never holds anybody")
        } else {
            None
        }
    };
    let rows = config.rules.rows.iter().enumerate();
    let idle = rows.filter_map(|(index, row)| {
        Some(Fault::new(row.place, format!("rules.rows[{index}]"), why_idle(row)?))
    });
    idle.take(MOST_ROWS).collect()
}

/// Routes for a login alone, where another spelling of the path goes by its rules.
fn open_logins(config: &Config) -> Vec<Fault> {
    let mut open = Vec::new();
    for route in config.routes.iter().filter(|route| !route.rules.is_empty() && is_a_login(&route.path.value))
    {
        // The nearest takes them.
        let around = config.routes.iter().filter(|wide| goes_around(wide, route));
        let nearest = around.max_by_key(|wide| (wide.host.is_some(), wide.path.value.len()));
        if let Some(wide) = nearest.filter(|wide| !wide.rules.iter().any(|rule| has(route, &rule.value))) {
            let message = format!(
                "`{0}/`, `{0}.json` and the like go to the route `{1}`, where no rule of this route holds (docs/limits.md)",
                route.path.value, wide.id.value
            );
            open.push(Fault::new(
                route.path.place,
                format!("routes[{}].match.path", route.position),
                message,
            ));
        }
    }
    open
}

fn has(route: &Route, rule: &str) -> bool {
    route.rules.iter().any(|name| *name.value == *rule)
}

fn is_a_login(path: &str) -> bool {
    path.rsplit('/').next().is_some_and(|last| LOGINS.contains(&last.to_ascii_lowercase().as_str()))
}

/// Whether `wide` takes what is beside the one path of `route`.
fn goes_around(wide: &Route, route: &Route) -> bool {
    let parent = route.path.value.rsplit_once('/').map_or("", |(parent, _)| parent);
    let below =
        |prefix| parent.strip_prefix(prefix).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'));
    wide.path.value.strip_suffix("/*").is_some_and(below)
        && (wide.host.is_none() || host_of(wide) == host_of(route))
        && (wide.methods.is_empty()
            || route.methods.is_empty()
            || wide.methods.iter().any(|method| route.methods.contains(method)))
}

fn host_of(route: &Route) -> Option<&str> {
    route.host.as_ref().map(|host| &*host.value)
}
