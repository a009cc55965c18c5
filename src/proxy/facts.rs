//! What a request is, read from the session once.

use std::borrow::Cow;

use pingora::proxy::Session;

use super::gate::{self, Rejection};
use crate::route::RouteId;
use crate::snapshot::{Snapshot, Subject};

/// Route and tenant of one request.
#[derive(Debug)]
pub struct Facts<'r> {
    /// The route that takes it.
    pub route: RouteId,
    /// Whose it is.
    pub subject: Subject<'r>,
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
        let subject = snapshot.subject(&request.headers)?;
        let route = snapshot.routes.find(&host, request.method.as_str(), &path);
        let must_rewrite = !gate::is_origin_form(request.raw_path()) || matches!(path, Cow::Owned(_));
        Ok(Self { route, subject, path, must_rewrite })
    }

    /// The path to forward, where the one that came is not in normal form.
    pub fn rewritten_path(&self) -> Option<String> {
        self.must_rewrite.then(|| self.path.clone().into_owned())
    }
}
