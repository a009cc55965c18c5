//! Certificates of the listeners: chosen by name, read again by a reload, and refused with their place.

use std::path::Path;
use std::process::Command;

use rcgen::{CertificateParams, KeyPair};

use crate::harness::gateway::everything_to;
use crate::harness::{Gateway, Upstream};

const RULES: &str = "  default: {capacity: 1000, refill_per_second: 1/h}";

/// A certificate that vouches for itself, and so is its own authority: `file`.pem and `file`.key.
fn write(folder: &Path, file: &str, names: &[&str]) {
    let names: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
    let key = KeyPair::generate().unwrap();
    let certificate = CertificateParams::new(names).unwrap().self_signed(&key).unwrap();
    std::fs::write(folder.join(format!("{file}.pem")), certificate.pem()).unwrap();
    std::fs::write(folder.join(format!("{file}.key")), key.serialize_pem()).unwrap();
}

fn tls(folder: &Path, files: &[&str]) -> String {
    let folder = folder.display();
    let list: Vec<String> =
        files.iter().map(|file| format!("{{cert: {folder}/{file}.pem, key: {folder}/{file}.key}}")).collect();
    format!(", tls: {{certificates: [{}]}}", list.join(", "))
}

/// The status of a request to `name`, whose certificate must be the one in `file`.
fn ask(gateway: &Gateway, folder: &Path, name: &str, file: &str) -> String {
    let output = Command::new("curl")
        .args(["-s", "-o", "/dev/null", "-w", "%{http_code}", "-H", "X-Api-Key: a", "--max-time", "10"])
        .arg("--cacert")
        .arg(folder.join(format!("{file}.pem")))
        .args(["--resolve", &format!("{name}:{}:127.0.0.1", gateway.port)])
        .arg(format!("https://{name}:{}/", gateway.port))
        .output()
        .unwrap();
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn each_name_has_its_certificate() {
    let (upstream, folder) = (Upstream::start(), tempfile::tempdir().unwrap());
    let folder = folder.path();
    write(folder, "first", &["first.test", "127.0.0.1"]);
    write(folder, "second", &["second.test", "*.wild.test"]);
    let listener = tls(folder, &["first", "second"]);
    let gateway = Gateway::start_listening(&listener, "memory", &everything_to(&upstream, RULES), &[]);
    for (name, file, status) in [
        ("first.test", "first", "200"),
        ("second.test", "second", "200"),
        ("a.wild.test", "second", "200"),
        ("a.b.wild.test", "second", "000"),
        ("second.test", "first", "000"),
        // No name is asked for with an address: the first one is for all others.
        ("127.0.0.1", "first", "200"),
    ] {
        assert_eq!(ask(&gateway, folder, name, file), status, "{name} with {file}.pem");
    }
}

/// A renewed certificate is served from the next handshake after a SIGHUP on; one that is broken changes nothing.
#[test]
fn a_reload_reads_them_again() {
    let (upstream, folder) = (Upstream::start(), tempfile::tempdir().unwrap());
    let folder = folder.path();
    write(folder, "now", &["a.test"]);
    let listener = tls(folder, &["now"]);
    let gateway = Gateway::start_listening(&listener, "memory", &everything_to(&upstream, RULES), &[]);
    std::fs::copy(folder.join("now.pem"), folder.join("old.pem")).unwrap();
    assert_eq!(ask(&gateway, folder, "a.test", "old"), "200");

    write(folder, "now", &["a.test"]);
    assert_eq!(ask(&gateway, folder, "a.test", "old"), "200", "not before it is told");
    gateway.reload();
    assert_eq!(ask(&gateway, folder, "a.test", "now"), "200");
    assert_eq!(ask(&gateway, folder, "a.test", "old"), "000");

    std::fs::copy(folder.join("now.pem"), folder.join("good.pem")).unwrap();
    std::fs::write(folder.join("now.pem"), "no certificate").unwrap();
    gateway.reload();
    assert!(gateway.log().contains("now.pem: expected PEM with a certificate"), "{}", gateway.log());
    assert_eq!(ask(&gateway, folder, "a.test", "good"), "200", "the last good one goes on");
}

/// `check` and `serve` tell the same, and nothing panics.
#[test]
fn what_cannot_be_used_is_told_with_its_place() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    write(folder, "one", &["one.test"]);
    write(folder, "two", &["two.test"]);
    std::fs::write(folder.join("empty.pem"), "").unwrap();
    let text = "upstreams: {u: {servers: [127.0.0.1:9]}}
routes: [{id: a, match: {path: /}, upstream: u}, {id: a, match: {path: /b}, upstream: u}]
admin: {address: 127.0.0.1:9}
listeners:
  - address: 127.0.0.1:7
    tls:
      certificates:
        - {cert: one.pem, key: one.key}
        - {cert: one.pem, key: two.key}
        - {cert: missing.pem, key: one.key}
        - {cert: one.pem, key: empty.pem}
        - {cert: one.key, key: one.key}
";
    std::fs::write(folder.join("c.yaml"), text).unwrap();
    for command in ["check", "serve"] {
        let output = Command::new(env!("CARGO_BIN_EXE_tollgate"))
            .current_dir(folder)
            .args([command, "--config", "c.yaml"])
            .output()
            .unwrap();
        let said = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(2), "{command}: {said}");
        for expect in [
            "c.yaml:9:11: listeners[0].tls.certificates[1]: one.pem and two.key do not go together",
            "c.yaml:10:11: listeners[0].tls.certificates[2]: cannot read missing.pem: No such file or directory",
            "c.yaml:11:11: listeners[0].tls.certificates[3]: empty.pem: expected PEM with a private key",
            "c.yaml:12:11: listeners[0].tls.certificates[4]: one.key: expected PEM with a certificate",
            "c.yaml:2:",
            "c.yaml: 5 faults",
        ] {
            assert!(said.contains(expect), "{command}: {expect}\n{said}");
        }
    }
}
