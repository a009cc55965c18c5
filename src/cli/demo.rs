//! `tollgate demo`: a gateway that needs nothing else.

use std::net::Ipv4Addr;
use std::process::ExitCode;

use anyhow::Context as _;
use async_trait::async_trait;
use clap::Args;
use http::{Response, header};
use pingora::apps::http_app::ServeHttp;
use pingora::protocols::http::ServerSession;
use serde_json::json;
use tokio::net::TcpSocket;

use crate::config::{Level, LogFormat};
use crate::server::{self, Setup};
use crate::{logging, source};

/// Where the demo listens.
#[derive(Debug, Args)]
pub(super) struct Demo {
    /// The port for traffic, on loopback.
    #[arg(long, default_value_t = 8080)]
    port: u16,
    /// The port of the admin listener, on loopback.
    #[arg(long, default_value_t = 9090)]
    admin_port: u16,
}

impl Demo {
    pub(super) fn run(self) -> anyhow::Result<ExitCode> {
        anyhow::ensure!(self.port != self.admin_port, "--port and --admin-port are both {}", self.port);
        for (port, flag) in [(self.port, "--port"), (self.admin_port, "--admin-port")] {
            anyhow::ensure!(port > 0, "{flag} 0 is no port");
            may_listen(port)
                .with_context(|| format!("cannot listen on port {port}; choose another one with {flag}"))?;
        }
        let echo =
            server::open((Ipv4Addr::LOCALHOST, 0).into()).context("no free port for the echo upstream")?;
        let text = include_str!("demo.yaml")
            .replace("8080", &self.port.to_string())
            .replace("9090", &self.admin_port.to_string())
            .replace("9001", &echo.0.port().to_string());
        let loaded = source::load(&text, &|_| None)
            .map_err(|faults| anyhow::anyhow!("the demo's own configuration has faults: {faults:?}"))?;
        let log_level = logging::start(Level::Warn, LogFormat::Text);
        self.introduce();
        server::run_with(Setup { loaded, path: None, log_level }, Some((echo, Echo)))
            .context("the demo did not start")?;
        Ok(ExitCode::SUCCESS)
    }

    fn introduce(&self) {
        let Self { port, admin_port } = self;
        println!(
            "Tollgate demo: traffic on http://127.0.0.1:{port}, dashboard on http://127.0.0.1:{admin_port}
Memory store, embedded echo upstream. Three things to try:

1. A limit. shop-a may create 2 orders at once, then one each 2 seconds; the third answers 429:
   for i in 1 2 3; do curl -si -X POST -H 'X-Api-Key: shop-a' http://127.0.0.1:{port}/orders; echo; done

2. Everybody else has the default (20 at once, 10 per second), each tenant for itself:
   for i in $(seq 25); do curl -s -o /dev/null -w '%{{http_code}} ' -H 'X-Api-Key: somebody' http://127.0.0.1:{port}/items/$i; done; echo

3. What was decided, and why:
   curl -s http://127.0.0.1:{admin_port}/metrics | grep tollgate_decisions_total

Ctrl-C ends it."
        );
    }
}

/// Whether a port is free, without listening on it: somebody who waits for the demo would be let in and
/// thrown out again.
fn may_listen(port: u16) -> std::io::Result<()> {
    let socket = TcpSocket::new_v4()?;
    socket.set_reuseaddr(true)?;
    socket.bind((Ipv4Addr::LOCALHOST, port).into())
}

/// An upstream that answers with what it was asked.
struct Echo;

#[async_trait]
impl ServeHttp for Echo {
    async fn response(&self, session: &mut ServerSession) -> Response<Vec<u8>> {
        let mut received = 0;
        while let Ok(Some(chunk)) = session.read_request_body().await {
            received += chunk.len();
        }
        let request = session.req_header();
        let body = json!({
            "method": request.method.as_str(),
            "path": request.uri.path(),
            "query": request.uri.query(),
            "body_bytes": received,
        });
        let body = format!("{body}\n").into_bytes();
        let length = body.len();
        let mut response = Response::new(body);
        let headers = response.headers_mut();
        headers.insert(header::CONTENT_TYPE, http::HeaderValue::from_static("application/json"));
        headers.insert(header::CONTENT_LENGTH, http::HeaderValue::from(length));
        response
    }
}
