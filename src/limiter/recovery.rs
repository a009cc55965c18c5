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
const CALLS_AT_ONCE: usize = 16;

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
        let put_back = |node, due: Vec<(Check, Debt)>| {
            for (_, debt) in due {
                fallback.add(node, debt);
            }
        };
        for (owner, due) in elsewhere {
            put_back(owner, due);
        }
        let mut result = Ok(());
        let mut unsent = here.into_iter().map(|(_, due)| due);
        while result.is_ok() {
            let batch: Vec<_> = unsent.by_ref().take(CALLS_AT_ONCE).collect();
            if batch.is_empty() {
                break;
            }
            let outcomes = join_all(batch.iter().map(|due| self.debit_all(due))).await;
            for (due, outcome) in batch.into_iter().zip(outcomes) {
                match outcome {
                    Ok(()) => {}
                    Err(fault) if fault.may_have_run() => {
                        self.metrics.dropped_debits.inc_by(due.len() as u64);
                        result = Err(fault);
                    }
                    Err(fault) => {
                        put_back(node, due);
                        result = Err(fault);
                    }
                }
            }
        }
        unsent.for_each(|due| put_back(node, due));
        if result.is_ok() {
            fallback.settled(node);
        }
        result
    }

    async fn debit_all(&self, due: &[(Check, Debt)]) -> Result<(), StoreFault> {
        let debits: Vec<Check> = due.iter().map(|(debit, _)| debit.clone()).collect();
        match self.debit(&debits).await {
            // One key holds something else, or is being moved, and so none was debited: each for itself then.
            Err(fault) if !fault.is_of_the_node() => self.debit_one_by_one(&debits).await,
            result => result,
        }
    }

    async fn debit_one_by_one(&self, debits: &[Check]) -> Result<(), StoreFault> {
        for debit in debits.chunks(1) {
            match self.debit(debit).await {
                Err(fault) if !fault.is_of_the_node() => self.metrics.dropped_debits.inc(),
                result => result?,
            }
        }
        Ok(())
    }

    async fn debit(&self, debits: &[Check]) -> Result<(), StoreFault> {
        self.store.acquire(&debits.into()).await?;
        self.metrics.debited_tokens.inc_by(debits.iter().map(|debit| debit.cost).sum());
        Ok(())
    }

    /// What is owed to one node is owed to others.
    fn hand_over(&self, remote: &Remote, gone: NodeId) {
        for debt in remote.fallback.take_debts(gone) {
            let owner = self.store.node_of(self.store.slot_of(debt.key()));
            remote.fallback.add(owner, debt);
        }
        remote.fallback.settled(gone);
    }
}
