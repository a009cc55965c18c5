//! The way back: a probe to each node that was away, then what was spent without it is debited, then its requests
//! are decided by it again. In this order, so that recovery is no free burst.

use futures_util::future::join_all;

use super::{LOOK_EVERY, Limiter, Remote};
use crate::breaker::State;
use crate::fallback::Debt;
use crate::key::Key;
use crate::rule::{Check, Checks};
use crate::store::{NodeId, StoreFault};

/// Debits in one call.
const DEBITS_PER_CALL: usize = 64;

/// Calls that are made at once: of a cluster, few debits share a slot.
pub(super) const CALLS_AT_ONCE: usize = 16;

/// How many slots are tried for one that a node has; of a thousand nodes, each has one among so many.
const MOST_TRIES: u32 = 20_000;

impl Limiter {
    /// Looks after the breakers until the process ends.
    pub async fn keep_recovering(&self) {
        loop {
            tokio::time::sleep(LOOK_EVERY).await;
            self.recover().await;
        }
    }

    /// One step of the way back of each node, if one is due. Each for itself: one that hangs holds up no other.
    pub async fn recover(&self) {
        let Some(remote) = &self.remote else { return };
        let nodes = self.store.nodes();
        join_all(nodes.iter().map(|node| self.recover_node(remote, *node))).await;
        // What is owed to a node that has gone is owed to whoever has its slots now.
        for gone in remote.fallback.creditors().into_iter().filter(|node| !nodes.contains(node)) {
            if !nodes.is_empty() {
                self.hand_over(remote, gone);
            }
        }
    }

    async fn recover_node(&self, remote: &Remote, node: NodeId) {
        let (breaker, fallback) = (remote.breakers.of(node), &remote.fallback);
        // Without a connection a probe could only fail, and make the next pause longer.
        if !self.store.is_node_up(node) {
            breaker.note_cut_off(self.clock.now());
            return;
        }
        if breaker.state() == State::Closed {
            if fallback.in_debt(node) {
                // From single calls that failed, or from the last moments of an outage.
                let _ = self.settle(remote, node).await;
            }
            return;
        }
        let Some(probe) = breaker.probe(self.clock.now()) else { return };
        self.tell(node, State::HalfOpen, "the pause is over");
        let result = match self.knock(&remote.probe, node).await {
            Ok(()) => self.settle(remote, node).await,
            refused => refused,
        };
        match result {
            Ok(()) => {
                probe.close();
                self.tell(node, State::Closed, "the store answers");
            }
            Err(fault) => {
                drop(probe);
                self.tell(node, State::Open, &fault.to_string());
            }
        }
    }

    /// One call to a node, on a key of this gateway's own that it has.
    async fn knock(&self, probe: &Check, node: NodeId) -> Result<(), StoreFault> {
        let is_there = |key: &Key| self.store.node_of(self.store.slot_of(key)) == node;
        let others = (0..MOST_TRIES).map(|number| probe.key.in_another_slot(number));
        let key = std::iter::once(probe.key.clone()).chain(others).find(is_there).ok_or(StoreFault::Down)?;
        let ask: Checks = std::iter::once(Check { key, ..probe.clone() }).collect();
        self.store.acquire(&ask).await.map(drop)
    }

    /// Debits at a node what was spent without it until it was last known to be away, and since; each debit at most
    /// once: one whose outcome is unknown is dropped and counted, never repeated. Those that were not made wait for
    /// the next time.
    async fn settle(&self, remote: &Remote, node: NodeId) -> Result<(), StoreFault> {
        let (fallback, down_at) = (&remote.fallback, remote.breakers.of(node).down_at());
        let now = self.clock.now();
        let due = fallback.take_debts(node).into_iter();
        let due = due.filter_map(|debt| Some((fallback.debit(&debt, down_at, now)?, debt)));
        let calls = self.in_calls(due, DEBITS_PER_CALL, |(debit, _)| debit);
        // Slots that have moved since are another node's business.
        let (here, elsewhere): (Vec<_>, Vec<_>) = calls.into_iter().partition(|(owner, _)| *owner == node);
        for (owner, due) in elsewhere {
            // What has been refilled here is not owed there any more.
            for (debit, debt) in due {
                fallback.add(owner, debt.less(debit));
            }
        }
        let mut result = Ok(());
        let mut unsent = here.into_iter().map(|(_, due)| due);
        while result.is_ok() {
            let batch: Vec<_> = unsent.by_ref().take(CALLS_AT_ONCE).collect();
            if batch.is_empty() {
                break;
            }
            let outcomes = join_all(batch.into_iter().map(|due| self.debit_all(remote, node, due))).await;
            result = outcomes.into_iter().collect();
        }
        for (_, debt) in unsent.flatten() {
            fallback.add(node, debt);
        }
        if result.is_ok() {
            fallback.settled(node);
        }
        result
    }

    /// Debits at a node what shares a slot. What was certainly not debited is owed as before.
    async fn debit_all(
        &self,
        remote: &Remote,
        node: NodeId,
        due: Vec<(Check, Debt)>,
    ) -> Result<(), StoreFault> {
        let debits: Vec<Check> = due.iter().map(|(debit, _)| debit.clone()).collect();
        match self.debit(&debits).await {
            Ok(()) => Ok(()),
            // One key holds something else, or is being moved, and so none was debited: each for itself then.
            Err(StoreFault::WrongType(_) | StoreFault::Apart) if due.len() > 1 => {
                self.debit_one_by_one(remote, node, due).await
            }
            Err(fault) => {
                for (_, debt) in due {
                    self.not_made(remote, node, debt, &fault);
                }
                if fault.is_of_the_node() { Err(fault) } else { Ok(()) }
            }
        }
    }

    async fn debit_one_by_one(
        &self,
        remote: &Remote,
        node: NodeId,
        due: Vec<(Check, Debt)>,
    ) -> Result<(), StoreFault> {
        let mut result = Ok(());
        for (debit, debt) in due {
            if result.is_err() {
                remote.fallback.add(node, debt);
            } else if let Err(fault) = self.debit(&[debit]).await {
                self.not_made(remote, node, debt, &fault);
                if fault.is_of_the_node() {
                    result = Err(fault);
                }
            }
        }
        result
    }

    /// A debit that failed: one that may have been made, or that never can be, is dropped and counted.
    fn not_made(&self, remote: &Remote, node: NodeId, debt: Debt, fault: &StoreFault) {
        if fault.may_have_run() || matches!(fault, StoreFault::WrongType(_)) {
            self.metrics.dropped_debits.inc();
        } else {
            remote.fallback.add(node, debt);
        }
    }

    async fn debit(&self, debits: &[Check]) -> Result<(), StoreFault> {
        self.store.acquire(&debits.into()).await?;
        self.metrics.debited_tokens.inc_by(debits.iter().map(|debit| debit.cost).sum());
        Ok(())
    }

    /// What is owed to one node is owed to others.
    fn hand_over(&self, remote: &Remote, gone: NodeId) {
        let (down_at, now) = (remote.breakers.of(gone).down_at(), self.clock.now());
        for debt in remote.fallback.take_debts(gone) {
            // What has been refilled here meanwhile is not owed any more.
            let Some(debit) = remote.fallback.debit(&debt, down_at, now) else { continue };
            let owner = self.store.node_of(self.store.slot_of(debt.key()));
            remote.fallback.add(owner, debt.less(debit));
        }
        remote.fallback.settled(gone);
    }
}
