//! Who flies in which call, and what becomes of them when it lands.

use redis::{ErrorKind, RedisError, ServerErrorKind, Value};
use smallvec::{SmallVec, smallvec};
use tokio::sync::oneshot;
use tokio::time::Instant;

use super::access::Address;
use super::connection::server_error;
use super::node::{NoVerdict, Waiting};
use super::script::{Flight, MOST_CHECKS};
use crate::rule::{Checks, Verdicts};
use crate::store::StoreFault;

/// Who waits for an answer.
pub(super) type Passenger = oneshot::Sender<Result<Verdicts, NoVerdict>>;

/// The calls that are in the air together: one for each slot.
pub(super) type Calls = SmallVec<[Call; 1]>;

/// One script call: requests whose keys share a slot.
pub(super) struct Call {
    slot: u16,
    /// Sent here by a node that is moving the slot here. Such a request flies alone: of several keys all
    /// would have to be here already.
    pub(super) asking: bool,
    pub(super) flight: Flight,
}

/// Who is on board, by call, each in the order of the flight. Apart from the calls, so that they can leave while
/// those are still in the air.
#[derive(Default)]
pub(super) struct Passengers(SmallVec<[SmallVec<[Passenger; 16]>; 1]>);

/// Takes requests on board.
#[derive(Default)]
pub(super) struct Boarding {
    calls: Calls,
    passengers: Passengers,
    checks: usize,
    since: Option<Instant>,
}

impl Boarding {
    /// Whether `checks` still fit. A request alone always does.
    pub(super) fn has_room_for(&self, checks: &Checks) -> bool {
        self.checks == 0 || self.checks + checks.len() <= MOST_CHECKS
    }

    /// Takes one request on board.
    pub(super) fn board(&mut self, waiting: Waiting) {
        let Waiting { checks, slot, asking, since, reply } = waiting;
        self.since = self.since.min(Some(since)).or(Some(since));
        let known = |call: &Call| call.slot == slot && !call.asking && !asking;
        let position = self.calls.iter().position(known).unwrap_or(self.calls.len());
        if position == self.calls.len() {
            self.calls.push(Call { slot, asking, flight: Flight::new() });
            self.passengers.0.push(SmallVec::new());
        }
        self.checks += checks.len();
        self.calls[position].flight.board(checks);
        self.passengers.0[position].push(reply);
    }

    /// Since when the first of them waits.
    pub(super) fn since(&self) -> Option<Instant> {
        self.since
    }

    /// The doors close.
    pub(super) fn closed(self) -> (Calls, Passengers) {
        (self.calls, self.passengers)
    }
}

impl Passengers {
    /// How many there are.
    pub(super) fn count(&self) -> usize {
        self.0.iter().map(SmallVec::len).sum()
    }

    /// None of them gets an answer.
    pub(super) fn fail(self, fault: &StoreFault) {
        self.0.into_iter().for_each(|passengers| fail(passengers, fault));
    }
}

/// Hands out the answers. Gives back who is to fly again, each alone, because their keys are being moved; and the
/// error that ends the connection, if there is one.
pub(super) fn land(
    calls: Calls,
    passengers: Passengers,
    replies: Result<Vec<Result<Value, RedisError>>, RedisError>,
    here: Option<&Address>,
) -> (Boarding, Result<(), RedisError>) {
    let (mut again, mut ended) = (Boarding::default(), Ok(()));
    let replies = match replies {
        Ok(replies) => replies,
        Err(error) => {
            passengers.fail(&StoreFault::Io(error.to_string()));
            return (again, Err(error));
        }
    };
    for ((call, passengers), reply) in calls.into_iter().zip(passengers.0).zip(replies) {
        match reply {
            Err(error) if is_on_the_move(&error) && passengers.len() > 1 => {
                for (checks, passenger) in call.flight.into_requests().zip(passengers) {
                    let mut flight = Flight::new();
                    flight.board(checks);
                    again.calls.push(Call { flight, ..call });
                    again.passengers.0.push(smallvec![passenger]);
                }
            }
            reply => ended = ended.and(land_one(&call.flight, passengers, reply, here)),
        }
    }
    (again, ended)
}

/// An error of the server is an answer; one of the connection ends it.
fn land_one(
    flight: &Flight,
    passengers: SmallVec<[Passenger; 16]>,
    reply: Result<Value, RedisError>,
    here: Option<&Address>,
) -> Result<(), RedisError> {
    match reply {
        Ok(reply) => {
            let mut ended = Ok(());
            for (passenger, answer) in passengers.into_iter().zip(flight.answers(&reply)) {
                if answer.as_ref().is_err_and(is_read_only) {
                    ended =
                        Err(RedisError::from((ErrorKind::Server(ServerErrorKind::ReadOnly), "a replica")));
                }
                // Who has left does not need the answer.
                let _ = passenger.send(answer.map_err(NoVerdict::Fault));
            }
            ended
        }
        Err(error) if is_server_answer(&error) => {
            let told = no_verdict(&error, here);
            for passenger in passengers {
                let _ = passenger.send(Err(told.clone()));
            }
            if needs_new_connection(&error) { Err(error) } else { Ok(()) }
        }
        Err(error) => {
            fail(passengers, &StoreFault::Io(error.to_string()));
            Err(error)
        }
    }
}

/// What a refusal of the whole call means for who was in it. A node that names another one has done nothing.
fn no_verdict(error: &RedisError, here: Option<&Address>) -> NoVerdict {
    let elsewhere = || Address::parse(error.redirect_node()?.0, here?);
    match (server_error(error), elsewhere()) {
        (Some(ServerErrorKind::Moved), Some(to)) => NoVerdict::Moved(to),
        (Some(ServerErrorKind::Ask), Some(to)) => NoVerdict::Ask(to),
        (Some(ServerErrorKind::TryAgain), _) => NoVerdict::Fault(StoreFault::Apart),
        _ => NoVerdict::Fault(StoreFault::Refused(words(error))),
    }
}

/// Nothing was run, because of some keys, not all: which ones only each request alone is told. Before version 7 ASK
/// comes already when one key is missing.
fn is_on_the_move(error: &RedisError) -> bool {
    matches!(server_error(error), Some(ServerErrorKind::TryAgain | ServerErrorKind::Ask))
}

/// A replica answers reads, so only what a write inside of the script said tells of it.
fn is_read_only(fault: &StoreFault) -> bool {
    matches!(fault, StoreFault::Refused(text) if text.starts_with("READONLY"))
}

/// What the server said, beginning with its code.
pub(super) fn words(error: &RedisError) -> String {
    // Of a login that failed the library keeps no code.
    let without_code = if error.kind() == ErrorKind::AuthenticationFailed { "WRONGPASS" } else { "ERR" };
    format!("{} {}", error.code().unwrap_or(without_code), error.detail().unwrap_or_default())
}

pub(super) fn is_server_answer(error: &RedisError) -> bool {
    matches!(error.kind(), ErrorKind::Server(_) | ErrorKind::Extension | ErrorKind::AuthenticationFailed)
}

/// A demoted master answers READONLY for ever, and a changed password NOAUTH: another connection may
/// lead elsewhere, or fail to come about, which is told as what it is.
pub(super) fn needs_new_connection(error: &RedisError) -> bool {
    matches!(error.kind(), ErrorKind::Server(ServerErrorKind::ReadOnly) | ErrorKind::AuthenticationFailed)
        || error.code() == Some("NOAUTH")
}

/// None of them gets an answer.
pub(super) fn fail(passengers: impl IntoIterator<Item = Passenger>, fault: &StoreFault) {
    for passenger in passengers {
        let _ = passenger.send(Err(fault.clone().into()));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::key::{Hasher, Key, Part};
    use crate::limit::Limit;
    use crate::limit::token_bucket::TokenBucket;
    use crate::rule::{Check, Demand};

    fn waiting(slot: u16, asking: bool) -> (Waiting, oneshot::Receiver<Result<Verdicts, NoVerdict>>) {
        let part = Part::known(b"a", &Hasher::new(b""));
        let limit = Limit::TokenBucket(TokenBucket::new(10, "1/s".parse().unwrap()).unwrap());
        let check = Check::own(Key::tenant_route("rl", &part, &part), limit, 1, Demand::Take);
        let (reply, answer) = oneshot::channel();
        let since = tokio::time::Instant::now();
        (Waiting { checks: smallvec![check], slot, asking, since, reply }, answer)
    }

    fn server(text: &str) -> Result<Value, RedisError> {
        let mut parser = redis::Parser::new();
        match parser.parse_value(format!("-{text}\r\n").as_bytes()) {
            Ok(Value::ServerError(error)) => Err(error.into()),
            other => other,
        }
    }

    #[test]
    fn a_flight_has_room_for_64_checks() {
        let mut boarding = Boarding::default();
        for _ in 0..MOST_CHECKS {
            let (waiting, _) = waiting(0, false);
            assert!(boarding.has_room_for(&waiting.checks));
            boarding.board(waiting);
        }
        assert!(!boarding.has_room_for(&waiting(0, false).0.checks));
        let (calls, passengers) = boarding.closed();
        assert_eq!((calls.len(), passengers.count()), (1, MOST_CHECKS));
    }

    /// One call for each slot; who was sent here by another node flies alone.
    #[test]
    fn slots_fly_apart() {
        let mut boarding = Boarding::default();
        for (slot, asking) in [(1, false), (2, false), (1, false), (1, true), (1, true), (2, false)] {
            boarding.board(waiting(slot, asking).0);
        }
        let (calls, passengers) = boarding.closed();
        let calls: Vec<_> = calls.iter().map(|call| (call.slot, call.asking)).collect();
        assert_eq!(calls, [(1, false), (2, false), (1, true), (1, true)]);
        assert_eq!(passengers.count(), 6);
    }

    /// What one call is told is told to all who were in it, and to nobody else.
    #[test]
    fn each_is_told_what_became_of_its_call() {
        let here = Address::tcp("10.0.0.1", 7);
        let told = |text: &str| {
            let mut boarding = Boarding::default();
            let (first, mut first_answer) = waiting(1, false);
            let (other, mut other_answer) = waiting(2, false);
            boarding.board(first);
            boarding.board(other);
            let (calls, passengers) = boarding.closed();
            let (again, ended) =
                land(calls, passengers, Ok(vec![server(text), server("OOM full")]), Some(&here));
            assert!(again.calls.is_empty());
            let other = other_answer.try_recv().unwrap().unwrap_err();
            assert!(matches!(other, NoVerdict::Fault(fault) if fault.kind() == "oom"));
            (first_answer.try_recv().unwrap().unwrap_err(), ended.is_err())
        };
        assert!(
            matches!(told("MOVED 1 10.0.0.2:8"), (NoVerdict::Moved(to), false) if to == Address::tcp("10.0.0.2", 8))
        );
        assert!(
            matches!(told("MOVED 1 :8"), (NoVerdict::Moved(to), false) if to == Address::tcp("10.0.0.1", 8))
        );
        assert!(matches!(told("ASK 1 [::1]:8"), (NoVerdict::Ask(to), false) if to == Address::tcp("::1", 8)));
        assert!(matches!(told("TRYAGAIN x"), (NoVerdict::Fault(StoreFault::Apart), false)));
        for (text, kind, ends) in [
            ("MOVED nonsense", "moved", false),
            ("CLUSTERDOWN the cluster is down", "clusterdown", false),
            ("LOADING", "loading", false),
            ("READONLY a replica", "readonly", true),
            ("NOAUTH who", "noauth", true),
        ] {
            let (told, ended) = told(text);
            assert!(matches!(&told, NoVerdict::Fault(fault) if fault.kind() == kind), "{text}: {told:?}");
            assert_eq!(ended, ends, "{text}");
        }
    }

    /// Of several requests in a slot that is being moved each is asked again alone: together they cannot be.
    #[test]
    fn who_is_being_moved_flies_again_alone() {
        for text in ["TRYAGAIN keys", "ASK 1 10.0.0.2:8"] {
            each_flies_again_alone(text);
        }
    }

    fn each_flies_again_alone(text: &str) {
        let mut boarding = Boarding::default();
        let mut answers = Vec::new();
        for _ in 0..3 {
            let (waiting, answer) = waiting(1, false);
            boarding.board(waiting);
            answers.push(answer);
        }
        let (calls, passengers) = boarding.closed();
        let (again, ended) = land(calls, passengers, Ok(vec![server(text)]), None);
        assert!(ended.is_ok() && answers.iter_mut().all(|answer| answer.try_recv().is_err()));
        let (calls, passengers) = again.closed();
        assert_eq!((calls.len(), passengers.count()), (3, 3));
    }
}
