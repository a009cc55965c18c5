//! The deadline of a call: of the time in which its answer could have been read.

use std::pin::Pin;
use std::time::Duration;

use tokio::time::Instant;

/// The deadline is slept in parts of this length, to see how punctual the alarms are.
const PART: Duration = Duration::from_millis(1);

/// An alarm may come so late on a machine that has time for it: the runtime counts in milliseconds.
const PUNCTUAL: Duration = Duration::from_micros(1_500);

/// The most that a deadline is put off, in deadlines; and how many of them somebody may wait in a queue that moves.
pub(super) const MOST: u32 = 10;

/// Awaits `call` for `timeout`; `None` if that was too short.
///
/// Where an alarm comes late this thread had no time to read the answer, nor perhaps had Redis beside it: that time
/// does not count, up to [`MOST`] times the timeout in all. A burst on a busy machine is no fault of the store, and
/// what falls back then is let in beside the limit. Where the gateway is well, a store that is not costs `timeout`.
pub(super) async fn in_time<F: Future>(call: &mut Pin<&mut F>, timeout: Duration) -> Option<F::Output> {
    let mut due = Instant::now();
    let (last, mut left) = (due + timeout * MOST, timeout);
    while !left.is_zero() {
        let part = PART.min(left);
        left -= part;
        due += part;
        if let Ok(output) = tokio::time::timeout_at(due, call.as_mut()).await {
            return Some(output);
        }
        let now = Instant::now();
        if now >= last {
            return None;
        }
        if now.saturating_duration_since(due) > PUNCTUAL {
            due = now;
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    const TIMEOUT: Duration = Duration::from_millis(50);

    /// What becomes of a call that is answered `after` so long, on a thread that was kept busy for `busy` at first;
    /// and how long that took.
    fn ask(busy: Duration, after: Duration) -> (Option<()>, Duration) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        runtime.block_on(async {
            let begun = Instant::now();
            let mut call = std::pin::pin!(tokio::time::sleep(after));
            let (answer, ()) = tokio::join!(in_time(&mut call, TIMEOUT), async {
                std::thread::sleep(busy);
            });
            (answer, begun.elapsed())
        })
    }

    #[test]
    fn a_thread_that_was_busy_looks_again() {
        let (answer, _) = ask(TIMEOUT * 3, TIMEOUT * 7 / 2);
        assert_eq!(answer, Some(()), "answered before the thread had as much time as it should have");
        let (answer, took) = ask(TIMEOUT * 12, TIMEOUT * 1_000);
        assert!(answer.is_none() && took < TIMEOUT * 20, "there is an end: {took:?}");
    }

    #[test]
    fn a_thread_that_is_not_busy_waits_no_longer() {
        let (answer, took) = ask(Duration::ZERO, TIMEOUT * 1_000);
        assert!(answer.is_none() && (TIMEOUT..TIMEOUT * 8).contains(&took), "{took:?}");
    }
}
