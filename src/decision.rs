//! What happens to a request, from what its checks were told. Pure.

use std::cmp::Reverse;

use smallvec::SmallVec;

use crate::config::OnStoreFailure;
use crate::limit::{Outcome, Verdict};
use crate::rule::{Check, Checks, Demand, RuleId, Verdicts};

/// What happens to a request, and why.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Decision {
    /// What happens to the request.
    pub admission: Admission,
    /// What the decision rests on: on the fallback if any part of it does.
    pub basis: Basis,
    /// What it rests on by check, where the checks were not asked together; else empty.
    pub bases: SmallVec<[Basis; 2]>,
    /// What each check was told; empty where nothing was asked.
    pub verdicts: Verdicts,
    /// Whose turn it was among the shards, where there are some.
    pub turn: usize,
}

/// What happens to a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Admission {
    /// It passes.
    Admitted,
    /// It is over a limit: 429.
    Refused,
    /// The store is away and the rule says not to guess: 503.
    Unavailable,
}

/// What a decision rests on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Basis {
    /// No rule applies.
    NoRule,
    /// The store decided.
    Store,
    /// What this gateway has taken in advance of the key.
    Lease,
    /// The store has refused the same lately, and it cannot fit yet.
    Denial,
    /// What the rules say for when the store does not.
    Fallback,
}

impl Decision {
    /// The decision on a request that no rule applies to.
    pub fn no_rule() -> Self {
        Self {
            admission: Admission::Admitted,
            basis: Basis::NoRule,
            bases: SmallVec::new(),
            verdicts: Verdicts::new(),
            turn: 0,
        }
    }

    /// The decision not to guess without the store.
    pub fn unavailable() -> Self {
        Self { admission: Admission::Unavailable, basis: Basis::Fallback, ..Self::no_rule() }
    }

    /// A decision from what all checks were told. Shadows have no say in it.
    pub fn from_verdicts(basis: Basis, checks: &Checks, verdicts: Verdicts) -> Self {
        let mut votes = checks.iter().zip(&verdicts).filter(|(check, _)| check.votes());
        let admitted = votes.all(|(_, verdict)| verdict.outcome == Outcome::Allowed);
        let admission = if admitted { Admission::Admitted } else { Admission::Refused };
        Self { admission, basis, verdicts, ..Self::no_rule() }
    }

    /// The decision on all checks of a request from those on its parts: `parts` says which checks each of them was
    /// on. All must admit.
    pub fn of_parts(checks: &Checks, parts: &[(SmallVec<[usize; 2]>, Self)]) -> Self {
        if parts.iter().any(|(_, part)| part.admission == Admission::Unavailable) {
            return Self::unavailable();
        }
        let mut told: SmallVec<[(usize, Verdict, Basis); 4]> = parts
            .iter()
            .flat_map(|(asked, part)| {
                asked.iter().zip(&part.verdicts).map(|(index, verdict)| (*index, *verdict, part.basis))
            })
            .collect();
        told.sort_unstable_by_key(|(index, ..)| *index);
        let bases: SmallVec<[Basis; 2]> = told.iter().map(|(_, _, basis)| *basis).collect();
        let weakest = if bases.contains(&Basis::Fallback) { Basis::Fallback } else { Basis::Store };
        let verdicts = told.into_iter().map(|(_, verdict, _)| verdict).collect();
        Self { bases, ..Self::from_verdicts(weakest, checks, verdicts) }
    }

    /// What these checks had taken was given back.
    pub fn take_back(&mut self, checks: &Checks, group: &[usize]) {
        for index in group.iter().filter(|index| checks[**index].demand == Demand::Take) {
            if let Some(verdict) = self.verdicts.get_mut(*index) {
                let left = verdict.remaining.saturating_add(checks[*index].cost);
                verdict.remaining = left.min(checks[*index].limit.capacity());
            }
        }
    }

    /// Some of the checks were charged after the decision: clients are told what is left now. Not by somebody else
    /// than who decided: what is left of a share says nothing about the whole.
    pub fn charged(&mut self, checks: &Checks, told: &[(Check, Verdict, Basis)]) {
        for (charge, told, basis) in told {
            let is_of =
                |check: &Check| check.rule == charge.rule && check.on_shard(self.turn).key == charge.key;
            let Some(index) = checks.iter().position(is_of) else { continue };
            let check = &checks[index];
            let (by_fallback, is_local) =
                (*basis == Basis::Fallback, check.on_store_failure == OnStoreFailure::Local);
            if by_fallback != (self.basis_of(index) == Basis::Fallback) || by_fallback && !is_local {
                continue;
            }
            let Some(verdict) = self.verdicts.get_mut(index) else { continue };
            let left = told.remaining.saturating_mul(u64::from(check.shards));
            verdict.remaining = left.min(check.limit.capacity());
            verdict.reset_ms = told.reset_ms;
        }
    }

    /// What it says of a check rests on this.
    pub fn basis_of(&self, index: usize) -> Basis {
        self.bases.get(index).copied().unwrap_or(self.basis)
    }

    /// The same, told of the whole of each bucket that is split over shards. What the other shards hold is
    /// not known: they are asked in turn, so it is about as much.
    #[must_use]
    pub fn of_all_shards(mut self, checks: &Checks) -> Self {
        for (check, verdict) in checks.iter().zip(&mut self.verdicts) {
            let all = verdict.remaining.saturating_mul(u64::from(check.shards));
            verdict.remaining = all.min(check.limit.capacity());
        }
        self
    }

    /// This decision after some of its checks have been asked on another shard: what it says of a check is the
    /// better of the two answers.
    #[must_use]
    pub fn after(mut self, other: &Self, asked: &[usize], turn: usize) -> Self {
        for (index, verdict) in asked.iter().zip(&other.verdicts) {
            let known = &mut self.verdicts[*index];
            if verdict.is_allowed() || verdict.retry_after_ms < known.retry_after_ms {
                *known = *verdict;
            }
        }
        let mut bases: SmallVec<[Basis; 2]> =
            (0..self.verdicts.len()).map(|index| self.basis_of(index)).collect();
        for (position, index) in asked.iter().enumerate() {
            if let Some(basis) = bases.get_mut(*index) {
                *basis = other.basis_of(position);
            }
        }
        self.bases = bases;
        // Who was admitted has only asked for what refuses nobody.
        if self.admission != Admission::Admitted {
            (self.admission, self.basis, self.turn) = (other.admission, other.basis, turn);
        }
        self
    }

    /// The checks to ask on another shard: those that have found theirs empty, and, where the request was refused
    /// for that alone, all that take with it. None where that would help nobody.
    pub fn short_of_a_shard(&self, checks: &Checks) -> SmallVec<[usize; 4]> {
        let told = || checks.iter().zip(&self.verdicts).enumerate();
        let is_short =
            |check: &Check, verdict: &Verdict| check.shards > 1 && verdict.outcome == Outcome::Refused;
        let others_refuse = || {
            let refuses = |check: &Check, verdict: &Verdict| check.votes() && !verdict.is_allowed();
            told().any(|(_, (check, verdict))| refuses(check, verdict) && !is_short(check, verdict))
        };
        let votes_too = match self.admission {
            Admission::Admitted => false,
            Admission::Refused if !others_refuse() => true,
            Admission::Refused | Admission::Unavailable => return SmallVec::new(),
        };
        told()
            .filter(|(_, (check, verdict))| is_short(check, verdict) || votes_too && check.votes())
            .map(|(index, _)| index)
            .collect()
    }

    /// The check that clients are told of: the nearest to refusing, or the one that refused (with the longest
    /// wait): its position. A hidden one or a shadow only where there is nothing else; `None` where nothing was
    /// asked.
    pub fn nearest(&self, checks: &Checks) -> Option<usize> {
        (0..self.verdicts.len().min(checks.len()))
            .min_by_key(|index| (checks[*index].rule.is_hidden(), self.rank(checks, *index)))
    }

    /// The name of the rule that decided, hidden or not: for log and metrics.
    pub fn rule<'c>(&self, checks: &'c Checks) -> &'c str {
        let told = 0..self.verdicts.len().min(checks.len());
        let decisive = told.min_by_key(|index| self.rank(checks, *index));
        decisive.map_or("default", |index| checks[index].rule.name())
    }

    /// How near a check is to refusing: the nearest has the least.
    fn rank(&self, checks: &Checks, index: usize) -> (bool, bool, bool, Reverse<u64>, u64) {
        let (check, verdict) = (&checks[index], &self.verdicts[index]);
        let left = verdict.remaining.saturating_mul(1_000_000) / check.limit.capacity().max(1);
        let candidate = check.rule == RuleId::CANDIDATE;
        (!check.votes(), candidate, verdict.is_allowed(), Reverse(verdict.retry_after_ms), left)
    }

    /// How long it is surely worth waiting for a request that was refused: until all that have refused it would not;
    /// `None` where no wait helps.
    pub fn retry_after_ms(&self, checks: &Checks) -> Option<u64> {
        let refusing =
            || checks.iter().zip(&self.verdicts).filter(|(check, told)| check.votes() && !told.is_allowed());
        let never = refusing().any(|(_, told)| told.outcome == Outcome::NeverFits);
        refusing().map(|(_, told)| told.retry_after_ms).max().filter(|_| !never)
    }

    /// Whether it has given that permit, and on what basis it says so.
    pub fn gives(&self, checks: &Checks, permit: u64) -> (bool, Basis) {
        let admitted = self.admission == Admission::Admitted;
        let Some(index) = checks.iter().position(|check| check.permit == permit) else {
            return (false, self.basis);
        };
        let is_given = self.verdicts.get(index).is_some_and(Verdict::is_allowed)
            && (admitted || checks[index].demand == Demand::Shadow);
        (is_given, self.basis_of(index))
    }

    /// The outcome in metrics: that of the request, or what a rule in shadow would have made of it.
    pub fn outcome(&self, checks: &Checks) -> &'static str {
        let would_refuse = |(check, verdict): (&Check, &Verdict)| {
            !check.votes() && check.rule != RuleId::CANDIDATE && !verdict.is_allowed()
        };
        match self.admission {
            Admission::Admitted if checks.iter().zip(&self.verdicts).any(would_refuse) => "would_refuse",
            admission => admission.label(),
        }
    }

    /// Whether a candidate would have admitted the request, where it does not agree with the rule that it
    /// stands beside.
    pub fn disagreement(&self, checks: &Checks) -> Option<bool> {
        let says = |rule| {
            let position = checks.iter().position(|check| check.rule == rule)?;
            self.verdicts.get(position).map(Verdict::is_allowed)
        };
        let (live, candidate) = (says(RuleId::TENANT)?, says(RuleId::CANDIDATE)?);
        (live != candidate).then_some(candidate)
    }
}

impl Admission {
    /// The label in metrics.
    pub const fn label(self) -> &'static str {
        match self {
            Self::Admitted => "admitted",
            Self::Refused => "refused",
            Self::Unavailable => "unavailable",
        }
    }
}

impl Basis {
    /// The label in metrics.
    pub const fn label(self) -> &'static str {
        match self {
            Self::NoRule => "no_rule",
            Self::Store => "store",
            Self::Lease => "lease",
            Self::Denial => "denial",
            Self::Fallback => "fallback",
        }
    }
}

#[cfg(test)]
mod tests {
    use smallvec::smallvec;

    use super::*;
    use crate::key::{Hasher, Key, Part};
    use crate::limit::Limit;
    use crate::limit::token_bucket::TokenBucket;

    /// What is left of a share, after the store has gone, does not stand beside the limit of the whole.
    #[test]
    fn only_who_decided_tells_what_is_left_after_a_charge() {
        let part = Part::known(b"a", &Hasher::new(b""));
        let limit = Limit::TokenBucket(TokenBucket::new(200, "1".parse().unwrap()).unwrap());
        let check = Check::own(Key::tenant_route("rl", &part, &part), limit, 1, Demand::Take);
        let charge = Check { demand: Demand::Debit, ..check.clone() };
        let verdict =
            |remaining| Verdict { outcome: Outcome::Allowed, remaining, retry_after_ms: 0, reset_ms: 0 };
        let left = |decided, told, on_store_failure| {
            let checks: Checks = smallvec![Check { on_store_failure, ..check.clone() }];
            let mut decision = Decision::from_verdicts(decided, &checks, smallvec![verdict(150)]);
            decision.charged(&checks, &[(charge.clone(), verdict(36), told)]);
            decision.verdicts[0].remaining
        };
        let (local, allow) = (OnStoreFailure::Local, OnStoreFailure::Allow);
        assert_eq!(left(Basis::Store, Basis::Store, local), 36);
        assert_eq!(left(Basis::Lease, Basis::Store, local), 36);
        assert_eq!(left(Basis::Store, Basis::Fallback, local), 150);
        assert_eq!(left(Basis::Fallback, Basis::Store, local), 150);
        assert_eq!(left(Basis::Fallback, Basis::Fallback, local), 36);
        assert_eq!(left(Basis::Fallback, Basis::Fallback, allow), 150);
    }
}
