//! The certificates of the listeners: chosen by the name that a client asks for, and changed by a reload while
//! connections go on.

use std::net::SocketAddr;
use std::sync::Arc;

use arc_swap::ArcSwap;
use rustls::client::verify_server_name;
use rustls::crypto::{CryptoProvider, ring};
use rustls::pki_types::pem::{self, PemObject as _};
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::server::{ClientHello, ParsedCertificate, ResolvesServerCert};
use rustls::sign::CertifiedKey;

use crate::config::fault::Fault;
use crate::config::{Certificate, Listener};

/// The certificates of each listener that speaks TLS.
#[derive(Debug, Default)]
pub struct Certificates(Vec<(SocketAddr, Arc<Chains>)>);

/// The certificates of one listener, in the order of the configuration.
#[derive(Debug)]
pub struct Chains(ArcSwap<Vec<Arc<CertifiedKey>>>);

impl Certificates {
    /// Reads the files that the listeners name.
    ///
    /// # Errors
    /// Every certificate that cannot be used, each with its place.
    pub fn load(listeners: &[Listener]) -> Result<Self, Vec<Fault>> {
        let provider = ring::default_provider();
        let (mut all, mut faults) = (Vec::new(), Vec::new());
        for (index, listener) in listeners.iter().enumerate().filter(|(_, listener)| !listener.tls.is_empty())
        {
            let mut chains = Vec::new();
            for (position, written) in listener.tls.iter().enumerate() {
                match chain(&written.value, &provider) {
                    Ok(chain) => chains.push(Arc::new(chain)),
                    Err(message) => {
                        let field = format!("listeners[{index}].tls.certificates[{position}]");
                        faults.push(Fault::new(written.place, field, message));
                    }
                }
            }
            all.push((listener.address.value, Arc::new(Chains(ArcSwap::from_pointee(chains)))));
        }
        if faults.is_empty() { Ok(Self(all)) } else { Err(faults) }
    }

    /// Those of the listener at `address`.
    pub fn of(&self, address: SocketAddr) -> Option<Arc<Chains>> {
        let known = self.0.iter().find(|(known, _)| *known == address);
        known.map(|(_, chains)| Arc::clone(chains))
    }

    /// Serves those of `new` from the next handshake on, where a listener is in both.
    pub fn become_like(&self, new: &Self) {
        for (address, chains) in &self.0 {
            if let Some(new) = new.of(*address) {
                chains.0.store(new.0.load_full());
            }
        }
    }
}

impl ResolvesServerCert for Chains {
    /// The first one that is for the name and that the client can verify; else the first one.
    fn resolve(&self, hello: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        let chains = self.0.load();
        let name = hello.server_name().and_then(|name| ServerName::try_from(name).ok());
        let fits = |chain: &Arc<CertifiedKey>| {
            name.as_ref().is_none_or(|name| is_for(chain, name))
                && chain.key.choose_scheme(hello.signature_schemes()).is_some()
        };
        chains.iter().find(|chain| fits(chain)).or_else(|| chains.first()).cloned()
    }
}

fn is_for(chain: &CertifiedKey, name: &ServerName<'_>) -> bool {
    let certificate = chain.end_entity_cert().ok().and_then(|der| ParsedCertificate::try_from(der).ok());
    certificate.is_some_and(|certificate| verify_server_name(&certificate, name).is_ok())
}

/// A chain with its key, if they belong together.
fn chain(files: &Certificate, provider: &CryptoProvider) -> Result<CertifiedKey, String> {
    let unreadable = |path: &std::path::Path, what: &str, error: pem::Error| match error {
        pem::Error::Io(error) => format!("cannot read {}: {error}", path.display()),
        pem::Error::NoItemsFound => format!("{}: expected PEM with {what}", path.display()),
        error => format!("{}: {error}", path.display()),
    };
    let (cert, key) = (files.cert.as_path(), files.key.as_path());
    let read = CertificateDer::pem_file_iter(cert).and_then(Iterator::collect::<Result<Vec<_>, _>>);
    let chain = read.map_err(|error| unreadable(cert, "a certificate", error))?;
    if chain.is_empty() {
        return Err(unreadable(cert, "a certificate", pem::Error::NoItemsFound));
    }
    let private =
        PrivateKeyDer::from_pem_file(key).map_err(|error| unreadable(key, "a private key", error))?;
    CertifiedKey::from_der(chain, private, provider).map_err(|error| {
        let apart = matches!(error, rustls::Error::InconsistentKeys(_));
        let what = if apart { "do not go together" } else { "cannot be used" };
        format!("{} and {} {what}: {error}", cert.display(), key.display())
    })
}
