//! Running a command to its end.

use std::time::Duration;

use clap::{Args, Subcommand};
use sandbox_core::{
    Chunk, Command as Run, Error, ErrorKind, Outcome, Period, Process, Sandbox, TerminalSize,
};
use tokio::signal::unix::{SignalKind, signal};

use crate::{
    app::{App, Fail},
    output,
    progress::ProgressSink,
    terminal::{self, Raw},
};

/// The sandbox or the way to it failed.
const FAILED: u8 = 125;
/// What was to be run is not executable.
const NOT_EXECUTABLE: u8 = 126;
/// What was to be run is not there.
const NOT_FOUND: u8 = 127;

/// How long the end of a command that was broken off is waited for.
const PATIENCE: Duration = Duration::from_secs(10);

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Run a command in a sandbox, and exit as it does.
    ///
    /// Its output is passed on as it comes. There is no shell between you and the program: use
    /// `-- sh -c '…'` for one. Interrupting this kills it with all that it started.
    #[command(
        after_help = "Exit codes: the command's own; 128 and the signal's number; 124 timed out; \
125 the sandbox
or the way to it failed; 126 not executable; 127 not found.

Examples:
  sandboxer exec main -- make -j4 test
  sandboxer exec main --tty --stdin -- bash
  tar c src | sandboxer exec main --stdin -- tar x
  sandboxer exec main --timeout 5m --json -- ./run.sh | jq .exit_code"
    )]
    Exec(Exec),
}

#[derive(Debug, Args)]
pub(crate) struct Exec {
    /// Id or name.
    id: String,
    /// In this directory; relative ones begin at the workspace.
    #[arg(long, value_name = "DIR")]
    cwd: Option<String>,
    /// A variable of its environment.
    #[arg(long, value_name = "KEY=VALUE")]
    env: Vec<String>,
    /// As this user of the sandbox.
    #[arg(long)]
    user: Option<String>,
    /// Kill it after so long: a number and s, m, h or d.
    #[arg(long)]
    timeout: Option<Period>,
    /// On a terminal of its own.
    #[arg(long, short, conflicts_with = "json")]
    tty: bool,
    /// Pass standard input on.
    #[arg(long, short = 'i')]
    stdin: bool,
    /// Print the outcome and what it said as one document.
    #[arg(long)]
    json: bool,
    /// The program and its arguments.
    #[arg(last = true, required = true, value_name = "ARGV")]
    argv: Vec<std::ffi::OsString>,
}

pub(crate) async fn run(app: &App, command: Command) -> Result<u8, Fail> {
    let Command::Exec(exec) = command;
    let command = command_of(&exec)?;
    let sandbox = app.open(&exec.id).await.map_err(|fail| fail.code(FAILED))?;
    let mut process = match sandbox.spawn(command, &ProgressSink::silent()).await {
        Ok(process) => process,
        Err(error) => return Err(not_started(error)),
    };
    let stdin = process.take_stdin();
    let feeding = stdin.map(|stdin| tokio::spawn(terminal::feed(stdin)));
    let raw = exec.tty.then(Raw::begin);
    let done = if exec.json {
        capture(&sandbox, process).await
    } else {
        pass_on(&sandbox, process, exec.tty).await
    };
    drop(raw);
    if let Some(feeding) = feeding {
        feeding.abort();
    }
    done
}

fn command_of(exec: &Exec) -> Result<Run, Fail> {
    let [program, arguments @ ..] = &exec.argv[..] else {
        return Err(crate::app::usage("there is no program to run"));
    };
    let mut command = Run::new(program).args(arguments);
    for variable in &exec.env {
        let Some((key, value)) = variable.split_once('=') else {
            let message = format!("--env {variable:?} is not of the form KEY=VALUE");
            return Err(crate::app::usage(message));
        };
        command = command.env(key, value);
    }
    if let Some(cwd) = &exec.cwd {
        command = command.current_dir(cwd);
    }
    if let Some(user) = &exec.user {
        command = command.user(user);
    }
    if let Some(timeout) = exec.timeout {
        command = command.timeout(timeout.duration());
    }
    if exec.tty {
        let usual = TerminalSize { rows: 24, cols: 80 };
        command = command.pty(terminal::size().unwrap_or(usual));
    }
    if exec.stdin {
        command = command.stdin_piped();
    }
    Ok(command)
}

/// Why a command could not be started, as shells tell it.
fn not_started(error: Error) -> Fail {
    let code = match error.kind() {
        ErrorKind::NotFound => NOT_FOUND,
        ErrorKind::PermissionDenied => NOT_EXECUTABLE,
        _ => FAILED,
    };
    Fail::from(error).code(code)
}

/// Waits for the end, and prints all of it.
async fn capture(sandbox: &Sandbox, process: Process) -> Result<u8, Fail> {
    let id = process.id().clone();
    let sink = ProgressSink::silent();
    let run = tokio::select! {
        run = process.wait(sandbox, &sink) => run.map_err(|error| Fail::from(error).code(FAILED))?,
        signal = interrupted() => return broken_off(sandbox, &id, signal).await,
    };
    output::document(&output::run(&run))?;
    Ok(output::exit_code(&run.outcome))
}

/// Passes output on as it comes.
async fn pass_on(sandbox: &Sandbox, mut process: Process, tty: bool) -> Result<u8, Fail> {
    let id = process.id().clone();
    let mut resized = signal(SignalKind::window_change())?;
    let interrupted = interrupted();
    tokio::pin!(interrupted);
    loop {
        tokio::select! {
            chunk = process.next_output() => match chunk {
                Some(Chunk::Stdout(bytes)) => output::bytes(&bytes)?,
                Some(Chunk::Stderr(bytes)) => output::error_bytes(&bytes)?,
                None => break,
            },
            _ = resized.recv(), if tty => match terminal::size() {
                Some(size) => process.resize(size).await.map(|()| 0)?,
                None => 0,
            },
            signal = &mut interrupted => {
                drop(process);
                return broken_off(sandbox, &id, signal).await;
            }
        };
    }
    let run = process.wait(sandbox, &ProgressSink::silent()).await;
    let run = run.map_err(|error| Fail::from(error).code(FAILED))?;
    match &run.outcome {
        Outcome::Lost(reason) => Err(Fail::new(FAILED, format!("it was lost: {reason}"))),
        Outcome::TimedOut => {
            eprintln!("sandboxer: it took too long and was killed");
            Ok(output::exit_code(&run.outcome))
        }
        Outcome::OutOfMemory => {
            eprintln!("sandboxer: it was killed for want of memory");
            Ok(output::exit_code(&run.outcome))
        }
        outcome => Ok(output::exit_code(outcome)),
    }
}

/// Waits for somebody to end this process; the signal's number. Signals are seen from the call on, and not
/// only once it is waited for.
pub(crate) fn interrupted() -> impl Future<Output = u8> {
    let kinds = [SignalKind::interrupt(), SignalKind::terminate(), SignalKind::hangup()];
    let signals = kinds.map(signal);
    async move {
        let [Ok(mut interrupt), Ok(mut terminate), Ok(mut hangup)] = signals else {
            return std::future::pending().await;
        };
        tokio::select! {
            _ = interrupt.recv() => 2,
            _ = terminate.recv() => 15,
            _ = hangup.recv() => 1,
        }
    }
}

/// The command was let go of, which kills it; returns when that is in the history.
async fn broken_off(
    sandbox: &Sandbox,
    process: &sandbox_core::ProcessId,
    signal: u8,
) -> Result<u8, Fail> {
    let mut watch = sandbox.manager().watch(sandbox.id(), 0);
    let ended = async {
        while let Ok(event) = watch.next().await {
            match event.known() {
                Some(sandbox_core::Known::ProcessExited { process: ended, .. })
                    if ended == process =>
                {
                    return;
                }
                _ => {}
            }
        }
    };
    let _ = tokio::time::timeout(PATIENCE, ended).await;
    Ok(128 + signal)
}
