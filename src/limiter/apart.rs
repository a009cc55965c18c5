//! Checks of one request that do not share a slot: asked in parallel, each part for itself all or none. Where one
//! part refuses, what the others have taken goes back before the request is answered.

use std::collections::BTreeMap;

use futures_util::future::join_all;
use smallvec::{SmallVec, smallvec};

use super::{Apart, Limiter, Part, Remote};
use crate::clock::Timestamp;
use crate::decision::{Admission, Basis, Decision};
use crate::rule::{Check, Checks, Demand};
use crate::store::NodeId;

/// Positions of the checks that are asked together.
pub(super) type Group = SmallVec<[usize; 2]>;

/// Each check for itself.
pub(super) fn each_alone(checks: &Checks) -> Vec<Group> {
    (0..checks.len()).map(|index| smallvec![index]).collect()
}

fn of(checks: &Checks, group: &Group) -> Checks {
    group.iter().map(|index| checks[*index].clone()).collect()
}

impl Limiter {
    /// Decides the checks of one request in parts. To go on as if each took for itself is safe, because all that
    /// is taken can be given back: what a refused request held meanwhile may at worst refuse another one.
    pub(super) async fn decide_apart(
        &self,
        remote: &Remote,
        checks: &Checks,
        groups: Vec<Group>,
        asked: Timestamp,
    ) -> Decision {
        let mut parts = Vec::with_capacity(groups.len());
        let mut open = groups;
        while !open.is_empty() {
            let told = join_all(open.iter().map(|group| self.ask_part(remote, checks, group, asked))).await;
            let mut still_open = Vec::new();
            for (group, told) in open.into_iter().zip(told) {
                match told {
                    Ok(part) => parts.push((group, part)),
                    Err(Apart) => still_open.extend(group.into_iter().map(|index| smallvec![index])),
                }
            }
            open = still_open;
        }
        let decisions: Vec<_> =
            parts.iter().map(|(group, part)| (group.clone(), part.decision.clone())).collect();
        let mut whole = Decision::of_parts(checks, &decisions);
        if whole.admission == Admission::Admitted {
            for (group, part) in parts {
                let _ = part.paid_for(remote, &of(checks, &group));
            }
            return whole;
        }
        parts.retain(|(_, part)| part.decision.admission == Admission::Admitted);
        join_all(parts.iter().map(|(group, part)| self.take_back(remote, part, of(checks, group)))).await;
        for (group, _) in &parts {
            whole.take_back(checks, group);
        }
        whole
    }

    async fn ask_part(
        &self,
        remote: &Remote,
        checks: &Checks,
        group: &Group,
        asked: Timestamp,
    ) -> Result<Part, Apart> {
        let part = of(checks, group);
        let slot = part.first().map_or(0, |check| self.store.slot_of(&check.key));
        self.ask(remote, self.store.node_of(slot), &part, asked).await
    }

    /// Gives back what one part has taken. A call whose outcome is not known is not repeated: at worst its tokens
    /// are missing.
    async fn take_back(&self, remote: &Remote, part: &Part, checks: Checks) {
        if part.decision.basis == Basis::Fallback {
            return remote.fallback.give_back(&checks, self.clock.now());
        }
        let taken = checks.iter().filter(|check| check.demand == Demand::Take && check.cost > 0);
        let back: Checks = taken.map(|check| Check { demand: Demand::Return, ..check.clone() }).collect();
        let Some(call) = remote.breakers.of(part.node).admit().filter(|_| !back.is_empty()) else { return };
        match self.store.acquire(&back).await {
            Ok(_) => call.answered(self.clock.now()),
            Err(fault) => self.failed(part.node, call, &fault, self.clock.now()),
        }
    }

    /// The checks of a request by the slot of their keys.
    pub(super) fn by_slot(&self, checks: &Checks) -> Vec<Group> {
        let mut groups: BTreeMap<u16, Group> = BTreeMap::new();
        for (index, check) in checks.iter().enumerate() {
            groups.entry(self.store.slot_of(&check.key)).or_default().push(index);
        }
        groups.into_values().collect()
    }

    /// What is to be done on many keys, in calls of at most `most` that share a slot, each with its node.
    pub(super) fn in_calls<T: Clone>(
        &self,
        all: impl IntoIterator<Item = T>,
        most: usize,
        check: impl Fn(&T) -> &Check,
    ) -> Vec<(NodeId, Vec<T>)> {
        let mut slots: BTreeMap<u16, Vec<T>> = BTreeMap::new();
        for one in all {
            slots.entry(self.store.slot_of(&check(&one).key)).or_default().push(one);
        }
        let calls = slots.into_iter().flat_map(|(slot, all)| {
            let node = self.store.node_of(slot);
            all.chunks(most.max(1)).map(|call| (node, call.to_vec())).collect::<Vec<_>>()
        });
        calls.collect()
    }
}
