//! `tollgate check` and `tollgate schema`.
//!
//! `tests/bad-configs/*.yaml` each have a fault or several; the file of the same name with `.txt` has
//! what is said about it, to the letter. `UPDATE_GOLDEN=1` writes those anew, to be read in the diff.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

fn check(config: &Path) -> Output {
    Command::new(env!("CARGO_BIN_EXE_tollgate"))
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .args(["check", "--config"])
        .arg(config)
        .env_remove("TOLLGATE_UNSET")
        .output()
        .unwrap()
}

fn bad_configs() -> Vec<PathBuf> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/bad-configs");
    let mut files: Vec<PathBuf> = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.retain(|path| path.extension().is_some_and(|extension| extension == "yaml"));
    files.sort();
    files
}

#[test]
fn every_bad_config_is_told_what_is_wrong_with_it() {
    let files = bad_configs();
    assert!(files.len() >= 25, "{}", files.len());
    let update = std::env::var("UPDATE_GOLDEN").is_ok();
    for file in files {
        let relative = file.strip_prefix(env!("CARGO_MANIFEST_DIR")).unwrap();
        let output = check(relative);
        let said = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(2), "{}: {said}", relative.display());
        assert!(output.stdout.is_empty());
        // Every line has the place: file:line:column.
        for line in said.lines().filter(|line| !line.ends_with(" fault") && !line.ends_with(" faults")) {
            let place =
                line.strip_prefix(&relative.display().to_string()).unwrap_or_else(|| panic!("{line}"));
            let mut parts = place.split(':').skip(1);
            let number = |part: Option<&str>| part.and_then(|part| part.trim().parse::<u32>().ok());
            assert!(number(parts.next()) > Some(0) && number(parts.next()) > Some(0), "no place: {line}");
        }
        let golden = file.with_extension("txt");
        if update {
            fs::write(&golden, &said).unwrap();
        }
        let expect = fs::read_to_string(&golden).unwrap_or_default();
        assert_eq!(said, expect, "{}", relative.display());
    }
}

#[test]
fn a_folder_is_checked_file_by_file() {
    let output = check(Path::new("tests/bad-configs"));
    let said = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(2));
    for file in bad_configs() {
        assert!(said.contains(file.file_name().unwrap().to_str().unwrap()));
    }
}

#[test]
fn a_good_config_is_summed_up() {
    let output = check(Path::new("conf/tollgate.yaml"));
    assert_eq!(output.status.code(), Some(0));
    let said = String::from_utf8(output.stdout).unwrap();
    assert_eq!(said, "conf/tollgate.yaml: ok: 2 routes, 1 upstream, 1 of 1 rows\n");
    // An empty hash_secret works, and is warned about.
    let warned = String::from_utf8(output.stderr).unwrap();
    assert!(warned.contains("warning: identity.hash_secret: is empty"), "{warned}");
}

#[test]
fn a_missing_file_is_an_error_of_its_own() {
    let output = check(Path::new("conf/no-such-file.yaml"));
    assert_eq!(output.status.code(), Some(2));
    assert!(String::from_utf8(output.stderr).unwrap().starts_with("cannot read conf/no-such-file.yaml: "));
}

/// The schema knows every key that the reader knows, and no other.
#[test]
fn the_schema_is_the_readers() {
    let output = Command::new(env!("CARGO_BIN_EXE_tollgate")).arg("schema").output().unwrap();
    let schema: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(schema["$schema"], "https://json-schema.org/draft/2020-12/schema");
    // For each mapping in the schema, a key nobody knows: the fault then lists the reader's own keys.
    let mut sections = 0;
    let mut todo = vec![(String::new(), &schema)];
    while let Some((path, node)) = todo.pop() {
        if let Some(properties) = node["properties"].as_object() {
            let known: Vec<&str> = known_keys(&path)
                .unwrap_or_else(|| panic!("cannot reach {path}"))
                .leak()
                .split(", ")
                .collect();
            let mut in_schema: Vec<&str> = properties.keys().map(String::as_str).collect();
            let mut in_reader = known.clone();
            in_schema.sort_unstable();
            in_reader.sort_unstable();
            assert_eq!(in_schema, in_reader, "at `{path}`");
            assert_eq!(node["additionalProperties"], false, "at `{path}`");
            sections += 1;
            for (key, below) in properties {
                todo.push((format!("{path}.{key}").trim_start_matches('.').to_owned(), below));
            }
        }
        for variant in node["oneOf"].as_array().into_iter().flatten() {
            todo.push((path.clone(), variant));
        }
        if node["items"].is_object() {
            todo.push((format!("{path}[]"), &node["items"]));
        }
        if node["additionalProperties"].is_object() {
            todo.push((format!("{path}.any"), &node["additionalProperties"]));
        }
    }
    assert!(sections >= 15, "{sections}");
}

/// The keys that the reader accepts at a path of the schema, from what it says about a wrong one.
fn known_keys(path: &str) -> Option<String> {
    let mut text = String::from("{qqqqqqqqqq: 1}");
    for step in path.split('.').rev().filter(|step| !step.is_empty()) {
        let (name, list) = step.strip_suffix("[]").map_or((step, false), |name| (name, true));
        text = if list { format!("{{{name}: [{text}]}}") } else { format!("{{{name}: {text}}}") };
    }
    let (_, faults) = tollgate::config::read_all(&text, &|_| None);
    let message = faults.into_iter().find(|fault| fault.message.contains("qqqqqqqqqq"))?.message;
    Some(message.split_once("expected one of ")?.1.to_owned())
}
