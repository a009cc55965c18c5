//! A refill rate as people write it: `100` (per second), `0.5`, `100/s`, `5/m`, `1000/h`, `1/15s`.
//! Kept as an exact fraction of tokens over microseconds.

use std::fmt;
use std::str::FromStr;

use thiserror::Error;

/// Tokens per microseconds, in lowest terms; never zero.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Rate {
    tokens: u64,
    micros: u128,
}

/// Why a text is not a rate.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum RateError {
    /// Not of the form `number` or `number/period`.
    #[error("expected a rate such as 100, 0.5, 100/s, 5/m, 1000/h or 1/15s")]
    Malformed,
    /// Nothing would ever refill.
    #[error("a rate must be above 0")]
    Zero,
    /// More digits or a longer period than can be kept exactly.
    #[error("a rate has at most 16 digits, and its period is at most 366 days")]
    OutOfRange,
}

impl Rate {
    /// `tokens` each `micros` microseconds.
    pub fn new(tokens: u64, micros: u64) -> Result<Self, RateError> {
        if tokens == 0 {
            return Err(RateError::Zero);
        }
        if micros == 0 || micros > 366 * 86_400_000_000 {
            return Err(RateError::OutOfRange);
        }
        Ok(Self::reduced(tokens, u128::from(micros)))
    }

    /// `tokens` each `micros` microseconds; neither is 0.
    pub(super) fn of(tokens: u64, micros: u128) -> Self {
        Self::reduced(tokens, micros)
    }

    /// Whole tokens in whole seconds: (100, 1) for 100/s, (5, 60) for 5/m; none where it takes numbers
    /// beyond 2^63.
    pub fn per_seconds(self) -> Option<(i64, i64)> {
        let tokens = u128::from(self.tokens) * 1_000_000;
        let common = gcd(tokens, self.micros);
        Some((i64::try_from(tokens / common).ok()?, i64::try_from(self.micros / common).ok()?))
    }

    /// `tokens` in `seconds` seconds.
    pub fn in_seconds(tokens: i64, seconds: i64) -> Result<Self, RateError> {
        let tokens = u64::try_from(tokens).map_err(|_| RateError::Malformed)?;
        let micros = u128::try_from(seconds).map_err(|_| RateError::Malformed)? * 1_000_000;
        if tokens == 0 {
            return Err(RateError::Zero);
        }
        if micros == 0 {
            return Err(RateError::OutOfRange);
        }
        Ok(Self::reduced(tokens, micros))
    }

    fn reduced(tokens: u64, micros: u128) -> Self {
        let common = gcd(u128::from(tokens), micros);
        Self { tokens: (u128::from(tokens) / common) as u64, micros: micros / common }
    }

    /// A whole number of tokens per second.
    pub fn per_second(tokens: u64) -> Result<Self, RateError> {
        Self::new(tokens, 1_000_000)
    }

    /// The fraction: tokens, and the microseconds in which they refill.
    pub const fn fraction(self) -> (u64, u128) {
        (self.tokens, self.micros)
    }
}

impl fmt::Display for Rate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let per_second = u128::from(self.tokens) * 1_000_000;
        if per_second.is_multiple_of(self.micros) {
            write!(f, "{}/s", per_second / self.micros)
        } else if (per_second * 60).is_multiple_of(self.micros) {
            write!(f, "{}/m", per_second * 60 / self.micros)
        } else if (per_second * 3600).is_multiple_of(self.micros) {
            write!(f, "{}/h", per_second * 3600 / self.micros)
        } else {
            write!(f, "{} per {} us", self.tokens, self.micros)
        }
    }
}

impl FromStr for Rate {
    type Err = RateError;

    fn from_str(text: &str) -> Result<Self, RateError> {
        let (number, period) = text.split_once('/').unwrap_or((text, "s"));
        let (tokens, fraction) = decimal(number.trim())?;
        let micros = u128::from(period_micros(period.trim())?) * u128::from(fraction);
        if tokens == 0 {
            return Err(RateError::Zero);
        }
        Ok(Self::reduced(tokens, micros))
    }
}

/// A number without sign or exponent, as (digits, power of ten to divide them by).
fn decimal(text: &str) -> Result<(u64, u64), RateError> {
    let (whole, fraction) = text.split_once('.').unwrap_or((text, ""));
    let all_digits = |part: &str| part.bytes().all(|byte| byte.is_ascii_digit());
    if whole.is_empty() || !all_digits(whole) || !all_digits(fraction) || text.ends_with('.') {
        return Err(RateError::Malformed);
    }
    let (whole, fraction) = (whole.trim_start_matches('0'), fraction.trim_end_matches('0'));
    if whole.len() + fraction.len() > 16 {
        return Err(RateError::OutOfRange);
    }
    let digits = format!("0{whole}{fraction}").parse().map_err(|_| RateError::OutOfRange)?;
    Ok((digits, 10u64.pow(fraction.len() as u32)))
}

/// `s`, `m`, `15s`, `1h` ... in microseconds.
fn period_micros(text: &str) -> Result<u64, RateError> {
    let digits = text.bytes().take_while(u8::is_ascii_digit).count();
    let (count, unit) = text.split_at(digits);
    let count: u64 = if count.is_empty() { 1 } else { count.parse().map_err(|_| RateError::OutOfRange)? };
    let unit = match unit.trim() {
        "ms" => 1_000,
        "s" | "sec" | "second" => 1_000_000,
        "m" | "min" | "minute" => 60_000_000,
        "h" | "hour" => 3_600_000_000,
        "d" | "day" => 86_400_000_000,
        _ => return Err(RateError::Malformed),
    };
    match count.checked_mul(unit) {
        Some(micros) if micros > 0 && micros <= 366 * 86_400_000_000 => Ok(micros),
        _ => Err(RateError::OutOfRange),
    }
}

/// Greatest common divisor.
pub(super) fn gcd(mut a: u128, mut b: u128) -> u128 {
    while b > 0 {
        (a, b) = (b, a % b);
    }
    a
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(text: &str, expect: Result<(u64, u128), RateError>) {
        assert_eq!(text.parse::<Rate>().map(Rate::fraction), expect, "{text:?}");
    }

    #[test]
    fn as_people_write_them() {
        check("100", Ok((1, 10_000)));
        check("100/s", Ok((1, 10_000)));
        check("0.5", Ok((1, 2_000_000)));
        check("5/m", Ok((1, 12_000_000)));
        check("6/60s", Ok((1, 10_000_000)));
        check("1/15s", Ok((1, 15_000_000)));
        check("1000/h", Ok((1, 3_600_000)));
        check("33.333", Ok((33_333, 1_000_000_000)));
        check("2000000", Ok((2, 1)));
        check(" 10 / min ", Ok((1, 6_000_000)));
    }

    #[test]
    fn what_is_no_rate() {
        for text in
            ["", "-1", "+1", "1e3", "nan", "inf", ".5", "5.", "1/", "/s", "1/x", "1/-1s", "1,5", "0x10"]
        {
            check(text, Err(RateError::Malformed));
        }
        for text in ["0", "0.0", "0/m"] {
            check(text, Err(RateError::Zero));
        }
        for text in ["12345678901234567", "1/0s", "1/367d", "0.00000000000000001"] {
            check(text, Err(RateError::OutOfRange));
        }
    }

    #[test]
    fn shown_in_the_shortest_period() {
        for text in ["100/s", "5/m", "7/h"] {
            assert_eq!(text.parse::<Rate>().unwrap().to_string(), text);
        }
    }
}
