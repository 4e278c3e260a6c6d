//! Processes that go on by themselves.

use clap::{Args, Subcommand};
use sandbox_core::{
    Command as Run, OutputStream, ProcessId, ProcessInfo, ProcessRef, ProcessState,
};
use serde_json::{Value, json};

use crate::{
    app::{App, Fail, usage},
    output,
    progress::ProgressSink,
};

/// How much of a log is read at once, in bytes.
const PIECE: usize = 1024 * 1024;

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Start a command that goes on by itself, and print its id.
    #[command(after_help = "Example:\n  sandboxer spawn main -- ./server --port 8080")]
    Spawn(Spawn),
    /// List a sandbox's processes: those that run, and those that went on by themselves and have ended.
    #[command(after_help = "Example:\n  sandboxer ps main")]
    Ps {
        /// Id or name.
        id: String,
    },
    /// Print what a process that goes on by itself has said: both its output streams.
    #[command(after_help = "Examples:
  sandboxer logs main prc_0198…
  sandboxer logs main prc_0198… --follow --offset 4096")]
    Logs(Logs),
    /// Wait for a process's end, and print how it ended.
    #[command(after_help = "Example:\n  sandboxer wait main prc_0198… | jq .exit_code")]
    Wait(One),
    /// Kill a process with all that it started, or send it a signal.
    #[command(after_help = "Examples:
  sandboxer kill main prc_0198…
  sandboxer kill main prc_0198… --signal HUP")]
    Kill {
        #[command(flatten)]
        one: One,
        /// This signal, by name or number, to it alone.
        #[arg(long)]
        signal: Option<String>,
    },
}

#[derive(Debug, Args)]
pub(crate) struct Spawn {
    /// Id or name.
    id: String,
    /// The program and its arguments.
    #[arg(last = true, required = true, value_name = "ARGV")]
    argv: Vec<std::ffi::OsString>,
}

#[derive(Debug, Args)]
pub(crate) struct One {
    /// Id or name.
    id: String,
    /// The process.
    process: ProcessId,
}

#[derive(Debug, Args)]
pub(crate) struct Logs {
    #[command(flatten)]
    one: One,
    /// Go on with what comes, until it ends.
    #[arg(long, short)]
    follow: bool,
    /// From this byte of its standard output on.
    #[arg(long, default_value_t = 0)]
    offset: u64,
    /// From this byte of its standard error on.
    #[arg(long, default_value_t = 0)]
    stderr_offset: u64,
}

pub(crate) async fn run(app: &App, command: Command) -> Result<u8, Fail> {
    match command {
        Command::Spawn(Spawn { id, argv }) => {
            let [program, arguments @ ..] = &argv[..] else {
                return Err(usage("there is no program to run"));
            };
            let command = Run::new(program).args(arguments).detached();
            let sandbox = app.open(&id).await?;
            let process = sandbox.spawn(command, &ProgressSink::silent()).await?;
            output::document(&json!({
                "sandbox_id": sandbox.id(),
                "process_id": process.id(),
                "pid": process.pid(),
            }))
        }
        Command::Ps { id } => {
            let processes = app.open(&id).await?.processes().await?;
            output::document(&processes.iter().map(describe).collect::<Vec<_>>())
        }
        Command::Logs(logs) => self::logs(app, logs).await,
        Command::Wait(one) => {
            let process = find(app, &one).await?;
            let end = process.wait(&ProgressSink::silent()).await?;
            output::document(&json!({
                "process_id": process.id(),
                "outcome": end.outcome,
                "exit_code": end.outcome.code(),
                "duration_ms": end.duration.as_secs_f64() * 1000.0,
                "stdout_bytes": end.stdout,
                "stderr_bytes": end.stderr,
            }))
        }
        Command::Kill { one, signal } => {
            let process = find(app, &one).await?;
            match &signal {
                None => process.kill(&ProgressSink::silent()).await?,
                Some(text) => process.signal(number(text)?).await?,
            }
            output::document(&json!({"process_id": process.id(), "signal": signal}))
        }
    }
}

async fn find(app: &App, one: &One) -> Result<ProcessRef, Fail> {
    Ok(app.open(&one.id).await?.process(&one.process).await?)
}

fn describe(info: &ProcessInfo) -> Value {
    let end = match &info.state {
        ProcessState::Ended(end) => Some(end),
        _ => None,
    };
    json!({
        "process_id": info.id,
        "pid": info.pid,
        "argv": info.argv,
        "started_at": info.started_at,
        "detached": info.detached,
        "running": end.is_none(),
        "outcome": end.map(|end| &end.outcome),
        "exit_code": end.and_then(|end| end.outcome.code()),
        "stdout_bytes": info.stdout.end,
        "stderr_bytes": info.stderr.end,
    })
}

async fn logs(app: &App, logs: Logs) -> Result<u8, Fail> {
    let process = find(app, &logs.one).await?;
    if logs.follow {
        let mut follow = process.follow(logs.offset, logs.stderr_offset).await?;
        while let Some(piece) = follow.next().await? {
            print(piece.stream, &piece.bytes)?;
        }
        return Ok(0);
    }
    for (stream, from) in
        [(OutputStream::Stdout, logs.offset), (OutputStream::Stderr, logs.stderr_offset)]
    {
        let mut offset = from;
        loop {
            let piece = process.read(stream, offset, PIECE).await?;
            if piece.bytes.is_empty() {
                break;
            }
            offset = piece.end();
            print(stream, &piece.bytes)?;
        }
    }
    Ok(0)
}

fn print(stream: OutputStream, bytes: &[u8]) -> Result<u8, Fail> {
    match stream {
        OutputStream::Stdout => output::bytes(bytes),
        OutputStream::Stderr => output::error_bytes(bytes),
    }
}

/// A signal by name or number, as Linux numbers them.
fn number(text: &str) -> Result<i32, Fail> {
    const NAMES: [(&str, i32); 14] = [
        ("HUP", 1),
        ("INT", 2),
        ("QUIT", 3),
        ("ABRT", 6),
        ("KILL", 9),
        ("USR1", 10),
        ("SEGV", 11),
        ("USR2", 12),
        ("PIPE", 13),
        ("ALRM", 14),
        ("TERM", 15),
        ("CONT", 18),
        ("STOP", 19),
        ("WINCH", 28),
    ];
    let upper = text.to_ascii_uppercase();
    let name = upper.strip_prefix("SIG").unwrap_or(&upper);
    let named = NAMES.iter().find(|(known, _)| *known == name).map(|(_, number)| *number);
    let number = named.or_else(|| text.parse().ok().filter(|number| (1..=64).contains(number)));
    number.ok_or_else(|| usage(format!("--signal {text:?} is no signal's name or number")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn signals_have_names_and_numbers() {
        for (text, expected) in [("TERM", 15), ("sigkill", 9), ("1", 1)] {
            assert_eq!(number(text).unwrap(), expected);
        }
        for bad in ["", "0", "65", "-9", "NOPE"] {
            assert_eq!(number(bad).unwrap_err().code, 2, "{bad}");
        }
    }
}
