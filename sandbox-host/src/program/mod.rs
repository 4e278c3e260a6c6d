//! The program `sandbox-host`: one question of a harness elsewhere, and the answer.

mod bound;
mod call;
mod desk;
mod io;
mod links;
mod lock;
mod populate;
mod relay;
mod sources;
mod tend;

use std::{io::Write, process::ExitCode};

const USAGE: &str = "\
usage: sandbox-host call
       sandbox-host tend STATE INSTANCE
       sandbox-host version";

/// Runs what the arguments say.
#[must_use]
pub fn main() -> ExitCode {
    let arguments: Vec<_> = std::env::args_os().skip(1).collect();
    let words: Vec<&str> = arguments.iter().map(|word| word.to_str().unwrap_or_default()).collect();
    match words[..] {
        ["call"] => call::main(),
        ["tend", state, instance] => tend::main(state, instance),
        ["version"] => {
            let line = concat!("sandbox-host ", env!("CARGO_PKG_VERSION"), "\n");
            match std::io::stdout().write_all(line.as_bytes()) {
                Ok(()) => ExitCode::SUCCESS,
                Err(_) => ExitCode::FAILURE,
            }
        }
        _ => {
            let _ = std::io::stderr().write_all(format!("{USAGE}\n").as_bytes());
            ExitCode::from(64)
        }
    }
}
