//! Servers that serve the same, taken in turn.

use std::net::{SocketAddr, ToSocketAddrs as _};
use std::sync::atomic::{AtomicUsize, Ordering};

use pingora::prelude::HttpPeer;
use thiserror::Error;

use crate::config::fault::Place;
use crate::config::{self};

/// The servers of one upstream.
#[derive(Debug)]
pub struct Group {
    peers: Vec<HttpPeer>,
    turn: AtomicUsize,
}

/// A server whose name leads nowhere.
#[derive(Debug, Error)]
#[error("{place}: the server `{server}` cannot be resolved: {reason}")]
pub struct ResolveError {
    place: Place,
    server: Box<str>,
    reason: String,
}

impl Group {
    /// Looks up the addresses of the servers.
    pub fn resolve(written: &config::Upstream) -> Result<Self, ResolveError> {
        let mut peers = Vec::new();
        for server in &written.servers {
            let fail =
                |reason: String| ResolveError { place: server.place, server: server.value.clone(), reason };
            let addresses = server.value.to_socket_addrs().map_err(|error| fail(error.to_string()))?;
            let before = peers.len();
            peers.extend(addresses.map(|address| peer(address, written)));
            if peers.len() == before {
                return Err(fail("it has no address".into()));
            }
        }
        Ok(Self { peers, turn: AtomicUsize::new(0) })
    }

    /// The server whose turn it is.
    pub fn next(&self) -> Option<Box<HttpPeer>> {
        let turn = self.turn.fetch_add(1, Ordering::Relaxed);
        self.peers.get(turn % self.peers.len().max(1)).cloned().map(Box::new)
    }

    /// How many servers there are.
    pub fn len(&self) -> usize {
        self.peers.len()
    }

    /// Whether there is no server.
    pub fn is_empty(&self) -> bool {
        self.peers.is_empty()
    }
}

fn peer(address: SocketAddr, written: &config::Upstream) -> HttpPeer {
    let mut peer = HttpPeer::new(address, false, String::new());
    // Pingora's own default is to wait for ever.
    peer.options.connection_timeout = Some(written.connect_timeout);
    peer.options.total_connection_timeout = Some(written.connect_timeout);
    peer.options.read_timeout = Some(written.read_timeout);
    peer.options.write_timeout = Some(written.read_timeout);
    peer
}
