//! Host names, as requests and routes write them.

use std::borrow::Cow;

/// The host of a `Host` header: lower case, without port and final dot; `None` if it is no host.
pub fn normalise(written: &str) -> Option<Cow<'_, str>> {
    let name = match written.strip_prefix('[') {
        Some(rest) => {
            let (address, port) = rest.split_once(']')?;
            address.parse::<std::net::Ipv6Addr>().ok()?;
            (port.is_empty() || port.strip_prefix(':').is_some_and(is_port))
                .then_some(&written[..address.len() + 2])?
        }
        None => match written.split_once(':') {
            Some((name, port)) => is_port(port).then_some(name)?,
            None => written,
        },
    };
    let name = name.strip_suffix('.').unwrap_or(name);
    let valid =
        |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'.' | b'_' | b'[' | b']' | b':');
    if name.is_empty() || name.len() > 255 || !name.bytes().all(valid) {
        return None;
    }
    Some(if name.bytes().any(|byte| byte.is_ascii_uppercase()) {
        Cow::Owned(name.to_ascii_lowercase())
    } else {
        Cow::Borrowed(name)
    })
}

fn is_port(text: &str) -> bool {
    text.bytes().all(|byte| byte.is_ascii_digit()) && (text.is_empty() || text.parse::<u16>().is_ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hosts() {
        for (written, expect) in [
            ("Example.COM", Some("example.com")),
            ("example.com:8080", Some("example.com")),
            ("example.com.", Some("example.com")),
            ("127.0.0.1:1", Some("127.0.0.1")),
            ("[::1]:80", Some("[::1]")),
            ("[::1]", Some("[::1]")),
            ("", None),
            (":80", None),
            ("a b", None),
            ("a/../b?c", None),
            ("user@host", None),
            ("host:99999", None),
            ("host:x", None),
            ("[::1", None),
            ("[::1]80", None),
            ("host:+80", None),
            ("[zz]", None),
        ] {
            assert_eq!(normalise(written).as_deref(), expect, "{written:?}");
        }
    }
}
