//! The store, the cluster and hot keys.

use std::ops::RangeInclusive;
use std::time::Duration;

use super::no_effect_yet;
use super::redis::{TIMEOUT, redis_of};
use crate::config::fault::Fault;
use crate::config::fields::{Reading, join};
use crate::config::yaml::{Kind, Node};
use crate::config::{Breaker, HotKeys, Store};
use crate::limit::rate::Rate;

/// Buckets in memory unless `store.memory.max_keys` says otherwise: about 80 MB when full.
const MAX_KEYS: u64 = 500_000;

/// With fewer, the buckets of a single request could push out each other, and no limit would hold.
const MAX_KEYS_RANGE: RangeInclusive<u64> = 64..=1_000_000_000;

pub(super) fn store_of(node: Option<&Node<'_>>, r: &mut Reading<'_>) -> Store {
    let breaker = Breaker {
        failure_permille: 500,
        consecutive_failures: 10,
        open_for: Duration::from_secs(1),
        apart: TIMEOUT,
    };
    let mut store = Store { redis: None, max_keys: MAX_KEYS as usize, key_prefix: "rl".into(), breaker };
    let Some(node) = node else { return store };
    if matches!(node.kind, Kind::Scalar { .. }) {
        if !r.is_word(node, "memory") {
            let message = format!("expected `memory`, or a mapping with `redis:`; got {}", node.describe());
            r.fault(node.place, "store", message);
        }
        return store;
    }
    let [memory, redis, breaker] = r.fields(node, "store", ["memory", "redis", "breaker"]);
    if memory.is_none() && redis.is_none() {
        r.fault(node.place, "store", "expected `memory` or `redis` in it");
    }
    if let Some(node) = memory {
        let [max_keys] = r.fields(node, "store.memory", ["max_keys"]);
        if let Some((node, keys)) =
            max_keys.and_then(|node| Some((node, r.whole(node, "store.memory.max_keys")?)))
        {
            if MAX_KEYS_RANGE.contains(&keys) {
                store.max_keys = keys as usize;
            } else {
                let (least, most) = (MAX_KEYS_RANGE.start(), MAX_KEYS_RANGE.end());
                let message = format!("expected a number from {least} to {most}, got {keys}");
                r.fault(node.place, "store.memory.max_keys", message);
            }
        }
    }
    if let Some(node) = breaker {
        breaker_of(node, r, &mut store.breaker);
    }
    if let Some(node) = redis {
        redis_of(node, r, &mut store);
    }
    store
}

fn breaker_of(node: &Node<'_>, r: &mut Reading<'_>, breaker: &mut Breaker) {
    let [ratio, consecutive, open_for] =
        r.fields(node, "store.breaker", ["failure_ratio", "consecutive_failures", "open_for"]);
    if let Some((node, ratio)) =
        ratio.and_then(|node| Some((node, r.fraction(node, "store.breaker.failure_ratio")?)))
    {
        #[expect(clippy::cast_sign_loss, reason = "a fraction is not negative")]
        let permille = (ratio * 1_000.0).round() as u32;
        if permille == 0 {
            r.fault(
                node.place,
                "store.breaker.failure_ratio",
                "expected more than 0: else every call would open it",
            );
        }
        breaker.failure_permille = permille;
    }
    if let Some(node) = consecutive {
        let field = "store.breaker.consecutive_failures";
        match r.whole(node, field).map(u32::try_from) {
            Some(Ok(failures @ 1..)) => breaker.consecutive_failures = failures,
            Some(_) => r.fault(node.place, field, "expected a number from 1 to 4294967295"),
            None => {}
        }
    }
    if let Some(pause) = open_for.and_then(|node| r.some_time(node, "store.breaker.open_for")) {
        breaker.open_for = pause;
    }
}

pub(super) fn gateways_of(node: &Node<'_>, r: &mut Reading<'_>, warnings: &mut Vec<Fault>) -> Option<u32> {
    let [gateways, region] = r.fields(node, "cluster", ["gateways", "region"]);
    if let Some(node) = region {
        let [name, shares] = r.fields(node, "cluster.region", ["name", "shares"]);
        name.map(|node| r.name(node, "cluster.region.name"));
        for (key, share) in shares.map(|node| r.entries(node, "cluster.region.shares")).unwrap_or_default() {
            r.fraction(share, &join("cluster.region.shares", &key.text));
        }
        no_effect_yet(warnings, node, "cluster.region");
    }
    let node = gateways?;
    if r.is_word(node, "auto") {
        return None;
    }
    let number = r.whole(node, "cluster.gateways")?;
    if !(1..=100_000).contains(&number) {
        r.fault(
            node.place,
            "cluster.gateways",
            format!("expected auto or a number from 1 to 100000, got {number}"),
        );
        return None;
    }
    u32::try_from(number).ok()
}

pub(super) fn hot_keys_of(node: Option<&Node<'_>>, r: &mut Reading<'_>) -> HotKeys {
    let mut hot_keys = HotKeys {
        threshold: 100,
        window: Duration::from_secs(1),
        epsilon_ppm: 50_000,
        lease_for: Duration::from_millis(100),
    };
    let Some(node) = node else { return hot_keys };
    let [threshold, window, epsilon, lease_for] =
        r.fields(node, "hot_keys", ["threshold", "window", "epsilon", "lease_for"]);
    let mut within = |node: Option<&Node<'_>>, field: &str, range: RangeInclusive<Duration>, said: &str| {
        let node = node?;
        let duration = r.duration(node, field)?;
        if range.contains(&duration) {
            return Some(duration);
        }
        r.fault(node.place, field, format!("expected {said}, got {}", node.describe()));
        None
    };
    let seconds = Duration::from_secs;
    if let Some(window) = within(window, "hot_keys.window", seconds(1)..=seconds(60), "1s to 60s") {
        hot_keys.window = window;
    }
    let range = Duration::from_millis(10)..=seconds(1);
    if let Some(lease_for) = within(lease_for, "hot_keys.lease_for", range, "10ms to 1s") {
        hot_keys.lease_for = lease_for;
    }
    let rate = threshold.and_then(|node| r.parsed::<Rate>(node, "hot_keys.threshold"));
    let (count, per_micros) = rate.map_or((hot_keys.threshold, 1_000_000), Rate::fraction);
    let threshold = u128::from(count) * hot_keys.window.as_micros() / per_micros.max(1);
    hot_keys.threshold = u64::try_from(threshold).unwrap_or(u64::MAX).max(1);
    if let Some(epsilon) = epsilon.and_then(|node| r.fraction(node, "hot_keys.epsilon")) {
        #[expect(clippy::cast_sign_loss, reason = "a fraction is not negative")]
        let ppm = (epsilon * 1_000_000.0).round() as u32;
        hot_keys.epsilon_ppm = ppm;
    }
    hot_keys
}
