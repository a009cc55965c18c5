//! What happens to a request, from what its checks were told. Pure.

use std::cmp::Reverse;

use smallvec::SmallVec;

use crate::limit::{Outcome, Verdict};
use crate::rule::{Check, Checks, Demand, RuleId, Verdicts};

/// What happens to a request, and why.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Decision {
    /// What happens to the request.
    pub admission: Admission,
    /// What the decision rests on.
    pub basis: Basis,
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
        Self { admission: Admission::Admitted, basis: Basis::NoRule, verdicts: Verdicts::new(), turn: 0 }
    }

    /// The decision not to guess without the store.
    pub fn unavailable() -> Self {
        Self { admission: Admission::Unavailable, basis: Basis::Fallback, verdicts: Verdicts::new(), turn: 0 }
    }

    /// A decision from what all checks were told. Shadows have no say in it.
    pub fn from_verdicts(basis: Basis, checks: &Checks, verdicts: Verdicts) -> Self {
        let mut votes = checks.iter().zip(&verdicts).filter(|(check, _)| check.votes());
        let admitted = votes.all(|(_, verdict)| verdict.outcome == Outcome::Allowed);
        let admission = if admitted { Admission::Admitted } else { Admission::Refused };
        Self { admission, basis, verdicts, turn: 0 }
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

    /// Whether it has given that permit.
    pub fn gives(&self, checks: &Checks, permit: u64) -> bool {
        let admitted = self.admission == Admission::Admitted;
        let of = |(check, verdict): (&Check, &Verdict)| {
            check.permit == permit && verdict.is_allowed() && (admitted || check.demand == Demand::Shadow)
        };
        checks.iter().zip(&self.verdicts).any(of)
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
