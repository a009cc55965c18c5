//! The circuit in front of a store node: while it is open nobody asks the store, so nobody waits.
//!
//! closed -> open on a share of failures in a window, or on a number of failures in a row, where what
//! fails within one deadline is one failure;
//! open -> half-open after a pause that grows and jitters; half-open -> closed when one probe has come
//! back and what was spent meanwhile is settled, else -> open.
//!
//! Asking and recording cannot come apart: [`Breaker::admit`] gives a [`Call`] that takes the outcome.
//! A probe that is dropped on the way opens the circuit again, so half-open cannot get stuck.

use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use crate::clock::Timestamp;
use crate::config;
use crate::store::NodeId;

/// The window over which the share of failures is taken.
const WINDOW_MICROS: u64 = 10_000_000;

/// Calls that a window must have before its share means anything: two failures of three calls are
/// no sign of a sick store.
const FEWEST_CALLS: u32 = 20;

/// How often a pause doubles. A longer one would only delay the way back, and gateways that come back
/// far apart give out more.
const MOST_DOUBLINGS: u32 = 1;

/// Whether calls pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// They pass.
    Closed,
    /// None passes.
    Open,
    /// One is tried.
    HalfOpen,
}

impl State {
    const ALL: [Self; 3] = [Self::Closed, Self::Open, Self::HalfOpen];

    /// The label in metrics, in the log and on the status page.
    pub const fn label(self) -> &'static str {
        match self {
            Self::Closed => "closed",
            Self::Open => "open",
            Self::HalfOpen => "half_open",
        }
    }
}

/// The circuit in front of one store node.
#[derive(Debug)]
pub struct Breaker {
    settings: config::Breaker,
    /// [`State`] by its position; read without a lock by every request.
    state: AtomicU8,
    in_a_row: AtomicU32,
    window_started: AtomicU64,
    calls: AtomicU32,
    failures: AtomicU32,
    last_answer: AtomicU64,
    last_failure: AtomicU64,
    down_at: AtomicU64,
    /// There was no connection since the last probe.
    cut_off: AtomicBool,
    pause: Mutex<Pause>,
}

#[derive(Debug)]
struct Pause {
    until: Timestamp,
    doublings: u32,
    random: u64,
    /// Why it is open.
    cause: String,
}

impl Breaker {
    /// A closed circuit; `seed` spreads the pauses of gateways.
    pub fn new(settings: config::Breaker, seed: u64) -> Self {
        Self {
            settings,
            state: AtomicU8::new(State::Closed as u8),
            in_a_row: AtomicU32::new(0),
            window_started: AtomicU64::new(0),
            calls: AtomicU32::new(0),
            failures: AtomicU32::new(0),
            last_answer: AtomicU64::new(0),
            last_failure: AtomicU64::new(0),
            down_at: AtomicU64::new(0),
            cut_off: AtomicBool::new(false),
            pause: Mutex::new(Pause {
                until: Timestamp::default(),
                doublings: 0,
                random: seed,
                cause: String::new(),
            }),
        }
    }

    /// Whether calls pass now.
    pub fn state(&self) -> State {
        State::ALL[usize::from(self.state.load(Ordering::Acquire)).min(2)]
    }

    /// Why it is not closed, if it is not.
    pub fn cause(&self) -> Option<String> {
        (self.state() != State::Closed).then(|| self.pause().cause.clone())
    }

    /// A call, if one may be made.
    pub fn admit(&self) -> Option<Call<'_>> {
        (self.state() == State::Closed).then_some(Call(self))
    }

    /// The one probe, if the pause is over, or a new connection is there: that may lead to a node that is well, and
    /// they do not come about more often than they should. While it lives there is no second one.
    pub fn probe(&self, now: Timestamp) -> Option<Probe<'_>> {
        let pause = self.pause();
        if self.state() != State::Open {
            return None;
        }
        if !self.cut_off.swap(false, Ordering::Relaxed) && now < pause.until {
            return None;
        }
        self.set(State::HalfOpen);
        Some(Probe { breaker: self, now, closes: false })
    }

    /// Notes that there is no connection at `now`.
    pub fn note_cut_off(&self, now: Timestamp) {
        self.cut_off.store(true, Ordering::Relaxed);
        self.note_down(now);
    }

    /// Notes that the store is known to be away at `now`.
    fn note_down(&self, now: Timestamp) {
        self.down_at.fetch_max(now.as_micros(), Ordering::Relaxed);
    }

    /// When the store was last known to be away. Before that it answered nobody; since then it may have.
    pub fn down_at(&self) -> Timestamp {
        Timestamp::from_micros(self.down_at.load(Ordering::Relaxed))
    }

    fn succeed(&self, now: Timestamp) {
        if self.in_a_row.load(Ordering::Relaxed) > 0 {
            self.in_a_row.store(0, Ordering::Relaxed);
        }
        if self.is_next(&self.last_answer, now) {
            self.count(now, false);
        }
    }

    /// Counts a failure; tells whether it has opened the circuit.
    fn fail(&self, cause: &dyn fmt::Display, now: Timestamp) -> bool {
        self.note_down(now);
        if !self.is_next(&self.last_failure, now) {
            return false;
        }
        let in_a_row = self.in_a_row.fetch_add(1, Ordering::Relaxed) + 1;
        let (calls, failures) = self.count(now, true);
        let ratio = u64::from(self.settings.failure_permille);
        let too_many = calls >= FEWEST_CALLS && u64::from(failures) * 1_000 >= ratio * u64::from(calls);
        if in_a_row < self.settings.consecutive_failures && !too_many {
            return false;
        }
        let mut pause = self.pause();
        if self.state() != State::Closed {
            return false;
        }
        pause.cause = cause.to_string();
        self.open(&mut pause, now);
        true
    }

    /// Whether this outcome is one more, and not the same one told by another request: many travel in
    /// one call, and one hiccup must not count as often as there were passengers.
    fn is_next(&self, last: &AtomicU64, now: Timestamp) -> bool {
        let before = last.load(Ordering::Relaxed);
        let apart = u64::try_from(self.settings.apart.as_micros()).unwrap_or(u64::MAX);
        now.micros_since(Timestamp::from_micros(before)) >= apart
            && last.compare_exchange(before, now.as_micros(), Ordering::Relaxed, Ordering::Relaxed).is_ok()
    }

    /// Counts one call. Two threads at the edge of a window may count one call too few: that is no
    /// reason for a lock.
    fn count(&self, now: Timestamp, failed: bool) -> (u32, u32) {
        let started = Timestamp::from_micros(self.window_started.load(Ordering::Relaxed));
        if now.micros_since(started) > WINDOW_MICROS {
            self.window_started.store(now.as_micros(), Ordering::Relaxed);
            self.calls.store(0, Ordering::Relaxed);
            self.failures.store(0, Ordering::Relaxed);
        }
        let calls = self.calls.fetch_add(1, Ordering::Relaxed).saturating_add(1);
        let failed = u32::from(failed);
        (calls, self.failures.fetch_add(failed, Ordering::Relaxed).saturating_add(failed))
    }

    fn open(&self, pause: &mut Pause, now: Timestamp) {
        let whole = u64::try_from(self.settings.open_for.as_micros()).unwrap_or(u64::MAX) << pause.doublings;
        pause.doublings = (pause.doublings + 1).min(MOST_DOUBLINGS);
        pause.random =
            pause.random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        // Half of the pause is certain, half is chance: gateways do not come back in step.
        pause.until = now.plus_micros(whole / 2 + (pause.random >> 33) % (whole / 2).max(1));
        self.set(State::Open);
    }

    fn close(&self) {
        self.cut_off.store(false, Ordering::Relaxed);
        self.pause().doublings = 0;
        self.in_a_row.store(0, Ordering::Relaxed);
        self.window_started.store(0, Ordering::Relaxed);
        self.set(State::Closed);
    }

    fn set(&self, state: State) {
        self.state.store(state as u8, Ordering::Release);
    }

    fn pause(&self) -> MutexGuard<'_, Pause> {
        self.pause.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The circuits in front of all nodes of a store: one that is away must not send the keys of the others to the
/// fallback.
#[derive(Debug)]
pub struct Breakers {
    settings: config::Breaker,
    seed: u64,
    nodes: Box<[OnceLock<Box<Breaker>>]>,
}

impl Breakers {
    /// Closed circuits; `seed` spreads the pauses of gateways.
    pub fn new(settings: config::Breaker, seed: u64) -> Self {
        Self { settings, seed, nodes: (0..NodeId::MOST).map(|_| OnceLock::new()).collect() }
    }

    /// The circuit in front of one node.
    pub fn of(&self, node: NodeId) -> &Breaker {
        let seed = self.seed.wrapping_add(node.index() as u64);
        self.nodes[node.index()].get_or_init(|| Box::new(Breaker::new(self.settings, seed)))
    }
}

/// One call that the circuit let pass. Dropped without an outcome it counts for nothing.
#[derive(Debug)]
#[must_use = "its outcome must be recorded"]
pub struct Call<'b>(&'b Breaker);

impl Call<'_> {
    /// The store answered: whatever it said, a refusal as well.
    pub fn answered(self, now: Timestamp) {
        self.0.succeed(now);
    }

    /// The store did not answer, or that it cannot. Tells whether this has opened the circuit.
    pub fn failed(self, cause: &dyn fmt::Display, now: Timestamp) -> bool {
        self.0.fail(cause, now)
    }
}

/// The one call that is tried while the circuit is half-open.
#[derive(Debug)]
pub struct Probe<'b> {
    breaker: &'b Breaker,
    now: Timestamp,
    closes: bool,
}

impl Probe<'_> {
    /// The store answers, and all that had to be told it is told.
    pub fn close(mut self) {
        self.closes = true;
    }
}

impl Drop for Probe<'_> {
    fn drop(&mut self) {
        if self.closes {
            self.breaker.close();
        } else {
            self.breaker.note_down(self.now);
            self.breaker.open(&mut self.breaker.pause(), self.now);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    const START: Timestamp = Timestamp::from_micros(1_764_000_000_000_000);
    const SECOND: u64 = 1_000_000;

    fn breaker() -> Breaker {
        let settings = config::Breaker {
            failure_permille: 500,
            consecutive_failures: 10,
            open_for: Duration::from_secs(1),
            apart: Duration::from_millis(5),
        };
        Breaker::new(settings, 7)
    }

    /// Outcomes 5 ms apart, from `now` on.
    fn moments(now: Timestamp, times: u32) -> impl Iterator<Item = Timestamp> {
        (0..u64::from(times)).map(move |step| now.plus_micros(step * 5_000))
    }

    fn fail(breaker: &Breaker, times: u32, now: Timestamp) -> bool {
        moments(now, times).any(|now| breaker.admit().is_some_and(|call| call.failed(&"no answer", now)))
    }

    fn answer(breaker: &Breaker, times: u32, now: Timestamp) {
        for now in moments(now, times) {
            breaker.admit().unwrap().answered(now);
        }
    }

    #[test]
    fn failures_in_a_row_open_it() {
        let breaker = breaker();
        assert!(!fail(&breaker, 9, START));
        assert_eq!(breaker.state(), State::Closed);
        assert!(fail(&breaker, 1, START.plus_micros(SECOND)));
        assert!(breaker.admit().is_none());
    }

    #[test]
    fn a_share_of_failures_opens_it() {
        let breaker = breaker();
        for now in moments(START, 20) {
            answer(&breaker, 1, now);
            if fail(&breaker, 1, now) {
                break;
            }
        }
        assert_eq!(breaker.state(), State::Open);
    }

    /// One late call with 64 requests on board is one failure.
    #[test]
    fn one_hiccup_is_one_failure() {
        let breaker = breaker();
        for second in 0..20 {
            let now = START.plus_micros(second * SECOND);
            answer(&breaker, 20, now);
            for _ in 0..64 {
                assert!(!breaker.admit().unwrap().failed(&"no answer", now.plus_micros(200_000)));
            }
        }
        assert_eq!(breaker.state(), State::Closed);
    }

    /// B077: answers count as success, whatever they say; a few failures among them do nothing.
    #[test]
    fn answers_keep_it_closed() {
        let breaker = breaker();
        for second in 0..100 {
            let now = START.plus_micros(second * SECOND);
            answer(&breaker, 60, now);
            assert!(!fail(&breaker, 1, now.plus_micros(400_000)));
        }
        assert_eq!(breaker.state(), State::Closed);
    }

    #[test]
    fn old_failures_are_forgotten() {
        let breaker = breaker();
        answer(&breaker, 5, START);
        fail(&breaker, 9, START);
        answer(&breaker, 1, START.plus_micros(SECOND));
        let later = START.plus_micros(WINDOW_MICROS + SECOND);
        answer(&breaker, 15, later);
        assert!(!fail(&breaker, 5, later));
    }

    #[test]
    fn one_probe_at_a_time_after_the_pause() {
        let breaker = breaker();
        fail(&breaker, 10, START);
        assert!(breaker.probe(START.plus_micros(SECOND / 2 - 1)).is_none());
        let now = START.plus_micros(SECOND + 50_000);
        let probe = breaker.probe(now).unwrap();
        assert_eq!(breaker.down_at(), START.plus_micros(9 * 5_000), "the last failure");
        assert_eq!(breaker.state(), State::HalfOpen);
        assert!(breaker.probe(now).is_none() && breaker.admit().is_none());
        probe.close();
        assert_eq!(breaker.state(), State::Closed);
        assert!(!fail(&breaker, 9, now), "it begins anew");
    }

    /// A probe that is dropped on the way opens it again; it never sticks at half-open.
    #[test]
    fn a_dropped_probe_opens_it_again_for_longer() {
        let breaker = breaker();
        fail(&breaker, 10, START);
        let mut now = START;
        let mut pauses = Vec::new();
        for _ in 0..5 {
            let opened = now;
            while breaker.probe(now).map(drop).is_none() {
                now = now.plus_micros(10_000);
            }
            assert_eq!(breaker.down_at(), now);
            pauses.push(now.micros_since(opened));
            assert_eq!(breaker.state(), State::Open);
        }
        assert!(pauses.iter().all(|pause| *pause <= 2 * SECOND + 20_000), "{pauses:?}");
        assert!(pauses[4] > SECOND, "{pauses:?}");
    }

    /// Behind a new connection may be another node, after a failover: that is tried at once, and once.
    #[test]
    fn a_new_connection_is_tried_at_once() {
        let breaker = breaker();
        fail(&breaker, 10, START);
        let now = START.plus_micros(100_000);
        assert!(breaker.probe(now).is_none());
        breaker.note_cut_off(now);
        assert!(breaker.probe(now).map(drop).is_some());
        assert!(breaker.probe(now).is_none(), "not again before the pause is over");
    }

    #[test]
    fn two_gateways_do_not_come_back_in_step() {
        let until = |seed| {
            let breaker = Breaker::new(breaker().settings, seed);
            fail(&breaker, 10, START);
            breaker.pause().until
        };
        let moments: std::collections::HashSet<_> = (0..20).map(until).collect();
        assert!(moments.len() > 15, "{moments:?}");
    }
}
