//! A file.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use thiserror::Error;

/// The most bytes that a configuration may have.
const LARGEST: u64 = 1 << 30;

/// Why a file cannot be read.
#[derive(Debug, Error)]
pub enum ReadError {
    /// The system says no.
    #[error("cannot read {}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// What the system says.
        source: io::Error,
    },
    /// It is no text.
    #[error("{}:{line}:1: not UTF-8 text", path.display())]
    NotText {
        /// The file.
        path: PathBuf,
        /// The line with the first byte that is none.
        line: usize,
    },
    /// It is too large.
    #[error("{} has {size} bytes, expected at most 1073741824", path.display())]
    TooLarge {
        /// The file.
        path: PathBuf,
        /// Its size in bytes.
        size: u64,
    },
}

/// The text of a file.
pub fn read(path: &Path) -> Result<String, ReadError> {
    let io = |source| ReadError::Io { path: path.into(), source };
    let size = fs::metadata(path).map_err(io)?.len();
    if size > LARGEST {
        return Err(ReadError::TooLarge { path: path.into(), size });
    }
    let bytes = fs::read(path).map_err(io)?;
    String::from_utf8(bytes).map_err(|error| {
        let good = &error.as_bytes()[..error.utf8_error().valid_up_to()];
        ReadError::NotText { path: path.into(), line: good.split(|byte| *byte == b'\n').count() }
    })
}
