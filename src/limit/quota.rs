//! The quota: so many in each calendar day, week or month of a time zone. Twin of `lua/quota.lua`.
//!
//! Where the days begin is worked out here, with `now` of the gateway, and told to the script: the present period, the one
//! before and the next one. Which of them it is, Redis' own time says. So a gateway whose clock is wrong by less than a period
//! changes nothing.

use jiff::civil::{Date, Weekday};
use jiff::tz::TimeZone;

use super::fixed_window::{counted_since, dated_back_to, judge_until};
use super::{Counted, Verdict};
use crate::clock::Timestamp;

/// So many in each period of the calendar.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Quota {
    /// How many.
    pub limit: u64,
    /// Which period.
    pub period: Period,
    /// Whose calendar.
    pub zone: Zone,
    /// Where the period before begins, the present one, the next one, and the one after that, in microseconds
    /// since 1970.
    pub edges: [u64; 4],
}

/// A period of the calendar.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Period {
    /// From midnight to midnight.
    Day,
    /// From Monday to Sunday.
    Week,
    /// From the first on.
    Month,
}

/// The longest name of a time zone.
const LONGEST_NAME: usize = 39;

/// A time zone by its name.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Zone {
    name: [u8; LONGEST_NAME],
    length: u8,
}

impl Zone {
    /// UTC.
    pub const UTC: Self = {
        let mut name = [0; LONGEST_NAME];
        [name[0], name[1], name[2]] = *b"UTC";
        Self { name, length: 3 }
    };

    /// The zone of that name, such as `Europe/Berlin`; `None` if there is none.
    pub fn named(name: &str) -> Option<Self> {
        TimeZone::get(name).ok()?;
        let mut kept = [0; LONGEST_NAME];
        kept.get_mut(..name.len())?.copy_from_slice(name.as_bytes());
        Some(Self { name: kept, length: name.len() as u8 })
    }

    /// Its name.
    pub fn name(&self) -> &str {
        std::str::from_utf8(&self.name[..usize::from(self.length)]).unwrap_or("UTC")
    }

    fn zone(self) -> TimeZone {
        TimeZone::get(self.name()).unwrap_or(TimeZone::UTC)
    }
}

impl std::fmt::Debug for Zone {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

impl Period {
    /// As it is written.
    pub const fn label(self) -> &'static str {
        match self {
            Self::Day => "day",
            Self::Week => "week",
            Self::Month => "month",
        }
    }

    /// The day on which the period of `day` begins.
    fn first(self, day: Date) -> Date {
        match self {
            Self::Day => day,
            Self::Week => {
                let back = i64::from(day.weekday().since(Weekday::Monday));
                day.checked_sub(jiff::Span::new().days(back)).unwrap_or(day)
            }
            Self::Month => day.first_of_month(),
        }
    }

    /// The day on which the period after the one of `first` begins.
    fn next(self, first: Date) -> Date {
        let span = match self {
            Self::Day => jiff::Span::new().days(1),
            Self::Week => jiff::Span::new().days(7),
            Self::Month => jiff::Span::new().months(1),
        };
        first.checked_add(span).unwrap_or(Date::MAX)
    }
}

impl Quota {
    /// A quota whose edges are not worked out yet.
    pub const fn new(limit: u64, period: Period, zone: Zone) -> Self {
        Self { limit, period, zone, edges: [0; 4] }
    }

    /// The same with the edges of the periods around `now`.
    #[must_use]
    pub fn on(self, now: Timestamp) -> Self {
        if now.as_micros() >= self.edges[1] && now.as_micros() < self.edges[2] {
            return self;
        }
        let zone = self.zone.zone();
        let micros = i64::try_from(now.as_micros()).unwrap_or(i64::MAX);
        let moment = jiff::Timestamp::from_microsecond(micros).unwrap_or(jiff::Timestamp::MAX);
        let first = self.period.first(moment.to_zoned_datetime(zone.clone()).date());
        let before = first.yesterday().map_or(first, |day| self.period.first(day));
        let next = self.period.next(first);
        // A day begins at its first moment, also where midnight is skipped in spring.
        let begin = |day: Date| {
            let start = day.to_zoned_datetime(zone.clone()).ok().map(|day| day.timestamp().as_microsecond());
            start.and_then(|micros| u64::try_from(micros).ok()).unwrap_or(0)
        };
        Self { edges: [begin(before), begin(first), begin(next), begin(self.period.next(next))], ..self }
    }

    /// The edges of the period of `now`. Where the clock that worked them out is more than a period off, the first and
    /// the last of them go on at their length: no calendar, but an end.
    fn period_of(&self, now: Timestamp) -> (u64, u64) {
        let [before, begin, next, end] = self.edges;
        let now = now.as_micros();
        if now < before {
            let length = begin.saturating_sub(before).max(1);
            let ending = before - (before - now - 1) / length * length;
            (ending.saturating_sub(length), ending)
        } else if now < begin {
            (before, begin)
        } else if now < next {
            (begin, next)
        } else if now < end {
            (next, end)
        } else {
            let length = end.saturating_sub(next).max(1);
            let begin = now - (now - end) % length;
            (begin, begin.saturating_add(length))
        }
    }

    /// Whether `now` is in the period that this was worked out for.
    pub fn is_present(&self, now: Timestamp) -> bool {
        self.period_of(now).0 == self.edges[1]
    }

    /// What counts at `now`.
    pub fn counted(&self, held: Option<&Counted>, now: Timestamp) -> Counted {
        counted_since(held, self.period_of(now).0)
    }

    /// What was counted in a period that is more than one ahead, dated back to the present one.
    pub fn dated_back(&self, counted: &Counted, now: Timestamp) -> Option<Counted> {
        let (start, end) = self.period_of(now);
        dated_back_to(start, end, counted)
    }

    /// What the limit says to `cost`.
    pub fn judge(&self, counted: &Counted, cost: u64, now: Timestamp) -> Verdict {
        judge_until(self.limit, counted, self.period_of(now).1, cost, now)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn edges(period: Period, zone: &str, at: &str) -> Vec<String> {
        let quota = Quota::new(1, period, Zone::named(zone).unwrap());
        let on = quota.on(Timestamp::from_rfc3339(at).unwrap());
        on.edges[1..].iter().map(|edge| Timestamp::from_micros(*edge).to_rfc3339()).collect()
    }

    /// A gateway that believes it is 1970, or years later, still counts.
    #[test]
    fn a_period_has_an_end_however_wrong_the_clock_is() {
        const NOW: Timestamp = Timestamp::from_micros(1_764_000_000_000_000);
        for period in [Period::Day, Period::Week, Period::Month] {
            for wrong in [0, 1, 86_400_000_000, 1_700_000_000_000_000, 1_900_000_000_000_000] {
                let quota =
                    Quota::new(5, period, Zone::named("UTC").unwrap()).on(Timestamp::from_micros(wrong));
                let (begin, end) = quota.period_of(NOW);
                assert!(begin <= NOW.as_micros() && NOW.as_micros() < end, "{period:?} {wrong}");
                assert!(end - begin <= 31 * 86_400_000_000, "{period:?} {wrong}");
                let last = Timestamp::from_micros(end - 1);
                assert_eq!(quota.period_of(last), (begin, end), "{period:?} {wrong}");
                assert_eq!(quota.period_of(Timestamp::from_micros(end)).0, end, "{period:?} {wrong}");
            }
        }
    }

    #[test]
    fn periods_of_the_calendar() {
        for (period, zone, at, expect) in [
            (Period::Day, "UTC", "2026-11-30T12:00:00Z", ["2026-11-30T00", "2026-12-01T00", "2026-12-02T00"]),
            (
                Period::Week,
                "UTC",
                "2026-11-29T12:00:00Z",
                ["2026-11-23T00", "2026-11-30T00", "2026-12-07T00"],
            ),
            (
                Period::Month,
                "UTC",
                "2026-11-30T23:59:59Z",
                ["2026-11-01T00", "2026-12-01T00", "2027-01-01T00"],
            ),
            (
                Period::Day,
                "Asia/Ho_Chi_Minh",
                "2026-11-30T18:00:00Z",
                ["2026-11-30T17", "2026-12-01T17", "2026-12-02T17"],
            ),
            // Europe/Berlin: the 25th of October 2026 has 25 hours, the 29th of March 23.
            (
                Period::Day,
                "Europe/Berlin",
                "2026-10-25T12:00:00Z",
                ["2026-10-24T22", "2026-10-25T23", "2026-10-26T23"],
            ),
            (
                Period::Day,
                "Europe/Berlin",
                "2026-03-29T12:00:00Z",
                ["2026-03-28T23", "2026-03-29T22", "2026-03-30T22"],
            ),
            (
                Period::Month,
                "Europe/Berlin",
                "2026-03-31T22:00:00Z",
                ["2026-03-31T22", "2026-04-30T22", "2026-05-31T22"],
            ),
            // Where midnight is skipped the day begins an hour later.
            (
                Period::Day,
                "America/Asuncion",
                "2023-10-01T12:00:00Z",
                ["2023-10-01T04", "2023-10-02T03", "2023-10-03T03"],
            ),
        ] {
            let found = edges(period, zone, at);
            for (found, expect) in found.iter().zip(expect) {
                assert!(found.starts_with(expect), "{period:?} {zone} {at}: {found} {expect}");
            }
        }
        assert_eq!(Zone::named("Mars/Olympus"), None);
    }
}
