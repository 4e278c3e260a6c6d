//! What the example programs share: readable output, and a check that ends a story that went wrong.
#![allow(clippy::print_stdout, clippy::print_stderr, reason = "programs talk to people")]

/// The README's programs, compiled.
#[cfg(doctest)]
#[doc = include_str!("../../README.md")]
struct Readme;

pub mod custom_backend;
pub mod figures;
pub mod fingerprint;
pub mod project;
pub mod scene;

use std::{
    process::ExitCode,
    time::{Duration, Instant},
};

/// What a program returns.
pub type Outcome<T = ()> = Result<T, Box<dyn std::error::Error + Send + Sync>>;

/// The steps of a story, each with its duration.
#[derive(Debug, Default)]
pub struct Story {
    steps: Vec<(String, Duration)>,
}

impl Story {
    /// Carries a step out and remembers how long it took.
    ///
    /// # Errors
    ///
    /// The step's own.
    pub async fn step<T, E>(
        &mut self,
        title: &str,
        work: impl Future<Output = Result<T, E>>,
    ) -> Outcome<T>
    where
        E: Into<Box<dyn std::error::Error + Send + Sync>>,
    {
        println!("\n▸ {title}");
        let start = Instant::now();
        let result = work.await.map_err(Into::into)?;
        self.steps.push((title.to_owned(), start.elapsed()));
        Ok(result)
    }

    /// Prints the steps with their durations.
    pub fn summary(&self) {
        println!("\n── what it took ──");
        for (title, duration) in &self.steps {
            println!("{:>9.1} ms  {title}", duration.as_secs_f64() * 1000.0);
        }
    }
}

/// An error unless this holds.
///
/// # Errors
///
/// If it does not hold.
pub fn check(holds: bool, what: &str) -> Outcome {
    if holds {
        println!("  ✓ {what}");
        Ok(())
    } else {
        Err(format!("not so: {what}").into())
    }
}

/// How a program ends whose story went like this: what went wrong is said last.
#[must_use]
pub fn conclude(told: Outcome) -> ExitCode {
    match told {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("\n✗ {error}");
            ExitCode::FAILURE
        }
    }
}

/// The code in SELF-CONTROL.md, which must compile.
#[cfg(doctest)]
#[doc = include_str!("../../SELF-CONTROL.md")]
struct SelfControl;
