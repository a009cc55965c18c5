//! The script, its call and its reply.

use redis::{Cmd, Value};
use smallvec::SmallVec;

use crate::limit::sliding_log::MOST_ENTRIES;
use crate::limit::{Limit, MAX_EXACT, Outcome, Verdict};
use crate::rule::{Check, Checks, Demand, Verdicts};
use crate::store::StoreFault;

/// The script: Redis' time, the limits, and the loop over the requests of a flight.
pub const SOURCE: &str = concat!(
    include_str!("../../../lua/clock.lua"),
    include_str!("../../../lua/token_bucket.lua"),
    // Only made when a flight needs them: most are of token buckets alone.
    "local function other_algorithms()\n",
    include_str!("../../../lua/fixed_window.lua"),
    include_str!("../../../lua/quota.lua"),
    include_str!("../../../lua/sliding_window.lua"),
    include_str!("../../../lua/sliding_log.lua"),
    include_str!("../../../lua/concurrency.lua"),
    "return ALGORITHMS\nend\n",
    include_str!("../../../lua/acquire.lua"),
);

/// The most checks in one call: it blocks Redis for some 0.3 ms.
pub const MOST_CHECKS: usize = 64;

/// Numbers in the reply per check.
const PER_CHECK: usize = 4;

/// The keys and arguments of one call.
#[derive(Default)]
pub struct Flight {
    requests: SmallVec<[Checks; 16]>,
    checks: usize,
}

impl Flight {
    /// An empty flight.
    pub fn new() -> Self {
        Self::default()
    }

    /// Takes one request on board.
    pub fn board(&mut self, checks: Checks) {
        self.checks += checks.len();
        self.requests.push(checks);
    }

    /// Those on board, in their order.
    pub fn into_requests(self) -> impl Iterator<Item = Checks> {
        self.requests.into_iter()
    }

    /// The call: see `lua/acquire.lua`. Checks that ask the same share the question, for most requests of a
    /// flight are held to few different limits.
    pub fn command(&self, sha: &str) -> Cmd {
        let mut questions = SmallVec::<[Question; 4]>::new();
        let positions: SmallVec<[usize; MOST_CHECKS]> = self
            .requests
            .iter()
            .flatten()
            .map(|check| position(&mut questions, Question::of(check)))
            .collect();
        let arguments = 4 + self.checks * 2 + questions.len() * 8;
        let mut command = Cmd::with_capacity(arguments, 64 + self.checks * 64 + questions.len() * 64);
        command.arg("EVALSHA").arg(sha).arg(self.checks);
        for check in self.requests.iter().flatten() {
            command.arg(check.key.as_str());
        }
        command.arg(questions.len());
        for Question { algorithm, cost, limit, ttl_ms, demand } in &questions {
            command.arg(*algorithm).arg(*cost).arg(limit).arg(*ttl_ms).arg(match demand {
                Demand::Take => "take",
                Demand::Debit => "debit",
                Demand::Shadow => "shadow",
                Demand::Lease => "lease",
                Demand::Return => "return",
                Demand::Peek => "peek",
                Demand::Watch => "watch",
                Demand::Renew => "renew",
            });
        }
        let mut positions = positions.into_iter();
        for request in &self.requests {
            if request.len() != 1 {
                command.arg(-request.len().cast_signed());
            }
            for position in positions.by_ref().take(request.len()) {
                command.arg(position);
            }
        }
        command
    }

    /// The answers, one per request, in their order.
    pub fn answers(&self, reply: &Value) -> Vec<Result<Verdicts, StoreFault>> {
        let numbers = match reply {
            Value::Array(numbers) if numbers.len() == 1 + self.checks * PER_CHECK => &numbers[1..],
            _ => return vec![Err(bad_reply(reply)); self.requests.len()],
        };
        let (mut answers, mut rest) = (Vec::with_capacity(self.requests.len()), numbers);
        for request in &self.requests {
            // Each request has its own numbers, also when one of them tells of a fault.
            let (own, others) = rest.split_at(request.len() * PER_CHECK);
            rest = others;
            let told = own.chunks_exact(PER_CHECK).zip(request);
            answers
                .push(told.map(|(own, check)| verdict(own).map_err(|fault| named(fault, check))).collect());
        }
        answers
    }
}

/// Whoever repairs a key of the wrong type has to find it.
#[cold]
fn named(fault: StoreFault, check: &Check) -> StoreFault {
    match fault {
        StoreFault::WrongType(text) => StoreFault::WrongType(format!("{}: {text}", check.key.as_str())),
        other => other,
    }
}

/// What a check asks for, but for its key; as the script takes it.
#[derive(PartialEq)]
struct Question {
    algorithm: &'static str,
    /// In units, where the limit has some.
    cost: u64,
    limit: [u64; 4],
    ttl_ms: u64,
    demand: Demand,
}

impl Question {
    fn of(check: &Check) -> Self {
        let limit = match &check.limit {
            Limit::TokenBucket(limit) => limit.script_numbers(),
            Limit::FixedWindow(window) => [window.limit, window.window, 0, 0],
            Limit::SlidingWindow(window) => [window.limit, window.window, 0, 0],
            Limit::SlidingLog(log) => [log.limit, log.window, MOST_ENTRIES, 0],
            Limit::Quota(quota) => [quota.limit, quota.edges[0], quota.edges[1], quota.edges[2]],
            Limit::Concurrency(permits) => [permits.limit, permits.hold, check.permit, 0],
        };
        let (cost, ttl_ms) = match (&check.limit, check.demand) {
            (Limit::TokenBucket(limit), Demand::Debit | Demand::Return) => {
                (limit.spent_units(check.cost), limit.ttl_ms())
            }
            (Limit::TokenBucket(limit), _) => (limit.units(check.cost), limit.ttl_ms()),
            (Limit::Quota(quota), _) => (check.cost.min(MAX_EXACT), quota.edges[3]),
            _ => (check.cost.min(MAX_EXACT), 0),
        };
        Self { algorithm: check.limit.algorithm(), cost, limit, ttl_ms, demand: check.demand }
    }
}

/// The position of `question` in `all`, from 1, where it is put if it is new.
fn position(all: &mut SmallVec<[Question; 4]>, question: Question) -> usize {
    match all.iter().position(|known| *known == question) {
        Some(index) => index + 1,
        None => {
            all.push(question);
            all.len()
        }
    }
}

/// The time at which Redis decided, in microseconds, from a reply.
pub fn decided_at(reply: &Value) -> Option<u64> {
    match reply {
        Value::Array(numbers) => match numbers.first() {
            Some(Value::Int(now)) => u64::try_from(*now).ok(),
            _ => None,
        },
        _ => None,
    }
}

fn verdict(numbers: &[Value]) -> Result<Verdict, StoreFault> {
    let number = |value: &Value| match value {
        Value::Int(number) => u64::try_from(*number).map_err(|_| bad_reply(value)),
        _ => Err(bad_reply(value)),
    };
    let outcome = match &numbers[0] {
        Value::Int(1) => Outcome::Allowed,
        Value::Int(0) => Outcome::Refused,
        Value::Int(2) => Outcome::NeverFits,
        Value::Int(3) => {
            let tokens = number(&numbers[2])?;
            let (remaining, reset_ms) = (number(&numbers[1])?, number(&numbers[3])?);
            return Ok(Verdict { outcome: Outcome::Leased(tokens), remaining, retry_after_ms: 0, reset_ms });
        }
        Value::Int(-1) => return Err(script_fault(&numbers[1])),
        other => return Err(bad_reply(other)),
    };
    Ok(Verdict {
        outcome,
        remaining: number(&numbers[1])?,
        retry_after_ms: number(&numbers[2])?,
        reset_ms: number(&numbers[3])?,
    })
}

/// What a command inside of the script said.
fn script_fault(text: &Value) -> StoreFault {
    let text = match text {
        Value::BulkString(text) => String::from_utf8_lossy(text).into_owned(),
        Value::SimpleString(text) => text.clone(),
        other => return bad_reply(other),
    };
    if text.starts_with("WRONGTYPE") || text.starts_with("BADSTATE") {
        StoreFault::WrongType(text)
    } else {
        StoreFault::Refused(text)
    }
}

fn bad_reply(value: &Value) -> StoreFault {
    let mut text = format!("{value:?}");
    if text.len() > 100 {
        text = text.chars().take(100).collect();
    }
    StoreFault::BadReply(text)
}

#[cfg(test)]
mod tests;
