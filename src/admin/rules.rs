//! `/api/v1/rules`, `/api/v1/plan-rules` and `/api/v1/versions`: what holds, and changes of what the
//! database says.

mod body;
mod listing;

use std::borrow::Cow;
use std::str::FromStr;

use http::{HeaderMap, HeaderValue, Method, Response, StatusCode, header};
use percent_encoding::percent_decode_str;
use pingora::protocols::http::ServerSession;
use serde_json::json;

use super::{Admin, READ, json_response, not_allowed};
use crate::config::{self, Row};
use crate::source;
use crate::source::postgres::write::{Address, Author, Condition, Writer};
use crate::source::postgres::{DatabaseError, Table};

/// The largest body that is read.
const LARGEST_BODY: usize = 64 << 20;

/// As many rows of an import are told of that cannot be served.
const MOST_FAULTS: usize = 100;

/// A request that this part answers.
struct Call<'a> {
    method: Method,
    segments: Vec<Cow<'a, str>>,
    query: Vec<(Cow<'a, str>, Cow<'a, str>)>,
    headers: HeaderMap,
    who: String,
}

/// Whether this part answers `path`.
pub(super) fn takes(path: &str) -> bool {
    ["/api/v1/rules", "/api/v1/plan-rules", "/api/v1/versions"]
        .iter()
        .any(|root| path.strip_prefix(root).is_some_and(|rest| rest.is_empty() || rest.starts_with('/')))
}

/// Answers.
pub(super) async fn answer(admin: &Admin, session: &mut ServerSession) -> Response<Vec<u8>> {
    let request = session.req_header();
    let (uri, method, headers) = (request.uri.clone(), request.method.clone(), request.headers.clone());
    let reads = matches!(method, Method::GET | Method::HEAD);
    if !reads && let Err(refusal) = admin.authorized(headers.get(header::AUTHORIZATION)) {
        return *refusal;
    }
    let client = session.client_addr().map(ToString::to_string).unwrap_or_default();
    let path = uri.path().trim_start_matches("/api/v1/");
    let segments: Result<Vec<_>, _> =
        path.split('/').map(|segment| percent_decode_str(segment).decode_utf8()).collect();
    let Ok(segments) = segments else {
        return ApiError::Other(StatusCode::BAD_REQUEST, "the path: expected UTF-8".into()).response();
    };
    let call = Call {
        method,
        segments,
        query: form_urlencoded::parse(uri.query().unwrap_or_default().as_bytes()).collect(),
        headers,
        who: format!("admin API, {client}"),
    };
    let body = if reads { Ok(Vec::new()) } else { whole_body(session).await };
    let answer = match body {
        Ok(body) => call.answer(admin, &body).await,
        Err(error) => Err(error),
    };
    answer.unwrap_or_else(ApiError::response)
}

/// Why there is no answer.
enum ApiError {
    Database(DatabaseError),
    /// The methods that there are.
    Method(&'static str),
    /// The status, and what to say.
    Other(StatusCode, String),
}

impl From<DatabaseError> for ApiError {
    fn from(error: DatabaseError) -> Self {
        Self::Database(error)
    }
}

impl ApiError {
    fn bad(message: impl Into<String>) -> Self {
        Self::Other(StatusCode::UNPROCESSABLE_ENTITY, message.into())
    }

    fn response(self) -> Response<Vec<u8>> {
        let (status, message) = match self {
            Self::Method(allowed) => return not_allowed(allowed),
            Self::Other(status, message) => (status, message),
            Self::Database(error) => {
                let status = match error {
                    DatabaseError::NotFound(_) => StatusCode::NOT_FOUND,
                    DatabaseError::Changed(_) => StatusCode::PRECONDITION_FAILED,
                    DatabaseError::Invalid(_) => StatusCode::UNPROCESSABLE_ENTITY,
                    DatabaseError::Address(_)
                    | DatabaseError::NotMigrated(_)
                    | DatabaseError::Failed(_)
                    | DatabaseError::Late(_) => StatusCode::SERVICE_UNAVAILABLE,
                };
                (status, error.to_string())
            }
        };
        json_response(status, &json!({ "error": message }))
    }
}

type Answer = Result<Response<Vec<u8>>, ApiError>;

impl Call<'_> {
    async fn answer(&self, admin: &Admin, body: &[u8]) -> Answer {
        let segments: Vec<&str> = self.segments.iter().map(|segment| &**segment).collect();
        let method = if self.method == Method::HEAD { &Method::GET } else { &self.method };
        match (method, &segments[..]) {
            (&Method::GET, ["rules"]) => self.list(admin),
            (&Method::GET, ["rules", "export"]) => self.export(admin).await,
            (&Method::POST, ["rules", "import"]) => self.import(admin, body).await,
            (&Method::GET, ["versions"]) => {
                let most: u32 = self.number("limit")?.unwrap_or(50);
                let versions = writer(admin)?.versions(most.clamp(1, 10_000)).await?;
                Ok(json_response(StatusCode::OK, &json!({ "versions": versions })))
            }
            (&Method::GET, ["versions", "diff"]) => {
                let side = |name: &str| -> Result<i64, ApiError> {
                    let number = self.number(name)?;
                    number.ok_or_else(|| ApiError::bad(format!("{name}: expected the number of a version")))
                };
                let changes = writer(admin)?.diff(side("from")?, side("to")?).await?;
                Ok(json_response(StatusCode::OK, &json!({ "changes": changes })))
            }
            (&Method::POST, ["versions", version, "rollback"]) => {
                let version =
                    version.parse().map_err(|_| ApiError::bad("expected the number of a version"))?;
                let what = format!("rollback to {version}");
                let made = writer(admin)?.rollback(version, &self.author(&what)).await?;
                Ok(done(made))
            }
            (_, [table @ ("rules" | "plan-rules"), holder, route]) => {
                let table = if *table == "rules" { Table::Rules } else { Table::PlanRules };
                self.one(admin, &Address { table, holder, route }, body).await
            }
            (_, ["rules" | "versions"] | ["rules", "export"] | ["versions", "diff"]) => {
                Err(ApiError::Method(READ))
            }
            (_, ["rules", "import"] | ["versions", _, "rollback"]) => Err(ApiError::Method("POST")),
            _ => Err(ApiError::Other(StatusCode::NOT_FOUND, "not found".into())),
        }
    }

    /// One rule of the database: GET, PUT, DELETE.
    async fn one(&self, admin: &Admin, address: &Address<'_>, body: &[u8]) -> Answer {
        let writer = writer(admin)?;
        let what = format!("{} {} {} {}", self.method, address.table.name(), address.holder, address.route);
        let condition = || self.condition();
        let stored = match self.method {
            Method::GET | Method::HEAD => writer.get(address).await?,
            Method::PUT => {
                let row = row(address, body)?;
                expect_served(admin, std::slice::from_ref(&row))?;
                writer.put_if(&row, &condition()?, &self.author(&what)).await?
            }
            Method::DELETE => {
                return Ok(done(writer.delete(address, &condition()?, &self.author(&what)).await?));
            }
            _ => return Err(ApiError::Method("GET, HEAD, PUT, DELETE")),
        };
        let mut response = json_response(StatusCode::OK, &stored.rule);
        if let Ok(etag) = HeaderValue::from_str(&stored.etag) {
            response.headers_mut().insert(header::ETAG, etag);
        }
        Ok(response)
    }

    async fn export(&self, admin: &Admin) -> Answer {
        let rules = writer(admin)?.list().await?;
        // What cannot be served could not be read again either.
        let rows: Vec<_> = rules.into_iter().filter(|rule| rule["fault"].is_null()).collect();
        Ok(json_response(StatusCode::OK, &json!({ "rows": rows })))
    }

    async fn import(&self, admin: &Admin, body: &[u8]) -> Answer {
        let text = std::str::from_utf8(body).map_err(|_| ApiError::bad("expected UTF-8 text"))?;
        let text = text.to_owned();
        // A large file takes a while, in which others are answered.
        let read = tokio::task::spawn_blocking(move || config::read_rows(&text, &|_| None)).await;
        let read = read.map_err(|_| ApiError::bad("the reading was cut off"))?;
        let rows = read.map_err(|faults| {
            let faults: Vec<String> = faults.iter().map(ToString::to_string).collect();
            ApiError::bad(faults.join("; "))
        })?;
        expect_served(admin, &rows)?;
        let what = format!("import of {} rows", rows.len());
        let made = writer(admin)?.put(&rows, &self.author(&what)).await?;
        Ok(done(made))
    }

    fn author<'a>(&'a self, what: &'a str) -> Author<'a> {
        Author { who: &self.who, what }
    }

    /// What the request says of how the rule must be.
    fn condition(&self) -> Result<Condition, ApiError> {
        let list = |name: header::HeaderName| -> Result<Option<Vec<String>>, ApiError> {
            let mut etags = Vec::new();
            for value in self.headers.get_all(&name) {
                let value = value.to_str().map_err(|_| ApiError::bad(format!("{name}: expected ETags")))?;
                etags.extend(value.split(',').map(|etag| etag.trim().to_owned()));
            }
            Ok((!etags.is_empty()).then_some(etags))
        };
        let is_new = match list(header::IF_NONE_MATCH)? {
            None => false,
            Some(etags) if etags == ["*"] => true,
            Some(_) => return Err(ApiError::bad("If-None-Match: expected *")),
        };
        Ok(Condition { one_of: list(header::IF_MATCH)?, is_new })
    }

    fn text(&self, name: &str) -> Option<&str> {
        self.query.iter().find(|(key, _)| key == name).map(|(_, value)| &**value)
    }

    fn number<T: FromStr>(&self, name: &str) -> Result<Option<T>, ApiError> {
        let parse = |text: &str| {
            text.parse().map_err(|_| ApiError::bad(format!("{name}: expected a whole number, got `{text}`")))
        };
        self.text(name).map(parse).transpose()
    }
}

fn done(version: Option<i64>) -> Response<Vec<u8>> {
    json_response(StatusCode::OK, &json!({ "version": version }))
}

/// The one writer of this listener, so that its calls share few connections.
fn writer(admin: &Admin) -> Result<Writer, ApiError> {
    if let Some(writer) = admin.writer.get() {
        return Ok(writer.clone());
    }
    let Some(settings) = admin.reloader.database_settings() else {
        let message = "rules.database.url is not set: rules come from the file alone";
        return Err(ApiError::Other(StatusCode::CONFLICT, message.into()));
    };
    let writer = Writer::new(&settings.url.value)?;
    Ok(admin.writer.get_or_init(|| writer).clone())
}

/// The row that a body says for the rule at `address`.
fn row(address: &Address<'_>, body: &[u8]) -> Result<Row, ApiError> {
    let mut fields = body::object(body).map_err(ApiError::bad)?;
    let (holder, other) = if address.table == Table::Rules { ("tenant", "plan") } else { ("plan", "tenant") };
    if fields.contains_key(other) {
        return Err(ApiError::bad(format!("{other}: the address names a {holder}")));
    }
    for (name, value) in [(holder, address.holder), ("route", address.route)] {
        if fields.get(name).is_some_and(|given| given != value) {
            return Err(ApiError::bad(format!("{name}: is not the one of the address, `{value}`")));
        }
        fields.insert(name.into(), value.into());
    }
    source::row_from_json(&fields.into()).map_err(ApiError::bad)
}

/// A row that no gateway could serve is not written: its author would wait for it in vain.
fn expect_served(admin: &Admin, rows: &[Row]) -> Result<(), ApiError> {
    let live = admin.live.load();
    let refused = rows.iter().enumerate().filter_map(|(index, row)| {
        let route = row.route.as_ref().map(|route| &*route.value);
        let reason = live.snapshot.route_of_row(route, &row.terms.value).err()?;
        Some(if rows.len() == 1 { reason } else { format!("rows[{index}]: {reason}") })
    });
    let refused: Vec<String> = refused.take(MOST_FAULTS).collect();
    if refused.is_empty() { Ok(()) } else { Err(ApiError::bad(refused.join("; "))) }
}

async fn whole_body(session: &mut ServerSession) -> Result<Vec<u8>, ApiError> {
    let mut body = Vec::new();
    while let Some(chunk) =
        session.read_request_body().await.map_err(|error| ApiError::bad(error.to_string()))?
    {
        if body.len() + chunk.len() > LARGEST_BODY {
            let message = format!("expected at most {LARGEST_BODY} bytes");
            return Err(ApiError::Other(StatusCode::PAYLOAD_TOO_LARGE, message));
        }
        body.extend_from_slice(&chunk);
    }
    Ok(body)
}
