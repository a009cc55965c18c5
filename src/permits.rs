//! Permits of concurrency limits that requests of this gateway hold: renewed while they last, given back at their
//! end, however they end.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use indexmap::IndexMap;
use smallvec::SmallVec;
use tokio::sync::Notify;

use crate::clock::Timestamp;
use crate::limit::Limit;
use crate::rule::{Check, Checks, Demand};

/// Orders that wait at most, in an outage.
const MOST_ORDERS: usize = 10_000;

/// The permits of one gateway.
#[derive(Debug)]
pub struct Permits {
    next: AtomicU64,
    held: Mutex<IndexMap<u64, Held>>,
    orders: Mutex<Vec<PermitOrder>>,
    ordered: Notify,
}

#[derive(Debug)]
struct Held {
    check: Check,
    place: Place,
    renew_at: Timestamp,
}

/// Where a permit was given.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// In the store.
    Store,
    /// In the memory of this process, while the store was away.
    Here,
}

/// What became of a permit that was asked for.
#[derive(Clone, Copy, Debug)]
pub struct Told {
    /// Whether it was given.
    pub keeps: bool,
    /// Where that was said.
    pub place: Place,
    /// Whether the store may have it down all the same: it gave no answer, or another part of the request was refused.
    pub may_be_in_store: bool,
}

/// A permit to be given back or renewed.
#[derive(Clone, Debug)]
pub struct PermitOrder {
    /// The check to send.
    pub check: Check,
    /// Where to.
    pub place: Place,
    /// Not after this: it counts no more by itself then.
    pub until: Timestamp,
}

/// The permits of one request. Dropping it gives them back.
#[derive(Debug)]
pub struct Guard {
    permits: Arc<Permits>,
    held: SmallVec<[u64; 1]>,
}

impl Permits {
    /// None yet; `first` is where their numbers begin, which no other gateway comes near.
    pub fn new(first: u64) -> Self {
        Self {
            next: AtomicU64::new(first),
            held: Mutex::default(),
            orders: Mutex::default(),
            ordered: Notify::new(),
        }
    }

    /// Numbers the permits that `checks` ask for, and holds them from now on: if the request ends while the store is
    /// asked, they are given back all the same. `None` where none is asked for.
    pub fn hold(self: &Arc<Self>, checks: &mut Checks, now: Timestamp) -> Option<Guard> {
        let mut guard = Guard { permits: Arc::clone(self), held: SmallVec::new() };
        for check in checks.iter_mut() {
            let Limit::Concurrency(limit) = &check.limit else { continue };
            check.permit = self.next.fetch_add(1, Ordering::Relaxed);
            guard.held.push(check.permit);
            let renew_at = now.plus_micros(limit.hold / 3);
            let held = Held { check: check.clone(), place: Place::Store, renew_at };
            lock(&self.held).insert(check.permit, held);
        }
        (!guard.held.is_empty()).then_some(guard)
    }

    /// The renewals that are due at `now`, and what is to be given back.
    pub fn take_orders(&self, now: Timestamp) -> Vec<PermitOrder> {
        let mut orders = std::mem::take(&mut *lock(&self.orders));
        for held in lock(&self.held).values_mut().filter(|held| now >= held.renew_at) {
            let hold = hold_of(&held.check);
            held.renew_at = now.plus_micros(hold / 3);
            let check = Check { demand: Demand::Renew, ..held.check.clone() };
            orders.push(PermitOrder { check, place: held.place, until: now.plus_micros(hold / 3) });
        }
        orders
    }

    /// Puts an order back that could not be carried out.
    pub fn put_back(&self, order: PermitOrder, now: Timestamp) {
        let mut orders = lock(&self.orders);
        if now < order.until && orders.len() < MOST_ORDERS {
            orders.push(order);
        }
    }

    /// Waits until something is to be given back.
    pub async fn ordered(&self) {
        self.ordered.notified().await;
    }

    /// How many are held.
    pub fn len(&self) -> usize {
        lock(&self.held).len()
    }

    /// Whether none is held.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

impl Guard {
    /// Keeps those that were given: `told` tells it of each, by its number.
    pub fn keep(&mut self, told: impl Fn(u64) -> Told) {
        let mut held = lock(&self.permits.held);
        self.held.retain(|permit| {
            let Told { keeps, place, may_be_in_store } = told(*permit);
            if may_be_in_store && let Some(known) = held.get(permit) {
                order_back(&self.permits, known, Place::Store);
            }
            match held.get_mut(permit) {
                Some(known) if keeps => known.place = place,
                _ => drop(held.swap_remove(permit)),
            }
            keeps
        });
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        let permits = &self.permits;
        for permit in &self.held {
            let Some(held) = lock(&permits.held).swap_remove(permit) else { continue };
            order_back(permits, &held, held.place);
        }
        if !self.held.is_empty() {
            permits.ordered.notify_one();
        }
    }
}

/// Orders a permit back. What is beyond the bound comes back by itself when it is not renewed.
fn order_back(permits: &Permits, held: &Held, place: Place) {
    let until = held.renew_at.plus_micros(hold_of(&held.check));
    let check = Check { demand: Demand::Return, ..held.check.clone() };
    let mut orders = lock(&permits.orders);
    if orders.len() < MOST_ORDERS {
        orders.push(PermitOrder { check, place, until });
    }
}

fn hold_of(check: &Check) -> u64 {
    match &check.limit {
        Limit::Concurrency(limit) => limit.hold,
        _ => 0,
    }
}

/// What is behind these locks is never half written, so a panic elsewhere does no harm.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
