//! Faults: the harness is killed at each step of each change, its futures are dropped, the disk is full, the
//! state is damaged. Nothing may be lost or left behind, and the history tells what happened.
#![allow(clippy::print_stdout, clippy::print_stderr, reason = "it is a test program")]

mod attached;
mod cancelled;
mod child;
mod disk;
mod killed;
mod many;
mod place;
mod scene;
mod steps;
mod unreadable;

use std::process::ExitCode;

use libtest_mimic::{Arguments, Completion, Failed, Trial};
use sandbox_conformance::Check;

fn main() -> ExitCode {
    if let Some(code) = child::from_environment() {
        return code;
    }
    let mut trials = Vec::new();
    trials.extend(killed::trials());
    trials.extend(attached::trials());
    trials.extend(cancelled::trials());
    trials.extend(disk::trials());
    trials.extend(unreadable::trials());
    trials.extend(many::trials());
    let mut arguments = Arguments::from_args();
    // Each case keeps both of two processors busy by itself.
    arguments.test_threads.get_or_insert(2);
    libtest_mimic::run(&arguments, trials).exit_code()
}

/// A trial in a runtime of its own; `Some` says why it was skipped.
fn trial<F>(name: impl Into<String>, case: impl FnOnce() -> F + Send + 'static) -> Trial
where
    F: Future<Output = Check<Option<String>>>,
{
    Trial::ignorable_test(name, move || {
        // One thread: when a case has waited for anything, what it has begun has taken place up to its
        // own first wait.
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        match runtime.block_on(case()) {
            Ok(None) => Ok(Completion::Completed),
            Ok(Some(why)) => Ok(Completion::ignored_with(why)),
            Err(failure) => Err(Failed::from(failure.message())),
        }
    })
}
