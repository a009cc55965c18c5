//! The wire gate: what two servers could read in two ways is refused, before anything is matched.

use std::borrow::Cow;

use http::{HeaderMap, Version, header};
use pingora::proxy::Session;
use thiserror::Error;

use crate::identity::IdentityError;
use crate::route::path::{self, PathError};

/// Why a request is refused before any rule is asked.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum Rejection {
    /// No usable Host.
    #[error("the request has no valid Host: expected exactly one host name, with or without a port")]
    Host,
    /// More than one way to tell where the body ends.
    #[error("the request says in two ways where its body ends: expected one Content-Length or one Transfer-Encoding")]
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
}

impl Rejection {
    /// The label in metrics.
    pub const fn reason(&self) -> &'static str {
        match self {
            Self::Host => "host",
            Self::Framing => "framing",
            Self::TransferEncoding => "transfer_encoding",
            Self::BareLineFeed => "bare_line_feed",
            Self::Path(_) => "path",
            Self::Identity(IdentityError::Missing(_)) => "no_tenant",
            Self::Identity(_) => "tenant",
        }
    }
}

/// Refuses what is ambiguous on the wire.
pub fn check(session: &Session) -> Result<(), Rejection> {
    let request = session.req_header();
    check_framing(&request.headers)?;
    if request.version < Version::HTTP_2 && has_bare_line_feed(&session.as_downstream().to_h1_raw()) {
        return Err(Rejection::BareLineFeed);
    }
    Ok(())
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
    head.first() == Some(&b'\n') || head.windows(2).any(|pair| pair[1] == b'\n' && pair[0] != b'\r')
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
    normal_host(written).ok_or(Rejection::Host)
}

fn normal_host(written: &str) -> Option<Cow<'_, str>> {
    let name = match written.strip_prefix('[') {
        Some(rest) => {
            let (address, port) = rest.split_once(']')?;
            address.parse::<std::net::Ipv6Addr>().ok()?;
            is_port(port.strip_prefix(':').unwrap_or(port)).then_some(&written[..address.len() + 2])?
        }
        None => match written.split_once(':') {
            Some((name, port)) => is_port(port).then_some(name)?,
            None => written,
        },
    };
    let name = name.strip_suffix('.').unwrap_or(name);
    let valid = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'.' | b'_' | b'[' | b']' | b':');
    if name.is_empty() || name.len() > 255 || !name.bytes().all(valid) {
        return None;
    }
    Some(if name.bytes().any(|byte| byte.is_ascii_uppercase()) {
        Cow::Owned(name.to_ascii_lowercase())
    } else {
        Cow::Borrowed(name)
    })
}

fn is_port(text: &str) -> bool {
    text.is_empty() || text.parse::<u16>().is_ok()
}

/// The path that a request is matched by and forwarded with.
pub fn path(uri: &http::Uri) -> Result<Cow<'_, str>, Rejection> {
    match uri.path() {
        // `OPTIONS *` asks about the server as a whole, and matches no route.
        "*" => Ok(Cow::Borrowed("*")),
        written => Ok(path::normalise(written)?),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hosts() {
        for (written, expect) in [
            ("Example.COM", Some("example.com")),
            ("example.com:8080", Some("example.com")),
            ("example.com.", Some("example.com")),
            ("127.0.0.1:1", Some("127.0.0.1")),
            ("[::1]:80", Some("[::1]")),
            ("[::1]", Some("[::1]")),
            ("", None),
            (":80", None),
            ("a b", None),
            ("a/../b?c", None),
            ("user@host", None),
            ("host:99999", None),
            ("host:x", None),
            ("[::1", None),
            ("[zz]", None),
        ] {
            assert_eq!(normal_host(written).as_deref(), expect, "{written:?}");
        }
    }

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
        assert_eq!(headers(&[(coding.clone(), "chunked"), (coding.clone(), "chunked")]), Err(Rejection::Framing));
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
