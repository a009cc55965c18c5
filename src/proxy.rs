//! The proxy: one request, one way.
//!
//! `request_filter` reads as the list in ARCHITECTURE.md: gate, facts, checks, decision. What it
//! admits goes to an upstream; what it does not is answered here. Every response carries the headers
//! of the decision, also one that the gateway makes itself.

mod access_log;
pub mod answer;
pub mod cost;
pub mod facts;
pub mod gate;
pub mod headers;
mod live;
pub mod proxy_protocol;
pub mod upstream;

use std::io::Write as _;
use std::sync::Arc;

use arc_swap::ArcSwap;
use async_trait::async_trait;
use http::HeaderName;
use pingora::http::{RequestHeader, ResponseHeader};
use pingora::modules::http::HttpModules;
use pingora::prelude::{Error, ErrorType, HttpPeer, OrErr as _};
use pingora::proxy::{FailToProxy, ProxyHttp, Session};
use prometheus::IntGauge;
use smallvec::SmallVec;

use self::answer::Answer;
use self::facts::Facts;
use self::gate::Rejection;
pub use self::live::Live;
use crate::clock::{Clock, Timestamp};
use crate::decision::{Admission, Basis, Decision};
use crate::limiter::Limiter;
use crate::metrics::Metrics;
use crate::permits::{Guard, Place, Told};
use crate::route::RouteId;
use crate::route::path::PathError;
use crate::rule::{Checks, RuleId};
use crate::snapshot::Snapshot;

/// How long a connection may wait for its next request.
const IDLE_SECONDS: u64 = 60;

/// With these an upstream may be asked for another method than the one that the route and its limits were chosen by.
const METHOD_OVERRIDES: [&str; 3] = ["x-http-method-override", "x-http-method", "x-method-override"];

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
    permits: Option<Guard>,
    servers_tried: usize,
    _in_flight: InFlight,
}

impl Gateway {
    /// A gateway that serves what is in `live`, each request as it was when its head arrived.
    pub fn new(
        live: Arc<ArcSwap<Live>>,
        limiter: Arc<Limiter>,
        clock: Arc<dyn Clock>,
        metrics: Metrics,
    ) -> Self {
        Self { live, limiter, clock, metrics }
    }

    /// Decides, or says what to answer at once.
    async fn admit(&self, session: &mut Session, ctx: &mut Context) -> Option<Answer> {
        let mut note_missing =
            |rule: &RuleId| self.metrics.missing_values.with_label_values(&[rule.name()]).inc();
        let (route, mut checks) = match read(session, &ctx.live.snapshot, ctx.started, &mut note_missing) {
            Ok(read) => read,
            Err(rejection) => {
                self.metrics.rejected.with_label_values(&[rejection.reason()]).inc();
                return Some(Answer::rejected(&rejection));
            }
        };
        ctx.route = route;
        // Held before it is given: a client that leaves meanwhile gives it back.
        ctx.permits = self.limiter.hold(&mut checks);
        let decision = self.limiter.decide(&checks).await;
        if let Some(permits) = &mut ctx.permits {
            permits.keep(|permit| told(&checks, &decision, permit));
        }
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
        counters.decision(decision.rule(checks), decision.outcome(checks), decision.basis.label());
        if let Some(candidate_admits) = decision.disagreement(checks) {
            counters.disagreement(candidate_admits);
        }
        if decision.basis == Basis::Store {
            let micros = self.clock.now().micros_since(ctx.started);
            counters.decided_in(std::time::Duration::from_micros(micros).as_secs_f64());
        }
    }

    async fn answer(&self, session: &mut Session, answer: &Answer, ctx: &Context) -> pingora::Result<()> {
        let (mut response, body) = answer.render(session.req_header())?;
        decorate(session, &mut response, ctx)?;
        // What an upstream answers says this itself.
        headers::allow_origin(&mut response, &ctx.live.cors, &session.req_header().headers)?;
        answer::send(session, response, body, answer.ends_connection()).await
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
            permits: None,
            servers_tried: 0,
            _in_flight: InFlight::begin(&self.metrics.in_flight),
        }
    }

    /// None: by itself Pingora asks a module that may compress responses, and here never does, at each step of each
    /// request.
    fn init_downstream_modules(&self, _modules: &mut HttpModules) {}

    async fn request_filter(&self, session: &mut Session, ctx: &mut Context) -> pingora::Result<bool> {
        // By itself Pingora waits for the next head on this connection for ever. `None` is a
        // connection that is to end, and stays so.
        if session.get_keepalive().is_some() {
            session.set_keepalive(Some(IDLE_SECONDS));
        }
        let Some(answer) = self.admit(session, ctx).await else { return Ok(false) };
        self.answer(session, &answer, ctx).await?;
        Ok(true)
    }

    async fn upstream_peer(
        &self,
        _session: &mut Session,
        ctx: &mut Context,
    ) -> pingora::Result<Box<HttpPeer>> {
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
    ) -> pingora::Result<()> {
        let overrides = request.headers.keys().filter(|name| overrides_method(name.as_str()));
        for name in overrides.cloned().collect::<SmallVec<[HeaderName; 1]>>() {
            request.remove_header(&name);
        }
        if let Some(client) = session.client_addr().and_then(|address| address.as_inet()) {
            // No address is longer, so nothing is allocated but the value itself.
            let mut text = SmallVec::<[u8; 48]>::new();
            let written = write!(text, "{}", client.ip());
            written.or_err(ErrorType::InternalError, "an address that cannot be written")?;
            request.append_header("X-Forwarded-For", text.as_slice())?;
        }
        Ok(())
    }

    async fn response_filter(
        &self,
        session: &mut Session,
        response: &mut ResponseHeader,
        ctx: &mut Context,
    ) -> pingora::Result<()> {
        // Before the client sees the answer: its next request is to know of it.
        let told = self.limiter.charge(&ctx.charges(response)).await;
        if let Some((checks, decision)) = &mut ctx.decided {
            decision.charged(checks, &told);
        }
        decorate(session, response, ctx)
    }

    async fn fail_to_proxy(&self, session: &mut Session, error: &Error, ctx: &mut Context) -> FailToProxy {
        let answer = answer::for_proxy_error(error);
        let code = answer.as_ref().map_or(0, Answer::status);
        let unanswered = session.response_written().is_none_or(|written| written.status.is_informational());
        if let Some(answer) = answer.filter(|_| unanswered) {
            // What the client still sends is not read, so this connection cannot go on.
            session.set_keepalive(None);
            if let Err(error) = self.answer(session, &answer, ctx).await {
                tracing::debug!(%error, "could not answer the client");
            }
        }
        FailToProxy { error_code: code, can_reuse_downstream: false }
    }

    async fn logging(&self, session: &mut Session, error: Option<&Error>, ctx: &mut Context) {
        // An upgrade (101) is an answer, other informational ones are not. 499: the client left before
        // it was answered.
        let written = session.response_written().map(|response| response.status.as_u16());
        let status = written.filter(|status| *status == 101 || *status >= 200).unwrap_or(499);
        ctx.live.counters(ctx.route).response(status);
        access_log::write(session, ctx, status, error, self.clock.now());
    }

    fn suppress_error_log(&self, _session: &Session, _ctx: &Context, _error: &Error) -> bool {
        // `fail_to_proxy` and the access log tell of it.
        true
    }
}

impl Context {
    /// What is to be charged, now that there is a response.
    fn charges(&self, response: &ResponseHeader) -> Checks {
        let Some((checks, decision)) = &self.decided else { return Checks::new() };
        // Informational ones come before the response.
        if response.status.is_informational() {
            return Checks::new();
        }
        let snapshot = &self.live.snapshot;
        let priced = snapshot.routes.get(self.route).priced.as_ref();
        let settled = priced.and_then(|priced| cost::settled(priced, &response.headers));
        let told = (checks, &decision.verdicts);
        snapshot.charges(self.route, told, decision.turn, response.status.as_u16(), settled)
    }
}

/// Whether a header asks for another method; many upstreams read `_` in its name as `-`.
fn overrides_method(name: &str) -> bool {
    let is = |known: &str| {
        let mut pairs = known.bytes().zip(name.bytes());
        known.len() == name.len() && pairs.all(|(known, byte)| byte == known || (known, byte) == (b'-', b'_'))
    };
    METHOD_OVERRIDES.iter().any(|known| is(known))
}

/// What became of a permit that `decision` is on.
fn told(checks: &Checks, decision: &Decision, permit: u64) -> Told {
    let (keeps, basis) = decision.gives(checks, permit);
    let place = if basis == Basis::Fallback { Place::Here } else { Place::Store };
    let another_part_refused = !keeps && !decision.bases.is_empty();
    Told { keeps, place, may_be_in_store: place == Place::Here || another_part_refused }
}

/// What every response carries.
fn decorate(session: &mut Session, response: &mut ResponseHeader, ctx: &Context) -> pingora::Result<()> {
    headers::write(response, &ctx.live.headers, ctx.decided.as_ref())?;
    if session.is_process_shutting_down() {
        // Ask clients to go elsewhere while this process ends.
        session.set_keepalive(None);
    }
    Ok(())
}

/// The route and the checks of a request, whose path is in normal form from here on.
fn read(
    session: &mut Session,
    snapshot: &Snapshot,
    now: Timestamp,
    note_missing: &mut dyn FnMut(&RuleId),
) -> Result<(RouteId, Checks), Rejection> {
    let facts = Facts::read(session, snapshot)?;
    let (route, checks) = (facts.route, facts.checks(session.req_header(), snapshot, now, note_missing)?);
    if let Some(path) = facts.rewritten_path() {
        rewrite(session.req_header_mut(), &path)?;
    }
    Ok((route, checks))
}

/// Puts the normal form of the path where the upstream will read it, with the query as it came; in
/// HTTP/2 beside the authority, from which the upstream's Host is made.
fn rewrite(request: &mut RequestHeader, path: &str) -> Result<(), Rejection> {
    let target = match request.uri.query() {
        Some(query) => format!("{path}?{query}"),
        None => path.to_owned(),
    };
    let mut parts = request.uri.clone().into_parts();
    if request.version < http::Version::HTTP_2 {
        (parts.scheme, parts.authority) = (None, None);
    }
    parts.path_and_query = Some(target.parse().map_err(|_| Rejection::Path(PathError::Forbidden))?);
    request.set_uri(http::Uri::from_parts(parts).map_err(|_| Rejection::Path(PathError::Forbidden))?);
    Ok(())
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
