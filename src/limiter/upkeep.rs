//! What a limiter does beside deciding: permits are given back and renewed, leases fetched and given back.

use std::time::Duration;

use futures_util::future::join_all;
use smallvec::smallvec;

use super::recovery::CALLS_AT_ONCE;
use super::{LOOK_EVERY, Limiter, Remote};
use crate::breaker::State;
use crate::leases::Order;
use crate::permits::{PermitOrder, Place};
use crate::rule::{Check, Checks, Demand};
use crate::store::NodeId;

/// How often permits are looked after.
const PERMITS_EVERY: Duration = Duration::from_millis(250);

/// Permits in one call.
const PERMITS_PER_CALL: usize = 32;

impl Limiter {
    /// Looks after the permits until the process ends.
    pub async fn keep_permits(&self) {
        loop {
            tokio::select! {
                () = self.permits.ordered() => {}
                () = tokio::time::sleep(PERMITS_EVERY) => {}
            }
            self.carry_permits().await;
        }
    }

    /// Gives back the permits that are not held any more, and renews those that are. Either may be done twice, so what
    /// fails is tried again while it matters.
    pub async fn carry_permits(&self) {
        let now = self.clock.now();
        let (store, here): (Vec<_>, Vec<_>) =
            self.permits.take_orders(now).into_iter().partition(|order| order.place == Place::Store);
        if let Some(remote) = &self.remote {
            let checks: Checks = here.into_iter().map(|order| order.check).collect();
            remote.fallback.carry_out(&checks, now);
        }
        let calls = self.in_calls(store, PERMITS_PER_CALL, |order| &order.check);
        for calls in calls.chunks(CALLS_AT_ONCE) {
            self.carry_to_store(calls).await;
        }
    }

    async fn carry_to_store(&self, calls: &[(NodeId, Vec<PermitOrder>)]) {
        join_all(calls.iter().map(|(node, orders)| async {
            let checks: Checks = orders.iter().map(|order| order.check.clone()).collect();
            if !self.store.is_node_up(*node) || self.store.acquire(&checks).await.is_err() {
                let now = self.clock.now();
                orders.iter().cloned().for_each(|order| self.permits.put_back(order, now));
            }
        }))
        .await;
    }

    /// Looks after hot keys and leases until the process ends.
    pub async fn keep_leasing(&self) {
        let mut sweep = tokio::time::interval(LOOK_EVERY);
        loop {
            tokio::select! {
                () = self.lease_ordered() => {}
                _ = sweep.tick() => self.look_after_leases(),
            }
            self.lease().await;
        }
    }

    /// Waits until a call for a lease is due: for ever where there is nothing to lease from.
    async fn lease_ordered(&self) {
        match &self.remote {
            Some(remote) => remote.leases.ordered().await,
            None => std::future::pending().await,
        }
    }

    /// Lets go of what has cooled down, and of leases that nobody uses or that must not be held any more.
    pub fn look_after_leases(&self) {
        let now = self.clock.now();
        self.hot_keys.sweep(now);
        if let Some(Remote { leases, .. }) = &self.remote {
            leases.sweep(now);
        }
    }

    /// Makes the calls for leases that are due now.
    pub async fn lease(&self) {
        let Some(Remote { leases, .. }) = &self.remote else { return };
        join_all(leases.take_orders().iter().map(|order| self.carry_out(order))).await;
    }

    /// Gives back what is held in advance: for the end of this process.
    pub async fn give_back(&self) {
        let Some(Remote { leases, .. }) = &self.remote else { return };
        leases.give_all_back(self.clock.now());
        self.lease().await;
    }

    /// One call for a lease, or to give one back. It is not repeated, whatever becomes of it.
    async fn carry_out(&self, order: &Order) {
        let Some(Remote { leases, breakers, fallback, .. }) = &self.remote else { return };
        let node = self.store.node_of(self.store.slot_of(&order.check.key));
        let breaker = breakers.of(node);
        let checks: Checks = smallvec![order.check.clone()];
        let answer = match breaker.admit().filter(|_| node != NodeId::NOBODY) {
            None => None,
            Some(call) => match self.store.acquire(&checks).await {
                Ok(verdicts) => {
                    let now = self.clock.now();
                    call.answered(now);
                    if breaker.state() == State::Closed {
                        let key = order.check.key.clone();
                        let level = smallvec![Check::own(key, order.check.limit, 1, Demand::Take)];
                        fallback.learn(node, &level, &verdicts, now);
                    }
                    verdicts.first().copied()
                }
                Err(fault) => {
                    self.failed(node, call, &fault, self.clock.now());
                    None
                }
            },
        };
        leases.land(order, answer, self.clock.now());
    }
}
