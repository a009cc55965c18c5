//! What is counted. Label values come from the configuration or from closed sets, never from a
//! client; handles of the request path are looked up once, not per request.

use prometheus::{
    Encoder as _, Gauge, Histogram, HistogramOpts, HistogramVec, IntCounter, IntCounterVec, IntGauge,
    IntGaugeVec, Opts, Registry, TextEncoder,
};

/// Bounds of decision times, in seconds: from in memory to beyond every deadline.
const DECISION_BUCKETS: [f64; 11] =
    [0.000_01, 0.000_05, 0.000_1, 0.000_25, 0.000_5, 0.001, 0.002, 0.005, 0.01, 0.05, 0.25];

/// The kinds of store faults: there from the start, so that the first one is seen as an increase.
const STORE_FAULTS: [&str; 20] = [
    "down",
    "timeout",
    "waited",
    "queue_full",
    "io",
    "refused",
    "readonly",
    "loading",
    "masterdown",
    "oom",
    "busy",
    "noauth",
    "noperm",
    "noreplicas",
    "wrong_type",
    "bad_reply",
    "clusterdown",
    "moved",
    "apart",
    "unfit",
];

/// All metrics of a gateway.
#[derive(Clone, Debug)]
pub struct Metrics {
    registry: Registry,
    /// Requests that were answered, by route and class of status.
    pub responses: IntCounterVec,
    /// Requests that were decided on.
    pub decisions: IntCounterVec,
    /// Requests on which a candidate and the rule in force did not agree.
    pub disagreements: IntCounterVec,
    /// How long decisions took.
    pub decision_seconds: HistogramVec,
    /// Requests refused before any route: by reason.
    pub rejected: IntCounterVec,
    /// Why a store gave no decision.
    pub store_errors: IntCounterVec,
    /// Decisions made without the store.
    pub fallback_decisions: IntCounterVec,
    /// The circuit in front of the store: 0 closed, 1 open, 2 half-open.
    pub breaker_state: IntGauge,
    /// Its transitions.
    pub breaker_transitions: IntCounterVec,
    /// Tokens spent without the store that it was told of afterwards.
    pub debited_tokens: IntCounter,
    /// Debits that the store was not told of.
    pub dropped_debits: IntCounter,
    /// What is taken in advance.
    pub leases: LeaseMetrics,
    /// What the stores do.
    pub store: StoreMetrics,
    /// Reloads, applied and rejected.
    pub reloads: IntCounterVec,
    /// The revision that is served.
    pub revision: IntGauge,
    /// What the database of rules gives.
    pub rules: RulesMetrics,
    /// Requests between their head and their end.
    pub in_flight: IntGauge,
    /// Requests without a value that a rule is keyed by.
    pub missing_values: IntCounterVec,
    /// Permits of concurrency limits that requests hold.
    pub permits_held: IntGauge,
    /// Buckets in the memory of this process.
    pub memory_buckets: IntGauge,
    /// Buckets forgotten before they were full, for want of room.
    pub memory_evictions: IntGauge,
}

/// What is known of the rules of a database.
#[derive(Clone, Debug)]
pub struct RulesMetrics {
    /// Rules that are served, of file and database.
    pub rows: IntGauge,
    /// Rows of the database that cannot be served.
    pub skipped: IntGauge,
    /// The newest version of the database that is served.
    pub version: IntGauge,
    /// Seconds since the database was last found to have nothing newer.
    pub age_seconds: IntGauge,
    /// 1 while the database answers.
    pub connected: IntGauge,
    /// Times that rules were read, by outcome.
    pub refreshes: IntCounterVec,
}

impl RulesMetrics {
    fn new(r: &Registry) -> Result<Self, prometheus::Error> {
        Ok(Self {
            rows: gauge(r, "rules", "Rules that are served, of file and database.")?,
            skipped: gauge(r, "rules_skipped", "Rows of the database that cannot be served.")?,
            version: gauge(r, "rules_version", "The newest version of the database that is served.")?,
            age_seconds: gauge(
                r,
                "rules_age_seconds",
                "Seconds since the database was last found to have nothing newer.",
            )?,
            connected: gauge(r, "rules_database_connected", "1 while the database of rules answers.")?,
            refreshes: counters(
                r,
                "rules_refreshes_total",
                "Times that rules were read from the database, by outcome.",
                &["outcome"],
            )?,
        })
    }
}

/// What becomes of the tokens of leases.
#[derive(Clone, Debug)]
pub struct LeaseMetrics {
    /// They were taken from the store in advance.
    pub fetched: IntCounter,
    /// A request had them.
    pub spent: IntCounter,
    /// They were given back.
    pub returned: IntCounter,
    /// They were let go, because the store was not heard for too long.
    pub expired: IntCounter,
    /// It was asked for them, or to take them back, without an answer: they may be gone.
    pub lost: IntCounter,
    /// Keys that are leased now.
    pub leases: IntGauge,
    /// The configured bound: what all gateways may hold of a key, as a part of its limit.
    pub epsilon: Gauge,
}

impl LeaseMetrics {
    fn new(r: &Registry) -> Result<Self, prometheus::Error> {
        let tokens =
            counters(r, "lease_tokens_total", "Tokens of leases, by what became of them.", &["event"])?;
        let event = |event: &str| tokens.with_label_values(&[event]);
        let epsilon = Gauge::with_opts(opts(
            "lease_slack_ratio",
            "What all gateways together may hold of a hot key, as a part of its capacity or rate.",
        ))?;
        r.register(Box::new(epsilon.clone()))?;
        Ok(Self {
            fetched: event("fetched"),
            spent: event("spent"),
            returned: event("returned"),
            expired: event("expired"),
            lost: event("lost"),
            leases: gauge(r, "leases", "Hot keys that are leased now.")?,
            epsilon,
        })
    }
}

/// What a store counts.
#[derive(Clone, Debug)]
pub struct StoreMetrics {
    /// Script calls.
    pub calls: IntCounter,
    /// Requests decided by them.
    pub checks: IntCounter,
    /// Times that the script had to be loaded again.
    pub script_reloads: IntCounter,
    /// 1 while all nodes are connected.
    pub connected: IntGauge,
    /// Nodes with buckets.
    pub nodes: IntGauge,
    /// Those that are connected.
    pub nodes_up: IntGauge,
    /// Keys that they have evicted.
    pub evicted_keys: IntGauge,
    /// Gateways that share the limits, as far as is known.
    pub live_gateways: IntGauge,
    /// Why there was no connection, or no decision.
    pub errors: IntCounterVec,
}

impl StoreMetrics {
    fn new(r: &Registry, store_errors: &IntCounterVec) -> Result<Self, prometheus::Error> {
        Ok(Self {
            calls: counter(r, "store_calls_total", "Script calls to the store.")?,
            checks: counter(r, "store_requests_total", "Requests that were decided by script calls.")?,
            script_reloads: counter(r, "script_reloads_total", "Times the store had lost the script.")?,
            connected: gauge(r, "store_connected", "1 while all nodes of the store are connected.")?,
            nodes: gauge(r, "store_nodes", "Nodes of the store that have buckets.")?,
            nodes_up: gauge(r, "store_nodes_up", "Nodes of the store that are connected.")?,
            evicted_keys: gauge(r, "store_evicted_keys", "Keys that the store has evicted to make room.")?,
            live_gateways: gauge(r, "live_gateways", "Gateways that share the limits, as far as is known.")?,
            errors: store_errors.clone(),
        })
    }
}

impl Metrics {
    /// Registers everything.
    ///
    /// # Errors
    /// Only if two metrics had one name: a mistake in this file.
    pub fn new() -> Result<Self, prometheus::Error> {
        let r = Registry::new();
        let build = IntGaugeVec::new(opts("build_info", "The version that runs; always 1."), &["version"])?;
        build.with_label_values(&[env!("CARGO_PKG_VERSION")]).set(1);
        r.register(Box::new(build))?;
        let store_errors =
            counters(&r, "store_errors_total", "Calls without a decision, by kind.", &["kind"])?;
        for kind in STORE_FAULTS {
            store_errors.with_label_values(&[kind]);
        }
        let store = StoreMetrics::new(&r, &store_errors)?;
        let decision_seconds = HistogramVec::new(
            HistogramOpts::new(
                "tollgate_decision_duration_seconds",
                "Time from the head of a request to its decision.",
            )
            .buckets(DECISION_BUCKETS.to_vec()),
            &["basis"],
        )?;
        r.register(Box::new(decision_seconds.clone()))?;
        let reloads =
            counters(&r, "config_reloads_total", "Reloads of the configuration by outcome.", &["outcome"])?;
        for outcome in ["applied", "rejected"] {
            // There from the start, so that the first one is seen as an increase.
            reloads.with_label_values(&[outcome]);
        }
        let breaker_transitions =
            counters(&r, "breaker_transitions_total", "Transitions of the store's breaker.", &["to"])?;
        for state in ["closed", "open", "half_open"] {
            breaker_transitions.with_label_values(&[state]);
        }
        Ok(Self {
            responses: counters(
                &r,
                "responses_total",
                "Responses by route and class of status.",
                &["route", "status"],
            )?,
            decisions: counters(
                &r,
                "decisions_total",
                "Decisions by route, the rule that decided, outcome and basis.",
                &["route", "rule", "outcome", "basis"],
            )?,
            disagreements: counters(
                &r,
                "candidate_disagreements_total",
                "Requests on which a candidate and the rule in force did not agree, by what the candidate says.",
                &["route", "candidate"],
            )?,
            decision_seconds,
            rejected: counters(
                &r,
                "rejected_requests_total",
                "Requests refused before a decision.",
                &["reason"],
            )?,
            store_errors,
            fallback_decisions: counters(
                &r,
                "fallback_decisions_total",
                "Decisions made without the store.",
                &["rule", "mode", "outcome"],
            )?,
            breaker_state: gauge(
                &r,
                "breaker_state",
                "The worst of the store's breakers: 0 closed, 1 open, 2 half-open.",
            )?,
            breaker_transitions,
            debited_tokens: counter(
                &r,
                "debited_tokens_total",
                "Tokens spent without the store, debited afterwards.",
            )?,
            dropped_debits: counter(&r, "dropped_debits_total", "Debits that the store was not told of.")?,
            leases: LeaseMetrics::new(&r)?,
            store,
            reloads,
            revision: gauge(&r, "config_revision", "The revision of the configuration that is served.")?,
            rules: RulesMetrics::new(&r)?,
            in_flight: gauge(&r, "requests_in_flight", "Requests between their head and their end.")?,
            missing_values: counters(
                &r,
                "rule_key_missing_total",
                "Requests without a header or cookie that a rule is keyed by.",
                &["rule"],
            )?,
            permits_held: gauge(&r, "permits_held", "Permits of concurrency limits that requests hold.")?,
            memory_buckets: gauge(&r, "memory_buckets", "Buckets held in the memory of this process.")?,
            memory_evictions: gauge(
                &r,
                "memory_evicted_buckets",
                "Buckets forgotten before they were full.",
            )?,
            registry: r,
        })
    }

    /// Everything in Prometheus' text format.
    pub fn render(&self) -> Vec<u8> {
        let mut text = Vec::new();
        // Writing to memory does not fail.
        let _ = TextEncoder::new().encode(&self.registry.gather(), &mut text);
        text
    }

    /// The counters of one route, looked up once.
    pub fn route(&self, route: &str) -> RouteMetrics {
        let responses = |class: &str| self.responses.with_label_values(&[route, class]);
        RouteMetrics {
            responses: [
                responses("1xx"),
                responses("2xx"),
                responses("3xx"),
                responses("4xx"),
                responses("5xx"),
            ],
            decisions: self.decisions.clone(),
            disagreements: self.disagreements.clone(),
            admitted_by_store: self.decisions.with_label_values(&[route, "default", "admitted", "store"]),
            admitted_by_lease: self.decisions.with_label_values(&[route, "default", "admitted", "lease"]),
            refused_by_lease: self.decisions.with_label_values(&[route, "default", "refused", "lease"]),
            refused_by_denial: self.decisions.with_label_values(&[route, "default", "refused", "denial"]),
            refused_by_store: self.decisions.with_label_values(&[route, "default", "refused", "store"]),
            seconds_by_store: self.decision_seconds.with_label_values(&["store"]),
            route: route.into(),
        }
    }
}

/// The counters of one route.
#[derive(Clone, Debug)]
pub struct RouteMetrics {
    responses: [IntCounter; 5],
    decisions: IntCounterVec,
    disagreements: IntCounterVec,
    admitted_by_store: IntCounter,
    refused_by_store: IntCounter,
    refused_by_denial: IntCounter,
    admitted_by_lease: IntCounter,
    refused_by_lease: IntCounter,
    seconds_by_store: Histogram,
    route: Box<str>,
}

impl RouteMetrics {
    /// Counts a response.
    pub fn response(&self, status: u16) {
        let class = usize::from(status / 100).clamp(1, 5) - 1;
        self.responses[class].inc();
    }

    /// Counts a decision.
    pub fn decision(&self, rule: &str, outcome: &str, basis: &str) {
        match (rule, outcome, basis) {
            ("default", "admitted", "store") => self.admitted_by_store.inc(),
            ("default", "refused", "store") => self.refused_by_store.inc(),
            ("default", "admitted", "lease") => self.admitted_by_lease.inc(),
            ("default", "refused", "lease") => self.refused_by_lease.inc(),
            ("default", "refused", "denial") => self.refused_by_denial.inc(),
            _ => self.decisions.with_label_values(&[&*self.route, rule, outcome, basis]).inc(),
        }
    }

    /// Counts a request on which a candidate does not agree with the rule in force.
    pub fn disagreement(&self, candidate_admits: bool) {
        let says = if candidate_admits { "admits" } else { "refuses" };
        self.disagreements.with_label_values(&[&*self.route, says]).inc();
    }

    /// Notes how long a decision of the store took.
    pub fn decided_in(&self, seconds: f64) {
        self.seconds_by_store.observe(seconds);
    }
}

fn opts(name: &str, help: &str) -> Opts {
    Opts::new(format!("tollgate_{name}"), help)
}

fn counter(r: &Registry, name: &str, help: &str) -> Result<IntCounter, prometheus::Error> {
    let counter = IntCounter::with_opts(opts(name, help))?;
    r.register(Box::new(counter.clone()))?;
    Ok(counter)
}

fn counters(
    r: &Registry,
    name: &str,
    help: &str,
    labels: &[&str],
) -> Result<IntCounterVec, prometheus::Error> {
    let counters = IntCounterVec::new(opts(name, help), labels)?;
    r.register(Box::new(counters.clone()))?;
    Ok(counters)
}

fn gauge(r: &Registry, name: &str, help: &str) -> Result<IntGauge, prometheus::Error> {
    let gauge = IntGauge::with_opts(opts(name, help))?;
    r.register(Box::new(gauge.clone()))?;
    Ok(gauge)
}
