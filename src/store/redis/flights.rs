//! The driver: collects who waits, flies, hands out the answers, and connects again when it must.

use std::collections::VecDeque;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use prometheus::IntCounter;
use redis::{Client, ErrorKind, RedisError, ServerErrorKind, Value};
use smallvec::SmallVec;
use tokio::sync::{mpsc, oneshot};
use tokio::time::Instant;

use super::connection::Connection;
use super::heartbeat::{self, Heartbeat};
use super::script::Flight;
use crate::clock::jittered;
use crate::metrics::StoreMetrics;
use crate::rule::{Checks, Verdicts};
use crate::store::StoreFault;

/// How many deadlines an answer may be late before Redis counts as down.
const PATIENCE: u32 = 4;

/// How many deadlines somebody may wait in a queue that moves: a burst of some hundred requests is no fault of the
/// store, and whoever is told nothing by it would be let in by the fallback.
const QUEUE_PATIENCE: u32 = 10;

/// How long after that it may be late before the connection is given up.
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
    client: Client,
    waiting: mpsc::Receiver<Waiting>,
    up: Arc<AtomicBool>,
    timeout: Duration,
    heartbeat: Option<Heartbeat>,
    connected_at: Instant,
    next_beat: Instant,
    beat_refused: bool,
    metrics: StoreMetrics,
}

/// What became of a connection.
enum Lost {
    /// It is of no use any more.
    Connection(RedisError),
    /// Nobody will ask again: the process ends.
    Gateway,
}

impl Flights {
    pub(super) fn new(
        client: Client,
        waiting: mpsc::Receiver<Waiting>,
        up: Arc<AtomicBool>,
        timeout: Duration,
        heartbeat: Option<Heartbeat>,
        metrics: StoreMetrics,
    ) -> Self {
        let now = Instant::now();
        Self {
            client,
            waiting,
            up,
            timeout,
            heartbeat,
            connected_at: now,
            next_beat: now,
            beat_refused: false,
            metrics,
        }
    }

    /// Connects, flies until the connection is lost, and begins anew.
    pub(super) async fn run(mut self) {
        let mut pause = FIRST_PAUSE;
        loop {
            let Some(connection) = self.connect(&mut pause).await else { return };
            self.connected_at = Instant::now();
            self.next_beat = self.connected_at;
            self.set_up(true);
            let lost = self.fly(connection).await;
            self.set_up(false);
            match lost {
                Lost::Gateway => return,
                Lost::Connection(error) => tracing::warn!(%error, "lost the connection to Redis"),
            }
            // One that held is followed by the next at once. One that did not (a replica accepts
            // connections, too) is followed after a pause that grows, like one that never came about.
            if self.connected_at.elapsed() > LAST_PAUSE {
                pause = FIRST_PAUSE;
            } else if self.rest(&mut pause).await.is_none() {
                return;
            }
        }
    }

    /// Connects, however long it takes. Whoever asks meanwhile is told at once.
    async fn connect(&mut self, pause: &mut Duration) -> Option<Connection> {
        let mut attempts = 0u32;
        loop {
            let attempt = Connection::open(&self.client);
            match refuse_while(&mut self.waiting, attempt).await? {
                Ok(connection) => {
                    tracing::info!(attempts, "connected to Redis");
                    return Some(connection);
                }
                Err(error) => {
                    let fault = if is_server_answer(&error) {
                        StoreFault::Refused(words(&error))
                    } else {
                        StoreFault::Down
                    };
                    self.metrics.errors.with_label_values(&[fault.kind()]).inc();
                    if attempts == 0 {
                        tracing::warn!(%error, "cannot connect to Redis, trying again");
                    }
                }
            }
            attempts = attempts.saturating_add(1);
            self.rest(pause).await?;
        }
    }

    /// Sleeps for a pause, and makes the next one longer.
    async fn rest(&mut self, pause: &mut Duration) -> Option<()> {
        let now = jittered(*pause);
        *pause = (*pause * 2).min(LAST_PAUSE);
        refuse_while(&mut self.waiting, tokio::time::sleep(now)).await
    }

    /// One flight after the other, until the connection is lost.
    async fn fly(&mut self, mut connection: Connection) -> Lost {
        let mut gate = VecDeque::new();
        loop {
            let lost = match self.next_at(&mut gate).await {
                Next::Request => self.one_flight(&mut connection, &mut gate).await,
                Next::Heartbeat => self.beat(&mut connection, &mut gate).await,
                Next::End => Err(Lost::Gateway),
            };
            if let Err(lost) = lost {
                fail(gate.into_iter().map(|waiting: Waiting| waiting.reply), &StoreFault::Down);
                return lost;
            }
        }
    }

    /// Waits for somebody at the gate, or for the time of the next heartbeat.
    async fn next_at(&mut self, gate: &mut VecDeque<Waiting>) -> Next {
        if Instant::now() >= self.next_beat {
            return Next::Heartbeat;
        }
        if !gate.is_empty() {
            return Next::Request;
        }
        match tokio::time::timeout_at(self.next_beat, self.waiting.recv()).await {
            Ok(Some(waiting)) => {
                gate.push_back(waiting);
                Next::Request
            }
            Ok(None) => Next::End,
            Err(_) => Next::Heartbeat,
        }
    }

    /// Takes on board who waits now, as many as fit. Who has waited too long already is told so: a queue
    /// that moves is no fault of the store, so it may take some deadlines, as in a burst of a thousand.
    fn board(&mut self, gate: &mut VecDeque<Waiting>) -> (Flight, Passengers) {
        let (mut flight, mut passengers) = (Flight::new(), Passengers::new());
        let now = Instant::now();
        while let Some(waiting) = gate.pop_front().or_else(|| self.waiting.try_recv().ok()) {
            let waited = now.saturating_duration_since(waiting.since);
            if waiting.reply.is_closed() {
                // Its request has ended: taking tokens for it would waste them.
                continue;
            }
            if waited >= self.timeout * QUEUE_PATIENCE {
                fail([waiting.reply], &StoreFault::Waited);
                continue;
            }
            if !flight.has_room_for(&waiting.checks) {
                gate.push_front(waiting);
                break;
            }
            flight.board(waiting.checks);
            passengers.push(waiting.reply);
        }
        (flight, passengers)
    }

    /// Flies once.
    async fn one_flight(
        &mut self,
        connection: &mut Connection,
        gate: &mut VecDeque<Waiting>,
    ) -> Result<(), Lost> {
        let (flight, passengers) = self.board(gate);
        if passengers.is_empty() {
            return Ok(());
        }
        self.metrics.calls.inc();
        self.metrics.checks.inc_by(passengers.len() as u64);
        let time = self.timeout;
        let deadline = Instant::now() + time;
        let script_reloads = self.metrics.script_reloads.clone();
        let mut call = std::pin::pin!(call(connection, &flight, deadline, &script_reloads));
        match in_time(&mut call, time).await {
            Some(reply) => land(passengers, &flight, reply),
            None => {
                fail(passengers, &StoreFault::Timeout);
                self.await_late(call, gate).await
            }
        }
    }

    /// Says that this gateway lives; also finds out that a connection nobody uses is lost.
    async fn beat(&mut self, connection: &mut Connection, gate: &mut VecDeque<Waiting>) -> Result<(), Lost> {
        self.next_beat = Instant::now() + heartbeat::EVERY;
        let sent = self.heartbeat.as_ref().map(Heartbeat::now);
        let command = self.heartbeat.as_ref().map_or_else(|| redis::cmd("PING"), Heartbeat::command);
        let mut answer = std::pin::pin!(connection.send(&command));
        match in_time(&mut answer, self.timeout).await {
            Some(Ok(reply)) => {
                if let (Some(heartbeat), Some(sent)) = (&self.heartbeat, sent) {
                    let live = heartbeat.heard(&reply, sent, self.connected_at);
                    self.metrics.live_gateways.set(i64::from(live));
                }
                Ok(())
            }
            Some(Err(error)) => {
                if !self.beat_refused {
                    self.beat_refused = true;
                    tracing::warn!(%error, "Redis refuses the heartbeat: gateways are not counted");
                }
                came(Err::<(), _>(error))
            }
            None => self.await_late(answer, gate).await,
        }
    }

    /// Waits for an answer that is late. Redis answers in order, so nobody else is answered before.
    /// For a while each request still waits its own time; then Redis counts as down, and nobody waits;
    /// then the connection does.
    async fn await_late<F, T>(
        &mut self,
        mut late: Pin<&mut F>,
        gate: &mut VecDeque<Waiting>,
    ) -> Result<(), Lost>
    where
        F: Future<Output = Result<T, RedisError>>,
    {
        let give_up_waiting = Instant::now() + self.timeout * PATIENCE;
        while Instant::now() < give_up_waiting {
            let first_leaves = gate.front().map_or(give_up_waiting, |first| first.since + self.timeout);
            tokio::select! {
                biased;
                answer = &mut late => return came(answer),
                waiting = self.waiting.recv() => match waiting {
                    Some(waiting) if gate.len() < super::LONGEST_QUEUE => gate.push_back(waiting),
                    Some(waiting) => fail([waiting.reply], &StoreFault::QueueFull),
                    None => return Err(Lost::Gateway),
                },
                () = tokio::time::sleep_until(first_leaves) => {
                    fail(gate.pop_front().map(|waiting| waiting.reply), &StoreFault::Waited);
                }
            }
        }
        self.set_up(false);
        tracing::warn!("Redis does not answer");
        fail(gate.drain(..).map(|waiting| waiting.reply), &StoreFault::Down);
        match refuse_while(&mut self.waiting, tokio::time::timeout(LATE_ANSWER, late)).await {
            None => Err(Lost::Gateway),
            Some(Ok(answer)) => {
                came(answer)?;
                self.set_up(true);
                tracing::info!("Redis answers again");
                Ok(())
            }
            Some(Err(_)) => {
                Err(Lost::Connection(RedisError::from((ErrorKind::Io, "no answer for a second"))))
            }
        }
    }

    fn set_up(&self, up: bool) {
        self.up.store(up, Ordering::Release);
        self.metrics.connected.set(i64::from(up));
    }
}

impl Drop for Flights {
    /// However the driver ends, nobody waits for it.
    fn drop(&mut self) {
        self.set_up(false);
    }
}

/// What comes next for the driver.
enum Next {
    Request,
    Heartbeat,
    End,
}

/// Those who are on board, in their order.
type Passengers = SmallVec<[oneshot::Sender<Result<Verdicts, StoreFault>>; 16]>;

/// Hands out the answers. An error of the server is an answer; one of the connection ends it.
fn land(passengers: Passengers, flight: &Flight, reply: Result<Value, RedisError>) -> Result<(), Lost> {
    match reply {
        Ok(reply) => {
            let mut read_only = None;
            for (passenger, answer) in passengers.into_iter().zip(flight.answers(&reply)) {
                if let Err(fault) = &answer
                    && is_read_only(fault)
                {
                    read_only =
                        Some(RedisError::from((ErrorKind::Server(ServerErrorKind::ReadOnly), "a replica")));
                }
                // Who has left does not need the answer.
                let _ = passenger.send(answer);
            }
            read_only.map_or(Ok(()), |error| Err(Lost::Connection(error)))
        }
        Err(error) if is_server_answer(&error) => {
            fail(passengers, &StoreFault::Refused(words(&error)));
            if needs_new_connection(&error) { Err(Lost::Connection(error)) } else { Ok(()) }
        }
        Err(error) => {
            fail(passengers, &StoreFault::Io(error.to_string()));
            Err(Lost::Connection(error))
        }
    }
}

/// A late answer has come. It belongs to nobody any more, but the connection is alive.
fn came<T>(answer: Result<T, RedisError>) -> Result<(), Lost> {
    match answer {
        Err(error) if !is_server_answer(&error) || needs_new_connection(&error) => {
            Err(Lost::Connection(error))
        }
        _ => Ok(()),
    }
}

/// Awaits `call` for `timeout`. The last part of it is slept: on a busy machine the answer may have
/// come, and only wait for this thread to read it.
async fn in_time<F: Future>(call: &mut Pin<&mut F>, timeout: Duration) -> Option<F::Output> {
    let last_part = Duration::from_millis(1).min(timeout / 2);
    for part in [timeout.saturating_sub(last_part), last_part] {
        if let Ok(output) = tokio::time::timeout(part, call.as_mut()).await {
            return Some(output);
        }
    }
    None
}

/// Calls the script. NOSCRIPT alone leads to a second call, if there is time for it: Redis has then
/// run nothing. Any other failure leaves open what was taken, and is never repeated.
async fn call(
    connection: &mut Connection,
    flight: &Flight,
    deadline: Instant,
    script_reloads: &IntCounter,
) -> Result<Value, RedisError> {
    match connection.call(flight).await {
        Err(error) if error.kind() == ErrorKind::Server(ServerErrorKind::NoScript) => {
            script_reloads.inc();
            connection.reload().await?;
            if Instant::now() >= deadline {
                return Err(error);
            }
            connection.call(flight).await
        }
        reply => reply,
    }
}

/// A replica answers reads, so only what a write inside of the script said tells of it.
fn is_read_only(fault: &StoreFault) -> bool {
    matches!(fault, StoreFault::Refused(text) if text.starts_with("READONLY"))
}

/// What the server said, beginning with its code.
fn words(error: &RedisError) -> String {
    format!("{} {}", error.code().unwrap_or("ERR"), error.detail().unwrap_or_default())
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
