//! The driver of a node: collects who waits, flies, hands out the answers, and connects again when it must.

use std::collections::VecDeque;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use prometheus::IntCounter;
use redis::{ErrorKind, RedisError, ServerErrorKind, Value};
use smallvec::SmallVec;
use tokio::sync::{mpsc, watch};
use tokio::time::Instant;

use super::access::Address;
use super::board::{Boarding, Call, fail, is_server_answer, land, needs_new_connection, words};
use super::connection::{Connection, OpenError, server_error};
use super::deadline::{in_time, last_moment};
use super::heartbeat::{self, Heartbeat};
use super::node::{LONGEST_QUEUE, Shared, State, Waiting};
use crate::clock::jittered;
use crate::store::StoreFault;

/// How many deadlines an answer may be late before Redis counts as down.
const PATIENCE: u32 = 4;

/// How long after that it may be late before the connection is given up.
const LATE_ANSWER: Duration = Duration::from_secs(1);

/// The first pause between two attempts to connect; doubled up to the last.
const FIRST_PAUSE: Duration = Duration::from_millis(50);
const LAST_PAUSE: Duration = Duration::from_secs(1);

/// The last pause where what answers is a replica: it may be one for long.
const LAST_PAUSE_AT_A_REPLICA: Duration = Duration::from_secs(2);

/// The most reasons why there is no connection that are logged.
const MOST_REASONS: usize = 5;

/// How often is looked whether a node may evict buckets.
const LOOK_EVERY: Duration = Duration::from_secs(30);

/// The driver of one node.
pub(super) struct Flights {
    shared: Arc<Shared>,
    state: Arc<State>,
    /// Where the node is.
    target: watch::Receiver<Option<Address>>,
    waiting: mpsc::Receiver<Waiting>,
    /// Where the present connection leads.
    here: Option<Address>,
    connected_at: Instant,
    next_beat: Instant,
    beat_refused: bool,
    next_look: Instant,
    /// The policy of eviction that was warned about.
    warned_of: Option<String>,
}

/// What became of a connection.
enum Lost {
    /// It is of no use any more.
    Connection(RedisError),
    /// The node is elsewhere now.
    Moved,
    /// Nobody will ask again: the node, or the process, ends.
    Gateway,
}

impl From<RedisError> for Lost {
    fn from(error: RedisError) -> Self {
        Self::Connection(error)
    }
}

impl Flights {
    pub(super) fn new(
        shared: Arc<Shared>,
        state: Arc<State>,
        target: watch::Receiver<Option<Address>>,
        waiting: mpsc::Receiver<Waiting>,
    ) -> Self {
        let now = Instant::now();
        Self {
            shared,
            state,
            target,
            waiting,
            here: None,
            connected_at: now,
            next_beat: now,
            beat_refused: false,
            next_look: now,
            warned_of: None,
        }
    }

    /// Connects, flies until the connection is lost, and begins anew.
    pub(super) async fn run(mut self) {
        let mut pause = FIRST_PAUSE;
        loop {
            let Some(connection) = self.connect(&mut pause).await else { return };
            self.connected_at = Instant::now();
            self.next_beat = self.connected_at;
            self.next_look = self.connected_at;
            self.set_up(true);
            let lost = self.fly(connection).await;
            self.set_up(false);
            let lasted = self.connected_at.elapsed() > LAST_PAUSE;
            match lost {
                Lost::Gateway => return,
                Lost::Moved => {
                    pause = FIRST_PAUSE;
                    continue;
                }
                Lost::Connection(error) => {
                    tracing::warn!(%error, node = %self.name(), "lost the connection to Redis");
                    self.in_trouble(error.to_string());
                }
            }
            // One that held is followed by the next at once. One that did not is followed after a pause that
            // grows, like one that never came about.
            if lasted {
                pause = FIRST_PAUSE;
            } else if self.rest(&mut pause, LAST_PAUSE).await.is_none() {
                return;
            }
        }
    }

    /// Connects, however long it takes. Whoever asks meanwhile is told at once.
    async fn connect(&mut self, pause: &mut Duration) -> Option<Connection> {
        let (mut attempts, mut told) = (0u32, Vec::new());
        loop {
            let target = self.target.borrow_and_update().clone();
            let Some(address) = target else {
                // Nobody knows as yet where it is.
                let _ = refuse_while(&mut self.waiting, self.target.changed()).await?;
                continue;
            };
            self.here = Some(address.clone());
            let shared = Arc::clone(&self.shared);
            let attempt = async {
                let client = shared.access.load().client(&address)?;
                Connection::open(&client, &shared.name, shared.kind).await
            };
            let error = match refuse_while(&mut self.waiting, attempt).await? {
                Ok(connection) => {
                    tracing::info!(attempts, node = %address, "connected to Redis");
                    return Some(connection);
                }
                Err(error) => error,
            };
            let why = error.to_string();
            // Each reason once: the first may say less than the next (a peer that hangs up, then why).
            if told.len() < MOST_REASONS && !told.contains(&why) {
                tracing::warn!(%error, node = %address, "cannot connect to Redis, trying again");
                if told.is_empty() && shared.heartbeat.as_ref().is_some_and(Heartbeat::was_never_heard) {
                    tracing::warn!(
                        "gateways were not counted yet: until Redis answers, or cluster.gateways says how many there are, this one's share is the whole of each limit"
                    );
                }
                told.push(why.clone());
            }
            self.in_trouble(why);
            let (kind, longest) = match &error {
                OpenError::Redis(error) if is_server_answer(error) => {
                    (StoreFault::Refused(words(error)).kind(), LAST_PAUSE)
                }
                OpenError::Redis(_) => (StoreFault::Down.kind(), LAST_PAUSE),
                OpenError::Replica => ("readonly", LAST_PAUSE_AT_A_REPLICA),
                OpenError::Unfit(why) => {
                    let _ = self.shared.unfit.set(format!("{address}: {why}"));
                    ("unfit", LAST_PAUSE)
                }
            };
            self.shared.metrics.errors.with_label_values(&[kind]).inc();
            attempts = attempts.saturating_add(1);
            self.rest(pause, longest).await?;
        }
    }

    /// Sleeps for a pause, unless the node moves meanwhile, and makes the next one longer.
    async fn rest(&mut self, pause: &mut Duration, longest: Duration) -> Option<()> {
        let now = jittered(*pause);
        *pause = (*pause * 2).min(longest);
        let target = &mut self.target;
        let slept = async {
            tokio::select! {
                () = tokio::time::sleep(now) => false,
                moved = target.changed() => moved.is_ok(),
            }
        };
        if refuse_while(&mut self.waiting, slept).await? {
            *pause = FIRST_PAUSE;
        }
        Some(())
    }

    /// One flight after the other, until the connection is lost.
    async fn fly(&mut self, mut connection: Connection) -> Lost {
        let mut gate = VecDeque::new();
        loop {
            let lost = match self.next_at(&mut gate).await {
                Next::Request => self.one_flight(&mut connection, &mut gate).await,
                Next::Heartbeat => self.beat(&mut connection, &mut gate).await,
                Next::Move => Err(Lost::Moved),
                Next::End => Err(Lost::Gateway),
            };
            if let Err(lost) = lost {
                fail(gate.into_iter().map(|waiting: Waiting| waiting.reply), &StoreFault::Down);
                return lost;
            }
        }
    }

    /// Waits for somebody at the gate, for the time of the next heartbeat, or until the node is elsewhere.
    async fn next_at(&mut self, gate: &mut VecDeque<Waiting>) -> Next {
        match self.target.has_changed() {
            Ok(false) => {}
            Ok(true) => return Next::Move,
            Err(_) => return Next::End,
        }
        if Instant::now() >= self.next_beat {
            return Next::Heartbeat;
        }
        if !gate.is_empty() {
            return Next::Request;
        }
        let next_beat = self.next_beat;
        tokio::select! {
            biased;
            waiting = self.waiting.recv() => match waiting {
                Some(waiting) => {
                    gate.push_back(waiting);
                    Next::Request
                }
                None => Next::End,
            },
            moved = self.target.changed() => {
                // As if it had not been seen: it is to be read when connecting.
                self.target.mark_changed();
                if moved.is_ok() { Next::Move } else { Next::End }
            }
            () = tokio::time::sleep_until(next_beat) => Next::Heartbeat,
        }
    }

    /// Takes on board who waits now, as many as fit. Who has waited too long already is told so: a queue
    /// that moves is no fault of the store, so it may take some deadlines, as in a burst of a thousand.
    fn board(&mut self, gate: &mut VecDeque<Waiting>) -> Boarding {
        let mut boarding = Boarding::default();
        let now = Instant::now();
        while let Some(waiting) = gate.pop_front().or_else(|| self.waiting.try_recv().ok()) {
            if waiting.reply.is_closed() {
                // Its request has ended: taking tokens for it would waste them.
                continue;
            }
            if now >= last_moment(waiting.since, self.shared.timeout) {
                fail([waiting.reply], &StoreFault::Waited);
                continue;
            }
            if !boarding.has_room_for(&waiting.checks) {
                gate.push_front(waiting);
                break;
            }
            boarding.board(waiting);
        }
        boarding
    }

    /// Flies once, and a second time with those whose keys are just being moved.
    async fn one_flight(
        &mut self,
        connection: &mut Connection,
        gate: &mut VecDeque<Waiting>,
    ) -> Result<(), Lost> {
        let mut boarding = self.board(gate);
        let time = self.shared.timeout;
        let last = last_moment(boarding.since().unwrap_or_else(Instant::now), time);
        loop {
            let (calls, passengers) = boarding.closed();
            if calls.is_empty() {
                return Ok(());
            }
            self.shared.metrics.calls.inc_by(calls.len() as u64);
            self.shared.metrics.checks.inc_by(passengers.count() as u64);
            let script_reloads = self.shared.metrics.script_reloads.clone();
            let awaited = AtomicBool::new(true);
            let replies = {
                let mut call = std::pin::pin!(call(connection, &calls, &awaited, &script_reloads));
                let Some(replies) = in_time(&mut call, time, last).await else {
                    awaited.store(false, Ordering::Relaxed);
                    passengers.fail(&StoreFault::Timeout);
                    return self.await_late(call, gate).await;
                };
                replies
            };
            let (again, ended) = land(calls, passengers, replies, self.here.as_ref());
            ended?;
            boarding = again;
        }
    }

    /// Says that this gateway lives; also finds out that a connection nobody uses is lost.
    async fn beat(&mut self, connection: &mut Connection, gate: &mut VecDeque<Waiting>) -> Result<(), Lost> {
        self.next_beat = Instant::now() + heartbeat::EVERY;
        let shared = Arc::clone(&self.shared);
        let heartbeat = shared.heartbeat.as_ref().filter(|_| self.state.beats.load(Ordering::Relaxed));
        let sent = heartbeat.map(Heartbeat::now);
        let command = heartbeat.map_or_else(|| redis::cmd("PING"), Heartbeat::command);
        let mut answer = std::pin::pin!(connection.send(&command));
        let last = last_moment(Instant::now(), shared.timeout);
        match in_time(&mut answer, shared.timeout, last).await {
            Some(Ok(reply)) => {
                if let (Some(heartbeat), Some(sent)) = (heartbeat, sent) {
                    let live = heartbeat.heard(&reply, sent, self.connected_at);
                    shared.metrics.live_gateways.set(i64::from(live));
                }
                if std::mem::take(&mut self.beat_refused) {
                    tracing::info!(node = %self.name(), "Redis takes the heartbeat again");
                }
                self.look(connection, gate).await
            }
            Some(Err(error)) => {
                if server_error(&error) == Some(ServerErrorKind::Moved) {
                    shared.trouble.notify_one();
                } else if !self.beat_refused {
                    self.beat_refused = true;
                    tracing::warn!(%error, node = %self.name(), "Redis refuses the heartbeat: gateways are not counted");
                }
                came(Err::<(), _>(error))
            }
            None => self.await_late(answer, gate).await,
        }
    }

    /// Looks now and then whether buckets are safe.
    async fn look(&mut self, connection: &Connection, gate: &mut VecDeque<Waiting>) -> Result<(), Lost> {
        if Instant::now() < self.next_look {
            return Ok(());
        }
        self.next_look = Instant::now() + LOOK_EVERY;
        let mut told = std::pin::pin!(connection.info());
        let last = last_moment(Instant::now(), self.shared.timeout);
        let Some(told) = in_time(&mut told, self.shared.timeout, last).await else {
            return self.await_late(std::pin::pin!(async { Ok(told.await) }), gate).await;
        };
        let Some(info) = told else { return Ok(()) };
        self.state.evicted.store(info.evicted(), Ordering::Relaxed);
        let policy = info.evicts();
        if policy != self.warned_of.as_deref() {
            if let Some(policy) = policy {
                tracing::warn!(
                    policy,
                    node = %self.name(),
                    "Redis may evict buckets, which gives out more than the limit: use noeviction"
                );
            }
            self.warned_of = policy.map(Into::into);
        }
        Ok(())
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
        let give_up_waiting = Instant::now() + self.shared.timeout * PATIENCE;
        while Instant::now() < give_up_waiting {
            let first_leaves =
                gate.front().map_or(give_up_waiting, |first| first.since + self.shared.timeout);
            tokio::select! {
                biased;
                answer = &mut late => return came(answer),
                waiting = self.waiting.recv() => match waiting {
                    Some(waiting) if gate.len() < LONGEST_QUEUE => gate.push_back(waiting),
                    Some(waiting) => fail([waiting.reply], &StoreFault::QueueFull),
                    None => return Err(Lost::Gateway),
                },
                () = tokio::time::sleep_until(first_leaves) => {
                    fail(gate.pop_front().map(|waiting| waiting.reply), &StoreFault::Waited);
                }
            }
        }
        self.set_up(false);
        tracing::warn!(node = %self.name(), "Redis does not answer");
        self.in_trouble("it does not answer".into());
        fail(gate.drain(..).map(|waiting| waiting.reply), &StoreFault::Down);
        match refuse_while(&mut self.waiting, tokio::time::timeout(LATE_ANSWER, late)).await {
            None => Err(Lost::Gateway),
            Some(Ok(answer)) => {
                came(answer)?;
                self.set_up(true);
                tracing::info!(node = %self.name(), "Redis answers again");
                Ok(())
            }
            Some(Err(_)) => {
                Err(Lost::Connection(RedisError::from((ErrorKind::Io, "no answer for a second"))))
            }
        }
    }

    fn set_up(&self, up: bool) {
        if up {
            self.state.in_trouble(None);
        }
        self.state.up.store(up, Ordering::Release);
    }

    /// Notes why there is no connection, and that it may be time to look who has what now.
    fn in_trouble(&self, why: String) {
        self.state.in_trouble(Some(why));
        self.shared.trouble.notify_one();
    }

    fn name(&self) -> String {
        self.here.as_ref().map(ToString::to_string).unwrap_or_default()
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
    Move,
    End,
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

/// Makes the calls. NOSCRIPT alone leads to a second one, if it is still `awaited`: Redis has then run nothing.
/// Any other failure leaves open what was taken, and is never repeated.
async fn call(
    connection: &mut Connection,
    calls: &[Call],
    awaited: &AtomicBool,
    script_reloads: &IntCounter,
) -> Result<Vec<Result<Value, RedisError>>, RedisError> {
    let all: SmallVec<[_; 1]> = calls.iter().map(|call| (&call.flight, call.asking)).collect();
    let mut replies = connection.call(&all).await?;
    let lost = |reply: &Result<Value, RedisError>| {
        reply.as_ref().is_err_and(|error| server_error(error) == Some(ServerErrorKind::NoScript))
    };
    let without: Vec<usize> = (0..replies.len()).filter(|position| lost(&replies[*position])).collect();
    if without.is_empty() {
        return Ok(replies);
    }
    script_reloads.inc();
    // What the other calls have said holds, whatever becomes of these.
    if connection.reload().await.is_err() || !awaited.load(Ordering::Relaxed) {
        return Ok(replies);
    }
    let again: SmallVec<[_; 1]> = without.iter().map(|position| all[*position]).collect();
    match connection.call(&again).await {
        Ok(told) => {
            for (position, reply) in without.iter().zip(told) {
                replies[*position] = reply;
            }
        }
        Err(error) => {
            for position in without {
                let lost = (ErrorKind::Io, "lost after the script was loaded", error.to_string());
                replies[position] = Err(RedisError::from(lost));
            }
        }
    }
    Ok(replies)
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
