//! Listening sockets that are open before their services start.

use std::io;
use std::net::{SocketAddr, TcpListener};
use std::os::fd::IntoRawFd as _;

use async_trait::async_trait;
use pingora::server::{ListenFds, ShutdownWatch};
use pingora::services::Service;

use super::StartError;
use crate::config::fault::Placed;

/// A socket that listens, and where.
pub type Socket = (SocketAddr, TcpListener);

/// Opens a socket; at port 0 at a free one.
pub fn open(address: SocketAddr) -> io::Result<Socket> {
    let socket = TcpListener::bind(address)?;
    socket.set_nonblocking(true)?;
    Ok((socket.local_addr()?, socket))
}

/// A service whose sockets listen already. Whoever connects before it accepts waits in the queue of the
/// socket, and no service meets another one's closed port, in whatever order they start. Pingora would
/// open them by itself, one service at a time, and panic in a thread where it cannot.
pub(super) struct Listening<S> {
    service: S,
    sockets: Vec<Socket>,
}

impl<S> Listening<S> {
    pub(super) fn new(service: S, sockets: Vec<Socket>) -> Self {
        Self { service, sockets }
    }
}

/// Opens the sockets of some addresses.
pub(super) fn bind(
    addresses: impl IntoIterator<Item = Placed<SocketAddr>>,
) -> Result<Vec<Socket>, StartError> {
    let bind = |address: Placed<SocketAddr>| match open(address.value) {
        // As it is written: under these words the service asks for it.
        Ok((_, socket)) => Ok((address.value, socket)),
        Err(reason) => Err(StartError::Bind { address, reason }),
    };
    addresses.into_iter().map(bind).collect()
}

#[async_trait]
impl<S: Service> Service for Listening<S> {
    async fn start_service(
        &mut self,
        fds: Option<ListenFds>,
        shutdown: ShutdownWatch,
        listeners_per_fd: usize,
    ) {
        if let Some(fds) = &fds {
            // Pingora takes a socket that is listed under the address a service was given; it is the
            // owner from then on.
            for (address, socket) in self.sockets.drain(..) {
                fds.lock().add(address.to_string(), socket.into_raw_fd());
            }
        }
        self.service.start_service(fds, shutdown, listeners_per_fd).await;
    }

    fn name(&self) -> &str {
        self.service.name()
    }

    fn threads(&self) -> Option<usize> {
        self.service.threads()
    }

    fn listen_addresses(&self) -> Option<Vec<String>> {
        self.service.listen_addresses()
    }
}
