//! `tollgate check`.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Context as _;

use super::EXIT_FAULTS;
use crate::config::fault::Fault;
use crate::config::{Config, env};
use crate::snapshot::Snapshot;
use crate::source::{self, Loaded};

pub(super) fn run(path: &Path) -> ExitCode {
    let files = if path.is_dir() { yaml_files(path) } else { Ok(vec![path.to_owned()]) };
    let files = match files {
        Ok(files) => files,
        Err(error) => {
            eprintln!("{error:#}");
            return EXIT_FAULTS.into();
        }
    };
    let mut all_good = true;
    for file in files {
        all_good &= check(&file);
    }
    if all_good { ExitCode::SUCCESS } else { EXIT_FAULTS.into() }
}

/// Prints what is to say about one file; tells whether it can be served.
fn check(path: &Path) -> bool {
    let text = match source::file::read(path) {
        Ok(text) => text,
        Err(error) => {
            eprintln!("{error}");
            return false;
        }
    };
    match source::load(&text, &env::process) {
        Ok(Loaded { config, snapshot, .. }) => {
            for warning in &config.warnings {
                eprintln!(
                    "{}:{}: warning: {}: {}",
                    path.display(),
                    warning.place,
                    warning.field,
                    warning.message
                );
            }
            println!("{}: ok: {}", path.display(), summary(&config, &snapshot));
            true
        }
        Err(faults) => {
            print_faults(path, &faults);
            false
        }
    }
}

pub(super) fn print_faults(path: &Path, faults: &[Fault]) {
    for fault in faults {
        eprintln!("{}:{fault}", path.display());
    }
    let noun = if faults.len() == 1 { "fault" } else { "faults" };
    eprintln!("{}: {} {noun}", path.display(), faults.len());
}

fn summary(config: &Config, snapshot: &Snapshot) -> String {
    let plural = |count: usize, noun: &str| format!("{count} {noun}{}", if count == 1 { "" } else { "s" });
    format!(
        "{}, {}, {} of {} rows",
        plural(config.routes.len(), "route"),
        plural(config.upstreams.len(), "upstream"),
        snapshot.rows(),
        config.rules.rows.len(),
    )
}

fn yaml_files(folder: &Path) -> anyhow::Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    for entry in std::fs::read_dir(folder).with_context(|| format!("cannot read {}", folder.display()))? {
        let path = entry?.path();
        if path.extension().is_some_and(|extension| extension == "yaml" || extension == "yml") {
            files.push(path);
        }
    }
    files.sort();
    anyhow::ensure!(!files.is_empty(), "there is no .yaml file in {}", folder.display());
    Ok(files)
}
