//! A fault: one thing that is wrong in a configuration, and where.

use std::fmt;

/// A place in a configuration file: line and column, both from 1.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Place {
    /// Line, from 1.
    pub line: u32,
    /// Column in characters, from 1.
    pub column: u32,
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.line, self.column)
    }
}

/// One thing wrong, with its place and what was expected there.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Fault {
    /// Where.
    pub place: Place,
    /// Which field, as a path such as `rules.rows[3].capacity`; empty for the file itself.
    pub field: String,
    /// What is wrong and what was expected.
    pub message: String,
}

impl Fault {
    /// A fault at `place` in `field`.
    pub fn new(place: Place, field: impl Into<String>, message: impl Into<String>) -> Self {
        Self { place, field: field.into(), message: message.into() }
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: ", self.place)?;
        if !self.field.is_empty() {
            write!(f, "{}: ", self.field)?;
        }
        f.write_str(&self.message)
    }
}

/// A value with the place where it was written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Placed<T> {
    /// The value.
    pub value: T,
    /// Where it was written.
    pub place: Place,
}
