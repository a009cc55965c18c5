//! Reloading the configuration while traffic flows: all of it or none of it. And the rules of a database,
//! which come by themselves.

mod database;

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use arc_swap::ArcSwap;
use thiserror::Error;

use crate::book::Book;
use crate::config::fault::Fault;
use crate::config::{Config, Rules, env};
use crate::logging::LogLevel;
use crate::metrics::Metrics;
use crate::proxy::Live;
use crate::proxy::upstream::ResolveError;
use crate::source::certificates::Certificates;
use crate::source::{self, Loaded, ReadError};
use crate::store::redis::RedisStore;

/// Swaps in what the configuration file says now.
pub struct Reloader {
    /// The store, where it can be told otherwise who the gateway is.
    redis: Option<Arc<RedisStore>>,
    /// The certificates of the listeners.
    certificates: Arc<Certificates>,
    path: Option<PathBuf>,
    live: Arc<ArcSwap<Live>>,
    /// What the process started with: what cannot change without a restart is compared with this.
    started_with: Config,
    log_level: LogLevel,
    metrics: Metrics,
    /// What the database says. Held during a reload: one at a time.
    book: Mutex<Book>,
    /// What was served before, until no request holds it any more.
    retired: Mutex<Vec<Arc<Live>>>,
    database: database::State,
    /// Why the last one was rejected. Never held for long: the admin listener reads it.
    last_error: Mutex<Option<String>>,
    /// What the file says otherwise than what runs, until a restart.
    needs_restart: Mutex<Vec<&'static str>>,
}

/// A reload that was applied.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Applied {
    /// The revision that is served now.
    pub revision: u64,
    /// Sections that differ from what runs, and wait for a restart.
    pub needs_restart: Vec<&'static str>,
}

/// Why a reload changed nothing.
#[derive(Debug, Error)]
pub enum ReloadError {
    /// There is no file to read again.
    #[error("this process was started without a configuration file")]
    NoFile,
    /// The file cannot be read.
    #[error(transparent)]
    Read(#[from] ReadError),
    /// The file has faults.
    #[error("{} has {} faults: {}", path.display(), faults.len(), list(faults))]
    Faults {
        /// The file.
        path: PathBuf,
        /// Each fault.
        faults: Vec<Fault>,
    },
    /// A server cannot be resolved.
    #[error("{}:{error}", path.display())]
    Resolve {
        /// The file.
        path: PathBuf,
        /// Which server and why.
        error: ResolveError,
    },
}

impl Reloader {
    /// A reloader of `path` into `live`.
    pub fn new(
        path: Option<&Path>,
        live: Arc<ArcSwap<Live>>,
        started_with: Config,
        redis: Option<Arc<RedisStore>>,
        certificates: Arc<Certificates>,
        log_level: LogLevel,
        metrics: Metrics,
    ) -> Self {
        Self {
            redis,
            certificates,
            path: path.map(Into::into),
            live,
            database: database::State::new(started_with.rules.database.clone()),
            // Its rows are in the snapshot.
            started_with: Config { rules: Rules { rows: Vec::new(), ..started_with.rules }, ..started_with },
            log_level,
            metrics,
            book: Mutex::default(),
            retired: Mutex::default(),
            last_error: Mutex::default(),
            needs_restart: Mutex::default(),
        }
    }

    /// Reads the file and serves what it says; or changes nothing, and tells every fault.
    pub fn reload(&self) -> Result<Applied, ReloadError> {
        let book = self.book.lock().unwrap_or_else(PoisonError::into_inner);
        let result = self.try_reload(&book);
        drop(book);
        if result.is_ok() {
            // Whoever reloads wants to see what there is: also what no notification has told of.
            self.database.reread.notify_one();
        }
        *self.last_error.lock().unwrap_or_else(PoisonError::into_inner) =
            result.as_ref().err().map(ToString::to_string);
        match &result {
            Ok(applied) => {
                self.needs_restart
                    .lock()
                    .unwrap_or_else(PoisonError::into_inner)
                    .clone_from(&applied.needs_restart);
                self.metrics.reloads.with_label_values(&["applied"]).inc();
                tracing::info!(
                    revision = applied.revision,
                    needs_restart = applied.needs_restart.join(", "),
                    "configuration reloaded"
                );
            }
            Err(error) => {
                self.metrics.reloads.with_label_values(&["rejected"]).inc();
                tracing::error!(%error, "configuration not reloaded, the old one goes on");
            }
        }
        result
    }

    /// Puts `live` in the place of what is served, which is kept until no request holds it: the last one to
    /// let go of half a million rules takes them apart, and that must not be a request.
    fn swap(&self, live: Live) {
        let old = self.live.swap(Arc::new(live));
        self.retired.lock().unwrap_or_else(PoisonError::into_inner).push(old);
        self.sweep();
    }

    /// Lets go of what was served before and no request holds.
    pub fn sweep(&self) {
        let mut retired = self.retired.lock().unwrap_or_else(PoisonError::into_inner);
        let (held, free) =
            std::mem::take(&mut *retired).into_iter().partition(|live| Arc::strong_count(live) > 1);
        *retired = held;
        drop(retired);
        let free: Vec<Arc<Live>> = free;
        drop(free);
    }

    /// Why the last reload was rejected, if it was.
    pub fn last_error(&self) -> Option<String> {
        self.last_error.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Sections that the file says otherwise than what runs, until a restart.
    pub fn needs_restart(&self) -> Vec<&'static str> {
        self.needs_restart.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn try_reload(&self, book: &Book) -> Result<Applied, ReloadError> {
        let path = self.path.as_ref().ok_or(ReloadError::NoFile)?;
        let text = source::file::read(path)?;
        let revision = self.live.load().snapshot.revision + 1;
        let faulty = |faults| ReloadError::Faults { path: path.clone(), faults };
        let Loaded { config, snapshot, certificates } =
            source::load_again(&text, &env::process, book, revision, &self.started_with).map_err(faulty)?;
        let live = Live::new(&config, snapshot, &self.metrics)
            .map_err(|error| ReloadError::Resolve { path: path.clone(), error })?;
        let needs_restart = needs_restart(&self.started_with, &config);
        // Who the gateway is elsewhere is no business of the place where it is.
        let place = |config: &Config| config.store.redis.as_ref().map(RedisStore::place);
        if let (Some(store), Some(redis)) = (&self.redis, &config.store.redis)
            && place(&self.started_with) == place(&config)
        {
            store.change_access(redis).map_err(|error| faulty(vec![error.into()]))?;
        }
        self.certificates.become_like(&certificates);
        self.log_level.set(config.log.level);
        self.serve(live, None);
        Ok(Applied { revision, needs_restart })
    }
}

/// What a running process cannot change: it is said, not silently left.
fn needs_restart(running: &Config, new: &Config) -> Vec<&'static str> {
    let addresses = |config: &Config| -> Vec<_> {
        config
            .listeners
            .iter()
            .map(|listener| (listener.address.value, listener.tls.is_empty(), listener.proxy_protocol))
            .collect()
    };
    // Who the gateway is there may change, where it is may not.
    let redis = |config: &Config| config.store.redis.as_ref().map(RedisStore::place);
    let mut sections = Vec::new();
    let mut compare = |differs: bool, section| {
        if differs {
            sections.push(section);
        }
    };
    compare(running.threads != new.threads, "threads");
    compare(running.drain != new.drain, "drain");
    compare(addresses(running) != addresses(new), "listeners");
    compare(
        running.admin.address.value != new.admin.address.value || running.admin.token != new.admin.token,
        "admin",
    );
    compare(
        redis(running) != redis(new)
            || running.store.max_keys != new.store.max_keys
            || running.store.breaker != new.store.breaker,
        "store",
    );
    compare(running.store.key_prefix != new.store.key_prefix, "store.redis.key_prefix");
    compare(running.identity.hash_secret != new.identity.hash_secret, "identity.hash_secret");
    let database = |config: &Config| {
        let database = config.rules.database.as_ref()?;
        Some((database.url.value.clone(), database.refresh, database.listen, database.cache.clone()))
    };
    compare(database(running) != database(new), "rules.database");
    compare(
        running.rules.database.is_none() && running.identity.keys.value != new.identity.keys.value,
        "identity.tenant.keys",
    );
    compare(running.gateways != new.gateways, "cluster.gateways");
    compare(running.hot_keys != new.hot_keys, "hot_keys");
    compare(running.log.format != new.log.format, "log.access.format");
    sections
}

fn list(faults: &[Fault]) -> String {
    faults.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ")
}
