//! What the tests stand on: a Redis, gateways as processes, an upstream that counts, a client that
//! speaks raw HTTP, and a proxy that breaks connections on purpose.

pub mod client;
pub mod cluster;
pub mod fault_proxy;
pub mod gateway;
pub mod postgres;
pub mod redis;
pub mod sentinels;
pub mod upstream;
pub mod world;

use std::collections::HashMap;
use std::net::TcpListener;
use std::process::{Command, Stdio};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU16, Ordering};
use std::time::{Duration, Instant};

pub use client::{Connection, Response, get};
pub use fault_proxy::FaultProxy;
pub use gateway::Gateway;
pub use postgres::Postgres;
pub use redis::Redis;
pub use upstream::Upstream;

/// A port nobody listens on: below the range from which the system gives ports to connections.
pub fn free_port() -> u16 {
    static NEXT: AtomicU16 = AtomicU16::new(0);
    let base = 11_000 + (std::process::id() % 150) as u16 * 100;
    loop {
        let port = base + NEXT.fetch_add(1, Ordering::Relaxed) % 6_000;
        if TcpListener::bind(("127.0.0.1", port)).is_ok() {
            return port;
        }
    }
}

/// Whether a Docker engine answers and has the image. Asked once for each.
pub fn docker_has(image: &'static str) -> bool {
    static ANSWERS: Mutex<Option<HashMap<&str, bool>>> = Mutex::new(None);
    *ANSWERS.lock().unwrap().get_or_insert_default().entry(image).or_insert_with(|| {
        let has = std::env::var("TOLLGATE_TEST_DOCKER").as_deref() != Ok("0")
            && Command::new("docker")
                .args(["image", "inspect", image])
                .stdout(Stdio::null())
                .stderr(Stdio::null())
                .status()
                .is_ok_and(|status| status.success());
        eprintln!("{image}: {}", if has { "Testcontainers" } else { "processes" });
        has
    })
}

/// Waits until something holds, for 20 s at most.
#[track_caller]
pub fn eventually<T>(what: &str, mut probe: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + Duration::from_secs(20);
    loop {
        if let Some(value) = probe() {
            return value;
        }
        assert!(Instant::now() < deadline, "never came: {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Numbers from a seed, the same on every run with it (splitmix64).
pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// One of `0..below`.
    pub fn below(&mut self, below: u64) -> u64 {
        self.next() % below
    }

    /// One of `choices`.
    pub fn choose<T: Copy>(&mut self, choices: &[T]) -> T {
        choices[self.below(choices.len() as u64) as usize]
    }
}
