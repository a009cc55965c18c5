//! The traffic service: the proxy, with the store's driver and the limiter's way back on the same runtime.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::time::Duration;

use async_trait::async_trait;
use pingora::server::{ListenFds, ShutdownWatch};
use pingora::services::Service;

use crate::limiter::Limiter;
use crate::store::Store;
use crate::store::redis::Driver;

/// How long the first request may have to wait for the first connection to the store.
const WAIT_FOR_STORE: Duration = Duration::from_secs(1);

/// The proxy and the driver of its store.
pub(super) struct Traffic<S> {
    pub(super) proxy: S,
    pub(super) store: Arc<dyn Store>,
    pub(super) limiter: Arc<Limiter>,
    pub(super) driver: Option<Driver>,
    /// Set when requests are taken.
    pub(super) started: Arc<AtomicBool>,
    pub(super) ended: mpsc::Sender<Result<(), String>>,
}

#[async_trait]
impl<S: Service> Service for Traffic<S> {
    async fn start_service(
        &mut self,
        fds: Option<ListenFds>,
        shutdown: ShutdownWatch,
        listeners_per_fd: usize,
    ) {
        let limiter = Arc::clone(&self.limiter);
        tokio::spawn(async move { tokio::join!(limiter.keep_permits(), limiter.keep_leasing()) });
        if let Some(driver) = self.driver.take() {
            // Here, because this is the runtime of the proxy: a driver on another one would pay for a
            // thread's waking with each flight.
            let unfit = driver.unfit();
            tokio::spawn(driver.run());
            let limiter = Arc::clone(&self.limiter);
            tokio::spawn(async move { limiter.keep_recovering().await });
            let connected = async {
                while !self.store.is_up() && unfit.get().is_none() {
                    tokio::time::sleep(Duration::from_millis(2)).await;
                }
            };
            // Without a store it begins all the same, on the fallback.
            let _ = tokio::time::timeout(WAIT_FOR_STORE, connected).await;
            if let Some(why) = unfit.get() {
                let _ = self.ended.send(Err(why.clone()));
                return;
            }
        }
        self.started.store(true, Ordering::Relaxed);
        self.proxy.start_service(fds, shutdown, listeners_per_fd).await;
    }

    fn name(&self) -> &str {
        self.proxy.name()
    }

    fn threads(&self) -> Option<usize> {
        self.proxy.threads()
    }

    fn listen_addresses(&self) -> Option<Vec<String>> {
        self.proxy.listen_addresses()
    }
}
