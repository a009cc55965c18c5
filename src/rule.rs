//! Rules and checks. A rule is a named promise; a check is one rule applied to one request.

use std::sync::Arc;

use smallvec::SmallVec;

use crate::config::OnStoreFailure;
use crate::key::Key;
use crate::limit::{Limit, Verdict};

/// A rule by its name.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct RuleId {
    name: Name,
    hidden: bool,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Name {
    /// Of what every configuration has.
    Own(&'static str),
    /// As the configuration gives it.
    Given(Arc<str>),
}

impl RuleId {
    /// The rule that holds a tenant on a route, from a row or the default.
    pub const TENANT: Self = Self { name: Name::Own("default"), hidden: false };

    /// The limit that is tried beside the tenant's own rule.
    pub const CANDIDATE: Self = Self { name: Name::Own("candidate"), hidden: false };

    /// A rule of that name, of which clients may not be told.
    pub fn named(name: &Arc<str>, hidden: bool) -> Self {
        Self { name: Name::Given(Arc::clone(name)), hidden }
    }

    /// The name in metrics, headers and answers.
    pub fn name(&self) -> &str {
        match &self.name {
            Name::Own(name) => name,
            Name::Given(name) => name,
        }
    }

    /// Whether clients are not told of it.
    pub const fn is_hidden(&self) -> bool {
        self.hidden
    }
}

/// One rule applied to one request: which bucket, which limit, how much.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Check {
    /// The rule.
    pub rule: RuleId,
    /// The bucket.
    pub key: Key,
    /// The limit it is held to.
    pub limit: Limit,
    /// How many buckets the limit is split over; the key and the limit are those of all of them.
    pub shards: u16,
    /// Tokens; 0 asks without taking.
    pub cost: u64,
    /// Which permit, where the limit gives some; 0 elsewhere.
    pub permit: u64,
    /// What is to become of them.
    pub demand: Demand,
    /// What decides when the store does not.
    pub on_store_failure: OnStoreFailure,
}

impl Check {
    /// A check of the gateway itself, which stands for no request.
    pub const fn own(key: Key, limit: Limit, cost: u64, demand: Demand) -> Self {
        Self {
            rule: RuleId::TENANT,
            key,
            limit,
            shards: 1,
            cost,
            permit: 0,
            demand,
            on_store_failure: OnStoreFailure::Local,
        }
    }

    /// The same on one shard of its bucket; `turn` goes round all of them.
    #[must_use]
    pub fn on_shard(&self, turn: usize) -> Self {
        if self.shards <= 1 {
            return self.clone();
        }
        let shard = (turn % usize::from(self.shards)) as u16;
        Self {
            key: self.key.of_shard(shard),
            limit: self.limit.shard(shard, self.shards),
            shards: 1,
            ..self.clone()
        }
    }

    /// Whether the request is refused if this is.
    pub fn votes(&self) -> bool {
        matches!(self.demand, Demand::Take | Demand::Peek)
    }
}

/// What a check wants of its bucket.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Demand {
    /// The cost, if all checks of the request that take can have theirs.
    #[default]
    Take,
    /// The cost that has been spent already, also below 0. Never refused.
    Debit,
    /// The cost for itself, whatever becomes of the other checks, which it does not hold up.
    Shadow,
    /// Whole tokens in advance: as many as there are, up to the cost.
    Lease,
    /// To take the cost back, or the permit, which was taken and is not used.
    Return,
    /// To know whether the cost would fit, without taking it: it is charged later, if at all.
    Peek,
    /// The same as [`Demand::Peek`], of a rule in shadow: it refuses nobody.
    Watch,
    /// That the permit goes on counting.
    Renew,
}

/// All checks of one request, in order. Few requests have more than two.
pub type Checks = SmallVec<[Check; 2]>;

/// What each check was told, in the order of the checks.
pub type Verdicts = SmallVec<[Verdict; 2]>;
