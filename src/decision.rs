//! What happens to a request, from what its checks were told. Pure.

use std::cmp::Reverse;

use crate::limit::Outcome;
use crate::rule::{Checks, RuleId, Verdicts};

/// What happens to a request, and why.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Decision {
    /// What happens to the request.
    pub admission: Admission,
    /// What the decision rests on.
    pub basis: Basis,
    /// What each check was told; empty where nothing was asked.
    pub verdicts: Verdicts,
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
    /// What the rules say for when the store does not.
    Fallback,
}

impl Decision {
    /// The decision on a request that no rule applies to.
    pub fn no_rule() -> Self {
        Self { admission: Admission::Admitted, basis: Basis::NoRule, verdicts: Verdicts::new() }
    }

    /// The decision not to guess without the store.
    pub fn unavailable() -> Self {
        Self { admission: Admission::Unavailable, basis: Basis::Fallback, verdicts: Verdicts::new() }
    }

    /// A decision from what all checks were told.
    pub fn from_verdicts(basis: Basis, verdicts: Verdicts) -> Self {
        let admitted = verdicts.iter().all(|verdict| verdict.outcome == Outcome::Allowed);
        let admission = if admitted { Admission::Admitted } else { Admission::Refused };
        Self { admission, basis, verdicts }
    }

    /// The check that is nearest to refusing, or that refused (the one with the longest wait): its
    /// position. `None` where nothing was asked.
    pub fn nearest(&self, checks: &Checks) -> Option<usize> {
        let rank = |index: usize| {
            let verdict = &self.verdicts[index];
            let left = verdict.remaining.saturating_mul(1_000_000) / checks[index].limit.capacity().max(1);
            (verdict.is_allowed(), Reverse(verdict.retry_after_ms), left)
        };
        (0..self.verdicts.len().min(checks.len())).min_by_key(|index| rank(*index))
    }

    /// The name of the rule that [`Decision::nearest`] points at.
    pub fn rule(&self, checks: &Checks) -> RuleId {
        self.nearest(checks).map_or(RuleId::TENANT, |index| checks[index].rule)
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
            Self::Fallback => "fallback",
        }
    }
}
