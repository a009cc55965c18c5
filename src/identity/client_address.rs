//! The address of the client: the rightmost hop that no trusted proxy has told of. Pure.
//!
//! What a header says counts only if it came from a trusted proxy, and each of its hops only if the one to the right
//! of it is trusted. So a client can write what it likes: it stands to the left of what the first trusted proxy has
//! seen itself.

use std::net::{IpAddr, Ipv6Addr};

use http::HeaderMap;
use ipnet::IpNet;

use crate::config::ClientAddress;

impl ClientAddress {
    /// The address of the client of a request that came from `peer`.
    pub fn find(&self, peer: IpAddr, headers: &HeaderMap) -> IpAddr {
        let mut client = peer.to_canonical();
        if !self.trusts(client) {
            return client;
        }
        let lines: Vec<&[u8]> =
            headers.get_all(&self.header).iter().map(http::HeaderValue::as_bytes).collect();
        let forwarded = self.header == http::header::FORWARDED;
        // Hop by hop: what a client has written, in whatever bytes, says nothing of what stands to the right of it.
        for hop in lines.iter().rev().flat_map(|line| line.rsplit(|byte| *byte == b',')) {
            let hop = std::str::from_utf8(hop).ok();
            let hop = if forwarded { hop.and_then(forwarded_for) } else { hop };
            // What cannot be read is nobody: the proxy that told of it stands in its place.
            let Some(address) = hop.and_then(address) else { return client };
            client = address;
            if !self.trusts(client) {
                return client;
            }
        }
        client
    }

    /// The bytes that stand for `client` in a key: an IPv6 address up to the prefix that names a client.
    pub fn subject(&self, client: IpAddr) -> Vec<u8> {
        match client {
            IpAddr::V4(address) => address.octets().into(),
            IpAddr::V6(address) => {
                let rest = (128 - u32::from(self.ipv6_prefix)).min(127);
                Ipv6Addr::from(u128::from(address) >> rest << rest).octets().into()
            }
        }
    }

    /// Whether `address` is that of a trusted proxy.
    pub fn trusts(&self, address: IpAddr) -> bool {
        contains(&self.trusted_proxies, address)
    }
}

/// Whether one of `networks` contains `address`.
pub fn contains(networks: &[IpNet], address: IpAddr) -> bool {
    networks.iter().any(|network| network.contains(&address))
}

/// The `for` of one element of `Forwarded` (RFC 7239).
fn forwarded_for(element: &str) -> Option<&str> {
    element.split(';').find_map(|pair| {
        let (name, value) = pair.split_once('=')?;
        name.trim().eq_ignore_ascii_case("for").then(|| value.trim().trim_matches('"'))
    })
}

/// An address as proxies write it: bare, with a port, in brackets, with a zone.
fn address(text: &str) -> Option<IpAddr> {
    let text = text.trim();
    let host = match text.strip_prefix('[') {
        Some(rest) => {
            let (host, port) = rest.split_once(']')?;
            if !port.is_empty() && !is_port(port) {
                return None;
            }
            host
        }
        // One colon is a port; several are an IPv6 address without brackets.
        None => match text.split_once(':') {
            Some((host, port)) if !port.contains(':') => {
                if !is_port(&text[host.len()..]) {
                    return None;
                }
                host
            }
            _ => text,
        },
    };
    let host = host.split_once('%').map_or(host, |(host, _zone)| host);
    host.parse::<IpAddr>().ok().map(|address| address.to_canonical())
}

fn is_port(text: &str) -> bool {
    text.strip_prefix(':').is_some_and(|port| port.parse::<u16>().is_ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn client(trusted: &[&str], header: &'static str, peer: &str, lines: &[&str]) -> String {
        let found = ClientAddress {
            trusted_proxies: trusted.iter().map(|network| network.parse().unwrap()).collect(),
            header: http::HeaderName::from_static(header),
            ipv6_prefix: 64,
        };
        let mut headers = HeaderMap::new();
        for line in lines {
            headers.append(header, http::HeaderValue::from_bytes(line.as_bytes()).unwrap());
        }
        found.find(peer.parse().unwrap(), &headers).to_string()
    }

    #[test]
    fn only_trusted_proxies_are_believed() {
        let xff = "x-forwarded-for";
        for (trusted, peer, lines, expect) in [
            // A spoofed header from anybody changes nothing.
            (&[][..], "203.0.113.9", &["198.51.100.1"][..], "203.0.113.9"),
            (&["10.0.0.0/8"], "203.0.113.9", &["198.51.100.1"], "203.0.113.9"),
            (&["10.0.0.0/8"], "10.0.0.1", &["198.51.100.1"], "198.51.100.1"),
            (&["10.0.0.0/8"], "10.0.0.1", &[], "10.0.0.1"),
            // The client's own words stand to the left (B101).
            (&["10.0.0.0/8"], "10.0.0.1", &["6.6.6.6, 198.51.100.1, 10.0.0.7"], "198.51.100.1"),
            // All lines count (B103).
            (&["10.0.0.0/8"], "10.0.0.1", &["6.6.6.6", "198.51.100.1", "10.0.0.7"], "198.51.100.1"),
            (&["10.0.0.0/8"], "10.0.0.1", &["198.51.100.1", "10.0.0.3, 10.0.0.7"], "198.51.100.1"),
            // A port is no part of it (B105).
            (&["10.0.0.0/8"], "10.0.0.1", &["198.51.100.1:4711"], "198.51.100.1"),
            (&["10.0.0.0/8"], "10.0.0.1", &["[2001:db8::1]:4711"], "2001:db8::1"),
            (&["10.0.0.0/8"], "10.0.0.1", &["2001:db8::1"], "2001:db8::1"),
            (&["10.0.0.0/8"], "10.0.0.1", &["fe80::1%eth0"], "fe80::1"),
            // One notation of an IPv4 address is as good as the other (B107).
            (&["10.0.0.0/8"], "::ffff:10.0.0.1", &["::ffff:198.51.100.1"], "198.51.100.1"),
            (&["10.0.0.0/8"], "10.0.0.1", &["::ffff:c633:6401"], "198.51.100.1"),
            // What is no address ends the walk: the proxy that told of it counts.
            (&["10.0.0.0/8"], "10.0.0.1", &["198.51.100.1, unknown, 10.0.0.7"], "10.0.0.7"),
            (&["10.0.0.0/8"], "10.0.0.1", &["198.51.100.1:x"], "10.0.0.1"),
            (&["10.0.0.0/8"], "10.0.0.1", &["198.51.100.1,"], "10.0.0.1"),
            (&["10.0.0.0/8"], "10.0.0.1", &["\u{ff}, 198.51.100.1"], "198.51.100.1"),
            (&["10.0.0.0/8"], "10.0.0.1", &["2001:db8::1.2.3.4"], "2001:db8::102:304"),
            (&["0.0.0.0/0"], "10.0.0.1", &["198.51.100.1, 10.0.0.2"], "198.51.100.1"),
        ] {
            assert_eq!(client(trusted, xff, peer, lines), expect, "{trusted:?} {peer} {lines:?}");
        }
    }

    #[test]
    fn the_standard_header() {
        for (lines, expect) in [
            (&["for=198.51.100.1"][..], "198.51.100.1"),
            (&["for=6.6.6.6, for=198.51.100.1;proto=https;by=10.0.0.2"], "198.51.100.1"),
            (&["proto=http;For=\"[2001:db8::1]:4711\""], "2001:db8::1"),
            (&["for=6.6.6.6", "for=198.51.100.1", "for=10.0.0.3"], "198.51.100.1"),
            (&["for=198.51.100.1, for=_hidden"], "10.0.0.1"),
            (&["proto=https"], "10.0.0.1"),
        ] {
            assert_eq!(client(&["10.0.0.0/8"], "forwarded", "10.0.0.1", lines), expect, "{lines:?}");
        }
    }

    #[test]
    fn an_ipv6_client_is_its_network() {
        let of = |prefix: u8, address: &str| {
            ClientAddress { ipv6_prefix: prefix, ..ClientAddress::default() }
                .subject(address.parse().unwrap())
        };
        assert_eq!(of(64, "2001:db8::1"), of(64, "2001:db8::ffff:1"));
        assert_ne!(of(64, "2001:db8::1"), of(64, "2001:db8:0:1::1"));
        assert_ne!(of(128, "2001:db8::1"), of(128, "2001:db8::2"));
        assert_ne!(of(64, "198.51.100.1"), of(64, "198.51.100.2"));
    }
}
