//! The lines that ARCHITECTURE.md draws, held by a test.

use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// The modules in their layers, lowest first. A module imports only from lower layers.
const LAYERS: [&[&str]; 14] = [
    &["clock", "key", "metrics"],
    &["keyed", "limit"],
    &["config"],
    &["logging"],
    &["book", "gateways", "identity", "route", "rule"],
    &["decision", "snapshot"],
    &["store"],
    &["source"],
    &["breaker", "denials", "fallback", "hot_keys", "leases", "permits"],
    &["limiter"],
    &["proxy"],
    &["reload"],
    &["admin"],
    &["server"],
];

/// Layers above the last one: the command line.
const TOP: &str = "cli";

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// Every source file below `folder`, as path and text.
fn sources(folder: &str) -> Vec<(PathBuf, String)> {
    let mut files = Vec::new();
    let mut folders = vec![root().join(folder)];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                let text = fs::read_to_string(&path).unwrap();
                files.push((path.strip_prefix(root()).unwrap().to_owned(), text));
            }
        }
    }
    files.sort();
    files
}

/// The top-level module that a file of `src/` belongs to.
fn module(path: &Path) -> String {
    let second = path.iter().nth(1).unwrap().to_str().unwrap();
    second.trim_end_matches(".rs").to_owned()
}

/// Lines of code: without comments and tests.
fn code(text: &str) -> impl Iterator<Item = &str> {
    text.lines()
        .take_while(|line| *line != "#[cfg(test)]")
        .filter(|line| !line.trim_start().starts_with("//"))
}

#[test]
fn imports_go_only_downward() {
    let layer: HashMap<&str, usize> = LAYERS
        .iter()
        .enumerate()
        .flat_map(|(layer, modules)| modules.iter().map(move |module| (*module, layer)))
        .collect();
    for (path, text) in sources("src") {
        let own = module(&path);
        if matches!(own.as_str(), "lib" | "main" | TOP) || path.ends_with("tests.rs") {
            continue;
        }
        let own_layer = *layer.get(&*own).unwrap_or_else(|| panic!("{} is in no layer", path.display()));
        for line in code(&text) {
            for (_, rest) in line.match_indices("crate::").map(|(at, found)| line.split_at(at + found.len()))
            {
                let names = match rest.strip_prefix('{') {
                    Some(list) => list
                        .split(',')
                        .map(|name| name.trim().split("::").next().unwrap_or_default())
                        .collect(),
                    None => vec![
                        rest.split(|c: char| !c.is_alphanumeric() && c != '_').next().unwrap_or_default(),
                    ],
                };
                for name in names {
                    let Some(other) = layer.get(name.trim_end_matches(['}', ';'])) else { continue };
                    let sibling = *other == own_layer && name != own;
                    assert!(
                        *other <= own_layer && !sibling,
                        "{}: {own} imports {name}: {line}",
                        path.display()
                    );
                }
            }
        }
    }
}

#[test]
fn libraries_stay_behind_their_seams() {
    for (library, allowed) in [
        ("pingora", &["proxy", "admin", "server", "cli"][..]),
        ("rustls", &["source"]),
        ("redis", &["store"]),
        ("clap", &["cli"]),
        ("anyhow", &["cli"]),
        ("prometheus", &["metrics", "server", "proxy", "store"]),
        ("granit_parser", &["config"]),
    ] {
        for (path, text) in sources("src") {
            let own = module(&path);
            let named = code(&text).any(|line| {
                line.trim_start().starts_with(&format!("use {library}::"))
                    || line.contains(&format!(" {library}::")) && !line.contains("mod ")
                    || line.contains(&format!("<{library}::"))
            });
            assert!(!named || allowed.contains(&&*own), "{} names {library}", path.display());
            let store_file = path.starts_with("src/store") && library == "redis";
            assert!(
                !named || !store_file || path.to_str().unwrap().contains("redis"),
                "{} names redis",
                path.display()
            );
        }
    }
}

/// Below the stores nothing awaits, locks, or reads a clock, the environment or a socket.
#[test]
fn the_core_is_pure() {
    let core = ["key", "limit", "config", "identity", "route", "rule", "decision", "snapshot"];
    for (path, text) in sources("src") {
        if !core.contains(&&*module(&path)) {
            continue;
        }
        for line in code(&text) {
            for forbidden in [
                ".await",
                "async fn",
                "Mutex",
                "RwLock",
                "Instant::",
                "SystemTime",
                "std::net::Tcp",
                "tokio::",
            ] {
                assert!(!line.contains(forbidden), "{}: {line}", path.display());
            }
            let reads_environment = line.contains("std::env") && !path.ends_with("config/env.rs");
            assert!(!reads_environment, "{}: {line}", path.display());
        }
    }
}

#[test]
fn only_the_composition_root_gets_the_whole_configuration() {
    for (path, text) in sources("src") {
        let own = module(&path);
        // `snapshot` and `proxy::Live` are built from it, `reload` compares it, `source` reads it.
        if ["config", "snapshot", "proxy", "reload", "source", "server", "cli"].contains(&&*own) {
            continue;
        }
        assert!(
            !code(&text).any(|line| line.contains("&Config") || line.contains(": Config")),
            "{}",
            path.display()
        );
    }
}

#[test]
fn files_have_names_and_one_subject() {
    for (path, text) in sources("src").into_iter().chain(sources("tests")) {
        let name = path.file_name().unwrap().to_str().unwrap();
        assert!(
            !["util.rs", "utils.rs", "common.rs", "helpers.rs", "misc.rs", "mod.rs", "types.rs"]
                .contains(&name),
            "{}",
            path.display()
        );
        assert!(text.lines().count() <= 700, "{} is too long", path.display());
        assert!(!text.contains("#[ign\u{6f}re"), "{}: an ignored test is a skipped test", path.display());
        let is_glob = |line: &str| line.trim_start().starts_with("use ") && line.ends_with("::*;");
        let glob = code(&text)
            .find(|line| is_glob(line) && !line.contains("super::*") && !line.contains("prelude::*"));
        assert_eq!(glob, None, "{}: a glob import", path.display());
    }
}

#[test]
fn allowances_carry_a_reason() {
    for (path, text) in sources("src").into_iter().chain(sources("tests")) {
        for line in text.lines().map(str::trim_start).filter(|line| !line.starts_with("//")) {
            assert!(
                !line.starts_with("#[allow") && !line.starts_with("#![allow"),
                "{}: use #[expect(.., reason)]",
                path.display()
            );
        }
    }
}

/// The map names every module and every Lua file; what it names exists.
#[test]
fn the_map_is_true() {
    let map = fs::read_to_string(root().join("ARCHITECTURE.md")).unwrap();
    let modules = LAYERS.iter().flat_map(|layer| layer.iter().copied()).chain([TOP]);
    for module in modules {
        assert!(map.contains(&format!("`{module}`")), "ARCHITECTURE.md does not name `{module}`");
    }
    for entry in fs::read_dir(root().join("lua")).unwrap() {
        let name = entry.unwrap().file_name().into_string().unwrap();
        assert!(map.contains(&name), "ARCHITECTURE.md does not name {name}");
    }
    for path in map.split(['`', '(', ')', ' ', '\n']).filter(|word| {
        word.contains('/') && (word.ends_with(".rs") || word.ends_with(".lua") || word.ends_with(".md"))
    }) {
        assert!(root().join(path).exists(), "ARCHITECTURE.md names {path}");
    }
}

/// The rustc at hand reads the profile, and only release builds are compiled with it.
#[test]
fn a_release_build_takes_the_profile() {
    let wrapped = |arguments: &[&str]| {
        let mut command = Command::new(root().join("profile/rustc"));
        command.args(arguments).stdin(Stdio::null()).output().unwrap()
    };
    let told = |folder: &str| String::from_utf8(wrapped(&["echo", "--out-dir", folder]).stdout).unwrap();
    let profile = root().join("profile/tollgate.profdata");
    assert!(told("target/release/deps").contains(&format!("-Cprofile-use={} ", profile.display())));
    assert_eq!(told("target/debug/deps"), "--out-dir target/debug/deps\n");
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path().join("release/deps");
    let rustc = std::env::var("RUSTC").unwrap_or_else(|_| "rustc".into());
    let compiled =
        wrapped(&[&rustc, "-", "--crate-type=lib", "-Copt-level=3", "--out-dir", folder.to_str().unwrap()]);
    assert!(compiled.status.success(), "{}", String::from_utf8_lossy(&compiled.stderr));
}

/// What the Dockerfile copies is let into the build.
#[test]
fn the_image_gets_what_it_copies() {
    let read = |name: &str| fs::read_to_string(root().join(name)).unwrap();
    let (let_in, dockerfile) = (read(".dockerignore"), read("Dockerfile"));
    for line in dockerfile.lines().filter(|line| line.starts_with("COPY") && !line.contains("--from")) {
        let words: Vec<&str> =
            line.split_whitespace().skip(1).filter(|word| !word.starts_with("--")).collect();
        for copied in &words[..words.len() - 1] {
            assert!(root().join(copied).exists(), "{copied} is copied, but is not here");
            let copied = copied.trim_start_matches("./");
            assert!(let_in.lines().any(|line| line == format!("!{copied}")), "{copied} is not let in");
        }
    }
}
