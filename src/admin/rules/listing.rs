//! What this gateway serves: every rule, where it comes from, and what is skipped. One page of it.

use std::sync::Arc;

use http::StatusCode;
use serde_json::{Value, json};

use super::{Answer, Call};
use crate::admin::{Admin, json_response};
use crate::book::{Holder, RowId};
use crate::clock::Timestamp;
use crate::config::Mode;
use crate::proxy::Live;
use crate::snapshot::rules::{Entry, Held, Origin};
use crate::source;

/// Rules on one page, unless `limit` says otherwise; and the most it can say.
const PAGE: usize = 1_000;
const LARGEST_PAGE: usize = 10_000;

impl Call<'_> {
    /// What this gateway serves, and what it skips.
    pub(super) fn list(&self, admin: &Admin) -> Answer {
        let limit = self.number("limit")?.unwrap_or(PAGE).clamp(1, LARGEST_PAGE);
        let offset: usize = self.number("offset")?.unwrap_or(0);
        let live = admin.live.load_full();
        let mut listing = Listing {
            live: &live,
            now: admin.clock.now(),
            call: self,
            offset,
            limit,
            met: 0,
            rules: Vec::new(),
        };
        listing.collect();
        let next = (listing.met > offset.saturating_add(limit)).then_some(offset.saturating_add(limit));
        let skipped = live.snapshot.skipped.values().take(LARGEST_PAGE).map(|skipped| {
            let mut row = origin(Origin::Database(skipped.id));
            name_holder(&mut row, &skipped.holder);
            row["route"] = skipped.route.as_deref().unwrap_or("*").into();
            row["reason"] = (*skipped.reason).into();
            row
        });
        Ok(json_response(
            StatusCode::OK,
            &json!({
                "revision": live.snapshot.revision,
                "rules": listing.rules,
                "next_offset": next,
                "skipped": skipped.collect::<Vec<_>>(),
            }),
        ))
    }
}

/// The rules of a snapshot, in the order of the alphabet: one page of them.
struct Listing<'a> {
    live: &'a Arc<Live>,
    now: Timestamp,
    call: &'a Call<'a>,
    offset: usize,
    limit: usize,
    /// Rules met so far, on this page or not; no further than one beyond it.
    met: usize,
    rules: Vec<Value>,
}

impl Listing<'_> {
    fn collect(&mut self) {
        let live = Arc::clone(self.live);
        let (default, anyone, plans, tenants) = live.snapshot.rules.all();
        let (tenant, plan) = (self.call.text("tenant"), self.call.text("plan"));
        if plan.is_none() && tenant.is_none_or(|tenant| tenant == "*") {
            self.held(&Holder::Anyone, anyone);
            self.add(&Holder::Anyone, "*", default, true);
        }
        let mut plans: Vec<_> =
            plans.filter(|(name, _)| tenant.is_none() && plan.is_none_or(|plan| plan == &***name)).collect();
        plans.sort_by_key(|(name, _)| *name);
        for (name, held) in plans {
            self.held(&Holder::Plan(Arc::clone(name)), held);
        }
        let mut tenants: Vec<_> = tenants
            .filter(|(name, _)| plan.is_none() && tenant.is_none_or(|tenant| tenant == &***name))
            .collect();
        tenants.sort_by_key(|(name, _)| *name);
        for (name, tenant) in tenants {
            if self.met > self.offset.saturating_add(self.limit) {
                break;
            }
            self.held(&Holder::Tenant(Arc::clone(name)), &tenant.own);
        }
    }

    fn held(&mut self, holder: &Holder, held: &Held) {
        let live = Arc::clone(self.live);
        let mut before = None;
        for (route, entry) in held.all() {
            let id = route.map_or("*", |route| &live.snapshot.routes.get(route).id);
            // The first one in its time is the one in force; those behind it wait.
            let in_front = before != Some(*route) && entry.terms.are_valid(self.now);
            if in_front {
                before = Some(*route);
            }
            self.add(holder, id, entry, in_front && entry.terms.mode != Mode::Off);
        }
    }

    fn add(&mut self, holder: &Holder, route: &str, entry: &Entry, active: bool) {
        if self.call.text("route").is_some_and(|wanted| wanted != route) {
            return;
        }
        self.met += 1;
        if self.met > self.offset && self.rules.len() < self.limit {
            self.rules.push(rule(holder, route, entry, active));
        }
    }
}

fn rule(holder: &Holder, route: &str, entry: &Entry, active: bool) -> Value {
    let mut rule = json!({});
    name_holder(&mut rule, holder);
    rule["route"] = route.into();
    source::describe(&entry.terms, &mut rule);
    rule["active"] = active.into();
    rule["hits"] = entry.hits().into();
    if let (Some(rule), Value::Object(origin)) = (rule.as_object_mut(), origin(entry.origin)) {
        rule.extend(origin);
    }
    rule
}

/// Where a rule comes from.
fn origin(origin: Origin) -> Value {
    match origin {
        Origin::Default => json!({ "origin": "default" }),
        Origin::File(place) => json!({ "origin": "file", "place": place.to_string() }),
        Origin::Database(RowId::Rule(id)) => {
            json!({ "origin": "database", "table": "rate_limit_rule", "id": id })
        }
        Origin::Database(RowId::Plan(id)) => json!({ "origin": "database", "table": "plan_rules", "id": id }),
    }
}

fn name_holder(rule: &mut Value, holder: &Holder) {
    match holder {
        Holder::Tenant(name) => rule["tenant"] = (**name).into(),
        Holder::Plan(name) => rule["plan"] = (**name).into(),
        Holder::Anyone => rule["tenant"] = "*".into(),
    }
}
