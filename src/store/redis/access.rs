//! How a Redis is reached: its address, who the gateway is there, and TLS.

use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};

use redis::io::tcp::TcpSettings;
use redis::{
    Client, ClientTlsConfig, ConnectionAddr, ConnectionInfo, IntoConnectionInfo as _, RedisConnectionInfo,
    RedisError, TlsCertificates,
};
use thiserror::Error;

use crate::config::fault::{Fault, Place};
use crate::config::{self, Login, RedisTls, Secret, Servers};

/// Where a node is.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) enum Address {
    Tcp { host: Box<str>, port: u16 },
    Unix(PathBuf),
}

impl Address {
    pub(super) fn tcp(host: &str, port: u16) -> Self {
        Self::Tcp { host: host.into(), port }
    }

    /// From `host:port`, where the host may be missing (a node that does not know its own) or an IPv6 address; as a redirection says it.
    pub(super) fn parse(text: &str, same_host_as: &Self) -> Option<Self> {
        let (host, port) = text.rsplit_once(':')?;
        let host = match (host, same_host_as) {
            ("" | "?", Self::Tcp { host, .. }) => host,
            (host, _) => host.trim_start_matches('[').trim_end_matches(']'),
        };
        Some(Self::tcp(host, port.parse().ok()?))
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp { host, port } if host.contains(':') => write!(f, "[{host}]:{port}"),
            Self::Tcp { host, port } => write!(f, "{host}:{port}"),
            Self::Unix(path) => path.display().fmt(f),
        }
    }
}

/// Why a Redis cannot be reached as it is configured.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("{message}")]
pub struct AccessError {
    place: Place,
    field: &'static str,
    message: String,
}

impl From<AccessError> for Fault {
    fn from(error: AccessError) -> Self {
        Self::new(error.place, error.field, error.message)
    }
}

/// Who the gateway is, and how it speaks, to all nodes of one deployment.
#[derive(Clone)]
pub(super) struct Access {
    is_tls: bool,
    certificates: Option<TlsCertificates>,
    settings: RedisConnectionInfo,
}

/// What a configuration says of its Redis: where it may be asked first, and how.
pub(super) struct Reach {
    /// The nodes, or the Sentinels.
    pub(super) addresses: Vec<Address>,
    /// How the nodes that have buckets are spoken to.
    pub(super) access: Access,
    /// The same for Sentinels.
    pub(super) sentinels: Access,
}

impl Reach {
    /// Reads a configuration, and the files it names.
    pub(super) fn of(config: &config::Redis) -> Result<Self, AccessError> {
        let (servers, field) = (&config.servers, config.servers.field());
        let fail = |place, message| AccessError { place, field, message };
        let mut addresses = Vec::new();
        let mut first: Option<(bool, RedisConnectionInfo)> = None;
        for url in servers.addresses() {
            let info = info(&url.value).map_err(|error| fail(url.place, error))?;
            let database = info.redis_settings().db();
            if database < 0 {
                return Err(fail(url.place, format!("expected a database from 0 on, got {database}")));
            }
            let (address, is_tls) = match info.addr() {
                ConnectionAddr::Tcp(host, port) => (Address::tcp(host, *port), false),
                ConnectionAddr::TcpTls { host, port, .. } => (Address::tcp(host, *port), true),
                ConnectionAddr::Unix(path) => (Address::Unix(path.clone()), false),
                _ => return Err(fail(url.place, "expected redis://, rediss:// or unix://".into())),
            };
            addresses.push(address);
            first.get_or_insert_with(|| (is_tls, info.redis_settings().clone()));
        }
        let Some((is_tls, settings)) = first else {
            return Err(fail(Place::default(), "expected an address".into()));
        };
        let settings = settings.set_skip_set_lib_name();
        let certificates = match &config.tls {
            Some(tls) => Some(certificates(&tls.value).map_err(|message| AccessError {
                place: tls.place,
                field: "store.redis.tls",
                message,
            })?),
            None => None,
        };
        // What an address of a Sentinel says is for the Sentinel.
        let (ours, sentinels) = match servers {
            Servers::Sentinel { login, .. } => {
                (RedisConnectionInfo::default().set_skip_set_lib_name(), with(settings, login, None))
            }
            _ => (settings.clone(), settings),
        };
        let settings = with(ours, &config.login, config.database);
        let access = Access { is_tls, certificates: certificates.clone(), settings };
        let sentinels = Access { is_tls, certificates, settings: sentinels };
        // Certificates are only taken apart when a client is made.
        if let (Some(tls), Err(error)) = (&config.tls, access.client(&addresses[0])) {
            return Err(AccessError {
                place: tls.place,
                field: "store.redis.tls",
                message: error.to_string(),
            });
        }
        Ok(Self { addresses, access, sentinels })
    }
}

impl Access {
    pub(super) fn database(&self) -> i64 {
        self.settings.db()
    }

    pub(super) const fn is_tls(&self) -> bool {
        self.is_tls
    }

    /// The same, but for what a running store cannot change.
    pub(super) fn at_the_place_of(self, known: &Self) -> Self {
        Self { is_tls: known.is_tls, settings: self.settings.set_db(known.settings.db()), ..self }
    }

    /// A client for the node at `address`. Without NODELAY the single small write of a flight could wait for
    /// the ACK of the one before.
    pub(super) fn client(&self, address: &Address) -> Result<Client, RedisError> {
        let address = match address {
            Address::Unix(path) => ConnectionAddr::Unix(path.clone()),
            Address::Tcp { host, port } if self.is_tls => ConnectionAddr::TcpTls {
                host: host.to_string(),
                port: *port,
                insecure: false,
                tls_params: None,
            },
            Address::Tcp { host, port } => ConnectionAddr::Tcp(host.to_string(), *port),
        };
        let info = address
            .into_connection_info()?
            .set_redis_settings(self.settings.clone())
            .set_tcp_settings(TcpSettings::default().set_nodelay(true));
        match &self.certificates {
            Some(certificates) => Client::build_with_tls(info, certificates.clone()),
            None => Client::open(info),
        }
    }
}

fn info(url: &Secret) -> Result<ConnectionInfo, String> {
    url.0.as_str().into_connection_info().map_err(|error| format!("no Redis address: {error}"))
}

fn with(mut settings: RedisConnectionInfo, login: &Login, database: Option<u32>) -> RedisConnectionInfo {
    if let Some(user) = &login.user {
        settings = settings.set_username(user);
    }
    if let Some(Secret(password)) = &login.password {
        settings = settings.set_password(password);
    }
    match database {
        Some(database) => settings.set_db(i64::from(database)),
        None => settings,
    }
}

fn certificates(tls: &RedisTls) -> Result<TlsCertificates, String> {
    let read = |path: &Path, what: &str| {
        let bytes = fs::read(path).map_err(|error| format!("cannot read {}: {error}", path.display()))?;
        if bytes.windows(what.len()).any(|window| window == what.as_bytes()) {
            Ok(bytes)
        } else {
            Err(format!("{}: expected PEM with {what}", path.display()))
        }
    };
    let client_tls = match &tls.client {
        Some(files) => Some(ClientTlsConfig {
            client_cert: read(&files.cert, "BEGIN CERTIFICATE")?,
            client_key: read(&files.key, "PRIVATE KEY")?,
        }),
        None => None,
    };
    let root_cert = tls.ca.as_deref().map(|path| read(path, "BEGIN CERTIFICATE")).transpose()?;
    Ok(TlsCertificates { client_tls, root_cert })
}
