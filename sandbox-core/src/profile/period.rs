//! Lengths of time as people write them.

use std::{fmt, str::FromStr, time::Duration};

use serde::{Deserialize, Serialize};

use crate::{Error, ErrorKind, Result};

/// A length of time: a positive whole number and `s`, `m`, `h` or `d`.
///
/// ```
/// use sandbox_core::Period;
///
/// let period: Period = "90m".parse()?;
/// assert_eq!(period.seconds(), 5400);
/// assert_eq!(Period::from_seconds(7200).to_string(), "2h");
/// # Ok::<(), sandbox_core::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Period(u64);

/// The units and their seconds, the largest first.
const UNITS: [(char, u64); 4] = [('d', 86_400), ('h', 3_600), ('m', 60), ('s', 1)];

impl Period {
    /// So many seconds.
    #[must_use]
    pub fn from_seconds(seconds: u64) -> Self {
        Self(seconds)
    }

    /// In seconds.
    #[must_use]
    pub fn seconds(self) -> u64 {
        self.0
    }

    /// As what the rest of the SDK takes.
    #[must_use]
    pub fn duration(self) -> Duration {
        Duration::from_secs(self.0)
    }
}

impl FromStr for Period {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let parsed = UNITS.iter().find_map(|(unit, seconds)| {
            let number = text.strip_suffix(*unit)?;
            let digits = !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit());
            let number = digits.then(|| number.parse::<u64>().ok()).flatten()?;
            number.checked_mul(*seconds).filter(|total| *total > 0)
        });
        parsed.map(Self).ok_or_else(|| {
            let message = format!(
                "{text:?} is no length of time: use a positive whole number and s, m, h or d, such as 30m"
            );
            Error::new(ErrorKind::InvalidSpec, "read a length of time", message)
        })
    }
}

impl TryFrom<String> for Period {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse().map_err(|error: Error| error.message().to_owned())
    }
}

impl From<Period> for String {
    fn from(period: Period) -> Self {
        period.to_string()
    }
}

impl fmt::Display for Period {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let fits =
            UNITS.iter().find(|(_, seconds)| self.0 >= *seconds && self.0.is_multiple_of(*seconds));
        let (unit, seconds) = fits.unwrap_or(&('s', 1));
        write!(f, "{}{unit}", self.0 / seconds)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_what_is_read() {
        for (text, seconds, again) in [
            ("1s", 1, "1s"),
            ("90s", 90, "90s"),
            ("60s", 60, "1m"),
            ("30m", 1_800, "30m"),
            ("4h", 14_400, "4h"),
            ("24h", 86_400, "1d"),
            ("2d", 172_800, "2d"),
        ] {
            let period: Period = text.parse().unwrap();
            assert_eq!(period.seconds(), seconds);
            assert_eq!(period.to_string(), again);
        }
    }

    #[test]
    fn everything_else_is_refused() {
        for bad in
            ["", "4", "h", "0h", "-1h", "+1h", "1.5h", "4 h", "4H", "1w", "99999999999999999d"]
        {
            let error = bad.parse::<Period>().unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidSpec, "{bad}");
            assert!(error.to_string().contains("s, m, h or d"), "{error}");
        }
    }
}
