//! Answers that the gateway makes itself: `application/problem+json` (RFC 9457), or the same as a
//! gRPC status for who speaks gRPC.

use std::borrow::Cow;
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderValue, Method, StatusCode, header};
use pingora::http::{RequestHeader, ResponseHeader};
use pingora::prelude::{Error, ErrorSource, ErrorType, Result};
use pingora::protocols::http::HttpTask;
use pingora::proxy::Session;
use serde::Serialize;
use smallvec::SmallVec;

use super::gate::Rejection;
use super::headers::{Values, retry_after};
use crate::decision::Decision;
use crate::identity::IdentityError;
use crate::limit::Outcome;
use crate::rule::{Checks, RuleId};

/// A body up to this size is read to its end after a refusal, and the connection goes on.
const READ_TO_THE_END: u64 = 64 * 1024;

/// How long a refused body is read for at most, so that its client sees the answer and not a reset.
const DRAIN_WITHIN: Duration = Duration::from_secs(5);

/// What nearly every body fits in.
const PROBLEM_BYTES: usize = 320;

const PROBLEM: HeaderValue = HeaderValue::from_static("application/problem+json");
const NO_STORE: HeaderValue = HeaderValue::from_static("no-store");

/// The body of an answer (RFC 9457).
#[derive(Serialize)]
struct Problem<'a> {
    #[serde(rename = "type")]
    kind: &'static str,
    title: &'static str,
    status: u16,
    detail: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    retry_after: Option<u64>,
    #[serde(rename = "violated-policies", skip_serializing_if = "<[&str]>::is_empty")]
    violated_policies: &'a [&'a str],
}

/// An answer of the gateway.
#[derive(Debug)]
pub struct Answer {
    status: StatusCode,
    kind: &'static str,
    detail: Cow<'static, str>,
    retry_after: Option<u64>,
    violated: SmallVec<[RuleId; 1]>,
    challenge: Option<String>,
    ends_connection: bool,
}

impl Answer {
    fn new(status: StatusCode, detail: impl Into<Cow<'static, str>>) -> Self {
        Self {
            status,
            kind: "about:blank",
            detail: detail.into(),
            retry_after: None,
            violated: SmallVec::new(),
            challenge: None,
            ends_connection: false,
        }
    }

    /// 429: over a limit.
    pub fn refused(checks: &Checks, decision: &Decision) -> Self {
        let over = || {
            let told = decision.verdicts.iter().zip(checks);
            told.filter(|(verdict, check)| check.votes() && !verdict.is_allowed())
        };
        let never = over().find(|(verdict, _)| verdict.outcome == Outcome::NeverFits);
        let detail: Cow<'static, str> = match never {
            Some((_, check)) => format!(
                "The cost {} is above the limit {}; it can never pass.",
                check.cost,
                check.limit.capacity()
            )
            .into(),
            None => "Too many requests; try again after the time in Retry-After.".into(),
        };
        Self {
            kind: "https://iana.org/assignments/http-problem-types#quota-exceeded",
            // A wait that would not help is not promised.
            retry_after: decision.retry_after_ms(checks).map(retry_after),
            violated: over()
                .filter(|(_, check)| !check.rule.is_hidden())
                .map(|(_, check)| check.rule.clone())
                .collect(),
            ..Self::new(StatusCode::TOO_MANY_REQUESTS, detail)
        }
    }

    /// 503: the store is away, and the rule does not guess.
    pub fn unavailable() -> Self {
        Self {
            kind: "https://iana.org/assignments/http-problem-types#temporary-reduced-capacity",
            retry_after: Some(1),
            ..Self::new(StatusCode::SERVICE_UNAVAILABLE, "The limit of this request cannot be checked now.")
        }
    }

    /// 404: no route.
    pub fn no_route() -> Self {
        Self::new(StatusCode::NOT_FOUND, "No route takes this host, path and method.")
    }

    /// 400, 401, 403 or 431: refused before any rule was asked.
    pub fn rejected(rejection: &Rejection) -> Self {
        let status = match rejection {
            Rejection::Identity(IdentityError::Missing(_) | IdentityError::Unknown(_)) => {
                StatusCode::UNAUTHORIZED
            }
            Rejection::Identity(IdentityError::Suspended) => StatusCode::FORBIDDEN,
            Rejection::Identity(IdentityError::TooLong(_)) => StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE,
            _ => StatusCode::BAD_REQUEST,
        };
        let challenge = match rejection {
            Rejection::Identity(IdentityError::Missing(header) | IdentityError::Unknown(header)) => {
                Some(format!("ApiKey realm=\"tollgate\", header=\"{header}\""))
            }
            _ => None,
        };
        let ends_connection = rejection.is_of_the_head();
        Self { challenge, ends_connection, ..Self::new(status, format!("{rejection}.")) }
    }

    /// Whether what comes next on the connection cannot be told from what is refused.
    pub fn ends_connection(&self) -> bool {
        self.ends_connection
    }

    /// The status code.
    pub fn status(&self) -> u16 {
        self.status.as_u16()
    }

    /// The head, without what every response carries, and the body: none for HEAD and for gRPC.
    pub fn render(&self, request: &RequestHeader) -> Result<(ResponseHeader, Option<Bytes>)> {
        if is_grpc(request) {
            return Ok((self.grpc_head()?, None));
        }
        let problem = self.problem();
        let mut values = Values::default();
        let mut head = ResponseHeader::build(self.status, Some(12))?;
        head.insert_header(header::CONTENT_TYPE, PROBLEM)?;
        head.insert_header(header::CACHE_CONTROL, NO_STORE)?;
        head.insert_header(header::CONTENT_LENGTH, values.number(problem.len() as u64)?)?;
        if let Some(seconds) = self.retry_after {
            head.insert_header("Retry-After", values.number(seconds)?)?;
        }
        if let Some(challenge) = &self.challenge {
            head.insert_header("WWW-Authenticate", challenge)?;
        }
        Ok((head, (request.method != Method::HEAD).then(|| problem.into())))
    }

    fn problem(&self) -> Vec<u8> {
        let violated: SmallVec<[&str; 1]> = self.violated.iter().map(RuleId::name).collect();
        let problem = Problem {
            kind: self.kind,
            title: self.status.canonical_reason().unwrap_or("Error"),
            status: self.status(),
            detail: &self.detail,
            retry_after: self.retry_after,
            violated_policies: &violated,
        };
        let mut text = Vec::with_capacity(PROBLEM_BYTES);
        // Texts and numbers can always be written.
        let _ = serde_json::to_writer(&mut text, &problem);
        text
    }

    /// A status only, as gRPC clients read it: HTTP 200 and the code in `grpc-status`.
    fn grpc_head(&self) -> Result<ResponseHeader> {
        let code = match self.status {
            StatusCode::TOO_MANY_REQUESTS => 8,
            StatusCode::UNAUTHORIZED => 16,
            StatusCode::FORBIDDEN => 7,
            StatusCode::NOT_FOUND => 12,
            StatusCode::BAD_REQUEST | StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE => 3,
            StatusCode::GATEWAY_TIMEOUT => 4,
            _ => 14,
        };
        let mut head = ResponseHeader::build(StatusCode::OK, Some(8))?;
        head.insert_header(header::CONTENT_TYPE, "application/grpc")?;
        head.insert_header("grpc-status", code.to_string())?;
        head.insert_header("grpc-message", self.detail.replace('%', "%25"))?;
        if let Some(seconds) = self.retry_after {
            head.insert_header("Retry-After", seconds)?;
        }
        Ok(head)
    }
}

/// What to answer when a request could not be proxied; `None` if nobody is there to be answered.
pub fn for_proxy_error(error: &Error) -> Option<Answer> {
    let status = match (error.etype(), error.esource()) {
        (ErrorType::HTTPStatus(code), _) => StatusCode::from_u16(*code).unwrap_or(StatusCode::BAD_GATEWAY),
        (ErrorType::ReadTimedout | ErrorType::WriteTimedout, ErrorSource::Upstream) => {
            StatusCode::GATEWAY_TIMEOUT
        }
        (_, ErrorSource::Upstream) => StatusCode::BAD_GATEWAY,
        (
            ErrorType::WriteError
            | ErrorType::ReadError
            | ErrorType::ConnectionClosed
            | ErrorType::WriteTimedout,
            ErrorSource::Downstream,
        ) => return None,
        (ErrorType::ReadTimedout, ErrorSource::Downstream) => StatusCode::REQUEST_TIMEOUT,
        (_, ErrorSource::Downstream) => StatusCode::BAD_REQUEST,
        _ => StatusCode::INTERNAL_SERVER_ERROR,
    };
    let detail = match status {
        StatusCode::BAD_GATEWAY => "The upstream could not be reached, or its answer could not be read.",
        StatusCode::GATEWAY_TIMEOUT => "The upstream did not answer in time.",
        _ => "The request could not be forwarded.",
    };
    Some(Answer::new(status, detail))
}

/// gRPC is spoken over HTTP/2 only; what names its content type over HTTP/1 wants an HTTP status.
fn is_grpc(request: &RequestHeader) -> bool {
    if request.version < http::Version::HTTP_2 {
        return false;
    }
    let kind = request.headers.get(header::CONTENT_TYPE).map(http::HeaderValue::as_bytes).unwrap_or_default();
    kind.starts_with(b"application/grpc") && !kind.starts_with(b"application/grpc-web")
}

/// Sends an answer, and sees to what the client may still be sending.
///
/// A small body is read to its end, so that it never becomes the next request of the connection. Of a
/// large one the rest is read too, but the connection ends: closing at once would reset it, and the
/// client might never see the answer. If it `ends`, the connection ends in any case.
pub async fn send(
    session: &mut Session,
    mut response: ResponseHeader,
    body: Option<Bytes>,
    ends: bool,
) -> Result<()> {
    let unread = !session.is_body_done();
    let is_http2 = session.req_header().version >= http::Version::HTTP_2;
    let goes_on = !ends && unread && body_is_small(session.req_header());
    if goes_on {
        session.set_close_on_response_before_downstream_finish(false);
        session.set_total_drain_timeout(Some(DRAIN_WITHIN));
    } else if unread || ends {
        session.set_keepalive(None);
        if !is_http2 {
            response.insert_header(header::CONNECTION, "close")?;
        }
    }
    match body {
        Some(body) => {
            session.write_response_header(Box::new(response), false).await?;
            session.write_response_body(Some(body), true).await?;
        }
        // As a task the end of the stream goes with the head, as gRPC clients expect it.
        None => drop(session.write_response_tasks(vec![HttpTask::Header(Box::new(response), true)]).await?),
    }
    // A stream of HTTP/2 that is left unread is reset, and some clients then do not tell the answer.
    if unread && (!goes_on || is_http2) {
        // Whether it ends, or the time is up: the answer has been sent.
        let _ = tokio::time::timeout(DRAIN_WITHIN, session.as_downstream_mut().drain_request_body()).await;
    }
    Ok(())
}

fn body_is_small(request: &RequestHeader) -> bool {
    let length =
        request.headers.get(header::CONTENT_LENGTH).and_then(|value| value.to_str().ok()?.parse().ok());
    length.is_some_and(|length: u64| length <= READ_TO_THE_END)
        && !request.headers.contains_key(header::EXPECT)
}
