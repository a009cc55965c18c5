//! Leases: tokens of hot keys, taken from the store in advance and spent here, so that a hot request
//! waits for nobody. The next ones are asked for before the present ones run out.
//!
//! What all gateways hold of one key, on its way or here, is never more than the slack:
//! `epsilon * max(capacity, what is earned in a second)`. So over any window all together admit at most
//! `capacity + rate * time + slack` (`docs/leases.md` has the proof).
//!
//! A key that has run dry is not asked for whenever a token may fit again: at a high rate that would
//! bring every call back. It is left alone until this gateway's share of the rate can have filled all that it
//! may hold, and refused meanwhile. The tokens gather in the store; none is lost.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::Notify;

use crate::clock::Timestamp;
use crate::config::HotKeys as Settings;
use crate::gateways::Gateways;
use crate::key::Key;
use crate::keyed::Keyed;
use crate::limit::{Limit, Outcome, Verdict};
use crate::metrics::LeaseMetrics;
use crate::rule::{Check, Demand};

/// The smallest part of the slack that is worth a lease.
const FEWEST: u64 = 2;

/// A lease that nobody has used for so long goes back.
const IDLE_MICROS: u64 = 1_000_000;

/// How long the tokens that are left must last while more are on their way.
const CALL_MICROS: u64 = 5_000;

/// How long a key is left to the store that refills too slowly to be leased while it is dry.
const RESTS_MICROS: u64 = 1_000_000;

/// A key is dry no more when the store has left so many times what all gateways may hold.
const PLENTY: u64 = 2;

/// The least time between two calls for a dry key, and after a call that failed.
const PAUSE_MICROS: u64 = 10_000;

/// A key that was left alone for so long is in no flood; who waits as `Retry-After` says waits longer.
const LULL_MICROS: u64 = 100_000;

/// The leases of one gateway.
#[derive(Debug)]
pub struct Leases {
    epsilon_ppm: u32,
    lease_micros: u64,
    gateways: Arc<Gateways>,
    held: Keyed<Lease>,
    orders: Mutex<Vec<Order>>,
    ordered: Notify,
    metrics: LeaseMetrics,
}

/// What one gateway holds of one key.
#[derive(Debug)]
struct Lease {
    limit: Limit,
    /// Here, and not spent.
    tokens: u64,
    /// Asked for, and not answered.
    asked: u64,
    /// The store had no more when it was asked last.
    dry: bool,
    /// It was dry before a lull; what it has now the order that is on its way will tell.
    in_doubt: bool,
    /// Not asked for before.
    ask_at: Timestamp,
    used_at: Timestamp,
    /// What the store had left when it was asked last.
    left: u64,
}

/// A call that is to be made in the background.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Order {
    /// The check to send: for a lease, or to give back.
    pub check: Check,
    /// When it was decided on.
    pub at: Timestamp,
}

impl Leases {
    /// No leases yet, for one of `gateways`.
    pub fn new(settings: &Settings, gateways: Arc<Gateways>, metrics: LeaseMetrics) -> Self {
        Self {
            epsilon_ppm: settings.epsilon_ppm,
            lease_micros: settings.lease_for.as_micros() as u64,
            gateways,
            held: Keyed::default(),
            orders: Mutex::default(),
            ordered: Notify::new(),
            metrics,
        }
    }

    /// What a hot check, whose key is asked for `rate` tokens a second, is told without the store. `None` is
    /// for the store to say: there is no lease yet, or it cannot hold so much.
    pub fn take(&self, check: &Check, rate: u64, now: Timestamp) -> Option<Verdict> {
        if !check.limit.is_token_bucket() || !matches!(check.demand, Demand::Take | Demand::Shadow) {
            return None;
        }
        let holders = self.gateways.holders(now)?;
        let most = self.most(&check.limit, holders);
        if most < FEWEST {
            return None;
        }
        let mut held = self.held.of(&check.key);
        let lease = match held.get_mut(&check.key) {
            Some(lease) => lease,
            None => held.entry(check.key.clone()).or_insert(Lease::of(check.limit, now)),
        };
        if lease.limit != check.limit {
            // Counted under another rule: back with it, and begin anew.
            self.give_back(&check.key, lease, lease.tokens, now);
            *lease = Lease { asked: lease.asked, ..Lease::of(check.limit, now) };
        }
        lease.doubt_after_a_lull(now);
        lease.used_at = now;
        self.give_back(&check.key, lease, lease.tokens.saturating_sub(most), now);
        let spent = check.cost <= lease.tokens;
        if spent {
            lease.tokens -= check.cost;
            self.metrics.spent.inc_by(check.cost);
        }
        if let Some(tokens) = lease.wanted(most, rate, self.lease_micros, now) {
            lease.asked = tokens;
            self.order(Check::own(check.key.clone(), check.limit, tokens, Demand::Lease), now);
        }
        match () {
            () if spent => Some(lease.allowed(now)),
            () if lease.dry && !lease.in_doubt && check.cost <= most => Some(lease.refused(check.cost, now)),
            () => None,
        }
    }

    /// Notes what the store has answered to an order: for a lease how many tokens, and what it has left. `None` if
    /// it gave no answer, which is not asked for again: the tokens may be gone.
    pub fn land(&self, order: &Order, answer: Option<Verdict>, now: Timestamp) {
        let key = &order.check.key;
        if order.check.demand == Demand::Return {
            let event = if answer.is_some() { &self.metrics.returned } else { &self.metrics.lost };
            event.inc_by(order.check.cost);
            return;
        }
        let mut held = self.held.of(key);
        let granted = match answer {
            Some(Verdict { outcome: Outcome::Leased(tokens), .. }) => tokens,
            _ => 0,
        };
        self.metrics.fetched.inc_by(granted);
        let Some(lease) = held.get_mut(key) else {
            // Nobody holds this lease any more.
            self.order(Check { demand: Demand::Return, cost: granted, ..order.check.clone() }, now);
            return;
        };
        lease.asked = 0;
        lease.in_doubt = false;
        let Some(answer) = answer else {
            self.metrics.lost.inc_by(order.check.cost);
            lease.dry = false;
            lease.ask_at = now.plus_micros(PAUSE_MICROS);
            return;
        };
        if lease.limit != order.check.limit {
            lease.tokens += granted;
            self.give_back(key, lease, granted, now);
            return;
        }
        lease.tokens += granted;
        lease.left = answer.remaining;
        let holders = u64::from(self.gateways.count());
        let most = self.most(&lease.limit, self.gateways.count());
        let all_hold = most.saturating_mul(holders);
        let short = granted < order.check.cost;
        // Once dry it is asked for at a pace until there is enough for all gateways to hold what they may, and
        // stays dry until there is plenty: else each request of a flood would ask the store as soon as these are spent.
        if short || lease.dry && answer.remaining < all_hold {
            let fills_in = lease.limit.micros_to_earn(all_hold);
            if lease.limit.earned(self.lease_micros) < FEWEST * holders {
                // It refills so slowly that the exact answer costs less than waiting.
                lease.dry = false;
                lease.ask_at = order.at.plus_micros(RESTS_MICROS);
            } else {
                lease.dry = true;
                let pause = fills_in.min(self.lease_micros).max(PAUSE_MICROS);
                lease.ask_at = order.at.plus_micros(pause);
            }
        } else {
            let plenty = all_hold.saturating_mul(PLENTY).min(lease.limit.capacity() / 2);
            lease.dry &= answer.remaining < plenty;
            lease.ask_at = now;
        }
    }

    /// Orders back what nobody uses, and what is more than may be held now. What this gateway must not hold
    /// at all any more is let go: the others do not count on it coming back.
    pub fn sweep(&self, now: Timestamp) {
        let holders = self.gateways.holders(now);
        for mut held in self.held.all() {
            held.retain(|key, lease| {
                let Some(holders) = holders else {
                    self.metrics.expired.inc_by(lease.tokens);
                    lease.tokens = 0;
                    return lease.asked > 0;
                };
                let idle = now.micros_since(lease.used_at) >= IDLE_MICROS;
                let most = if idle { 0 } else { self.most(&lease.limit, holders) };
                self.give_back(key, lease, lease.tokens.saturating_sub(most), now);
                !idle || lease.asked > 0
            });
        }
        self.recount();
    }

    /// Orders back all that is held: for the end of this process.
    pub fn give_all_back(&self, now: Timestamp) {
        for mut held in self.held.all() {
            for (key, mut lease) in held.drain(..) {
                let tokens = lease.tokens;
                self.give_back(&key, &mut lease, tokens, now);
            }
        }
        self.recount();
    }

    /// The calls that are to be made.
    pub fn take_orders(&self) -> Vec<Order> {
        std::mem::take(&mut *lock(&self.orders))
    }

    /// Waits until there is a call to be made.
    pub async fn ordered(&self) {
        self.ordered.notified().await;
    }

    /// How many keys are leased.
    pub fn len(&self) -> usize {
        self.held.len()
    }

    /// Whether none is.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Tokens that are held here of `key`.
    pub fn held(&self, key: &Key) -> u64 {
        self.held.of(key).get(key).map_or(0, |lease| lease.tokens)
    }

    /// The most that one of `holders` may hold of a key, on its way or here.
    fn most(&self, limit: &Limit, holders: u32) -> u64 {
        slack(limit, self.epsilon_ppm) / u64::from(holders.max(1))
    }

    fn give_back(&self, key: &Key, lease: &mut Lease, tokens: u64, now: Timestamp) {
        if tokens == 0 {
            return;
        }
        lease.tokens -= tokens;
        self.order(Check::own(key.clone(), lease.limit, tokens, Demand::Return), now);
    }

    fn order(&self, check: Check, now: Timestamp) {
        if check.cost > 0 {
            lock(&self.orders).push(Order { check, at: now });
            self.ordered.notify_one();
        }
    }

    fn recount(&self) {
        self.metrics.leases.set(i64::try_from(self.len()).unwrap_or(i64::MAX));
    }
}

/// What all gateways together may hold of one key: `epsilon * max(capacity, what is earned in a second)`.
pub fn slack(limit: &Limit, epsilon_ppm: u32) -> u64 {
    let base = u128::from(limit.capacity().max(limit.earned(1_000_000)));
    u64::try_from(base * u128::from(epsilon_ppm) / 1_000_000).unwrap_or(u64::MAX)
}

impl Lease {
    const fn of(limit: Limit, now: Timestamp) -> Self {
        Self {
            limit,
            tokens: 0,
            asked: 0,
            dry: false,
            in_doubt: false,
            ask_at: Timestamp::from_micros(0),
            used_at: now,
            left: 0,
        }
    }

    /// What was dry before a lull the store knows better: who has waited as he was told is not refused by hearsay. In
    /// a flood there is none.
    fn doubt_after_a_lull(&mut self, now: Timestamp) {
        let is_lull = now.micros_since(self.used_at) >= LULL_MICROS;
        self.in_doubt |= self.dry && self.asked == 0 && now >= self.ask_at && is_lull;
    }

    /// How many tokens are to be asked for now, if any: at a `rate` of tokens per second, and at `most` so many.
    fn wanted(&self, most: u64, rate: u64, lease_micros: u64, now: Timestamp) -> Option<u64> {
        if self.asked > 0 || now < self.ask_at {
            return None;
        }
        let in_time = |micros: u64| {
            u64::try_from(u128::from(rate) * u128::from(micros) / 1_000_000).unwrap_or(u64::MAX)
        };
        let target = if self.dry { most } else { in_time(lease_micros).clamp(FEWEST, most) };
        // Early enough for a call, late enough to be worth one.
        let few = in_time(CALL_MICROS).clamp(target / 4, target / 2);
        (self.tokens <= few).then(|| target - self.tokens)
    }

    fn allowed(&self, now: Timestamp) -> Verdict {
        self.limit.at_level(self.left.saturating_add(self.tokens), now)
    }

    /// A refusal: the cost surely fits when it is earned, and is looked for again at `ask_at`.
    fn refused(&self, cost: u64, now: Timestamp) -> Verdict {
        let earned_in = self.limit.micros_to_earn(cost.saturating_sub(self.tokens));
        let wait = earned_in.max(self.ask_at.micros_since(now));
        Verdict {
            outcome: Outcome::Refused,
            retry_after_ms: wait.div_ceil(1_000).max(1),
            ..self.limit.at_level(self.tokens, now)
        }
    }
}

/// What is behind these locks is never half written, so a panic elsewhere does no harm.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests;
