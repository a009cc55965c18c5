//! Tollgate: an edge proxy that limits request rates truthfully over a whole cluster of gateways.
//!
//! `ARCHITECTURE.md` has the map. The modules stand here in layers, lowest first; a module imports
//! only from above its own line (`tests/tidy.rs` holds that).

// leaf
pub mod metrics;
// layer 0
pub mod clock;
pub mod key;
// layer 1
pub mod limit;
// configuration: below the rules, which are built from it
pub mod config;
// layer 2
pub mod identity;
pub mod route;
pub mod rule;
pub mod snapshot;
// layer 3
pub mod store;
