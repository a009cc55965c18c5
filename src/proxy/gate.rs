//! The wire gate: what two servers could read in two ways is refused, before anything is matched.

use std::borrow::Cow;

use http::{HeaderMap, Version, header};
use pingora::http::RequestHeader;
use pingora::proxy::Session;
use thiserror::Error;

use crate::identity::IdentityError;
use crate::route::host;
use crate::route::path::{self, PathError};

/// Why a request is refused before any rule is asked.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum Rejection {
    /// No usable Host.
    #[error("the request has no valid Host: expected exactly one host name, with or without a port")]
    Host,
    /// More than one way to tell where the body ends.
    #[error(
        "the request says in two ways where its body ends: expected one Content-Length or one Transfer-Encoding"
    )]
    Framing,
    /// A transfer coding that is not `chunked`.
    #[error("the request has a Transfer-Encoding that is not supported: expected `chunked`")]
    TransferEncoding,
    /// A line that ends in LF without CR.
    #[error("the request head has a line that does not end in CR LF")]
    BareLineFeed,
    /// The path has no normal form.
    #[error("{0}")]
    Path(#[from] PathError),
    /// It names no tenant.
    #[error("{0}")]
    Identity(#[from] IdentityError),
    /// What it says of its cost is no number.
    #[error("{0} does not tell a cost: expected one whole number")]
    Cost(String),
    /// A rule is keyed by what it does not have.
    #[error("{0} is missing or empty")]
    MissingValue(String),
    /// A rule is keyed by what it has several times.
    #[error("{0} was sent more than once: expected one value")]
    SeveralValues(String),
}

impl Rejection {
    /// Whether the head itself can be read in two ways, so that nobody knows where the next one begins.
    pub const fn is_of_the_head(&self) -> bool {
        matches!(self, Self::Host | Self::Framing | Self::TransferEncoding | Self::BareLineFeed)
    }

    /// The label in metrics.
    pub const fn reason(&self) -> &'static str {
        match self {
            Self::Host => "host",
            Self::Framing => "framing",
            Self::TransferEncoding => "transfer_encoding",
            Self::BareLineFeed => "bare_line_feed",
            Self::Path(_) => "path",
            Self::Cost(_) => "cost",
            Self::MissingValue(_) => "missing_value",
            Self::SeveralValues(_) => "several_values",
            Self::Identity(IdentityError::Missing(_)) => "no_tenant",
            Self::Identity(IdentityError::Unknown(_)) => "unknown_key",
            Self::Identity(IdentityError::Suspended) => "suspended",
            Self::Identity(_) => "tenant",
        }
    }
}

/// Refuses what is ambiguous on the wire. Blanks and control bytes within the target Pingora has encoded by now; so they
/// are matched, and so forwarded.
pub fn check(session: &Session) -> Result<(), Rejection> {
    let request = session.req_header();
    check_framing(&request.headers)?;
    if request.version >= Version::HTTP_2 {
        return Ok(());
    }
    let head = session.as_downstream().to_h1_raw();
    if has_bare_line_feed(&head) {
        return Err(Rejection::BareLineFeed);
    }
    // Pingora drops the Content-Length of a chunked request before any filter sees it: only the head
    // as it came tells that there was one.
    if request.headers.contains_key(header::TRANSFER_ENCODING) && has_content_length(&head) {
        return Err(Rejection::Framing);
    }
    Ok(())
}

fn has_content_length(head: &[u8]) -> bool {
    const NAME: &[u8] = b"content-length:";
    let starts_with_name =
        |line: &[u8]| line.get(..NAME.len()).is_some_and(|start| start.eq_ignore_ascii_case(NAME));
    head.split(|byte| *byte == b'\n').any(starts_with_name)
}

fn check_framing(headers: &HeaderMap) -> Result<(), Rejection> {
    let mut lengths = headers.get_all(header::CONTENT_LENGTH).iter();
    let length = lengths.next();
    if lengths.next().is_some() || length.is_some_and(|value| value.as_bytes().contains(&b',')) {
        return Err(Rejection::Framing);
    }
    let mut codings = headers.get_all(header::TRANSFER_ENCODING).iter();
    let Some(coding) = codings.next() else { return Ok(()) };
    if length.is_some() || codings.next().is_some() {
        return Err(Rejection::Framing);
    }
    if coding.as_bytes().eq_ignore_ascii_case(b"chunked") { Ok(()) } else { Err(Rejection::TransferEncoding) }
}

fn has_bare_line_feed(head: &[u8]) -> bool {
    memchr::memchr_iter(b'\n', head).any(|at| at == 0 || head[at - 1] != b'\r')
}

/// The host that a request is for: lower case, without port and final dot.
pub fn host<'r>(uri: &'r http::Uri, headers: &'r HeaderMap) -> Result<Cow<'r, str>, Rejection> {
    let mut lines = headers.get_all(header::HOST).iter();
    let line = lines.next().map(|value| value.to_str().map_err(|_| Rejection::Host)).transpose()?;
    if lines.next().is_some() {
        return Err(Rejection::Host);
    }
    let authority = uri.authority().map(http::uri::Authority::as_str);
    let written = line.filter(|line| !line.is_empty()).or(authority).ok_or(Rejection::Host)?;
    host::normalise(written).ok_or(Rejection::Host)
}

/// The path that a request is matched by and forwarded with.
pub fn path(request: &RequestHeader) -> Result<Cow<'_, str>, Rejection> {
    let target = request.raw_path();
    if target == b"*" {
        // `OPTIONS *` asks about the server as a whole, and matches no route.
        return Ok(Cow::Borrowed("*"));
    }
    // What is neither a path nor a URL would be matched as `/` and forwarded as it came.
    if !is_origin_form(target) && !is_absolute_form(target) {
        return Err(PathError::NotAbsolute.into());
    }
    Ok(path::normalise(request.uri.path())?)
}

/// `/path?query` or `*`.
pub fn is_origin_form(target: &[u8]) -> bool {
    target.starts_with(b"/") || target == b"*"
}

/// `http://host/path?query`, which is forwarded as a path, as it was matched.
fn is_absolute_form(target: &[u8]) -> bool {
    [&b"http://"[..], b"https://"]
        .iter()
        .any(|scheme| target.get(..scheme.len()).is_some_and(|start| start.eq_ignore_ascii_case(scheme)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn framing() {
        let headers = |lines: &[(header::HeaderName, &str)]| {
            let mut map = HeaderMap::new();
            for (name, value) in lines {
                map.append(name.clone(), value.parse().unwrap());
            }
            check_framing(&map)
        };
        let (length, coding) = (header::CONTENT_LENGTH, header::TRANSFER_ENCODING);
        assert_eq!(headers(&[]), Ok(()));
        assert_eq!(headers(&[(length.clone(), "3")]), Ok(()));
        assert_eq!(headers(&[(coding.clone(), "Chunked")]), Ok(()));
        assert_eq!(headers(&[(length.clone(), "3"), (length.clone(), "3")]), Err(Rejection::Framing));
        assert_eq!(headers(&[(length.clone(), "3, 3")]), Err(Rejection::Framing));
        assert_eq!(headers(&[(length, "3"), (coding.clone(), "chunked")]), Err(Rejection::Framing));
        assert_eq!(
            headers(&[(coding.clone(), "chunked"), (coding.clone(), "chunked")]),
            Err(Rejection::Framing)
        );
        for value in ["gzip, chunked", "identity", "identity, chunked", "xchunked"] {
            assert_eq!(headers(&[(coding.clone(), value)]), Err(Rejection::TransferEncoding), "{value}");
        }
    }

    #[test]
    fn line_feeds() {
        assert!(!has_bare_line_feed(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"));
        assert!(has_bare_line_feed(b"GET / HTTP/1.1\r\nHost: a\n\r\n"));
        assert!(has_bare_line_feed(b"GET / HTTP/1.1\nHost: a\r\n\r\n"));
    }
}
