//! What is printed.

use std::io::{IsTerminal, Write};

use base64::{Engine, engine::general_purpose::STANDARD as BASE64};
use sandbox_core::{Captured, Outcome, Run};
use serde::Serialize;
use serde_json::{Value, json};

use crate::app::Fail;

/// Prints one document: for people on a terminal, on one line otherwise.
pub(crate) fn document(value: &impl Serialize) -> Result<u8, Fail> {
    let text = if std::io::stdout().is_terminal() {
        serde_json::to_string_pretty(value)
    } else {
        serde_json::to_string(value)
    };
    line(&text.map_err(std::io::Error::from)?)
}

/// Prints one record of a stream.
pub(crate) fn record(value: &impl Serialize) -> Result<u8, Fail> {
    line(&serde_json::to_string(value).map_err(std::io::Error::from)?)
}

fn line(text: &str) -> Result<u8, Fail> {
    bytes(format!("{text}\n").as_bytes())
}

/// Prints bytes as they are. Nobody who reads them any more is no failure.
pub(crate) fn bytes(bytes: &[u8]) -> Result<u8, Fail> {
    let mut out = std::io::stdout().lock();
    match out.write_all(bytes).and_then(|()| out.flush()) {
        Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => {
            Err(Fail::new(1, "nobody reads the output any more"))
        }
        written => Ok(written.map(|()| 0)?),
    }
}

/// The same for standard error.
pub(crate) fn error_bytes(bytes: &[u8]) -> Result<u8, Fail> {
    let mut out = std::io::stderr().lock();
    out.write_all(bytes).and_then(|()| out.flush())?;
    Ok(0)
}

/// What a process that ended like this exits with here.
pub(crate) fn exit_code(outcome: &Outcome) -> u8 {
    const TIMED_OUT: u8 = 124;
    const FAILED: u8 = 125;
    const KILLED: u8 = 128 + 9;
    match outcome {
        Outcome::Exited(code) => u8::try_from(*code & 0xff).unwrap_or(FAILED),
        Outcome::Signaled(signal) => u8::try_from(128 + signal).unwrap_or(u8::MAX),
        Outcome::TimedOut => TIMED_OUT,
        Outcome::Cancelled | Outcome::OutOfMemory => KILLED,
        _ => FAILED,
    }
}

/// A command's outcome and what it said.
pub(crate) fn run(run: &Run) -> Value {
    let mut told = json!({
        "process_id": run.process,
        "outcome": run.outcome,
        "exit_code": run.outcome.code(),
        "duration_ms": run.duration.as_secs_f64() * 1000.0,
        "cpu_ms": run.cpu.as_secs_f64() * 1000.0,
        "max_memory": run.max_memory,
        "output_open": run.output_open,
    });
    for (name, captured) in [("stdout", &run.stdout), ("stderr", &run.stderr)] {
        let (text, encoding) = text_or_base64(captured);
        told[name] = text.into();
        told[format!("{name}_encoding")] = encoding.into();
        told[format!("{name}_bytes")] = captured.total.into();
        told[format!("{name}_cut")] = captured.is_cut().into();
    }
    told
}

/// Text where it is UTF-8, else base64. Of what was cut, the beginning and the end follow one another.
fn text_or_base64(captured: &Captured) -> (String, &'static str) {
    let all = [&captured.head[..], &captured.tail[..]].concat();
    match String::from_utf8(all) {
        Ok(text) => (text, "utf8"),
        Err(error) => (BASE64.encode(error.as_bytes()), "base64"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_ends_as_shells_tell_it() {
        for (outcome, code) in [
            (Outcome::Exited(0), 0),
            (Outcome::Exited(3), 3),
            (Outcome::Exited(255), 255),
            (Outcome::Signaled(15), 143),
            (Outcome::TimedOut, 124),
            (Outcome::OutOfMemory, 137),
            (Outcome::Lost("x".into()), 125),
        ] {
            assert_eq!(exit_code(&outcome), code, "{outcome:?}");
        }
    }
}
