//! What a request is, read from the session once.

use std::borrow::Cow;
use std::net::IpAddr;

use pingora::http::RequestHeader;
use pingora::proxy::Session;

use super::cost::{self, CostError};
use super::gate::{self, Rejection};
use crate::clock::Timestamp;
use crate::route::{Route, RouteId};
use crate::rule::{Checks, RuleId};
use crate::snapshot::{Asked, Snapshot, Subject, ValueFault};

/// Route and tenant of one request.
#[derive(Debug)]
pub struct Facts<'r> {
    /// The route that takes it.
    pub route: RouteId,
    /// Whose it is; nobody's where no rule holds it.
    pub subject: Option<Subject<'r>>,
    /// Where it comes from.
    pub client: IpAddr,
    /// What it takes.
    pub cost: u64,
    path: Cow<'r, str>,
    /// Whether `path` must be put into the request before it is forwarded.
    must_rewrite: bool,
}

impl<'r> Facts<'r> {
    /// Reads the facts, or says why the request is refused.
    pub fn read(session: &'r Session, snapshot: &'r Snapshot) -> Result<Self, Rejection> {
        gate::check(session)?;
        let request = session.req_header();
        let host = gate::host(&request.uri, &request.headers)?;
        let path = gate::path(request)?;
        let method = request.method.as_str();
        let client = snapshot.client(peer(session), &request.headers);
        let subject = if snapshot.exempts(method, &request.headers, &path) {
            None
        } else {
            Some(snapshot.subject(&request.headers)?)
                .filter(|subject| !snapshot.exempts_client(subject, client))
        };
        let route = snapshot.routes.find(&host, method, &path);
        let cost = cost_of(snapshot.routes.get(route), request)?;
        let must_rewrite = !gate::is_origin_form(request.raw_path()) || matches!(path, Cow::Owned(_));
        Ok(Self { route, subject, client, cost, path, must_rewrite })
    }

    /// The checks that the request is held to.
    pub fn checks(
        &self,
        request: &RequestHeader,
        snapshot: &Snapshot,
        now: Timestamp,
        note_missing: &mut dyn FnMut(&RuleId),
    ) -> Result<Checks, Rejection> {
        let Some(subject) = &self.subject else { return Ok(Checks::new()) };
        let asked =
            Asked { headers: &request.headers, path: &self.path, client: self.client, cost: self.cost };
        snapshot.checks(self.route, subject, &asked, now, note_missing).map_err(|fault| match fault {
            ValueFault::Missing(what) => Rejection::MissingValue(what),
            ValueFault::Several(what) => Rejection::SeveralValues(what),
        })
    }

    /// The path to forward, where the one that came is not in normal form.
    pub fn rewritten_path(&self) -> Option<String> {
        self.must_rewrite.then(|| self.path.clone().into_owned())
    }
}

/// Who has connected. Over a Unix socket there is no address: the proxy in front is this machine.
fn peer(session: &Session) -> IpAddr {
    let peer = session.client_addr().and_then(|address| address.as_inet());
    peer.map_or(IpAddr::from([127, 0, 0, 1]), std::net::SocketAddr::ip)
}

fn cost_of(route: &Route, request: &RequestHeader) -> Result<u64, Rejection> {
    let Some(priced) = &route.priced else { return Ok(route.cost) };
    cost::asked(priced, route.cost, &request.headers, request.uri.query())
        .map_err(|CostError(place)| Rejection::Cost(place))
}
