//! Tollgate: an edge proxy that limits request rates truthfully over a whole cluster of gateways.
//!
//! `ARCHITECTURE.md` has the map. The modules stand here in layers, lowest first; a module imports
//! only from lines above its own, and not from its own layer (`tests/tidy.rs` holds that).

// layer 0: time as a value; keys that no client byte can forge; what is counted
pub mod clock;
pub mod key;
pub mod metrics;

// layer 1: limits, pure
pub mod keyed;
pub mod limit;

// the configuration: from as written to as meant; and the log
pub mod config;
// (on top of it)
pub mod logging;

// layer 2: routes, rules, identity and the snapshot of them, pure
pub mod book;
pub mod gateways;
pub mod identity;
pub mod route;
pub mod rule;
// (on top of those)
pub mod decision;
pub mod snapshot;

// layer 3: where buckets live
pub mod store;
// (on top of it) where rules come from
pub mod source;

// layer 4: decisions
pub mod breaker;
pub mod denials;
pub mod fallback;
pub mod hot_keys;
pub mod leases;
pub mod permits;
// (on top of it)
pub mod limiter;

// layer 5: HTTP
pub mod proxy;
// (on top of it)
pub mod reload;
// (on top of it)
pub mod admin;

// layer 6: the composition root
pub mod server;

// layer 7: the command line
pub mod cli;
