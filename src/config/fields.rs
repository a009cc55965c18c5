//! Reading a tree of nodes field by field. Nothing stops at the first fault: each is noted with its
//! place, and what could be read goes on to be checked.

use std::borrow::Cow;
use std::fmt::Display;
use std::str::FromStr;
use std::time::Duration;

use super::env::{self, Lookup};
use super::fault::{Fault, Place, Placed};
use super::yaml::{Kind, Node, Text, shorten};
use crate::clock::Timestamp;

/// The faults found so far, and the environment to expand `${...}` from.
pub struct Reading<'e> {
    /// Every fault so far.
    pub faults: Vec<Fault>,
    /// Where `${NAME}` comes from.
    pub lookup: Lookup<'e>,
}

impl Reading<'_> {
    /// Notes a fault.
    pub fn fault(&mut self, place: Place, field: &str, message: impl Into<String>) {
        self.faults.push(Fault::new(place, field, message));
    }

    /// The text of a scalar, with `${...}` expanded.
    pub fn text<'n>(&mut self, node: &'n Node<'_>, field: &str) -> Option<Cow<'n, str>> {
        let Kind::Scalar { text, .. } = &node.kind else {
            self.fault(node.place, field, format!("expected a text, got {}", node.describe()));
            return None;
        };
        match env::expand(text, self.lookup) {
            Ok(text) => Some(text),
            Err(message) => {
                self.fault(node.place, field, message);
                None
            }
        }
    }

    /// Whether a scalar is this word once `${...}` is expanded. What cannot be expanded is for the next reader to tell.
    pub fn is_word(&self, node: &Node<'_>, word: &str) -> bool {
        matches!(&node.kind, Kind::Scalar { text, .. } if env::expand(text, self.lookup).is_ok_and(|text| text == word))
    }

    /// A text that is not empty.
    pub fn name(&mut self, node: &Node<'_>, field: &str) -> Option<Box<str>> {
        let text = self.text(node, field)?;
        if text.is_empty() || node.is_null() {
            self.fault(node.place, field, "expected a text that is not empty");
            return None;
        }
        if text.len() > 256 || text.chars().any(char::is_control) {
            self.fault(node.place, field, "expected at most 256 bytes without control characters");
            return None;
        }
        Some(text.into())
    }

    /// A whole number, exactly as written.
    pub fn whole(&mut self, node: &Node<'_>, field: &str) -> Option<u64> {
        let text = self.text(node, field)?;
        let digits = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
        let number = if digits { text.parse().ok() } else { None };
        if number.is_none() {
            let message = if digits {
                format!("{} is too large to be counted exactly (at most 9007199254740992)", shorten(&text))
            } else {
                format!("expected a whole number such as 100, got {}", node.describe())
            };
            self.fault(node.place, field, message);
        }
        number
    }

    /// Whatever parses from a text; the fault is the parser's own.
    pub fn parsed<T: FromStr<Err: Display>>(&mut self, node: &Node<'_>, field: &str) -> Option<T> {
        let text = self.text(node, field)?;
        match text.parse() {
            Ok(value) => Some(value),
            Err(error) => {
                self.fault(node.place, field, format!("{error}, got {}", node.describe()));
                None
            }
        }
    }

    /// A fraction from 0 to 1.
    pub fn fraction(&mut self, node: &Node<'_>, field: &str) -> Option<f64> {
        let text = self.text(node, field)?;
        match text.parse::<f64>() {
            Ok(value) if (0.0..=1.0).contains(&value) => Some(value),
            _ => {
                self.fault(
                    node.place,
                    field,
                    format!("expected a fraction from 0 to 1, got {}", node.describe()),
                );
                None
            }
        }
    }

    /// A duration such as `5ms`, `30s`, `1m`.
    pub fn duration(&mut self, node: &Node<'_>, field: &str) -> Option<Duration> {
        let text = self.text(node, field)?;
        let duration = duration(&text);
        if duration.is_none() {
            let message = format!("expected a duration such as 5ms, 30s or 1m, got {}", node.describe());
            self.fault(node.place, field, message);
        }
        duration
    }

    /// A duration above 0.
    pub fn some_time(&mut self, node: &Node<'_>, field: &str) -> Option<Duration> {
        let duration = self.duration(node, field)?;
        if duration.is_zero() {
            self.fault(node.place, field, "expected at least 1ms");
            return None;
        }
        Some(duration)
    }

    /// A tenant, as the header names it, which has no blanks around its value.
    pub fn tenant(&mut self, node: &Node<'_>, field: &str) -> Option<Box<str>> {
        let name = self.name(node, field)?;
        if name.trim_ascii().len() < name.len() {
            let message = format!("can never match: a header has no blanks around its value, got `{name}`");
            self.fault(node.place, field, message);
            return None;
        }
        Some(name)
    }

    /// A moment such as `2026-12-24T18:00:00Z`.
    pub fn moment(&mut self, node: &Node<'_>, field: &str) -> Option<Timestamp> {
        let text = self.text(node, field)?;
        let moment = Timestamp::from_rfc3339(&text);
        if moment.is_none() {
            let message = format!("expected a time such as 2026-12-24T18:00:00Z, got {}", node.describe());
            self.fault(node.place, field, message);
        }
        moment
    }

    /// One of a closed set of words.
    pub fn one_of<T: Copy>(&mut self, node: &Node<'_>, field: &str, words: &[(&str, T)]) -> Option<T> {
        let text = self.text(node, field)?;
        if let Some((_, value)) = words.iter().find(|(word, _)| *word == text) {
            return Some(*value);
        }
        let list = words.iter().map(|(word, _)| *word).collect::<Vec<_>>().join(", ");
        self.fault(node.place, field, format!("expected one of {list}; got {}", node.describe()));
        None
    }

    /// The items of a list.
    pub fn list<'n, 'a>(&mut self, node: &'n Node<'a>, field: &str) -> &'n [Node<'a>] {
        match &node.kind {
            Kind::Sequence(items) => items,
            _ => {
                self.fault(node.place, field, format!("expected a list, got {}", node.describe()));
                &[]
            }
        }
    }

    /// The entries of a mapping with free keys.
    pub fn entries<'n, 'a>(&mut self, node: &'n Node<'a>, field: &str) -> &'n [(Text<'a>, Node<'a>)] {
        match &node.kind {
            Kind::Mapping(entries) => entries,
            _ => {
                self.fault(node.place, field, format!("expected a mapping, got {}", node.describe()));
                &[]
            }
        }
    }

    /// The fields of a mapping with fixed keys; an unknown key is a fault.
    pub fn fields<'n, 'a, const N: usize>(
        &mut self,
        node: &'n Node<'a>,
        field: &str,
        known: [&'static str; N],
    ) -> [Option<&'n Node<'a>>; N] {
        let mut found = [None; N];
        for (key, value) in self.entries(node, field) {
            match known.iter().position(|name| *name == key.text) {
                Some(index) if value.is_null() => {
                    self.fault(value.place, &join(field, known[index]), "expected a value, got nothing");
                }
                Some(index) => found[index] = Some(value),
                None => self.fault(key.place, field, unknown_key(&key.text, &known)),
            }
        }
        found
    }

    /// A field that must be there.
    pub fn required<'n, 'a>(
        &mut self,
        parent: &Node<'_>,
        field: &str,
        node: Option<&'n Node<'a>>,
    ) -> Option<&'n Node<'a>> {
        if node.is_none() && matches!(parent.kind, Kind::Mapping(_)) {
            self.fault(parent.place, field, "is missing");
        }
        node
    }
}

/// `node` with the place it was written at.
pub fn placed<T>(node: &Node<'_>, value: T) -> Placed<T> {
    Placed { value, place: node.place }
}

/// The path of a field below `parent`.
pub fn join(parent: &str, field: &str) -> String {
    if parent.is_empty() { field.to_owned() } else { format!("{parent}.{field}") }
}

fn unknown_key(key: &str, known: &[&str]) -> String {
    let near = known.iter().map(|name| (distance(key, name), name)).min();
    let hint = match near {
        Some((distance, name)) if distance <= 2 => format!("; did you mean `{name}`?"),
        _ => format!("; expected one of {}", known.join(", ")),
    };
    format!("unknown key `{}`{hint}", shorten(key))
}

/// Edit distance, for "did you mean".
fn distance(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, from) in a.chars().take(64).enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, to) in b.iter().enumerate() {
            let substituted = diagonal + usize::from(from != *to);
            diagonal = row[j + 1];
            row[j + 1] = substituted.min(row[j] + 1).min(diagonal + 1);
        }
    }
    row[b.len()]
}

fn duration(text: &str) -> Option<Duration> {
    let digits = text.bytes().take_while(u8::is_ascii_digit).count();
    let (count, unit) = text.split_at(digits);
    let count: u64 = count.parse().ok()?;
    let millis = match unit.trim() {
        "ms" => 1,
        "s" => 1_000,
        "m" | "min" => 60_000,
        "h" => 3_600_000,
        "d" => 86_400_000,
        _ => return None,
    };
    let millis = count.checked_mul(millis)?;
    (millis <= 366 * 86_400_000).then(|| Duration::from_millis(millis))
}
