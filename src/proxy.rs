//! The proxy: one request, one way.
//!
//! `request_filter` reads as the list in ARCHITECTURE.md: gate, facts, checks, decision. What it
//! admits goes to an upstream; what it does not is answered here. Every response carries the headers
//! of the decision, also one that the gateway makes itself.

mod access_log;
pub mod answer;
pub mod facts;
pub mod gate;
pub mod headers;
mod live;
pub mod upstream;

use std::sync::Arc;

use arc_swap::ArcSwap;
use async_trait::async_trait;
use pingora::http::{RequestHeader, ResponseHeader};
use pingora::prelude::{Error, ErrorType, HttpPeer, Result};
use pingora::proxy::{FailToProxy, ProxyHttp, Session};
use prometheus::IntGauge;

use self::answer::Answer;
use self::facts::Facts;
pub use self::live::Live;
use crate::clock::{Clock, Timestamp};
use crate::decision::{Admission, Basis, Decision};
use crate::limiter::Limiter;
use crate::metrics::Metrics;
use crate::route::RouteId;
use crate::rule::Checks;

/// The gateway, as Pingora drives it.
pub struct Gateway {
    live: Arc<ArcSwap<Live>>,
    limiter: Arc<Limiter>,
    clock: Arc<dyn Clock>,
    metrics: Metrics,
}

/// What is kept of one request.
pub struct Context {
    live: Arc<Live>,
    started: Timestamp,
    route: RouteId,
    decided: Option<(Checks, Decision)>,
    servers_tried: usize,
    _in_flight: InFlight,
}

impl Gateway {
    /// A gateway that serves what is in `live`, each request as it was when its head arrived.
    pub fn new(live: Arc<ArcSwap<Live>>, limiter: Arc<Limiter>, clock: Arc<dyn Clock>, metrics: Metrics) -> Self {
        Self { live, limiter, clock, metrics }
    }

    /// Decides, or says what to answer at once.
    async fn admit(&self, session: &mut Session, ctx: &mut Context) -> Option<Answer> {
        let (route, checks, rewritten) = match Facts::read(session, &ctx.live.snapshot) {
            Ok(facts) => (facts.route, ctx.live.snapshot.checks(facts.route, &facts.tenant), facts.rewritten_path()),
            Err(rejection) => {
                self.metrics.rejected.with_label_values(&[rejection.reason()]).inc();
                return Some(Answer::rejected(&rejection));
            }
        };
        ctx.route = route;
        if let Some(path) = rewritten {
            rewrite(session.req_header_mut(), &path);
        }
        let decision = self.limiter.decide(&checks).await;
        self.count(ctx, &checks, &decision);
        let answer = match decision.admission {
            Admission::Refused => Some(Answer::refused(&checks, &decision)),
            Admission::Unavailable => Some(Answer::unavailable()),
            Admission::Admitted if route == RouteId::UNMATCHED => Some(Answer::no_route()),
            Admission::Admitted => None,
        };
        ctx.decided = Some((checks, decision));
        answer
    }

    fn count(&self, ctx: &Context, checks: &Checks, decision: &Decision) {
        let counters = ctx.live.counters(ctx.route);
        counters.decision(decision.rule(checks).name(), decision.admission.label(), decision.basis.label());
        if decision.basis == Basis::Store {
            let micros = self.clock.now().micros_since(ctx.started);
            counters.decided_in(std::time::Duration::from_micros(micros).as_secs_f64());
        }
    }

    /// What every response carries.
    fn decorate(&self, session: &mut Session, response: &mut ResponseHeader, ctx: &Context) -> Result<()> {
        headers::write(response, &ctx.live.headers, ctx.decided.as_ref())?;
        if session.is_process_shutting_down() {
            // Ask clients to go elsewhere while this process ends.
            session.set_keepalive(None);
        }
        Ok(())
    }

    async fn answer(&self, session: &mut Session, answer: &Answer, ctx: &Context) -> Result<()> {
        let mut response = answer.head(session.req_header())?;
        self.decorate(session, &mut response, ctx)?;
        answer::send(session, response, answer.body(session.req_header())).await
    }
}

#[async_trait]
impl ProxyHttp for Gateway {
    type CTX = Context;

    fn new_ctx(&self) -> Context {
        Context {
            live: self.live.load_full(),
            started: self.clock.now(),
            route: RouteId::UNMATCHED,
            decided: None,
            servers_tried: 0,
            _in_flight: InFlight::begin(&self.metrics.in_flight),
        }
    }

    async fn request_filter(&self, session: &mut Session, ctx: &mut Context) -> Result<bool> {
        let Some(answer) = self.admit(session, ctx).await else { return Ok(false) };
        self.answer(session, &answer, ctx).await?;
        Ok(true)
    }

    async fn upstream_peer(&self, _session: &mut Session, ctx: &mut Context) -> Result<Box<HttpPeer>> {
        let group = ctx.live.upstream(ctx.route);
        let peer = group.and_then(upstream::Group::next);
        ctx.servers_tried += 1;
        peer.ok_or_else(|| Error::explain(ErrorType::InternalError, "the route has no upstream"))
    }

    fn fail_to_connect(
        &self,
        _session: &mut Session,
        _peer: &HttpPeer,
        ctx: &mut Context,
        mut error: Box<Error>,
    ) -> Box<Error> {
        // Nothing was sent yet, so the next server may be asked whatever the method is.
        let servers = ctx.live.upstream(ctx.route).map_or(0, upstream::Group::len);
        error.set_retry(ctx.servers_tried < servers);
        error
    }

    async fn upstream_request_filter(
        &self,
        session: &mut Session,
        request: &mut RequestHeader,
        _ctx: &mut Context,
    ) -> Result<()> {
        if let Some(client) = session.client_addr().and_then(|address| address.as_inet()) {
            request.append_header("X-Forwarded-For", client.ip().to_string())?;
        }
        Ok(())
    }

    async fn response_filter(
        &self,
        session: &mut Session,
        response: &mut ResponseHeader,
        ctx: &mut Context,
    ) -> Result<()> {
        self.decorate(session, response, ctx)
    }

    async fn fail_to_proxy(&self, session: &mut Session, error: &Error, ctx: &mut Context) -> FailToProxy {
        let answer = answer::for_proxy_error(error);
        let code = answer.as_ref().map_or(0, Answer::status);
        if let Some(answer) = answer.filter(|_| session.response_written().is_none()) {
            // What the client still sends is not read, so this connection cannot go on.
            session.set_keepalive(None);
            if let Err(error) = self.answer(session, &answer, ctx).await {
                tracing::debug!(%error, "could not answer the client");
            }
        }
        FailToProxy { error_code: code, can_reuse_downstream: false }
    }

    async fn logging(&self, session: &mut Session, error: Option<&Error>, ctx: &mut Context) {
        let status = session.response_written().map(|response| response.status.as_u16());
        // 499: the client left before it was answered.
        let status = status.unwrap_or(499);
        ctx.live.counters(ctx.route).response(status);
        access_log::write(session, ctx, status, error, self.clock.now());
    }

    fn suppress_error_log(&self, _session: &Session, _ctx: &Context, _error: &Error) -> bool {
        // `fail_to_proxy` and the access log tell of it.
        true
    }
}

/// Puts the normal form of the path where the upstream will read it, with the query as it came.
fn rewrite(request: &mut RequestHeader, path: &str) {
    let target = match request.uri.query() {
        Some(query) => format!("{path}?{query}"),
        None => path.to_owned(),
    };
    // A normal path and a parsed query make a target; if they did not, the request would go on as it
    // came, to the same route.
    if let Ok(uri) = target.parse() {
        request.set_uri(uri);
    }
}

/// One request between its head and its end, however it ends.
struct InFlight(IntGauge);

impl InFlight {
    fn begin(gauge: &IntGauge) -> Self {
        gauge.inc();
        Self(gauge.clone())
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        self.0.dec();
    }
}
