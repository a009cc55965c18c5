//! Time as a value. Nothing above this module reads a clock: `now` is an argument.

use std::fmt::Debug;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// A moment: microseconds since the Unix epoch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Timestamp(u64);

impl Timestamp {
    /// The moment `micros` microseconds after the Unix epoch.
    pub const fn from_micros(micros: u64) -> Self {
        Self(micros)
    }

    /// Microseconds since the Unix epoch.
    pub const fn as_micros(self) -> u64 {
        self.0
    }

    /// The moment that a text such as `2026-12-24T18:00:00Z` names; none before 1970.
    pub fn from_rfc3339(text: &str) -> Option<Self> {
        let moment: jiff::Timestamp = text.parse().ok()?;
        u64::try_from(moment.as_microsecond()).ok().map(Self)
    }

    /// As RFC 3339 writes it, in UTC.
    pub fn to_rfc3339(self) -> String {
        let micros = i64::try_from(self.0).unwrap_or(i64::MAX);
        jiff::Timestamp::from_microsecond(micros).unwrap_or(jiff::Timestamp::MAX).to_string()
    }

    /// Microseconds from `earlier` to here; 0 if `earlier` is in fact later.
    pub const fn micros_since(self, earlier: Self) -> u64 {
        self.0.saturating_sub(earlier.0)
    }

    /// The moment `micros` microseconds later.
    #[must_use]
    pub const fn plus_micros(self, micros: u64) -> Self {
        Self(self.0.saturating_add(micros))
    }

    /// The moment `micros` microseconds earlier.
    #[must_use]
    pub const fn minus_micros(self, micros: u64) -> Self {
        Self(self.0.saturating_sub(micros))
    }
}

/// A pause of half to all of `pause`, so that gateways do not knock in step.
pub fn jittered(pause: Duration) -> Duration {
    use std::hash::{BuildHasher as _, RandomState};
    let half = pause / 2;
    let random = RandomState::new().hash_one(0u8) % 1_000;
    half + half * u32::try_from(random).unwrap_or(0) / 1_000
}

/// Where the shell of the gateway reads the time. The core never does.
pub trait Clock: Debug + Send + Sync {
    /// The present moment. Never earlier than one told before.
    fn now(&self) -> Timestamp;
}

/// The clock of this process: starts at the wall clock's time and then runs evenly, so that a wall
/// clock that is set back or forth meanwhile neither mints tokens nor freezes a bucket.
#[derive(Debug)]
pub struct SystemClock {
    started_at: Timestamp,
    started: Instant,
}

impl SystemClock {
    /// Starts a clock at the wall clock's time.
    #[expect(clippy::disallowed_methods, reason = "this is the one place that reads the clocks")]
    pub fn start() -> Self {
        let wall = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or(Duration::ZERO);
        Self { started_at: Timestamp(micros(wall)), started: Instant::now() }
    }
}

impl Clock for SystemClock {
    fn now(&self) -> Timestamp {
        self.started_at.plus_micros(micros(self.started.elapsed()))
    }
}

/// A clock that stands still until it is told to go on: for tests and simulations.
#[derive(Debug, Default)]
pub struct ManualClock(AtomicU64);

impl ManualClock {
    /// A clock that stands at `at`.
    pub fn at(at: Timestamp) -> Self {
        Self(AtomicU64::new(at.as_micros()))
    }

    /// Moves the clock forward.
    pub fn advance(&self, by: Duration) {
        self.0.fetch_add(micros(by), Ordering::SeqCst);
    }
}

impl Clock for ManualClock {
    fn now(&self) -> Timestamp {
        Timestamp(self.0.load(Ordering::SeqCst))
    }
}

fn micros(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}
