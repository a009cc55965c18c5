//! Bucket keys. `rl:{tenant}:route` for a tenant-route token bucket; `{...}` is the Redis Cluster
//! hash tag, so that all buckets of one tenant share a slot.
//!
//! No client byte reaches a key as it came: a name that the configuration knows is escaped, any
//! other value is a keyed hash. Escaped names never contain `~`, hashes always begin with it, and
//! neither contains a brace or a colon: two different inputs cannot share a key.

use std::fmt::{self, Write as _};
use std::sync::Arc;

use arrayvec::ArrayString;
use hmac::{Hmac, KeyInit as _, Mac as _};
use sha2::Sha256;

/// The longest escaped name that is used as it stands; a longer one is hashed.
const LONGEST_PLAIN: usize = 40;

/// Bytes of the HMAC that are kept: 96 bits, written as 24 hex digits.
const HASH_BYTES: usize = 12;

/// The name of one bucket in every store.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Key(Arc<str>);

impl Key {
    /// The key of the bucket of one tenant on one route.
    pub fn tenant_route(prefix: &str, tenant: &Part, route: &Part) -> Self {
        // One allocation for the text and one for the Arc; 128 bytes hold every key there can be.
        let mut text = String::with_capacity(prefix.len() + tenant.0.len() + route.0.len() + 4);
        text.push_str(prefix);
        text.push_str(":{");
        text.push_str(&tenant.0);
        text.push_str("}:");
        text.push_str(&route.0);
        Self(text.into())
    }

    /// The key of the bucket of a named rule that is keyed by `parts`. By its algorithm, too: what one has written
    /// the other could not read.
    pub fn named(prefix: &str, parts: &[Part], rule: &str, algorithm: &str) -> Self {
        let length: usize = parts.iter().map(|part| part.0.len() + 1).sum();
        let mut text = String::with_capacity(prefix.len() + length + rule.len() + algorithm.len() + 6);
        text.push_str(prefix);
        text.push_str(":{");
        for (index, part) in parts.iter().enumerate() {
            // No part has a plus sign in it.
            text.push_str(if index == 0 { "" } else { "+" });
            text.push_str(&part.0);
        }
        text.push_str("}:");
        text.push_str(rule);
        text.push(':');
        text.push_str(algorithm);
        Self(text.into())
    }

    /// The key of the bucket that a candidate has beside the bucket of the rule in force. No part of a key
    /// holds a colon, so no other bucket has this name.
    #[must_use]
    pub fn of_candidate(&self) -> Self {
        Self(format!("{}:candidate", self.0).into())
    }

    /// The key of one shard of this bucket. Without a hash tag, so that the shards spread over a cluster; no
    /// other bucket's name is without braces.
    #[must_use]
    pub fn of_shard(&self, shard: u16) -> Self {
        Self(format!("{}:{shard}", self.0.replace(['{', '}'], "")).into())
    }

    /// A key of the gateways themselves: of their heartbeats and probes. It stands apart from the
    /// buckets, for those who look through them by their prefix.
    pub fn internal(prefix: &str, name: &str) -> Self {
        Self(format!("tollgate:{{{prefix}}}:{name}").into())
    }

    /// A key like this one in another slot: one of many, by `number`.
    #[must_use]
    pub fn in_another_slot(&self, number: u32) -> Self {
        Self(self.0.replacen('}', &format!("-{number}}}"), 1).into())
    }

    /// Whose bucket it is and on which route, as they stand in the key.
    pub fn parts(&self) -> Option<(&str, &str)> {
        let (_, rest) = self.0.split_once(":{")?;
        rest.split_once("}:")
    }

    /// The key as the stores know it.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// One part of a key, safe to stand beside others. Requests of strangers make one each, so it is not allocated.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Part(ArrayString<LONGEST_PLAIN>);

impl Part {
    /// A part from a name that the operator wrote (a tenant or route id): readable, escaped.
    /// Names too long to be shown whole are hashed instead.
    pub fn known(name: &[u8], hasher: &Hasher) -> Self {
        ArrayString::from(&escape(name)).map_or_else(|_| hasher.part(name), Self)
    }

    /// The part as it stands in a key.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

/// Percent-encodes all but letters, digits, `.`, `_` and `-`.
fn escape(name: &[u8]) -> String {
    let mut out = String::with_capacity(name.len());
    for &byte in name {
        if byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'_' | b'-') {
            out.push(char::from(byte));
        } else {
            // Writing to a String cannot fail.
            let _ = write!(out, "%{byte:02X}");
        }
    }
    out
}

/// FNV-1a: the same number for the same bytes in every process, where nobody gains by a collision.
pub fn fnv1a(bytes: &[u8]) -> u64 {
    bytes
        .iter()
        .fold(0xCBF2_9CE4_8422_2325, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01B3))
}

/// Bytes as hex digits.
pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The HMAC-SHA-256 of an API key.
pub type KeyHash = [u8; 32];

/// Hashes what must not be stored or logged as it came: HMAC-SHA-256 under the `hash_secret`,
/// truncated to 96 bits. Gateways with the same secret agree on every key.
#[derive(Clone)]
pub struct Hasher(Hmac<Sha256>);

impl Hasher {
    /// A hasher under `secret`. Any length will do, also none: see [`Hasher::DEFAULT_SECRET`].
    pub fn new(secret: &[u8]) -> Self {
        let secret = if secret.is_empty() { Self::DEFAULT_SECRET } else { secret };
        match Hmac::<Sha256>::new_from_slice(secret) {
            Ok(mac) => Self(mac),
            Err(_) => unreachable!("HMAC takes a key of any length"),
        }
    }

    /// What an empty `hash_secret` stands for, so that gateways agree. It hides nothing from who
    /// can read this source; `tollgate check` warns.
    pub const DEFAULT_SECRET: &'static [u8] = b"tollgate: no hash_secret was set";

    /// What stands for an API key where keys are looked up: the whole hash.
    pub fn key_hash(&self, key: &[u8]) -> KeyHash {
        let mut mac = self.0.clone();
        mac.update(key);
        mac.finalize().into_bytes().into()
    }

    /// The part of a key that stands for `value`: of one length, whatever the client sent.
    pub fn part(&self, value: &[u8]) -> Part {
        const DIGITS: &[u8; 16] = b"0123456789abcdef";
        let digest = self.key_hash(value);
        const { assert!(2 * HASH_BYTES < LONGEST_PLAIN) };
        let mut text = ArrayString::new();
        text.push('~');
        for byte in &digest[..HASH_BYTES] {
            text.push(char::from(DIGITS[usize::from(byte >> 4)]));
            text.push(char::from(DIGITS[usize::from(byte & 15)]));
        }
        Part(text)
    }
}

impl fmt::Debug for Hasher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Hasher(secret)")
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    fn key(tenant: &[u8], route: &[u8]) -> Key {
        let hasher = Hasher::new(b"");
        Key::tenant_route("rl", &Part::known(tenant, &hasher), &Part::known(route, &hasher))
    }

    #[test]
    fn the_key_of_the_design() {
        let key = key(b"shop-a", b"create-order");
        assert_eq!(key.as_str(), "rl:{shop-a}:create-order");
        assert_eq!(key.parts(), Some(("shop-a", "create-order")));
    }

    /// B037: ('a:b', 'c') and ('a', 'b:c') were one bucket.
    #[test]
    fn separators_in_a_name_forge_nothing() {
        let names: [&[u8]; 14] = [
            b"a",
            b"b",
            b"c",
            b"a:b",
            b"b:c",
            b"a}:b",
            b"{a",
            b"a}",
            b"~a",
            b"a%3Ab",
            b"a\0",
            b"a\n",
            b"a ",
            "\u{e4}".as_bytes(),
        ];
        let mut seen = HashSet::new();
        for tenant in names {
            for route in names {
                let key = key(tenant, route);
                assert_eq!(key.as_str().matches(['{', '}']).count(), 2, "{key:?}");
                assert_eq!(key.as_str().matches(':').count(), 2, "{key:?}");
                assert!(seen.insert(key));
            }
        }
    }

    #[test]
    fn a_plain_name_cannot_be_written_like_a_hash() {
        let hasher = Hasher::new(b"s");
        let victim = hasher.part(b"victim");
        assert_ne!(Part::known(victim.as_str().as_bytes(), &hasher), victim);
    }

    /// B039: memory was ruled by key lengths that users chose.
    #[test]
    fn a_hash_has_one_length() {
        let hasher = Hasher::new(b"s");
        for length in [0, 1, 1024, 8192, 61440] {
            assert_eq!(hasher.part(&vec![b'x'; length]).as_str().len(), 25);
            assert!(key(&vec![b':'; length], &vec![b'y'; length]).as_str().len() <= 128);
        }
    }

    #[test]
    fn secrets_part_the_hashes() {
        assert_ne!(Hasher::new(b"1").part(b"x"), Hasher::new(b"2").part(b"x"));
        assert_eq!(Hasher::new(b"").part(b"x"), Hasher::new(Hasher::DEFAULT_SECRET).part(b"x"));
    }
}
