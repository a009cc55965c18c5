//! `${NAME}` and `${NAME:-default}` inside of scalars; `$${` stands for a literal `${`.

use std::borrow::Cow;

/// Where the values of `${NAME}` come from. A function, so that tests bring their own.
pub type Lookup<'a> = &'a (dyn Fn(&str) -> Option<String> + Sync);

/// The environment of this process.
#[expect(clippy::disallowed_methods, reason = "this is the one place that reads the environment")]
pub fn process(name: &str) -> Option<String> {
    std::env::var(name).ok()
}

/// Replaces every `${...}` of `text`; or says what is wrong with it.
pub fn expand<'a>(text: &'a str, lookup: Lookup<'_>) -> Result<Cow<'a, str>, String> {
    if !text.contains("${") {
        return Ok(Cow::Borrowed(text));
    }
    let mut out = String::new();
    let mut rest = text;
    while let Some(start) = rest.find("${") {
        if rest[..start].ends_with('$') {
            out.push_str(&rest[..start - 1]);
            out.push_str("${");
            rest = &rest[start + 2..];
            continue;
        }
        out.push_str(&rest[..start]);
        let inner = &rest[start + 2..];
        let end = inner.find('}').ok_or("`${` without `}`: expected ${NAME} or ${NAME:-default}")?;
        out.push_str(&value_of(&inner[..end], lookup)?);
        rest = &inner[end + 1..];
    }
    out.push_str(rest);
    Ok(Cow::Owned(out))
}

fn value_of(inner: &str, lookup: Lookup<'_>) -> Result<String, String> {
    let (name, default) = match inner.split_once(":-") {
        Some((name, default)) => (name, Some(default)),
        None => (inner, None),
    };
    let is_name = !name.is_empty()
        && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_')
        && !name.as_bytes()[0].is_ascii_digit();
    if !is_name {
        return Err(format!("`${{{inner}}}` is no variable: expected ${{NAME}} or ${{NAME:-default}}"));
    }
    match (lookup(name).filter(|value| !value.is_empty()), default) {
        (Some(value), _) => Ok(value),
        (None, Some(default)) => Ok(default.to_owned()),
        (None, None) => {
            Err(format!("the environment variable {name} is not set, and has no default (${{{name}:-...}})"))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(text: &str, expect: Result<&str, &str>) {
        let lookup = |name: &str| match name {
            "HOST" => Some("redis".to_owned()),
            "EMPTY" => Some(String::new()),
            _ => None,
        };
        match (expand(text, &lookup), expect) {
            (Ok(got), Ok(expect)) => assert_eq!(got, expect),
            (Err(got), Err(expect)) => assert!(got.contains(expect), "{got}"),
            (got, expect) => panic!("{text}: {got:?}, expected {expect:?}"),
        }
    }

    #[test]
    fn expansion() {
        check("plain $ {x}", Ok("plain $ {x}"));
        check("redis://${HOST}:1", Ok("redis://redis:1"));
        check("${NONE:-redis://127.0.0.1:6379}", Ok("redis://127.0.0.1:6379"));
        check("${EMPTY:-x}", Ok("x"));
        check("${EMPTY:-}", Ok(""));
        check("$${HOST}", Ok("${HOST}"));
        check("${NONE}", Err("NONE is not set"));
        check("${HOST", Err("without `}`"));
        check("${}", Err("no variable"));
        check("${1A}", Err("no variable"));
    }
}
