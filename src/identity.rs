//! Who a request belongs to, from what its headers say.

pub mod client_address;

use thiserror::Error;

use crate::config;

/// The tenant of requests without a key, where those are allowed.
pub const ANONYMOUS: &[u8] = b"anonymous";

/// The longest key that is read; more is an attack or a mistake.
const LONGEST_KEY: usize = 8 * 1024;

/// How a request names its tenant.
#[derive(Clone, Debug)]
pub struct Identity {
    header: http::HeaderName,
    shown: Box<str>,
    missing: config::Missing,
}

/// Why a request has no tenant.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum IdentityError {
    /// No key, or an empty one.
    #[error("the header {0} is missing or empty")]
    Missing(Box<str>),
    /// More than one header line: which one counts would be a guess.
    #[error("the header {0} was sent more than once, expected one")]
    Several(Box<str>),
    /// Longer than a key can be.
    #[error("the header {0} is longer than 8192 bytes")]
    TooLong(Box<str>),
    /// A key that nobody has, or that was revoked.
    #[error("the key in the header {0} is unknown or was revoked")]
    Unknown(Box<str>),
    /// The tenant is suspended.
    #[error("this tenant is suspended")]
    Suspended,
}

/// What a request says of its tenant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Claim<'h> {
    /// Nothing, where that is allowed.
    Anonymous,
    /// A name, or a key.
    Named(&'h [u8]),
}

impl Identity {
    /// As the configuration says.
    pub fn new(written: &config::Identity) -> Self {
        // `config` has checked the name; what could not be a header is never found, and so refused.
        let header = http::HeaderName::from_bytes(written.tenant_header.as_bytes())
            .unwrap_or(http::HeaderName::from_static("x-api-key"));
        Self { header, shown: written.tenant_header.clone(), missing: written.missing }
    }

    /// What `headers` say.
    pub fn claim<'h>(&self, headers: &'h http::HeaderMap) -> Result<Claim<'h>, IdentityError> {
        let mut values = headers.get_all(&self.header).iter();
        let value = values.next().map(|value| value.as_bytes().trim_ascii()).unwrap_or_default();
        if values.next().is_some() {
            return Err(IdentityError::Several(self.shown.clone()));
        }
        if value.is_empty() {
            return match self.missing {
                config::Missing::Reject => Err(IdentityError::Missing(self.shown.clone())),
                config::Missing::Anonymous => Ok(Claim::Anonymous),
            };
        }
        if value.len() > LONGEST_KEY {
            return Err(IdentityError::TooLong(self.shown.clone()));
        }
        Ok(Claim::Named(value))
    }

    /// The error for a key that nobody has.
    pub fn unknown(&self) -> IdentityError {
        IdentityError::Unknown(self.shown.clone())
    }

    /// The header's name as it was configured.
    pub fn header(&self) -> &str {
        &self.shown
    }
}
