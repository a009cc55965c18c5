//! Every integration test, in one binary. Each starts what it needs, on ports it picks itself, and
//! ends it. A service that is missing fails the test; nothing is skipped.

#![expect(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::disallowed_methods,
    clippy::print_stdout,
    clippy::print_stderr,
    clippy::cast_precision_loss,
    clippy::cast_sign_loss,
    clippy::case_sensitive_file_extension_comparisons,
    reason = "tests may stop at the first thing that is not as it must be"
)]

mod access;
mod accuracy;
mod answers;
mod certificates;
mod check;
mod cluster;
mod contract;
mod demo;
mod doctor;
mod faults;
mod harness;
mod leases;
mod lifecycle;
mod limits;
mod outage;
mod proxied;
mod rollout;
mod rules;
mod sentinel;
mod simulation;
mod tidy;
mod twins;
mod versions;
