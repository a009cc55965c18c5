//! The admin listener: metrics, health, status, reload, rules. On loopback by default; writes need the
//! bearer token.

mod page;
mod rules;

use std::sync::{Arc, OnceLock};

use arc_swap::ArcSwap;
use async_trait::async_trait;
use http::{Method, Response, StatusCode, header};
use pingora::apps::http_app::ServeHttp;
use pingora::protocols::http::ServerSession;
use serde_json::{Value, json};

use crate::breaker::State;
use crate::clock::Clock;
use crate::config::Secret;
use crate::hot_keys::Heat;
use crate::key::Key;
use crate::limiter::Limiter;
use crate::metrics::Metrics;
use crate::proxy::Live;
use crate::reload::Reloader;
use crate::source::postgres::write::Writer;
use crate::store::Node;
use crate::store::memory::MemoryStore;

/// What can be read takes these methods.
const READ: &str = "GET, HEAD";

/// Hot keys that are listed.
const MOST_HOT_KEYS: usize = 100;

/// Serves the admin listener.
pub struct Admin {
    /// What is served now.
    pub live: Arc<ArcSwap<Live>>,
    /// Whether the store answers.
    pub limiter: Arc<Limiter>,
    /// Which store it is.
    pub store_kind: &'static str,
    /// Buckets in the memory of this process.
    pub memory: Arc<MemoryStore>,
    /// Reads the file again.
    pub reloader: Arc<Reloader>,
    /// Everything counted.
    pub metrics: Metrics,
    /// The token for writes; without one there are none.
    pub token: Option<Secret>,
    /// Set when requests are taken.
    pub started: Arc<std::sync::atomic::AtomicBool>,
    /// Whether this process still takes traffic.
    pub draining: Arc<std::sync::atomic::AtomicBool>,
    /// What time it is.
    pub clock: Arc<dyn Clock>,
    /// Changes the rules of the database; made when it is first needed.
    pub writer: OnceLock<Writer>,
}

#[async_trait]
impl ServeHttp for Admin {
    async fn response(&self, session: &mut ServerSession) -> Response<Vec<u8>> {
        let request = session.req_header();
        let method = request.method.clone();
        let path = request.uri.path().to_owned();
        let authorized = self.authorized(request.headers.get(header::AUTHORIZATION));
        let mut response = match (&method, path.as_str()) {
            (_, path) if rules::takes(path) => rules::answer(self, session).await,
            (&Method::GET | &Method::HEAD, path) => self.read(path),
            (&Method::POST, "/-/reload") => match authorized {
                Ok(()) => self.reload().await,
                Err(refusal) => *refusal,
            },
            (_, "/-/reload") => not_allowed("POST"),
            (_, path) => match self.read(path) {
                unknown if unknown.status() == StatusCode::NOT_FOUND => unknown,
                _ => not_allowed(READ),
            },
        };
        if method == Method::HEAD {
            response.body_mut().clear();
        }
        response
    }
}

impl Admin {
    fn read(&self, path: &str) -> Response<Vec<u8>> {
        match path {
            "/" => respond(StatusCode::OK, "text/html; charset=utf-8", page::PAGE.into()),
            "/metrics" => {
                // The age of the rules is told by the way.
                self.reloader.database_status(self.clock.now());
                let held = i64::try_from(self.limiter.permits_held()).unwrap_or(i64::MAX);
                self.metrics.permits_held.set(held);
                self.limiter.count_nodes();
                self.metrics.memory_buckets.set(i64::try_from(self.memory.len()).unwrap_or(i64::MAX));
                self.metrics.memory_evictions.set(i64::try_from(self.memory.evicted()).unwrap_or(i64::MAX));
                respond(StatusCode::OK, "text/plain; version=0.0.4; charset=utf-8", self.metrics.render())
            }
            "/healthz" => text(StatusCode::OK, "ok\n"),
            "/readyz" => self.ready(),
            "/api/v1/status" => json_response(StatusCode::OK, &self.status()),
            "/api/v1/hot-keys" => json_response(StatusCode::OK, &self.hot_keys()),
            "/-/reload" => not_allowed("POST"),
            _ => text(StatusCode::NOT_FOUND, "not found; see / for what there is\n"),
        }
    }

    /// Ready from when traffic is taken until the end begins. A store or a database
    /// that is away makes a gateway degraded, not unready: else one sick Redis would take every gateway out at once.
    fn ready(&self) -> Response<Vec<u8>> {
        if self.draining.load(std::sync::atomic::Ordering::Relaxed) {
            return text(StatusCode::SERVICE_UNAVAILABLE, "shutting down\n");
        }
        if !self.started.load(std::sync::atomic::Ordering::Relaxed) {
            return text(StatusCode::SERVICE_UNAVAILABLE, "starting\n");
        }
        if !self.reloader.has_keys() {
            let why = "keys are looked up, and no database has told any yet\n";
            return text(StatusCode::SERVICE_UNAVAILABLE, why);
        }
        text(
            StatusCode::OK,
            match (self.limiter.store_is_up(), self.reloader.database_is_up()) {
                (true, true) => "ready\n",
                (false, true) => "ready, degraded: the store is down\n",
                (true, false) => "ready, degraded: the database is down\n",
                (false, false) => "ready, degraded: the store is down, the database is down\n",
            },
        )
    }

    fn status(&self) -> Value {
        let live = self.live.load();
        let snapshot = &live.snapshot;
        json!({
            "version": env!("CARGO_PKG_VERSION"),
            "revision": snapshot.revision,
            "routes": snapshot.routes.all().len() - 1,
            "rows": snapshot.rows(),
            "rows_skipped": snapshot.skipped.size(),
            "database": self.reloader.database_status(self.clock.now()),
            "store": {
                "kind": self.store_kind,
                "up": self.limiter.store_is_up(),
                "breaker": self.limiter.breaker_state().label(),
                "nodes": self.limiter.nodes().into_iter().map(describe).collect::<Vec<_>>(),
            },
            "gateways": self.limiter.gateways(),
            "memory_buckets": self.memory.len(),
            "requests_in_flight": self.metrics.in_flight.get(),
            "last_reload_error": self.reloader.last_error(),
            "needs_restart": self.reloader.needs_restart(),
        })
    }

    fn hot_keys(&self) -> Value {
        let describe = |(key, heat, leased): (Key, Heat, u64)| {
            let (subject, route) = key.parts()?;
            Some(json!({
                "subject": subject,
                "route": route,
                "rate": heat.requests,
                "tokens_per_second": heat.tokens,
                "leased_tokens": leased,
            }))
        };
        json!({
            "hot_keys": self.limiter.hot_keys(MOST_HOT_KEYS).into_iter().filter_map(describe).collect::<Vec<_>>(),
        })
    }

    async fn reload(&self) -> Response<Vec<u8>> {
        let reloader = Arc::clone(&self.reloader);
        match tokio::task::spawn_blocking(move || reloader.reload()).await {
            Ok(Ok(applied)) => {
                let body = json!({ "revision": applied.revision, "needs_restart": applied.needs_restart });
                json_response(StatusCode::OK, &body)
            }
            Ok(Err(error)) => {
                json_response(StatusCode::UNPROCESSABLE_ENTITY, &json!({ "error": error.to_string() }))
            }
            Err(_) => json_response(
                StatusCode::INTERNAL_SERVER_ERROR,
                &json!({ "error": "the reload was cut off" }),
            ),
        }
    }

    fn authorized(&self, authorization: Option<&http::HeaderValue>) -> Result<(), Box<Response<Vec<u8>>>> {
        let Some(Secret(token)) = &self.token else {
            let body = json!({ "error": "admin.token is not set in the configuration: there are no writes" });
            return Err(Box::new(json_response(StatusCode::FORBIDDEN, &body)));
        };
        let given = authorization.and_then(|value| bearer(value.as_bytes()));
        if given.is_some_and(|given| same(given, token.as_bytes())) {
            return Ok(());
        }
        let body = json!({ "error": "expected the header Authorization: Bearer with the admin.token" });
        let mut refusal = json_response(StatusCode::UNAUTHORIZED, &body);
        refusal.headers_mut().insert(header::WWW_AUTHENTICATE, http::HeaderValue::from_static("Bearer"));
        Err(Box::new(refusal))
    }
}

/// The token of an `Authorization` header. Schemes are told without regard to case.
fn bearer(header: &[u8]) -> Option<&[u8]> {
    let (scheme, token) = header.split_at_checked(b"Bearer ".len())?;
    scheme.eq_ignore_ascii_case(b"Bearer ").then(|| token.trim_ascii())
}

fn describe((node, breaker): (Node, State)) -> Value {
    json!({ "address": node.address, "up": node.up, "breaker": breaker.label(), "trouble": node.trouble })
}

/// Compares in a time that depends on the lengths only.
fn same(a: &[u8], b: &[u8]) -> bool {
    a.len() == b.len() && a.iter().zip(b).fold(0, |differ, (a, b)| differ | (a ^ b)) == 0
}

/// 405, with the methods that there are.
fn not_allowed(methods: &'static str) -> Response<Vec<u8>> {
    let body = json!({ "error": format!("use {methods}") });
    let mut response = json_response(StatusCode::METHOD_NOT_ALLOWED, &body);
    response.headers_mut().insert(header::ALLOW, http::HeaderValue::from_static(methods));
    response
}

fn text(status: StatusCode, body: &str) -> Response<Vec<u8>> {
    respond(status, "text/plain; charset=utf-8", body.into())
}

fn json_response(status: StatusCode, body: &Value) -> Response<Vec<u8>> {
    respond(status, "application/json", format!("{body}\n").into_bytes())
}

fn respond(status: StatusCode, kind: &'static str, body: Vec<u8>) -> Response<Vec<u8>> {
    let length = body.len();
    let mut response = Response::new(body);
    *response.status_mut() = status;
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, http::HeaderValue::from_static(kind));
    headers.insert(header::CONTENT_LENGTH, http::HeaderValue::from(length));
    response
}
