//! Keeps the rules of a database fresh, on a thread of its own: whatever it reads or rebuilds, requests
//! go on.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use pingora::server::ShutdownWatch;
use pingora::services::background::BackgroundService;
use tokio::sync::Mutex;

use crate::clock::{Clock, jittered};
use crate::reload::Reloader;
use crate::source::postgres::feed::Feed;

/// The first pause after a failure; doubled up to the last.
const FIRST_PAUSE: Duration = Duration::from_millis(100);
const LAST_PAUSE: Duration = Duration::from_secs(2);

/// How often is looked whether there is something to write to disk.
const KEEP_EVERY: Duration = Duration::from_secs(1);

pub(super) struct RulesService {
    pub(super) feed: Mutex<Feed>,
    pub(super) reloader: Arc<Reloader>,
    pub(super) clock: Arc<dyn Clock>,
}

#[async_trait]
impl BackgroundService for RulesService {
    async fn start(&self, mut shutdown: ShutdownWatch) {
        let mut feed = self.feed.lock().await;
        tokio::select! {
            () = self.follow(&mut feed) => {}
            () = self.keep() => {}
            _ = shutdown.changed() => {}
        }
        feed.disconnect();
    }
}

impl RulesService {
    async fn follow(&self, feed: &mut Feed) {
        let (mut pause, mut whole) = (FIRST_PAUSE, false);
        loop {
            match feed.read(whole).await {
                Ok(news) => {
                    self.reloader.news(news, self.clock.now());
                    pause = FIRST_PAUSE;
                    whole = tokio::select! {
                        () = feed.wait() => false,
                        () = self.reloader.reread_wanted() => true,
                    };
                }
                Err(error) => {
                    self.reloader.database_failed(&error);
                    tokio::time::sleep(jittered(pause)).await;
                    pause = (pause * 2).min(LAST_PAUSE);
                }
            }
        }
    }

    async fn keep(&self) {
        loop {
            tokio::time::sleep(KEEP_EVERY).await;
            let (reloader, now) = (Arc::clone(&self.reloader), self.clock.now());
            // A failure is logged where it arises.
            let _ = tokio::task::spawn_blocking(move || reloader.keep_on_disk(now)).await;
        }
    }
}
