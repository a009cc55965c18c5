//! Upstreams and routes.

use std::net::SocketAddrV6;
use std::time::Duration;

use super::ON_STORE_FAILURE;
use crate::config::fault::Placed;
use crate::config::fields::{Reading, join, placed};
use crate::config::yaml::{Kind, Node};
use crate::config::{Priced, Route, Upstream};

pub(super) fn upstreams_of(node: &Node<'_>, r: &mut Reading<'_>) -> Vec<Upstream> {
    let mut upstreams = Vec::new();
    for (name, node) in r.entries(node, "upstreams") {
        let field = join("upstreams", &name.text);
        let [servers, connect, read] = r.fields(node, &field, ["servers", "connect_timeout", "read_timeout"]);
        let servers_field = join(&field, "servers");
        let servers = r.required(node, &servers_field, servers);
        upstreams.push(Upstream {
            name: Placed { value: name.text.as_ref().into(), place: name.place },
            servers: servers.map(|node| servers_of(node, &servers_field, r)).unwrap_or_default(),
            connect_timeout: connect
                .and_then(|node| r.some_time(node, &join(&field, "connect_timeout")))
                .unwrap_or(Duration::from_secs(2)),
            read_timeout: read
                .and_then(|node| r.some_time(node, &join(&field, "read_timeout")))
                .unwrap_or(Duration::from_secs(60)),
        });
    }
    upstreams
}

fn servers_of(node: &Node<'_>, field: &str, r: &mut Reading<'_>) -> Vec<Placed<Box<str>>> {
    let items = r.list(node, field);
    if items.is_empty() && matches!(node.kind, Kind::Sequence(_)) {
        r.fault(node.place, field, "expected at least one server");
    }
    let mut servers = Vec::new();
    for (index, item) in items.iter().enumerate() {
        let field = format!("{field}[{index}]");
        let Some(text) = r.name(item, &field) else { continue };
        if is_server(&text) {
            servers.push(placed(item, text));
        } else {
            let message = format!("expected host:port or [IPv6 address]:port, got {}", item.describe());
            r.fault(item.place, &field, message);
        }
    }
    servers
}

fn is_server(text: &str) -> bool {
    let Some((host, port)) = text.rsplit_once(':') else { return false };
    let is_port =
        port.bytes().all(|byte| byte.is_ascii_digit()) && port.parse::<u16>().is_ok_and(|port| port > 0);
    let is_host = if host.starts_with('[') {
        // With the number of a zone, if there is one.
        text.parse::<SocketAddrV6>().is_ok()
    } else {
        let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'-' | b'_');
        !host.is_empty() && host.bytes().all(is_plain)
    };
    is_port && is_host
}

/// The routes; the ids of those that could not be read are noted in `unread`.
pub(super) fn routes_of(
    root: &Node<'_>,
    node: Option<&Node<'_>>,
    unread: &mut Vec<Box<str>>,
    r: &mut Reading<'_>,
) -> Vec<Route> {
    let Some(node) = r.required(root, "routes", node) else { return Vec::new() };
    let items = r.list(node, "routes");
    if items.is_empty() && matches!(node.kind, Kind::Sequence(_)) {
        r.fault(node.place, "routes", "expected at least one route");
    }
    let mut routes = Vec::new();
    for (index, item) in items.iter().enumerate() {
        match route_of(item, index, r) {
            Some(route) => routes.push(route),
            None => unread.extend(item.text_of("id")),
        }
    }
    routes
}

fn route_of(item: &Node<'_>, position: usize, r: &mut Reading<'_>) -> Option<Route> {
    let field = &*format!("routes[{position}]");
    let [id, matches, upstream, cost, tenant_rule, rules, on_store_failure] = r.fields(
        item,
        field,
        ["id", "match", "upstream", "cost", "tenant_rule", "rules", "on_store_failure"],
    );
    let id = r.required(item, &join(field, "id"), id).and_then(|node| route_id(node, &join(field, "id"), r));
    let matches = r.required(item, &join(field, "match"), matches);
    let matches = matches.and_then(|node| match_of(node, &join(field, "match"), r));
    let upstream = r.required(item, &join(field, "upstream"), upstream);
    let upstream = upstream.and_then(|node| Some(placed(node, r.name(node, &join(field, "upstream"))?)));
    let cost = cost.and_then(|node| cost_of(node, &join(field, "cost"), r));
    let (cost, priced) = match cost {
        Some((cost, priced)) => (Some(cost), priced),
        None => (None, None),
    };
    let tenant_rule = tenant_rule
        .and_then(|node| r.one_of(node, &join(field, "tenant_rule"), &[("on", true), ("off", false)]))
        .unwrap_or(true);
    let mut named: Vec<Placed<Box<str>>> = Vec::new();
    for (index, node) in
        rules.map(|node| r.list(node, &join(field, "rules"))).unwrap_or_default().iter().enumerate()
    {
        let field = format!("{field}.rules[{index}]");
        let Some(name) = r.name(node, &field) else { continue };
        if named.iter().any(|known| known.value == name) {
            r.fault(node.place, &field, format!("`{name}` is there already: it would be counted twice"));
        }
        named.push(placed(node, name));
    }
    let on_store_failure =
        on_store_failure.and_then(|node| r.one_of(node, &join(field, "on_store_failure"), &ON_STORE_FAILURE));
    let (host, path, methods) = matches?;
    Some(Route {
        position,
        cost: cost.unwrap_or(Placed { value: 1, place: item.place }),
        priced,
        id: id?,
        host,
        path,
        methods,
        upstream: upstream?,
        tenant_rule,
        rules: named,
        on_store_failure,
    })
}

/// A number, or where the cost is told.
fn cost_of(node: &Node<'_>, field: &str, r: &mut Reading<'_>) -> Option<(Placed<u64>, Option<Priced>)> {
    if !matches!(node.kind, Kind::Mapping(_)) {
        return Some((placed(node, r.whole(node, field)?), None));
    }
    let [fixed, header, query, max, trusted, response_header] =
        r.fields(node, field, ["fixed", "header", "query", "max", "trusted", "response_header"]);
    let number = |node: Option<&Node<'_>>, name: &str, r: &mut Reading<'_>| {
        node.and_then(|node| Some(placed(node, r.whole(node, &join(field, name))?)))
    };
    let cost = number(fixed, "fixed", r).unwrap_or(placed(node, 1));
    let most = number(max, "max", r);
    if let Some(most) = most.filter(|most| most.value < cost.value.max(1)) {
        let message = format!("expected at least the fixed cost {}, got {}", cost.value, most.value);
        r.fault(most.place, &join(field, "max"), message);
    }
    let words = [("true", true), ("false", false)];
    let trusted = trusted.and_then(|node| r.one_of(node, &join(field, "trusted"), &words)).unwrap_or(false);
    let header = header.and_then(|node| header_of(node, &join(field, "header"), r));
    let response_header =
        response_header.and_then(|node| header_of(node, &join(field, "response_header"), r));
    let query = query.and_then(|node| r.name(node, &join(field, "query")));
    if most.is_none() && (header.is_some() || query.is_some() || response_header.is_some()) {
        r.fault(node.place, &join(field, "max"), "is missing: what is told must have a bound");
    }
    let max = most.map_or(cost.value, |most| most.value);
    Some((cost, Some(Priced { header, query, max, trusted, response_header })))
}

fn header_of(node: &Node<'_>, field: &str, r: &mut Reading<'_>) -> Option<http::HeaderName> {
    let name = r.name(node, field)?;
    let header = http::HeaderName::from_bytes(name.as_bytes()).ok();
    if header.is_none() {
        r.fault(node.place, field, format!("expected a header name, got {}", node.describe()));
    }
    header
}

fn route_id(node: &Node<'_>, field: &str, r: &mut Reading<'_>) -> Option<Placed<Box<str>>> {
    let id = r.name(node, field)?;
    if &*id == "default" {
        r.fault(
            node.place,
            field,
            "`default` is the route of requests that match no other; choose another id",
        );
    }
    Some(placed(node, id))
}

type Match = (Option<Placed<Box<str>>>, Placed<Box<str>>, Vec<Box<str>>);

fn match_of(node: &Node<'_>, field: &str, r: &mut Reading<'_>) -> Option<Match> {
    let [host, path, methods] = r.fields(node, field, ["host", "path", "methods"]);
    let host = host
        .and_then(|node| Some(placed(node, r.name(node, &join(field, "host"))?.to_ascii_lowercase().into())));
    let methods_field = join(field, "methods");
    let mut names: Vec<Box<str>> = Vec::new();
    for item in methods.map(|node| r.list(node, &methods_field)).unwrap_or_default() {
        let Some(name) = r.name(item, &methods_field) else { continue };
        if name.bytes().all(|byte| byte.is_ascii_uppercase() || byte == b'-') {
            names.push(name);
        } else {
            r.fault(
                item.place,
                &methods_field,
                format!("expected a method such as GET, got {}", item.describe()),
            );
        }
    }
    if let Some(node) = methods.filter(|node| matches!(&node.kind, Kind::Sequence(items) if items.is_empty()))
    {
        r.fault(node.place, &methods_field, "expected at least one method; leave it out for all");
    }
    let path_field = join(field, "path");
    let path = r.required(node, &path_field, path)?;
    Some((host, placed(path, r.name(path, &path_field)?), names))
}
