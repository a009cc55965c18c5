//! The driver: collects who waits, flies, hands out the answers, and connects again when it must.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use redis::{Client, ErrorKind, RedisError, ServerErrorKind, Value};
use smallvec::SmallVec;
use tokio::sync::{mpsc, oneshot};
use tokio::time::{Instant, timeout_at};

use super::connection::Connection;
use super::script::Flight;
use crate::metrics::StoreMetrics;
use crate::rule::{Checks, Verdicts};
use crate::store::StoreFault;

/// How long an answer may be late before the connection is given up.
const LATE_ANSWER: Duration = Duration::from_secs(1);

/// The first pause between two attempts to connect; doubled up to the last.
const FIRST_PAUSE: Duration = Duration::from_millis(50);
const LAST_PAUSE: Duration = Duration::from_secs(1);

/// One request that waits for its answer.
#[derive(Debug)]
pub(super) struct Waiting {
    pub(super) checks: Checks,
    pub(super) since: Instant,
    pub(super) reply: oneshot::Sender<Result<Verdicts, StoreFault>>,
}

/// The driver of one Redis.
pub(super) struct Flights {
    pub(super) client: Client,
    pub(super) waiting: mpsc::Receiver<Waiting>,
    pub(super) up: Arc<AtomicBool>,
    pub(super) timeout: Duration,
    pub(super) metrics: StoreMetrics,
}

/// What became of a connection.
enum Lost {
    /// It is of no use any more.
    Connection(RedisError),
    /// Nobody will ask again: the process ends.
    Gateway,
}

impl Flights {
    /// Connects, flies until the connection is lost, and begins anew.
    pub(super) async fn run(mut self) {
        loop {
            let Some(connection) = self.connect().await else { return };
            self.set_up(true);
            let lost = self.fly(connection).await;
            self.set_up(false);
            match lost {
                Lost::Gateway => return,
                Lost::Connection(error) => tracing::warn!(%error, "lost the connection to Redis"),
            }
        }
    }

    /// Connects, however long it takes. Whoever asks meanwhile is told at once.
    async fn connect(&mut self) -> Option<Connection> {
        let mut pause = FIRST_PAUSE;
        let mut attempts = 0u32;
        loop {
            let attempt = Connection::open(&self.client);
            match refuse_while(&mut self.waiting, attempt).await? {
                Ok(connection) => {
                    tracing::info!(attempts, "connected to Redis");
                    return Some(connection);
                }
                Err(error) if attempts == 0 => tracing::warn!(%error, "cannot connect to Redis, trying again"),
                Err(error) => tracing::debug!(%error, attempts, "cannot connect to Redis"),
            }
            attempts = attempts.saturating_add(1);
            refuse_while(&mut self.waiting, tokio::time::sleep(jittered(pause))).await?;
            pause = (pause * 2).min(LAST_PAUSE);
        }
    }

    /// One flight after the other, until the connection is lost.
    async fn fly(&mut self, mut connection: Connection) -> Lost {
        let mut passed_over = None;
        loop {
            let first = match passed_over.take() {
                Some(waiting) => waiting,
                None => match self.waiting.recv().await {
                    Some(waiting) => waiting,
                    None => return Lost::Gateway,
                },
            };
            let (flight, passengers, rest) = self.board(first);
            passed_over = rest;
            if let Err(lost) = self.one_flight(&mut connection, &flight, passengers).await {
                fail(passed_over.into_iter().map(|waiting| waiting.reply), &StoreFault::Down);
                return lost;
            }
        }
    }

    /// Takes on board who waits now; gives back the one who no longer fitted.
    fn board(&mut self, first: Waiting) -> (Flight, Passengers, Option<Waiting>) {
        let mut flight = Flight::new();
        let mut passengers = Passengers { deadline: first.since + self.timeout, replies: SmallVec::new() };
        let mut next = Some(first);
        while let Some(waiting) = next {
            if !flight.has_room_for(&waiting.checks) {
                return (flight, passengers, Some(waiting));
            }
            flight.board(waiting.checks);
            passengers.replies.push(waiting.reply);
            next = self.waiting.try_recv().ok();
        }
        (flight, passengers, None)
    }

    /// Flies once. A late answer fails the passengers at the deadline of the one who waited longest;
    /// the next flight leaves only when it has come, for until then Redis is not answering anybody.
    async fn one_flight(
        &mut self,
        connection: &mut Connection,
        flight: &Flight,
        passengers: Passengers,
    ) -> Result<(), Lost> {
        self.metrics.calls.inc();
        self.metrics.checks.inc_by(passengers.replies.len() as u64);
        let mut call = std::pin::pin!(call(connection, flight, &self.metrics));
        if let Ok(reply) = timeout_at(passengers.deadline, &mut call).await {
            return passengers.land(flight, reply);
        }
        self.up.store(false, Ordering::Release);
        fail(passengers.replies, &StoreFault::Timeout);
        let late = tokio::time::timeout(LATE_ANSWER, call);
        match refuse_while(&mut self.waiting, late).await {
            None => Err(Lost::Gateway),
            Some(Ok(Ok(_))) => {
                self.up.store(true, Ordering::Release);
                Ok(())
            }
            Some(Ok(Err(error))) => Err(Lost::Connection(error)),
            Some(Err(_)) => Err(Lost::Connection(RedisError::from((ErrorKind::Io, "no answer for a second")))),
        }
    }

    fn set_up(&self, up: bool) {
        self.up.store(up, Ordering::Release);
        self.metrics.connected.set(i64::from(up));
    }
}

/// Who is on board, and when the first of them has waited long enough.
struct Passengers {
    deadline: Instant,
    replies: SmallVec<[oneshot::Sender<Result<Verdicts, StoreFault>>; 16]>,
}

impl Passengers {
    /// Hands out the answers. An error of the server is an answer; one of the connection ends it.
    fn land(self, flight: &Flight, reply: Result<Value, RedisError>) -> Result<(), Lost> {
        match reply {
            Ok(reply) => {
                for (passenger, answer) in self.replies.into_iter().zip(flight.answers(&reply)) {
                    // Who has left does not need the answer.
                    let _ = passenger.send(answer);
                }
                Ok(())
            }
            Err(error) if is_server_answer(&error) => {
                fail(self.replies, &StoreFault::Refused(error.to_string()));
                if needs_new_connection(&error) { Err(Lost::Connection(error)) } else { Ok(()) }
            }
            Err(error) => {
                fail(self.replies, &StoreFault::Io(error.to_string()));
                Err(Lost::Connection(error))
            }
        }
    }
}

/// Calls the script. NOSCRIPT alone leads to a second call: Redis has then run nothing. Any other
/// failure leaves open what was taken, and is never repeated.
async fn call(connection: &mut Connection, flight: &Flight, metrics: &StoreMetrics) -> Result<Value, RedisError> {
    match connection.call(flight).await {
        Err(error) if error.kind() == ErrorKind::Server(ServerErrorKind::NoScript) => {
            metrics.script_reloads.inc();
            connection.reload().await?;
            connection.call(flight).await
        }
        reply => reply,
    }
}

fn is_server_answer(error: &RedisError) -> bool {
    matches!(error.kind(), ErrorKind::Server(_) | ErrorKind::Extension | ErrorKind::AuthenticationFailed)
}

/// A demoted master answers READONLY for ever, and a changed password NOAUTH: another connection may
/// lead elsewhere, or fail to come about, which is told as what it is.
fn needs_new_connection(error: &RedisError) -> bool {
    matches!(error.kind(), ErrorKind::Server(ServerErrorKind::ReadOnly) | ErrorKind::AuthenticationFailed)
        || error.code() == Some("NOAUTH")
}

/// Awaits `future`; whoever queues meanwhile is refused at once. `None` when nobody can ask any more.
async fn refuse_while<F: Future>(waiting: &mut mpsc::Receiver<Waiting>, future: F) -> Option<F::Output> {
    let mut future = std::pin::pin!(future);
    loop {
        tokio::select! {
            biased;
            output = &mut future => return Some(output),
            waiting = waiting.recv() => fail([waiting?.reply], &StoreFault::Down),
        }
    }
}

fn fail(
    passengers: impl IntoIterator<Item = oneshot::Sender<Result<Verdicts, StoreFault>>>,
    fault: &StoreFault,
) {
    for passenger in passengers {
        let _ = passenger.send(Err(fault.clone()));
    }
}

/// A pause of half to all of `pause`, so that gateways do not knock in step.
fn jittered(pause: Duration) -> Duration {
    use std::hash::{BuildHasher as _, RandomState};
    let half = pause / 2;
    let random = RandomState::new().hash_one(0u8) % 1_000;
    half + half * u32::try_from(random).unwrap_or(0) / 1_000
}
