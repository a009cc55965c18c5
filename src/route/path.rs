//! The normal form of a path. A request is matched in this form and forwarded in this form, so no
//! spelling of a path can pass by the rule that is written for it.
//!
//! * what may stand in a path as it is stands so: percent-encoded letters, digits and `-._~:@!$&'()+,=` are decoded
//! * what may not is encoded: all beyond ASCII, and `"<>^{|}` with the backtick; escapes have capital digits
//! * `//` becomes `/`; `.` and `..` segments are resolved, also when they came encoded
//! * an encoded slash, semicolon or star (`%2F`, `%3B`, `%2A`) stays encoded: it does not divide, or stand for others
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
    /// A control byte or a backslash, plain or encoded; a blank.
    #[error("the path has a control character, a blank or a backslash")]
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
    let suspicious = |pair: &[u8]| pair[0] == b'/' && matches!(pair[1], b'/' | b'.');
    if bytes.iter().all(|byte| stands_for_itself(*byte) || matches!(byte, b'/' | b';' | b'*'))
        && !bytes.windows(2).any(suspicious)
    {
        return Ok(Cow::Borrowed(path));
    }
    Ok(Cow::Owned(resolve(&decode(bytes)?)?))
}

/// What is written as it is and never as an escape.
const fn stands_for_itself(byte: u8) -> bool {
    matches!(
        byte,
        b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'~' | b':' | b'@' | b'!' | b'$' | b'&' | b'\''
            | b'(' | b')' | b'+' | b',' | b'='
    )
}

fn push_escape(out: &mut Vec<u8>, byte: u8) {
    const DIGITS: &[u8; 16] = b"0123456789ABCDEF";
    out.extend([b'%', DIGITS[usize::from(byte >> 4)], DIGITS[usize::from(byte & 15)]]);
}

/// Decodes what needs no escape, and encodes what does.
fn decode(bytes: &[u8]) -> Result<Vec<u8>, PathError> {
    let mut out = Vec::with_capacity(bytes.len());
    let mut rest = bytes;
    while let Some((&byte, tail)) = rest.split_first() {
        if byte != b'%' {
            match byte {
                0..=0x20 | 0x7F | b'\\' => return Err(PathError::Forbidden),
                0x80.. | b'"' | b'<' | b'>' | b'^' | b'`' | b'{' | b'|' | b'}' => push_escape(&mut out, byte),
                _ => out.push(byte),
            }
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
            _ if stands_for_itself(decoded) => out.push(decoded),
            _ => push_escape(&mut out, decoded),
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
    fn what_may_stand_in_a_path_is_not_escaped_and_all_else_is() {
        for (path, expect) in [
            ("/v1/docs%3Aimport", "/v1/docs:import"),
            ("/%40me", "/@me"),
            ("/%21%24%26%27%28%29%2B%2C%3D", "/!$&'()+,="),
            ("/caf\u{e9}", "/caf%C3%A9"),
            ("/caf%c3%a9", "/caf%C3%A9"),
            ("/x{y}|z^\"<>`", "/x%7By%7D%7Cz%5E%22%3C%3E%60"),
            ("/a%3Bb", "/a%3Bb"),
            ("/a%2ab*", "/a%2Ab*"),
            ("/a%23%3f%5b", "/a%23%3F%5B"),
        ] {
            check(path, Ok(expect));
            check(expect, Ok(expect));
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
