//! What the benchmarks measure with.

use std::{
    process::Stdio,
    time::{Duration, Instant},
};

use crate::Outcome;

/// How long some work takes.
///
/// # Errors
///
/// The work's own.
pub async fn timed<T, E>(work: impl Future<Output = Result<T, E>>) -> Result<Duration, E> {
    let start = Instant::now();
    work.await?;
    Ok(start.elapsed())
}

/// The time below which so many of a hundred are, in milliseconds.
#[must_use]
pub fn percentile(times: &[Duration], percent: usize) -> f64 {
    let mut sorted = times.to_vec();
    sorted.sort();
    let at = (sorted.len() * percent / 100).min(sorted.len().saturating_sub(1));
    sorted.get(at).map_or(f64::NAN, |time| time.as_secs_f64() * 1000.0)
}

/// The time in the middle, in milliseconds.
#[must_use]
pub fn median(times: &[Duration]) -> f64 {
    percentile(times, 50)
}

/// A figure as it is printed: three digits after the point.
#[must_use]
pub fn round(figure: f64) -> f64 {
    (figure * 1000.0).round() / 1000.0
}

/// Runs a program whose output is of no interest, and which must succeed.
///
/// # Errors
///
/// What it said on standard error, if it does not.
pub async fn succeed(mut command: tokio::process::Command) -> Outcome {
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
    let output = command.output().await?;
    if output.status.success() {
        Ok(())
    } else {
        Err(String::from_utf8_lossy(&output.stderr).into_owned().into())
    }
}
