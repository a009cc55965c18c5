//! The deadline of a call: of the time in which its answer could have been read.

use std::pin::Pin;
use std::time::Duration;

use tokio::time::Instant;

/// The deadline is slept in parts of this length, to see how punctual the alarms are.
const PART: Duration = Duration::from_millis(1);

/// An alarm may come so late on a machine that has time for it: the runtime counts in milliseconds.
const PUNCTUAL: Duration = Duration::from_micros(1_500);

/// What somebody waits at most, in deadlines, where it is not Redis that takes the time.
const MOST: u32 = 10;

/// When somebody has waited long enough who has waited since then, whatever the reason.
pub(super) fn last_moment(since: Instant, timeout: Duration) -> Instant {
    since + timeout * MOST
}

/// Awaits `call` for `timeout`; `None` if that was too short.
///
/// Where an alarm comes late this thread had no time to read the answer, nor perhaps had Redis beside it: that time
/// does not count, and there is a part more in which to read it; until `last`, or the one part after it. A burst on a
/// busy machine is no fault of the store, and what falls back then is let in beside the limit. Where the gateway is
/// well, a store that is not costs `timeout`.
pub(super) async fn in_time<F: Future>(
    call: &mut Pin<&mut F>,
    timeout: Duration,
    last: Instant,
) -> Option<F::Output> {
    let (mut begun, mut left) = (Instant::now(), timeout);
    while !left.is_zero() {
        let part = PART.min(left);
        let due = begun + part;
        if let Ok(output) = tokio::time::timeout_at(due, call.as_mut()).await {
            return Some(output);
        }
        left -= part;
        let now = Instant::now();
        let is_late = now.saturating_duration_since(due) > PUNCTUAL;
        if is_late && begun < last {
            left = left.max(part);
        }
        begun = if is_late { now } else { due };
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
        ask_within(TIMEOUT, busy, after)
    }

    fn ask_within(timeout: Duration, busy: Duration, after: Duration) -> (Option<()>, Duration) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        runtime.block_on(async {
            let begun = Instant::now();
            let mut call = std::pin::pin!(tokio::time::sleep(after));
            let (answer, ()) =
                tokio::join!(in_time(&mut call, timeout, last_moment(begun, timeout)), async {
                    std::thread::sleep(busy);
                });
            (answer, begun.elapsed())
        })
    }

    #[test]
    fn a_thread_that_was_busy_looks_again() {
        let (answer, _) = ask(TIMEOUT * 3, TIMEOUT * 7 / 2);
        assert_eq!(answer, Some(()), "answered before the thread had as much time as it should have");
        let (answer, _) = ask(TIMEOUT * 12, TIMEOUT * 12 + PART / 2);
        assert_eq!(answer, Some(()), "looked once more, after whatever time");
        let (answer, _) = ask_within(PART, TIMEOUT, TIMEOUT + PART / 2);
        assert_eq!(answer, Some(()), "also where there is only one part");
        let (answer, took) = ask(TIMEOUT * 12, TIMEOUT * 1_000);
        assert!(answer.is_none() && took < TIMEOUT * 20, "there is an end: {took:?}");
    }

    #[test]
    fn a_thread_that_is_not_busy_waits_no_longer() {
        let (answer, took) = ask(Duration::ZERO, TIMEOUT * 1_000);
        assert!(answer.is_none() && (TIMEOUT..TIMEOUT * 8).contains(&took), "{took:?}");
    }
}
