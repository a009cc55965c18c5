//! Which keys are asked for most on this gateway, and how fast.
//!
//! Every key is counted in a sketch of constant size, which may count too much but never too little. One
//! that passes the threshold there is promoted, and counted exactly from then on, until it cools down.

use std::hash::BuildHasher as _;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use foldhash::fast::RandomState;
use pingora_limits::rate::Rate;

use crate::clock::Timestamp;
use crate::key::Key;
use crate::keyed::Keyed;

/// Counters of the sketch: with these, among a million keys none counts as hot that is not.
const HASHES: usize = 4;
const SLOTS: usize = 8_192;

/// One request of so many is shown to the sketch.
const SAMPLE: usize = 8;

/// Keys that are counted exactly at most, per lock. At 100/s each, all together are 400,000/s.
const MOST_PER_LOCK: usize = 256;

/// From here on a part of a window tells a rate.
const SOON_MICROS: u64 = 10_000;

/// The keys that are hot on one gateway.
pub struct HotKeys {
    sketch: Rate,
    /// Requests of one window from which on a key is hot.
    threshold: u64,
    window_micros: u64,
    hot: Keyed<Heat>,
    hasher: RandomState,
    count: AtomicUsize,
    turn: AtomicUsize,
}

/// What is known of one hot key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Heat {
    /// Requests per second.
    pub requests: u64,
    /// Tokens per second that they ask for.
    pub tokens: u64,
    since: Timestamp,
    requests_since: u64,
    tokens_since: u64,
}

impl HotKeys {
    /// Keys are hot from `threshold` requests in a `window` on, which is a second at least: a shorter one
    /// makes the sketch panic in its first second.
    pub fn new(threshold: u64, window: Duration) -> Self {
        let window = window.max(Duration::from_secs(1));
        Self {
            sketch: Rate::new_with_estimator_config(window, HASHES, SLOTS),
            threshold: threshold.max(1),
            window_micros: window.as_micros() as u64,
            hot: Keyed::default(),
            hasher: RandomState::default(),
            count: AtomicUsize::new(0),
            turn: AtomicUsize::new(0),
        }
    }

    /// Counts a request for `cost` tokens of `key`; how hot the key is, if it is.
    pub fn see(&self, key: &Key, cost: u64, now: Timestamp) -> Option<Heat> {
        if self.count.load(Ordering::Relaxed) > 0 {
            let mut hot = self.hot.of(key);
            if let Some((index, _, heat)) = hot.get_full_mut(key) {
                heat.add(cost, now, self.window_micros);
                if self.is_hot(heat) {
                    return Some(*heat);
                }
                hot.swap_remove_index(index);
                self.count.fetch_sub(1, Ordering::Relaxed);
                return None;
            }
        }
        // The sketch costs more than all the rest here, so it is shown one request of some, for all of them.
        if !self.turn.fetch_add(1, Ordering::Relaxed).is_multiple_of(SAMPLE) {
            return None;
        }
        let seen =
            u64::try_from(self.sketch.observe(&self.hasher.hash_one(key), SAMPLE.cast_signed())).unwrap_or(0);
        if seen < self.threshold {
            return None;
        }
        let rate = |count: u64| count.saturating_mul(1_000_000) / self.window_micros;
        let heat = Heat {
            requests: rate(seen),
            tokens: rate(seen.saturating_mul(cost)),
            since: now,
            requests_since: 0,
            tokens_since: 0,
        };
        let mut hot = self.hot.of(key);
        if hot.len() >= MOST_PER_LOCK {
            return None;
        }
        if hot.insert(key.clone(), heat).is_none() {
            self.count.fetch_add(1, Ordering::Relaxed);
        }
        Some(heat)
    }

    /// Forgets the keys that nobody has asked for during two windows.
    pub fn sweep(&self, now: Timestamp) {
        for mut hot in self.hot.all() {
            let before = hot.len();
            hot.retain(|_, heat| now.micros_since(heat.since) <= 2 * self.window_micros);
            self.count.fetch_sub(before - hot.len(), Ordering::Relaxed);
        }
    }

    /// The `most` hottest keys, the hottest first.
    pub fn top(&self, most: usize) -> Vec<(Key, Heat)> {
        let mut all: Vec<(Key, Heat)> = Vec::new();
        for hot in self.hot.all() {
            all.extend(hot.iter().map(|(key, heat)| (key.clone(), *heat)));
        }
        all.sort_by(|(a, x), (b, y)| y.requests.cmp(&x.requests).then_with(|| a.cmp(b)));
        all.truncate(most);
        all
    }

    /// How many keys are hot.
    pub fn len(&self) -> usize {
        self.count.load(Ordering::Relaxed)
    }

    /// Whether none is.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// A key stays hot down to half of the threshold, so that one at the threshold does not come and go.
    fn is_hot(&self, heat: &Heat) -> bool {
        heat.requests.saturating_mul(self.window_micros) >= self.threshold.saturating_mul(500_000)
    }
}

impl std::fmt::Debug for HotKeys {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("HotKeys")
            .field("threshold", &self.threshold)
            .field("count", &self.count)
            .finish_non_exhaustive()
    }
}

impl Heat {
    fn add(&mut self, cost: u64, now: Timestamp, window_micros: u64) {
        self.requests_since += 1;
        self.tokens_since = self.tokens_since.saturating_add(cost);
        let elapsed = now.micros_since(self.since);
        if elapsed < SOON_MICROS {
            return;
        }
        let (requests, tokens) = (rate(self.requests_since, elapsed), rate(self.tokens_since, elapsed));
        if elapsed >= window_micros {
            *self = Self { requests, tokens, since: now, requests_since: 0, tokens_since: 0 };
        } else {
            // A key that heats up is noticed at once, one that cools down with the window.
            self.requests = self.requests.max(requests);
            self.tokens = self.tokens.max(tokens);
        }
    }
}

fn rate(count: u64, micros: u64) -> u64 {
    count.saturating_mul(1_000_000) / micros.max(1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::key::{Hasher, Part};
    use crate::keyed::LOCKS;

    fn key(name: &str) -> Key {
        let hasher = Hasher::new(b"");
        Key::tenant_route("rl", &Part::known(name.as_bytes(), &hasher), &Part::known(b"r", &hasher))
    }

    /// Asks `count` times over a second that begins at `second`.
    fn ask(keys: &HotKeys, key: &Key, count: u64, second: u64) -> Option<Heat> {
        let at = |index| Timestamp::from_micros(second * 1_000_000 + index * 1_000_000 / count);
        (0..count).map(|index| keys.see(key, 2, at(index))).last().flatten()
    }

    #[test]
    fn a_key_is_hot_from_the_threshold_on_until_it_cools_down() {
        let keys = HotKeys::new(100, Duration::from_secs(1));
        let hot = key("hot");
        assert_eq!(ask(&keys, &hot, 96, 10), None);
        assert!(ask(&keys, &hot, 8, 11).is_some());
        let heat = ask(&keys, &hot, 1_000, 12).expect("hot");
        assert!((900..=1_100).contains(&heat.requests), "{heat:?}");
        assert!((1_800..=2_200).contains(&heat.tokens), "{heat:?}");
        assert!(ask(&keys, &hot, 60, 13).is_some(), "above half of the threshold it stays");
        ask(&keys, &hot, 20, 14);
        assert_eq!(keys.see(&hot, 2, Timestamp::from_micros(15_200_000)), None);
        assert!(keys.is_empty(), "{keys:?}");
    }

    #[test]
    fn the_hottest_come_first_and_the_silent_are_forgotten() {
        let keys = HotKeys::new(10, Duration::from_secs(1));
        let names: Vec<Key> = ["a", "b", "c"].map(key).into();
        for second in 10..13 {
            for (index, name) in names.iter().enumerate() {
                ask(&keys, name, 100 * (1 + index as u64), second);
            }
        }
        let top: Vec<Key> = keys.top(2).into_iter().map(|(key, _)| key).collect();
        assert_eq!(top, [key("c"), key("b")]);
        keys.sweep(Timestamp::from_micros(13_000_000));
        assert_eq!(keys.len(), 3);
        keys.sweep(Timestamp::from_micros(20_000_000));
        assert!(keys.is_empty());
    }

    /// However many keys come, there is room for so many.
    #[test]
    fn there_is_a_bound() {
        let keys = HotKeys::new(1, Duration::from_secs(1));
        for index in 0..20_000 {
            keys.see(&key(&index.to_string()), 1, Timestamp::from_micros(1_000_000));
        }
        assert!(keys.len() <= LOCKS * MOST_PER_LOCK);
        assert_eq!(keys.top(usize::MAX).len(), keys.len());
    }
}
