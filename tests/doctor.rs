//! `tollgate doctor`: what it finds, and what it says about it.

use std::process::Command;

use crate::access::granted;
use crate::harness::cluster::Cluster;
use crate::harness::sentinels::{MASTER, Sentinels};
use crate::harness::{Redis, free_port};

/// The exit code and what was printed, for a store.
fn doctor(store: &str, more: &[&str]) -> (i32, String) {
    let folder = tempfile::tempdir().unwrap();
    let config = folder.path().join("c.yaml");
    let text = format!(
        "store: {store}\nidentity: {{hash_secret: s}}\nupstreams: {{u: {{servers: [127.0.0.1:1]}}}}\nroutes: [{{id: a, match: {{path: /}}, upstream: u}}]\n"
    );
    std::fs::write(&config, text).unwrap();
    let output = Command::new(env!("CARGO_BIN_EXE_tollgate"))
        .arg("doctor")
        .args(more)
        .arg("--config")
        .arg(&config)
        .output();
    let output = output.unwrap();
    let told = [output.stdout, output.stderr].concat();
    (output.status.code().unwrap(), String::from_utf8(told).unwrap())
}

#[track_caller]
fn says(told: &str, expected: &[&str]) {
    for text in expected {
        assert!(told.contains(text), "{text}: not in\n{told}");
    }
}

#[test]
fn one_redis_from_well_to_unreachable() {
    let redis = Redis::process();
    // With the rights of the guide, and no more.
    let rights = granted(0);
    let words: Vec<&str> = rights.iter().map(String::as_str).collect();
    let _: String = redis.command(&[&["ACL", "SETUSER", "tollgate"], &words[..]].concat());
    let store = |password: &str| {
        format!("{{redis: {{url: '{}', user: tollgate, password: {password}}}}}", redis.url())
    };
    let _: String = redis.command(&["CONFIG", "SET", "appendonly", "yes"]);
    let (code, told) = doctor(&store("secret"), &[]);
    says(
        &told,
        &[": Redis ", ", master, standalone", "noeviction, and no maxmemory", "append-only file", "clock "],
    );
    says(
        &told,
        &[
            "the script may do all",
            "0 gateways are counted",
            "(p99) of 5ms allowed",
            "bytes per bucket",
            "0 faults",
        ],
    );
    assert_eq!(code, 0);
    let bytes: u64 =
        told.split(" bytes per bucket").next().unwrap().rsplit(' ').next().unwrap().parse().unwrap();
    assert!((80..=200).contains(&bytes), "{told}");
    assert!(redis.command::<Vec<::redis::Value>>(&["ACL", "LOG"]).is_empty());

    let _: String = redis.command(&["CONFIG", "SET", "appendonly", "no"]);
    let _: String = redis.command(&["CONFIG", "SET", "maxmemory-policy", "allkeys-lru"]);
    let keys: u64 = redis.command(&["DBSIZE"]);
    let (code, told) = doctor(&store("secret"), &["--read-only"]);
    says(
        &told,
        &[
            "warning",
            "maxmemory-policy is allkeys-lru: what is evicted counts as not taken",
            "use noeviction",
        ],
    );
    says(&told, &["no append-only file, 0 replicas: after a crash", "2 warnings, 0 faults"]);
    assert!(code == 0 && redis.command::<u64>(&["DBSIZE"]) <= keys, "nothing is written");

    let _: String = redis.command(&["ACL", "SETUSER", "tollgate", "-zadd"]);
    let (code, told) = doctor(&store("secret"), &[]);
    says(&told, &["fault", "can't run this command", "docs/redis.md", "1 faults"]);
    assert_eq!(code, 1);
    let (code, told) = doctor(&store("wrong"), &[]);
    says(&told, &["fault", "Password authentication failed", "1 faults"]);
    assert!(code == 1 && !told.contains("wrong"), "{told}");
    let (code, told) = doctor(&format!("{{redis: {{url: 'redis://127.0.0.1:{}'}}}}", free_port()), &[]);
    says(&told, &["fault", "refused", "1 faults"]);
    assert_eq!(code, 1);
    let (code, told) = doctor("{redis: {url: nowhere}}", &[]);
    says(&told, &["store.redis.url: expected redis://host:port"]);
    assert_eq!(code, 2);
}

#[test]
fn a_cluster_and_sentinels() {
    let cluster = Cluster::start();
    let (code, told) = doctor(&cluster.store(""), &[]);
    says(&told, &["all 16384 slots on 3 masters", ", master, cluster", "all nodes within", "0 faults"]);
    assert_eq!((code, told.matches("bytes per bucket").count()), (0, 3), "{told}");
    assert_eq!(told.matches("gateways are counted").count(), 1, "{told}");
    let lonely = Redis::with(&["--cluster-enabled", "yes"]);
    let _: String = lonely.command(&["CLUSTER", "ADDSLOTSRANGE", "0", "16000"]);
    let (code, told) = doctor(&format!("{{redis: {{cluster: ['{}']}}}}", lonely.url()), &["--read-only"]);
    says(&told, &["383 of 16384 slots have no node", "no replica: if it dies"]);
    assert_eq!(code, 1);

    let sentinels = Sentinels::start();
    let (code, told) = doctor(&sentinels.store(), &[]);
    says(
        &told,
        &[
            "Sentinel 127.0.0.1:",
            &format!("{MASTER} is 127.0.0.1:"),
            "it knows 2 other Sentinels",
            "1 replicas",
        ],
    );
    assert_eq!(code, 0, "{told}");
}
