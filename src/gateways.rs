//! How many gateways share the limits, and whether this one may hold a part of them in advance.
//!
//! A gateway that joins is no surprise to the others: it takes nothing in advance before each of them
//! must have counted it. One that cannot tell any more that it lives spends nothing in advance from well
//! before the others count it as gone. So those that hold something are never more than those counted.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use crate::clock::Timestamp;

/// After which silence a gateway counts as gone.
pub const GONE_AFTER: Duration = Duration::from_secs(5);

/// How old the count may be by which this gateway holds something in advance.
const FRESH_MICROS: u64 = 3_000_000;

/// How long a gateway must have been counted before it may hold something: all others have heard a count
/// with it by then, or their own is not fresh any more. The rest is for what they have to give back.
const JOINING_MICROS: u64 = FRESH_MICROS + 500_000;

/// The gateways that share the limits, as far as this one knows.
#[derive(Debug)]
pub struct Gateways {
    count: AtomicU32,
    /// Whether somebody counts; else the number is from the configuration.
    counted: bool,
    /// When the last heartbeat was sent that was answered; 0 before.
    heard_at: AtomicU64,
    /// Since when this one has been counted without a gap.
    joined_at: AtomicU64,
}

impl Gateways {
    /// A number that the configuration gives.
    pub const fn fixed(count: u32) -> Self {
        Self {
            count: AtomicU32::new(count),
            counted: false,
            heard_at: AtomicU64::new(0),
            joined_at: AtomicU64::new(0),
        }
    }

    /// A number that heartbeats tell; one until then.
    pub const fn counted() -> Self {
        Self { counted: true, ..Self::fixed(1) }
    }

    /// Their number, at least one. Without a store the last one holds.
    pub fn count(&self) -> u32 {
        self.count.load(Ordering::Relaxed).max(1)
    }

    /// Whether somebody has told the number.
    pub fn is_known(&self) -> bool {
        !self.counted || self.heard_at.load(Ordering::Relaxed) > 0
    }

    /// Notes the `count` that a heartbeat was answered with, which was `sent` then and answered `now`.
    pub fn heard(&self, count: u32, sent: Timestamp, now: Timestamp) {
        let before = Timestamp::from_micros(self.heard_at.load(Ordering::Acquire));
        // The others may have counted it as gone meanwhile.
        if u128::from(now.micros_since(before)) > GONE_AFTER.as_micros() {
            self.joined_at.store(now.as_micros(), Ordering::Relaxed);
        }
        self.count.store(count.max(1), Ordering::Relaxed);
        self.heard_at.store(sent.as_micros(), Ordering::Release);
    }

    /// Among how many what is held in advance is divided at `now`; `None` while this gateway must hold
    /// nothing.
    pub fn holders(&self, now: Timestamp) -> Option<u32> {
        if !self.counted {
            return Some(self.count());
        }
        let heard_at = Timestamp::from_micros(self.heard_at.load(Ordering::Acquire));
        let joined_at = Timestamp::from_micros(self.joined_at.load(Ordering::Relaxed));
        let fresh = now.micros_since(heard_at) <= FRESH_MICROS;
        (fresh && now.micros_since(joined_at) >= JOINING_MICROS).then(|| self.count())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const START: Timestamp = Timestamp::from_micros(1_000_000_000_000);

    fn after(millis: u64) -> Timestamp {
        START.plus_micros(millis * 1_000)
    }

    fn beating(gateways: &Gateways, millis: std::ops::Range<u64>) {
        millis.step_by(1_000).for_each(|at| gateways.heard(3, after(at), after(at + 5)));
    }

    #[test]
    fn who_joins_waits_until_all_can_have_counted_it() {
        let gateways = Gateways::counted();
        assert_eq!(gateways.holders(START), None);
        beating(&gateways, 0..4_000);
        assert_eq!(gateways.holders(after(3_400)), None);
        assert_eq!(gateways.holders(after(3_600)), Some(3));
    }

    #[test]
    fn who_is_not_heard_any_more_holds_nothing_before_it_counts_as_gone() {
        let gateways = Gateways::counted();
        beating(&gateways, 0..10_000);
        assert_eq!(gateways.holders(after(12_000)), Some(3));
        assert_eq!(gateways.holders(after(12_001)), None);
        // Back before it was gone: all have counted it all the time.
        gateways.heard(3, after(13_000), after(13_005));
        assert_eq!(gateways.holders(after(13_005)), Some(3));
        // After a longer silence it joins anew.
        gateways.heard(3, after(18_100), after(18_105));
        assert_eq!(gateways.holders(after(18_105)), None);
        beating(&gateways, 19_100..22_100);
        assert_eq!(gateways.holders(after(21_700)), Some(3));
    }

    #[test]
    fn a_number_from_the_configuration_holds_at_once() {
        assert_eq!(Gateways::fixed(4).holders(START), Some(4));
    }
}
