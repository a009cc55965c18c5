//! What is served now: the snapshot with what belongs to its routes. Swapped as a whole by a reload.

use std::sync::Arc;

use super::upstream::{Group, ResolveError};
use crate::config::{Config, Cors, Headers};
use crate::metrics::{Metrics, RouteMetrics};
use crate::route::RouteId;
use crate::snapshot::Snapshot;

/// What is served now.
pub struct Live {
    /// Routes and rules.
    pub snapshot: Snapshot,
    /// Which headers responses carry.
    pub headers: Headers,
    /// Whose pages may read what the gateway answers.
    pub cors: Cors,
    /// The share of requests that the access log tells.
    pub access_sample: f64,
    upstreams: Arc<[Group]>,
    counters: Arc<[RouteMetrics]>,
}

impl Live {
    /// Resolves the upstreams and prepares the counters of the routes.
    pub fn new(config: &Config, snapshot: Snapshot, metrics: &Metrics) -> Result<Self, ResolveError> {
        let upstreams = config.upstreams.iter().map(Group::resolve).collect::<Result<_, _>>()?;
        let counters = snapshot.routes.all().iter().map(|route| metrics.route(&route.id)).collect();
        Ok(Self {
            snapshot,
            headers: config.headers,
            cors: config.cors.clone(),
            access_sample: config.log.access_sample,
            upstreams,
            counters,
        })
    }

    /// The same with other rules on the same routes.
    #[must_use]
    pub fn with_rules(&self, snapshot: Snapshot) -> Self {
        let (upstreams, counters) = (Arc::clone(&self.upstreams), Arc::clone(&self.counters));
        let cors = self.cors.clone();
        Self { snapshot, headers: self.headers, cors, access_sample: self.access_sample, upstreams, counters }
    }

    /// The counters of a route.
    pub(super) fn counters(&self, route: RouteId) -> &RouteMetrics {
        // There is one entry per route, the first for requests without one.
        self.counters.get(route.index()).unwrap_or(&self.counters[0])
    }

    /// The servers of a route.
    pub(super) fn upstream(&self, route: RouteId) -> Option<&Group> {
        self.snapshot.routes.get(route).upstream.and_then(|index| self.upstreams.get(index))
    }
}
