//! `tollgate healthcheck`: a container image needs no other HTTP client for it.

use std::io::{Read as _, Write as _};
use std::net::{TcpStream, ToSocketAddrs as _};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context as _;

const WITHIN: Duration = Duration::from_secs(2);

pub(super) fn run(url: &str) -> anyhow::Result<ExitCode> {
    let rest = url.strip_prefix("http://").context("expected a URL such as http://127.0.0.1:9090/healthz")?;
    let (host, path) = rest.split_once('/').unwrap_or((rest, ""));
    let address = host.to_socket_addrs().with_context(|| format!("expected host:port in {url}"))?.next();
    let address = address.with_context(|| format!("{host} has no address"))?;
    let mut stream =
        TcpStream::connect_timeout(&address, WITHIN).with_context(|| format!("{host} does not listen"))?;
    stream.set_read_timeout(Some(WITHIN))?;
    stream.set_write_timeout(Some(WITHIN))?;
    write!(stream, "GET /{path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n")?;
    let mut status_line = [0; 12];
    stream.read_exact(&mut status_line).with_context(|| format!("{url} does not answer"))?;
    let status = String::from_utf8_lossy(&status_line[9..]).into_owned();
    anyhow::ensure!(status == "200", "{url} answers {status}");
    Ok(ExitCode::SUCCESS)
}
