//! The composition root: takes the configuration apart, builds everything once, and runs it.

mod drain;
mod listening;
mod rules;
mod traffic;

use std::net::SocketAddr;
use std::path::Path;
use std::sync::atomic::AtomicBool;
use std::sync::mpsc;
use std::sync::{Arc, OnceLock};
use std::thread;

use arc_swap::ArcSwap;
use pingora::apps::http_app::{HttpServer, ServeHttp};
use pingora::listeners::tls::TlsSettings;
use pingora::proxy::http_proxy;
use pingora::server::configuration::ServerConf;
use pingora::server::{RunArgs, Server};
use pingora::services::background::background_service;
use pingora::services::listening::Service;
use thiserror::Error;

use self::drain::{Drain, Hangup};
use self::listening::{Listening, bind};
pub use self::listening::{Socket, open};
use self::rules::RulesService;
use self::traffic::Traffic;
use crate::admin::Admin;
use crate::breaker::Breakers;
use crate::clock::{Clock, SystemClock};
use crate::config::fault::Placed;
use crate::config::{self, Config};
use crate::denials::Denials;
use crate::fallback::Fallback;
use crate::gateways::Gateways;
use crate::hot_keys::HotKeys;
use crate::key::{Key, fnv1a};
use crate::leases::Leases;
use crate::limit::Limit;
use crate::limiter::{Limiter, Remote};
use crate::logging::LogLevel;
use crate::metrics::Metrics;
use crate::proxy::proxy_protocol::{Connections, ProxiedListener, ProxyProtocol};
use crate::proxy::upstream::ResolveError;
use crate::proxy::{Gateway, Live};
use crate::reload::Reloader;
use crate::rule::{Check, Demand};
use crate::source::Loaded;
use crate::source::certificates::Chains;
use crate::source::postgres::DatabaseError;
use crate::source::postgres::feed::Feed;
use crate::store::Store;
use crate::store::memory::MemoryStore;
use crate::store::redis::{AccessError, Driver, Heartbeat, RedisStore};

/// Idle connections to upstreams that are kept, over all threads. Pingora's own default is 128.
const UPSTREAM_POOL: usize = 2_048;

/// Why a gateway does not start.
#[derive(Debug, Error)]
pub enum StartError {
    /// An address cannot be listened on.
    #[error("{}: cannot listen on {}: {reason}", address.place, address.value)]
    Bind {
        /// The address and where it was written.
        address: Placed<SocketAddr>,
        /// What the system says.
        reason: std::io::Error,
    },
    /// TLS cannot be spoken.
    #[error("TLS: {0}")]
    Tls(String),
    /// A server cannot be resolved.
    #[error(transparent)]
    Resolve(#[from] ResolveError),
    /// The store cannot be reached as it is configured.
    #[error(transparent)]
    Store(#[from] AccessError),
    /// What answers as the store cannot be one.
    #[error("the store cannot be used: {0}")]
    Unfit(String),
    /// The address of the database is none.
    #[error(transparent)]
    Database(#[from] DatabaseError),
    /// Two metrics have one name.
    #[error("metrics: {0}")]
    Metrics(#[from] prometheus::Error),
    /// The server's thread is gone.
    #[error("the server ended by a panic; the lines before this one tell where")]
    Panicked,
    /// The system gives no thread.
    #[error("cannot start a thread: {0}")]
    Thread(std::io::Error),
}

/// What to run: a configuration, the snapshot of it, and where it came from.
pub struct Setup<'a> {
    /// The configuration, and what it names.
    pub loaded: Loaded,
    /// The file to read again on SIGHUP; none for the demo.
    pub path: Option<&'a Path>,
    /// The log's level, to be changed by a reload.
    pub log_level: LogLevel,
}

/// Runs a gateway until SIGTERM has ended its last request, or SIGINT.
pub fn run(setup: Setup<'_>) -> Result<(), StartError> {
    run_with(setup, None::<(Socket, NoService)>)
}

/// [`run`], with one more HTTP service in the same process, on a socket that listens already: the echo
/// upstream of the demo.
pub fn run_with<S>(setup: Setup<'_>, also: Option<(Socket, S)>) -> Result<(), StartError>
where
    S: ServeHttp + Send + Sync + 'static,
{
    let Setup { loaded, path, log_level } = setup;
    let Loaded { config, snapshot, certificates } = loaded;
    for warning in &config.warnings {
        tracing::warn!(place = %warning.place, field = warning.field, "{}", warning.message);
    }
    pingora::tls::install_default_crypto_provider();
    let certificates = Arc::new(certificates);
    let clock: Arc<dyn Clock> = Arc::new(SystemClock::start());
    let metrics = Metrics::new()?;
    let memory = Arc::new(MemoryStore::new(config.store.max_keys, Arc::clone(&clock)));
    let id = gateway_id(&clock);
    let gateways = Arc::new(config.gateways.map_or_else(Gateways::counted, Gateways::fixed));
    metrics.leases.epsilon.set(f64::from(config.hot_keys.epsilon_ppm) / 1e6);
    let redis = redis(&config, &id, &gateways, &clock, &metrics)?;
    let (store, redis, driver): (Arc<dyn Store>, _, _) = match redis {
        Some((redis, driver)) => (Arc::clone(&redis) as _, Some(redis), Some(driver)),
        None => (Arc::clone(&memory) as _, None, None),
    };
    let remote = config.store.redis.is_some().then(|| Remote {
        denials: Denials::default(),
        leases: Leases::new(&config.hot_keys, Arc::clone(&gateways), metrics.leases.clone()),
        breakers: Breakers::new(config.store.breaker, fnv1a(id.as_bytes())),
        fallback: Fallback::new(Arc::clone(&memory), gateways, config.store.max_keys, metrics.clone()),
        probe: probe(&config, &id),
    });
    let hot_keys = HotKeys::new(config.hot_keys.threshold, config.hot_keys.window);
    let limiter = Limiter::new(Arc::clone(&store), hot_keys, remote, Arc::clone(&clock), metrics.clone());
    let limiter = Arc::new(limiter);
    let live = Arc::new(ArcSwap::from_pointee(Live::new(&config, snapshot, &metrics)?));
    let reloader = Reloader::new(
        path,
        Arc::clone(&live),
        config.clone(),
        redis,
        Arc::clone(&certificates),
        log_level,
        metrics.clone(),
    );
    let reloader = Arc::new(reloader);
    let rules = config.rules.database.as_ref().map(|database| first_rules(database, &reloader, &clock));
    let rules = rules.transpose()?;
    let (started, draining) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicBool::new(false)));
    let (ended, wait_for_end) = mpsc::channel();

    let mut server = Server::new_with_opt_and_conf(None, server_conf(&config));
    server.bootstrap();
    let gateway = Gateway::new(Arc::clone(&live), Arc::clone(&limiter), Arc::clone(&clock), metrics.clone());
    let first = ProxyProtocol::new(proxied(&config), Arc::clone(&live), metrics.clone());
    let (proxy, first) = (http_proxy(&server.configuration, gateway), Arc::new(first));
    let mut traffic = Service::new("traffic".into(), Connections::new(proxy, Arc::clone(&first)));
    if !first.is_unused() {
        traffic.endpoints().set_pre_tls_callback(first);
    }
    // All are open before one is used, so that two that overlap are found as well.
    let sockets = bind(config.listeners.iter().map(|listener| listener.address))?;
    let admin_socket = bind([config.admin.address])?;
    for listener in &config.listeners {
        let address = listener.address.value;
        listen(&mut traffic, address, certificates.of(address))?;
    }
    let traffic = Traffic {
        proxy: traffic,
        store,
        limiter: Arc::clone(&limiter),
        driver,
        started: Arc::clone(&started),
        ended: ended.clone(),
    };
    server.add_service(Listening::new(traffic, sockets));
    let drained = Arc::clone(&limiter);
    let admin = Admin {
        live,
        limiter,
        store_kind: if config.store.redis.is_some() { "redis" } else { "memory" },
        memory,
        reloader: Arc::clone(&reloader),
        metrics: metrics.clone(),
        token: config.admin.token.clone(),
        started,
        draining: Arc::clone(&draining),
        clock,
        writer: OnceLock::new(),
    };
    let admin = http_service("admin", config.admin.address.value, admin);
    server.add_service(Listening::new(admin, admin_socket));
    if let Some((socket, app)) = also {
        server.add_service(Listening::new(http_service("echo", socket.0, app), vec![socket]));
    }
    if let Some(rules) = rules {
        server.add_service(background_service("rules", rules));
    }
    server.add_service(background_service("hangup", Hangup { reloader }));
    let drain =
        Drain { draining, in_flight: metrics.in_flight.clone(), limiter: drained, ended: ended.clone() };
    server.add_service(background_service("drain", drain));

    // The server has a thread of its own, so that this one can end the process as soon as nothing is
    // in flight: by itself Pingora sleeps through its whole grace period.
    let run = move || {
        server.run(RunArgs::default());
        let _ = ended.send(Ok(()));
    };
    thread::Builder::new().name("server".into()).spawn(run).map_err(StartError::Thread)?;
    wait_for_end.recv().map_err(|_| StartError::Panicked)?.map_err(StartError::Unfit)
}

/// Serves what the database says, or what it said last, and gives what keeps that fresh. Requests wait for
/// it: before, some would be held to the wrong limits.
fn first_rules(
    database: &config::Database,
    reloader: &Arc<Reloader>,
    clock: &Arc<dyn Clock>,
) -> Result<RulesService, StartError> {
    let mut feed = Feed::new(database)?;
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(StartError::Thread)?;
    let news = runtime.block_on(async {
        let news = feed.read(true).await;
        // This runtime goes, and with it the connection.
        feed.disconnect();
        news
    });
    match news {
        Ok(news) => reloader.news(news, clock.now()),
        Err(error) => reloader.begin_without_database(&error),
    }
    Ok(RulesService { feed: feed.into(), reloader: Arc::clone(reloader), clock: Arc::clone(clock) })
}

/// Catches SIGHUP, whose default is to kill the process. Until the gateway runs it has no effect.
pub fn catch_hangups() -> std::io::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    // The handler stays when the runtime has gone.
    runtime
        .block_on(async { tokio::signal::unix::signal(tokio::signal::unix::SignalKind::hangup()).map(drop) })
}

/// The Redis that the configuration names, if it does, and what drives it.
fn redis(
    config: &Config,
    id: &str,
    gateways: &Arc<Gateways>,
    clock: &Arc<dyn Clock>,
    metrics: &Metrics,
) -> Result<Option<(Arc<RedisStore>, Driver)>, StartError> {
    let Some(redis) = &config.store.redis else { return Ok(None) };
    // A number in the configuration needs no counting.
    let heartbeat = config
        .gateways
        .is_none()
        .then(|| Heartbeat::new(&config.store.key_prefix, id, Arc::clone(gateways), Arc::clone(clock)));
    metrics.store.live_gateways.set(i64::from(gateways.count()));
    let name = format!("tollgate-{id}");
    let (store, driver) = RedisStore::new(redis, &name, heartbeat, metrics.store.clone())?;
    Ok(Some((Arc::new(store), driver)))
}

/// A name for this process that no other has: where it runs, and when it began.
fn gateway_id(clock: &Arc<dyn Clock>) -> String {
    let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    format!("{}-{}-{}", host.trim(), std::process::id(), clock.now().as_micros())
}

/// What the way back to the store begins with: a bucket of this gateway's own that is never empty,
/// written like any other, so that a store that only reads does not pass for well.
fn probe(config: &Config, id: &str) -> Check {
    let name = format!("probe-{:016x}", fnv1a(id.as_bytes()));
    let key = Key::internal(&config.store.key_prefix, &name);
    Check::own(key, Limit::TokenBucket(config::built_in_default()), 1, Demand::Take)
}

fn server_conf(config: &Config) -> ServerConf {
    ServerConf {
        threads: config.threads.unwrap_or_else(|| thread::available_parallelism().map_or(1, Into::into)),
        grace_period_seconds: Some(config.drain.as_millis().div_ceil(1_000) as u64),
        graceful_shutdown_timeout_seconds: Some(1),
        upstream_keepalive_pool_size: UPSTREAM_POOL,
        ..ServerConf::default()
    }
}

/// The listeners whose connections begin with a PROXY protocol header.
fn proxied(config: &Config) -> Vec<ProxiedListener> {
    let listeners = config.listeners.iter().filter(|listener| listener.proxy_protocol);
    listeners
        .map(|listener| ProxiedListener { address: listener.address.value, is_tls: !listener.tls.is_empty() })
        .collect()
}

fn listen<A>(
    service: &mut Service<A>,
    address: SocketAddr,
    chains: Option<Arc<Chains>>,
) -> Result<(), StartError> {
    let Some(chains) = chains else {
        service.add_tcp(&address.to_string());
        return Ok(());
    };
    // There are no files that it would look for: the chains stand in their place.
    let mut settings =
        TlsSettings::intermediate("", "").map_err(|error| StartError::Tls(error.to_string()))?;
    settings.set_cert_resolver(chains);
    settings.enable_h2();
    service.add_tls_with_settings(&address.to_string(), None, settings);
    Ok(())
}

fn http_service<S>(name: &str, address: SocketAddr, app: S) -> Service<HttpServer<S>>
where
    S: ServeHttp + Send + Sync + 'static,
{
    let mut service = Service::new(name.into(), HttpServer::new_app(app));
    service.add_tcp(&address.to_string());
    service.threads = Some(1);
    service
}

/// Stands where [`run`] has no further service.
struct NoService;

#[async_trait::async_trait]
impl ServeHttp for NoService {
    async fn response(
        &self,
        _session: &mut pingora::protocols::http::ServerSession,
    ) -> http::Response<Vec<u8>> {
        http::Response::new(Vec::new())
    }
}
