//! What is promised to whom, as values.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use ipnet::IpNet;

use super::Secret;
use super::fault::{Place, Placed};
use crate::clock::Timestamp;
use crate::limit::Limit;
use crate::limit::token_bucket::TokenBucket;

/// What is promised to whom.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rules {
    /// What holds where no row does.
    pub default: Placed<TokenBucket>,
    /// What happens when the store fails, where nothing nearer says so.
    pub on_store_failure: OnStoreFailure,
    /// The rows.
    pub rows: Vec<Row>,
    /// Requests that none of them holds.
    pub exempt: Exempt,
    /// Rules that routes name.
    pub named: Vec<NamedRule>,
    /// Where more rules come from.
    pub database: Option<Database>,
}

/// Where a request, or its response, tells what it costs.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Priced {
    /// The request header.
    pub header: Option<http::HeaderName>,
    /// The query field.
    pub query: Option<Box<str>>,
    /// The most that counts.
    pub max: u64,
    /// Whether the request may also say less than the fixed cost.
    pub trusted: bool,
    /// The response header that tells the true cost afterwards.
    pub response_header: Option<http::HeaderName>,
}

/// Requests that no rule holds.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Exempt {
    /// Of clients in these networks.
    pub networks: Vec<IpNet>,
    /// Of these tenants.
    pub tenants: Vec<Box<str>>,
    /// For these paths.
    pub paths: Vec<Placed<Box<str>>>,
    /// CORS preflights.
    pub preflight: bool,
}

/// A rule that routes name, beside the tenants' own.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NamedRule {
    /// Its name.
    pub name: Placed<Arc<str>>,
    /// What its buckets are told apart by: all of these together.
    pub key: Vec<KeySource>,
    /// What becomes of a request without one of these values.
    pub missing: MissingValue,
    /// The limit.
    pub limit: Placed<Limit>,
    /// Whether it refuses.
    pub mode: Mode,
    /// The share of subjects for which `enforce` refuses, in per cent.
    pub enforce_percent: u8,
    /// What happens when the store fails; the route's word if not given.
    pub on_store_failure: Option<OnStoreFailure>,
    /// What a request takes; the cost of the request if not given.
    pub cost: Option<Placed<u64>>,
    /// Whether clients are not told of it.
    pub hidden: bool,
    /// Only responses with these statuses count, if any are given: checked before, charged after.
    pub statuses: Vec<u16>,
}

/// What becomes of a request without a header or cookie that a rule is keyed by.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum MissingValue {
    /// It shares one bucket with all others that leave it away.
    #[default]
    Share,
    /// The rule does not hold it.
    Skip,
    /// It is answered 400.
    Reject,
}

/// What the buckets of a rule are told apart by.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum KeySource {
    /// The tenant.
    Tenant,
    /// The key that the request came with, also where several belong to one tenant.
    ApiKey,
    /// The address of the client.
    ClientAddress,
    /// The route.
    Route,
    /// Nothing: one bucket for all.
    Global,
    /// The value of a header.
    Header(http::HeaderName),
    /// The value of a cookie.
    Cookie(Box<str>),
    /// A segment of the path, by its name in the pattern of the route.
    Path(Box<str>),
}

/// A PostgreSQL with rules.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Database {
    /// `postgres://...`. May hold a password.
    pub url: Placed<Secret>,
    /// How often is looked for changes that no notification told of.
    pub refresh: Duration,
    /// Whether notifications are listened to. Behind a pooler in transaction mode none come.
    pub listen: bool,
    /// The file that keeps the last good rules for a start without the database.
    pub cache: PathBuf,
}

/// One row: terms for a tenant or the tenants of a plan, on a route or on any; or a route for any tenant.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Row {
    /// Where it was written.
    pub place: Place,
    /// Only for this tenant.
    pub tenant: Option<Arc<str>>,
    /// Only for tenants of this plan.
    pub plan: Option<Arc<str>>,
    /// Only for this route.
    pub route: Option<Placed<Arc<str>>>,
    /// What it says; placed where its capacity is written.
    pub terms: Placed<Arc<Terms>>,
}

/// What a row says of those it is for.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Terms {
    /// The limit.
    pub limit: TokenBucket,
    /// What happens when the store fails; the route's or the rules' word if not given.
    pub on_store_failure: Option<OnStoreFailure>,
    /// Whether it refuses.
    pub mode: Mode,
    /// The share of subjects for which `enforce` refuses, in per cent; for the others it is `shadow`.
    pub enforce_percent: u8,
    /// How many buckets one of its buckets is split over, so that a cluster shares the load of a very large one.
    pub shards: u16,
    /// A limit to be tried beside this one: decided and counted, never enforced.
    pub candidate: Option<TokenBucket>,
    /// From when on the row counts, if not always.
    pub valid_from: Option<Timestamp>,
    /// From when on it counts no more.
    pub valid_until: Option<Timestamp>,
}

impl Terms {
    /// A limit that is enforced for all, always.
    pub const fn of(limit: TokenBucket) -> Self {
        Self {
            limit,
            on_store_failure: None,
            mode: Mode::Enforce,
            enforce_percent: 100,
            shards: 1,
            candidate: None,
            valid_from: None,
            valid_until: None,
        }
    }

    /// The largest cost that ever fits: what the smallest of its shards holds.
    pub const fn largest_cost(&self) -> u64 {
        self.limit.capacity() / self.shards as u64
    }

    /// Whether they count at `now`.
    pub fn are_valid(&self, now: Timestamp) -> bool {
        self.valid_from.is_none_or(|from| from <= now) && self.valid_until.is_none_or(|until| now < until)
    }
}

/// What a rule does with a request that is over its limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Mode {
    /// It is refused.
    #[default]
    Enforce,
    /// It is counted, and passes.
    Shadow,
    /// Nothing: nobody looks.
    Off,
}

impl OnStoreFailure {
    /// As it is written.
    pub const fn label(self) -> &'static str {
        match self {
            Self::Local => "local",
            Self::Allow => "allow",
            Self::Deny => "deny",
        }
    }
}

impl Mode {
    /// As it is written.
    pub const fn label(self) -> &'static str {
        match self {
            Self::Enforce => "enforce",
            Self::Shadow => "shadow",
            Self::Off => "off",
        }
    }
}

/// What decides while the store does not.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum OnStoreFailure {
    /// A bucket in memory with this gateway's share of the limit.
    #[default]
    Local,
    /// Everything passes.
    Allow,
    /// Nothing passes: 503.
    Deny,
}
