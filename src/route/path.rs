//! The normal form of a path. A request is matched in this form and forwarded in this form, so no
//! spelling of a path can pass by the rule that is written for it.
//!
//! * percent-encoded letters, digits, `-`, `.`, `_` and `~` are decoded; other escapes get capital digits
//! * `//` becomes `/`; `.` and `..` segments are resolved, also when they came encoded
//! * an encoded slash (`%2F`) stays encoded: it is not a separator
//! * upper and lower case differ; a trailing slash matters; `;x=1` is part of its segment
//!
//! A NUL or another control byte, a backslash, a broken escape, a `..` above the root and a dot segment
//! behind `%2F` or before `;` are refused.

use std::borrow::Cow;

use thiserror::Error;

/// Why a path is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum PathError {
    /// Not `/...`.
    #[error("the path does not begin with a slash")]
    NotAbsolute,
    /// `%` without two hex digits.
    #[error("the path has a `%` that is not followed by two hex digits")]
    BrokenEscape,
    /// A control byte or a backslash, plain or encoded.
    #[error("the path has a control character or a backslash")]
    Forbidden,
    /// A segment that some servers read as `.` or `..`: behind `%2F`, or before `;`.
    #[error("the path has a dot segment that is hidden behind `%2F` or `;`")]
    HiddenDots,
    /// `..` above the root.
    #[error("the path leads above its root")]
    AboveRoot,
}

/// The normal form of `path` (without query). Borrows if the path already is in it.
pub fn normalise(path: &str) -> Result<Cow<'_, str>, PathError> {
    if !path.starts_with('/') {
        return if path.is_empty() { Ok(Cow::Borrowed("")) } else { Err(PathError::NotAbsolute) };
    }
    let bytes = path.as_bytes();
    let ordinary = |byte: u8| !matches!(byte, b'%' | b'\\' | 0..=0x20 | 0x7F);
    let suspicious = |pair: &[u8]| pair[0] == b'/' && matches!(pair[1], b'/' | b'.');
    if bytes.iter().all(|byte| ordinary(*byte)) && !bytes.windows(2).any(suspicious) {
        return Ok(Cow::Borrowed(path));
    }
    Ok(Cow::Owned(resolve(&decode(bytes)?)?))
}

/// Decodes what needs no escape.
fn decode(bytes: &[u8]) -> Result<Vec<u8>, PathError> {
    let mut out = Vec::with_capacity(bytes.len());
    let mut rest = bytes;
    while let Some((&byte, tail)) = rest.split_first() {
        if byte != b'%' {
            if byte <= 0x20 || byte == 0x7F || byte == b'\\' {
                return Err(PathError::Forbidden);
            }
            out.push(byte);
            rest = tail;
            continue;
        }
        let [high, low, tail @ ..] = tail else { return Err(PathError::BrokenEscape) };
        let (Some(high), Some(low)) = (char::from(*high).to_digit(16), char::from(*low).to_digit(16)) else {
            return Err(PathError::BrokenEscape);
        };
        let decoded = (high * 16 + low) as u8;
        match decoded {
            0..=0x1F | 0x7F | b'\\' => return Err(PathError::Forbidden),
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'~' => out.push(decoded),
            _ => {
                const DIGITS: &[u8; 16] = b"0123456789ABCDEF";
                out.extend([b'%', DIGITS[high as usize], DIGITS[low as usize]]);
            }
        }
        rest = tail;
    }
    Ok(out)
}

/// Resolves empty, `.` and `..` segments.
fn resolve(path: &[u8]) -> Result<String, PathError> {
    let text = String::from_utf8_lossy(path);
    let mut segments: Vec<&str> = Vec::new();
    for segment in text.split('/') {
        match segment {
            "" | "." => {}
            ".." => drop(segments.pop().ok_or(PathError::AboveRoot)?),
            segment if hides_dots(segment) => return Err(PathError::HiddenDots),
            segment => segments.push(segment),
        }
    }
    let directory = matches!(text.rsplit('/').next(), Some("" | "." | ".."));
    let mut out = String::with_capacity(text.len());
    for segment in &segments {
        out.push('/');
        out.push_str(segment);
    }
    if directory || out.is_empty() {
        out.push('/');
    }
    Ok(out)
}

/// Whether a server that decodes `%2F`, or cuts parameters off, would find a dot segment here.
fn hides_dots(segment: &str) -> bool {
    let is_dots = |part: &str| matches!(part.split(';').next(), Some("." | ".."));
    segment.split("%2F").any(is_dots)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(path: &str, expect: Result<&str, PathError>) {
        assert_eq!(normalise(path).as_deref(), expect.as_ref().map(|path| *path), "{path:?}");
    }

    #[test]
    fn spellings_of_one_path() {
        for path in [
            "/a/b",
            "//a/b",
            "/a//b",
            "/./a/b",
            "/a/./b",
            "/a/c/../b",
            "/x/../a/b",
            "/%61/b",
            "/a/%62",
            "/a/%2e/b",
            "/c/%2E%2e/a/b",
            "///a///b",
            "/a/b/c/..%2e",
        ] {
            match path {
                "/a/b/c/..%2e" => check(path, Ok("/a/b/c/...")),
                _ => check(path, Ok("/a/b")),
            }
        }
    }

    #[test]
    fn what_stays_apart() {
        check("/", Ok("/"));
        check("/a/b/", Ok("/a/b/"));
        check("/a/b/.", Ok("/a/b/"));
        check("/a/..", Ok("/"));
        check("/a%2fb", Ok("/a%2Fb"));
        check("/A/b", Ok("/A/b"));
        check("/a;x=1/b", Ok("/a;x=1/b"));
        check("/.hidden", Ok("/.hidden"));
        check("/a%20b", Ok("/a%20b"));
        check("/%c3%a4", Ok("/%C3%A4"));
    }

    #[test]
    fn what_is_refused() {
        check("a", Err(PathError::NotAbsolute));
        check("*", Err(PathError::NotAbsolute));
        check("/%", Err(PathError::BrokenEscape));
        check("/%4", Err(PathError::BrokenEscape));
        check("/%zz", Err(PathError::BrokenEscape));
        check("/a\\b", Err(PathError::Forbidden));
        check("/%5c", Err(PathError::Forbidden));
        check("/%00", Err(PathError::Forbidden));
        check("/\u{1}", Err(PathError::Forbidden));
        check("/..", Err(PathError::AboveRoot));
        check("/a/../../b", Err(PathError::AboveRoot));
        for path in ["/a/..%2fb", "/a/%2e%2e%2Fb", "/a%2f..%2fb", "/a/..;/b", "/a/.;x=1/b", "/a/b%2F.."] {
            check(path, Err(PathError::HiddenDots));
        }
    }

    #[test]
    fn the_normal_form_is_its_own() {
        for path in ["/a//b/../c/%41%2f", "/%2f", "/x/%252e%252e/y", "/a/..b/.c./"] {
            if let Ok(normal) = normalise(path) {
                assert_eq!(normalise(&normal).as_deref(), Ok(&*normal));
            }
        }
    }
}
