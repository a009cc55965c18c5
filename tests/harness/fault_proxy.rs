//! A TCP proxy that breaks what passes through it, on purpose.

use std::io::{Read as _, Write as _};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

pub struct FaultProxy {
    pub port: u16,
    faults: Arc<Faults>,
}

#[derive(Default)]
struct Faults {
    delay_ms: AtomicU64,
    swallow_replies: AtomicBool,
    black_hole: AtomicBool,
    connections: AtomicU64,
}

impl FaultProxy {
    pub fn to(port: u16) -> Self {
        let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
        let own_port = listener.local_addr().unwrap().port();
        let faults = Arc::new(Faults::default());
        let shared = Arc::clone(&faults);
        thread::spawn(move || {
            for client in listener.incoming().flatten() {
                shared.connections.fetch_add(1, Ordering::SeqCst);
                let Ok(server) = TcpStream::connect(("127.0.0.1", port)) else { continue };
                for stream in [&client, &server] {
                    let _ = stream.set_nodelay(true);
                }
                let (from, to, faults) =
                    (client.try_clone().unwrap(), server.try_clone().unwrap(), Arc::clone(&shared));
                thread::spawn(move || copy(from, to, &faults, false));
                let faults = Arc::clone(&shared);
                thread::spawn(move || copy(server, client, &faults, true));
            }
        });
        Self { port: own_port, faults }
    }

    /// Every chunk towards the server arrives this much later.
    pub fn delay(&self, by: Duration) {
        self.faults.delay_ms.store(by.as_millis() as u64, Ordering::SeqCst);
    }

    /// Commands reach the server, replies never the client.
    pub fn swallow_replies(&self, swallow: bool) {
        self.faults.swallow_replies.store(swallow, Ordering::SeqCst);
    }
}

impl FaultProxy {
    /// Connections so far.
    pub fn connections(&self) -> u64 {
        self.faults.connections.load(Ordering::SeqCst)
    }

    /// Nothing arrives anywhere, and nobody is told: as behind a firewall that drops.
    pub fn black_hole(&self, on: bool) {
        self.faults.black_hole.store(on, Ordering::SeqCst);
    }
}

fn copy(mut from: TcpStream, mut to: TcpStream, faults: &Faults, replies: bool) {
    let mut buffer = vec![0; 64 * 1024];
    while let Ok(length) = from.read(&mut buffer) {
        if length == 0 {
            break;
        }
        if faults.black_hole.load(Ordering::SeqCst) {
            continue;
        }
        if replies && faults.swallow_replies.load(Ordering::SeqCst) {
            continue;
        }
        if !replies {
            thread::sleep(Duration::from_millis(faults.delay_ms.load(Ordering::SeqCst)));
        }
        if to.write_all(&buffer[..length]).is_err() {
            break;
        }
    }
    let _ = to.shutdown(Shutdown::Both);
}
