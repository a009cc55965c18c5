//! The PROXY protocol, versions 1 and 2: the first bytes of a connection say who has connected to the proxy in front.
//! Only of trusted proxies, and only on listeners that say so: there it must come, else anybody could leave it out.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::os::fd::RawFd;
use std::sync::Arc;
use std::time::Duration;

use arc_swap::ArcSwap;
use async_trait::async_trait;
use pingora::apps::ServerApp;
use pingora::listeners::PreTlsProcess;
use pingora::protocols::l4::socket::SocketAddr as Socket;
use pingora::protocols::l4::stream::Stream as L4Stream;
use pingora::protocols::{GetSocketDigest, SocketDigest, Stream, UniqueID};
use pingora::proxy::{HttpProxy, ProxyHttp};
use pingora::server::ShutdownWatch;
use pingora::{Error, ErrorType};
use ppp::{HeaderResult, v1, v2};
use thiserror::Error;
use tokio::io::{AsyncRead, AsyncReadExt as _};

use super::Live;
use crate::metrics::Metrics;

/// How long the header may take; a proxy sends it at once.
const HEADER_WITHIN: Duration = Duration::from_secs(5);

/// What a header of version 2 begins with, and the length of its fixed part.
const SIGNATURE: &[u8; 12] = b"\r\n\r\n\0\r\nQUIT\n";
const FIXED: usize = 16;

/// The longest header of version 1, and the most of version 2 that is read: addresses and some extensions.
const LONGEST_LINE: usize = 107;
const MOST_BYTES: usize = 4_096;

/// Who has connected where the header names no address: a health check of the proxy, or what is no TCP.
const NOBODY: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::UNSPECIFIED), 0);

/// Why a connection is ended before its first request.
#[derive(Debug, Error, PartialEq, Eq)]
enum Refusal {
    #[error("{0} is no trusted proxy")]
    Untrusted(IpAddr),
    #[error("no PROXY protocol header: {0}")]
    Malformed(&'static str),
    #[error("it did not come in time, or the connection broke")]
    Missing,
}

/// Reads who has connected, where a listener says so.
pub struct ProxyProtocol {
    listeners: Vec<ProxiedListener>,
    live: Arc<ArcSwap<Live>>,
    metrics: Metrics,
}

/// A listener on which each connection begins with the header.
#[derive(Clone, Copy, Debug)]
pub struct ProxiedListener {
    /// Where.
    pub address: SocketAddr,
    /// Whether TLS comes after it.
    pub is_tls: bool,
}

impl ProxyProtocol {
    /// For `listeners`, from those whom what is in `live` trusts.
    pub fn new(listeners: Vec<ProxiedListener>, live: Arc<ArcSwap<Live>>, metrics: Metrics) -> Self {
        Self { listeners, live, metrics }
    }

    /// Whether no listener asks for it.
    pub fn is_unused(&self) -> bool {
        self.listeners.is_empty()
    }

    /// Whether a connection begins with the header, before TLS or without it.
    fn expects(&self, stream: &(impl GetSocketDigest + ?Sized), before_tls: bool) -> bool {
        if self.is_unused() {
            return false;
        }
        let local = stream.get_socket_digest().and_then(|digest| digest.local_addr()?.as_inet().copied());
        self.listeners.iter().any(|listener| {
            let is_there = |local: SocketAddr| {
                local.port() == listener.address.port()
                    && (listener.address.ip().is_unspecified() || listener.address.ip() == local.ip())
            };
            listener.is_tls == before_tls && local.is_some_and(is_there)
        })
    }

    /// Reads the header; from then on the connection is one of the client that it names.
    async fn read<S>(&self, stream: &mut S) -> Result<(), Refusal>
    where
        S: AsyncRead + GetSocketDigest + UniqueID + Unpin + Send + ?Sized,
    {
        let peer = stream.get_socket_digest().and_then(|digest| digest.peer_addr()?.as_inet().copied());
        let peer = peer.map_or(IpAddr::from([127, 0, 0, 1]), |peer| peer.ip());
        if !self.live.load().snapshot.trusts_proxy(peer) {
            return Err(Refusal::Untrusted(peer));
        }
        let header = tokio::time::timeout(HEADER_WITHIN, header(stream)).await;
        let header = header.map_err(|_| Refusal::Missing)??;
        // Whom it does not name is nobody: not the proxy, whose word on addresses counts.
        let client = client(&header)?.unwrap_or(NOBODY);
        let digest = SocketDigest::from_raw_fd(RawFd::from(stream.id()));
        let _ = digest.peer_addr.set(Some(Socket::Inet(client)));
        stream.set_socket_digest(digest);
        Ok(())
    }

    fn refused(&self, refusal: &Refusal) {
        self.metrics.rejected.with_label_values(&["proxy_protocol"]).inc();
        tracing::debug!(%refusal, "a connection without a PROXY protocol header that counts");
    }
}

#[async_trait]
impl PreTlsProcess for ProxyProtocol {
    async fn process(&self, stream: &mut L4Stream) -> pingora::Result<()> {
        if !self.expects(stream, true) {
            return Ok(());
        }
        self.read(stream).await.map_err(|refusal| {
            self.refused(&refusal);
            Error::explain(ErrorType::ConnectError, refusal.to_string())
        })
    }
}

/// A proxy whose connections may begin with the header.
pub struct Connections<SV> {
    proxy: Arc<HttpProxy<SV>>,
    first: Arc<ProxyProtocol>,
}

impl<SV> Connections<SV> {
    /// Connections of `proxy`.
    pub fn new(proxy: HttpProxy<SV>, first: Arc<ProxyProtocol>) -> Self {
        Self { proxy: Arc::new(proxy), first }
    }
}

#[async_trait]
impl<SV> ServerApp for Connections<SV>
where
    SV: ProxyHttp + Send + Sync + 'static,
    SV::CTX: Send + Sync,
{
    async fn process_new(self: &Arc<Self>, mut stream: Stream, shutdown: &ShutdownWatch) -> Option<Stream> {
        if self.first.expects(&*stream, false)
            && let Err(refusal) = self.first.read(&mut *stream).await
        {
            self.first.refused(&refusal);
            return None;
        }
        // All requests of a connection: the header comes once.
        let mut next = Some(stream);
        while let Some(stream) = next {
            next = self.proxy.process_new(stream, shutdown).await;
        }
        None
    }

    async fn cleanup(&self) {
        self.proxy.cleanup().await;
    }
}

/// The bytes of a header, and not one more: what follows is the client's.
async fn header(stream: &mut (impl AsyncRead + Unpin + ?Sized)) -> Result<Vec<u8>, Refusal> {
    let mut bytes = vec![0; SIGNATURE.len()];
    read(stream, &mut bytes).await?;
    if bytes == SIGNATURE {
        bytes.resize(FIXED, 0);
        read(stream, &mut bytes[SIGNATURE.len()..]).await?;
        let rest = usize::from(u16::from_be_bytes([bytes[14], bytes[15]]));
        if rest > MOST_BYTES {
            return Err(Refusal::Malformed("it is too long"));
        }
        bytes.resize(FIXED + rest, 0);
        read(stream, &mut bytes[FIXED..]).await?;
        return Ok(bytes);
    }
    if !bytes.starts_with(b"PROXY ") {
        return Err(Refusal::Malformed("other bytes came"));
    }
    while !bytes.ends_with(b"\r\n") {
        if bytes.len() >= LONGEST_LINE {
            return Err(Refusal::Malformed("its line does not end"));
        }
        let mut byte = [0];
        read(stream, &mut byte).await?;
        bytes.push(byte[0]);
    }
    Ok(bytes)
}

async fn read(stream: &mut (impl AsyncRead + Unpin + ?Sized), bytes: &mut [u8]) -> Result<(), Refusal> {
    stream.read_exact(bytes).await.map(drop).map_err(|_| Refusal::Missing)
}

/// Who the header says has connected; `None` if it says nobody.
fn client(header: &[u8]) -> Result<Option<SocketAddr>, Refusal> {
    let of = |ip: IpAddr, port| Ok(Some(SocketAddr::new(ip.to_canonical(), port)));
    match HeaderResult::parse(header) {
        HeaderResult::V1(Ok(header)) => match header.addresses {
            v1::Addresses::Tcp4(told) => of(told.source_address.into(), told.source_port),
            v1::Addresses::Tcp6(told) => of(told.source_address.into(), told.source_port),
            v1::Addresses::Unknown => Ok(None),
        },
        HeaderResult::V2(Ok(header)) if header.command == v2::Command::Local => Ok(None),
        HeaderResult::V2(Ok(header)) => match header.addresses {
            v2::Addresses::IPv4(told) => of(told.source_address.into(), told.source_port),
            v2::Addresses::IPv6(told) => of(told.source_address.into(), told.source_port),
            v2::Addresses::Unspecified | v2::Addresses::Unix(_) => Ok(None),
        },
        HeaderResult::V1(Err(_)) => Err(Refusal::Malformed("its line cannot be read")),
        HeaderResult::V2(Err(_)) => Err(Refusal::Malformed("its fields cannot be read")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The header's client, and the bytes that are left for the request.
    fn told(bytes: &[u8]) -> (Result<Option<String>, Refusal>, usize) {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let mut stream = bytes;
        let told = runtime.block_on(header(&mut stream)).and_then(|header| client(&header));
        (told.map(|client| client.map(|client| client.to_string())), stream.len())
    }

    fn version_2(command: u8, family: u8, rest: &[u8]) -> Vec<u8> {
        let length = (rest.len() as u16).to_be_bytes();
        [&SIGNATURE[..], &[0x20 | command, family], &length, rest, b"GET /"].concat()
    }

    #[test]
    fn both_versions_are_read_to_the_last_byte_and_no_further() {
        let some = |text: &str| Ok(Some(text.to_owned()));
        assert_eq!(told(b"PROXY TCP4 192.0.2.7 192.0.2.1 5000 80\r\nGET /"), (some("192.0.2.7:5000"), 5));
        assert_eq!(
            told(b"PROXY TCP6 2001:db8::7 2001:db8::1 5000 80\r\nGET /"),
            (some("[2001:db8::7]:5000"), 5)
        );
        assert_eq!(told(b"PROXY TCP6 ::ffff:192.0.2.7 ::1 5000 80\r\n"), (some("192.0.2.7:5000"), 0));
        assert_eq!(told(b"PROXY UNKNOWN\r\nGET /"), (Ok(None), 5));
        let v4 = [192, 0, 2, 7, 192, 0, 2, 1, 0x13, 0x88, 0, 80];
        assert_eq!(told(&version_2(1, 0x11, &v4)), (some("192.0.2.7:5000"), 5));
        let with_extension = [&v4[..], &[0x04, 0, 2, 1, 2]].concat();
        assert_eq!(told(&version_2(1, 0x11, &with_extension)), (some("192.0.2.7:5000"), 5));
        assert_eq!(told(&version_2(0, 0x11, &v4)), (Ok(None), 5), "LOCAL: a health check");
        assert_eq!(told(&version_2(0, 0, &[])), (Ok(None), 5));
    }

    #[test]
    fn what_is_no_header_is_refused() {
        let malformed = |bytes: &[u8]| matches!(told(bytes).0, Err(Refusal::Malformed(_)));
        for bytes in [
            &b"GET / HTTP/1.1\r\n\r\n"[..],
            b"PROXY TCP4 nonsense\r\n",
            b"PROXY TCP4 1.2.3.4 1.2.3.4 99999 80\r\n",
            b"proxy TCP4 1.2.3.4 1.2.3.4 1 80\r\n",
            &[&b"PROXY TCP4 "[..], &[b'1'; 200]].concat(),
            &version_2(1, 0x11, &[1, 2, 3]),
            &version_2(7, 0x11, &[0; 12]),
            &version_2(1, 0x11, &vec![0; 5_000]),
        ] {
            assert!(malformed(bytes), "{:?}", told(bytes));
        }
        assert_eq!(told(b"PROXY TCP4 1.2.3").0, Err(Refusal::Missing));
        assert_eq!(told(b"").0, Err(Refusal::Missing));
    }
}
