//! Shell sessions: one shell, command after command, its state kept in between.

mod conversation;

use std::{
    ffi::{OsStr, OsString},
    path::{Path, PathBuf},
    time::Duration,
};

use sandbox_guest::ShellDone;
use tokio::sync::Mutex;

use self::conversation::{Captures, Conversation, End};
use crate::{
    Command, DEFAULT_OUTPUT_LIMIT, Error, ErrorKind, Known, Outcome, Process, ProcessId, Result,
    Run, Sandbox, TurnEventSink, manager::Recorder, signal,
};

/// How long a shell may take to be ready, or to be gone.
const PATIENCE: Duration = Duration::from_secs(30);

/// How long a command's text may be, in bytes: as long as a program's argument.
pub const SHELL_TEXT_LIMIT: usize = 128 * 1024;

/// Which shell, and how it begins.
///
/// ```
/// use sandbox_core::ShellOptions;
///
/// let options = ShellOptions::new().program("bash").current_dir("src").env("CI", "1");
/// ```
#[derive(Debug, Clone)]
pub struct ShellOptions {
    program: OsString,
    args: Vec<OsString>,
    env: Vec<(OsString, OsString)>,
    secrets: Vec<(OsString, String)>,
    cwd: Option<PathBuf>,
    user: Option<String>,
    output_limit: usize,
}

impl Default for ShellOptions {
    fn default() -> Self {
        Self {
            program: "/bin/sh".into(),
            args: Vec::new(),
            env: Vec::new(),
            secrets: Vec::new(),
            cwd: None,
            user: None,
            output_limit: DEFAULT_OUTPUT_LIMIT,
        }
    }
}

impl ShellOptions {
    /// `/bin/sh`, at the workspace.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// This shell: a path, or a name to be found in the sandbox's `PATH`. It must understand what POSIX says
    /// of a shell, as `dash`, `bash` and BusyBox's `sh` do.
    #[must_use]
    pub fn program(mut self, program: impl AsRef<OsStr>) -> Self {
        self.program = program.as_ref().to_owned();
        self
    }

    /// An argument for the shell itself: an option, or BusyBox's `sh`.
    #[must_use]
    pub fn arg(mut self, arg: impl AsRef<OsStr>) -> Self {
        self.args.push(arg.as_ref().to_owned());
        self
    }

    /// Begin with this environment variable. It is not in the history.
    #[must_use]
    pub fn env(mut self, key: impl AsRef<OsStr>, value: impl AsRef<OsStr>) -> Self {
        self.env.push((key.as_ref().to_owned(), value.as_ref().to_owned()));
        self
    }

    /// Begin with this environment variable, its value a secret's; see [`Command::env_secret`].
    #[must_use]
    pub fn env_secret(mut self, key: impl AsRef<OsStr>, reference: impl Into<String>) -> Self {
        self.secrets.push((key.as_ref().to_owned(), reference.into()));
        self
    }

    /// Begin in this directory; relative ones begin at the workspace.
    #[must_use]
    pub fn current_dir(mut self, dir: impl AsRef<Path>) -> Self {
        self.cwd = Some(dir.as_ref().to_owned());
        self
    }

    /// Run it as this user; see [`Command::user`].
    #[must_use]
    pub fn user(mut self, user: impl Into<String>) -> Self {
        self.user = Some(user.into());
        self
    }

    /// Keep so many bytes of each output stream of a command that does not say otherwise.
    #[must_use]
    pub fn output_limit(mut self, bytes: usize) -> Self {
        self.output_limit = bytes;
        self
    }

    /// The command that the shell is.
    fn command(&self) -> Command {
        let mut command = Command::new(&self.program).args(&self.args).stdin_piped().into_shell();
        for (key, value) in &self.env {
            command = command.env(key, value);
        }
        for (key, reference) in &self.secrets {
            command = command.env_secret(key, reference);
        }
        if let Some(cwd) = &self.cwd {
            command = command.current_dir(cwd);
        }
        if let Some(user) = &self.user {
            command = command.user(user);
        }
        command
    }
}

/// A text to run in a [`Shell`]. Any string is one.
///
/// ```
/// use std::time::Duration;
/// use sandbox_core::ShellCommand;
///
/// let command = ShellCommand::new("sort | uniq -c").stdin("b\na\nb\n").timeout(Duration::from_secs(5));
/// ```
#[derive(Debug, Clone)]
pub struct ShellCommand {
    text: Vec<u8>,
    stdin: Option<Vec<u8>>,
    timeout: Option<Duration>,
    output_limit: Option<usize>,
}

impl ShellCommand {
    /// This text, of as many lines as it likes.
    pub fn new(text: impl Into<Vec<u8>>) -> Self {
        Self { text: text.into(), stdin: None, timeout: None, output_limit: None }
    }

    /// Give it these bytes to read. Without this it reads from `/dev/null`.
    #[must_use]
    pub fn stdin(mut self, bytes: impl Into<Vec<u8>>) -> Self {
        self.stdin = Some(bytes.into());
        self
    }

    /// End the session after this time: see [`Shell::run`].
    #[must_use]
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = Some(timeout);
        self
    }

    /// Keep so many bytes of each output stream in the [`Run`].
    #[must_use]
    pub fn output_limit(mut self, bytes: usize) -> Self {
        self.output_limit = Some(bytes);
        self
    }

    fn check(&self) -> Result<()> {
        if self.text.contains(&0) {
            let message = "the text has a NUL byte, which no shell reads";
            return Err(Error::new(ErrorKind::InvalidSpec, "shell", message));
        }
        if self.text.len() > SHELL_TEXT_LIMIT {
            let message = format!(
                "a text of {} bytes; the limit is {SHELL_TEXT_LIMIT}: write it to a file, and run that",
                self.text.len()
            );
            return Err(Error::new(ErrorKind::LimitExceeded, "shell", message));
        }
        Ok(())
    }
}

impl<T: Into<Vec<u8>>> From<T> for ShellCommand {
    fn from(text: T) -> Self {
        Self::new(text)
    }
}

/// A shell in a sandbox: what one command sets (working directory, variables, functions, options, jobs),
/// the next one finds.
///
/// It is a process of the sandbox, with an id and an end in the history, and so is each command. Dropping
/// it kills the shell and everything that its commands have left running. A sandbox with a shell is not
/// idle.
///
/// ```no_run
/// # async fn turn(sandbox: sandbox_core::Sandbox, sink: sandbox_core::Suppressed) -> sandbox_core::Result<()> {
/// use sandbox_core::ShellOptions;
///
/// let shell = sandbox.shell(ShellOptions::new(), &sink).await?;
/// shell.run("cd src && export CFLAGS=-O2", &sink).await?;
/// let run = shell.run("pwd; echo $CFLAGS", &sink).await?;
/// assert_eq!(run.stdout.text(), "/workspace/src\n-O2\n");
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct Shell {
    sandbox: Sandbox,
    id: ProcessId,
    program: OsString,
    output_limit: usize,
    state: Mutex<State>,
}

#[derive(Debug)]
enum State {
    Open(Box<Conversation>),
    /// It has ended, and why.
    Over(String),
}

impl Shell {
    /// See [`Sandbox::shell`].
    pub(crate) async fn open(
        sandbox: &Sandbox,
        options: ShellOptions,
        sink: &dyn TurnEventSink,
    ) -> Result<Self> {
        // A sink that refuses does not undo what was done: the shell comes with the error.
        let (process, refused) = match sandbox.spawn(options.command(), sink).await {
            Ok(process) => (process, None),
            Err(error) => match error.take_outcome::<Process>() {
                Some(process) => (process, Some(error)),
                None => return Err(error),
            },
        };
        let id = process.id().clone();
        let mut conversation = Conversation::new(process);
        let greeting = tokio::time::timeout(PATIENCE, conversation.greet()).await;
        let greeted = greeting.unwrap_or_else(|_| {
            let seconds = PATIENCE.as_secs();
            let program = options.program.to_string_lossy();
            let message = format!(
                "{program:?} does not do what a shell does: it was told to run nothing, and had not said \
                 that it did so within {seconds} s"
            );
            Err(Error::unsupported("shell", message))
        });
        greeted.map_err(|error| error.with_sandbox(sandbox.id()))?;
        let shell = Self {
            sandbox: sandbox.clone(),
            id,
            program: options.program,
            output_limit: options.output_limit,
            state: Mutex::new(State::Open(Box::new(conversation))),
        };
        match refused {
            None => Ok(shell),
            Some(error) => Err(error.with_outcome(shell)),
        }
    }

    /// Its id in the history.
    #[must_use]
    pub fn id(&self) -> &ProcessId {
        &self.id
    }

    /// Runs a text in the shell to its end, and returns how it ended and what it said. Commands of one
    /// shell run one after the other, whoever asks.
    ///
    /// The outcome is what the shell has as `$?` afterwards: where a signal ended the last program, that is
    /// 128 and the signal's number, which cannot be told from an exit with that code, and so is
    /// [`Exited`](Outcome::Exited). Its output is its own, also while something that an earlier command left
    /// running goes on writing; what is written after a command's end is dropped. CPU time is counted in
    /// hundredths of a second, and the memory is not known (0).
    ///
    /// The session is over when the shell is: after `exit` or `exec`, where the text fails under `set -e`,
    /// or where it does what ends a shell (for `bash`, `${unset?}`; elsewhere a `return` outside of a
    /// function). That command's outcome is then the shell's end. A text that is no valid shell is an
    /// `Exited` with what the shell says of it, and the session goes on.
    ///
    /// A command whose time is over, and one whose future is dropped, ends the session too, with all that
    /// its commands have left running: what would be killed is one of the text's programs, and the shell
    /// would go on with what comes after it.
    ///
    /// # Errors
    ///
    /// `Lost` if the session is over, and the message says why: open another one. `InvalidSpec` for a text
    /// with a NUL byte, `LimitExceeded` for one above [`SHELL_TEXT_LIMIT`]; nothing is run then.
    pub async fn run(
        &self,
        command: impl Into<ShellCommand>,
        sink: &dyn TurnEventSink,
    ) -> Result<Run> {
        let command = command.into();
        command.check()?;
        let mut state = self.state.lock().await;
        if let State::Over(reason) = &*state {
            return Err(self.over(reason));
        }
        let mut call = self.sandbox.call(sink).await?;
        let recorder = call.recorder();
        let process = ProcessId::new();
        recorder.record(self.started(&process, &command)).await?;
        let cancelled = State::Over("a command was cancelled".into());
        let State::Open(mut conversation) = std::mem::replace(&mut *state, cancelled) else {
            return Err(self.over("it is being closed"));
        };
        // From here on what was begun gets its end, also if nobody waits for it.
        let mut guard =
            Guard(Some(Running { recorder, shell: self.id.clone(), command: process.clone() }));
        call.deliver().await;
        let limit = command.output_limit.unwrap_or(self.output_limit);
        let mut captured = Captures::new(limit);
        let end = conversation.run(command, &mut captured).await;
        let ended = match end {
            Ok(End::Done(done)) => {
                *state = State::Open(conversation);
                Ok((Outcome::Exited(done.status), Some(done)))
            }
            Ok(End::Over { done, timed_out, words }) => {
                let outcome = self.end_of(conversation, sink).await;
                *state = State::Over(reason(&outcome, timed_out, &words));
                match (done, timed_out) {
                    (None, _) => Err(self.over(&reason(&outcome, false, &words))),
                    (Some(done), true) => Ok((Outcome::TimedOut, Some(done))),
                    (Some(done), false) => Ok((outcome, Some(done))),
                }
            }
            Ok(End::Stuck) => {
                drop(conversation);
                kill(&call.recorder(), &self.id).await;
                *state = State::Over(reason(&Outcome::TimedOut, true, &[]));
                Ok((Outcome::TimedOut, None))
            }
            Ok(End::Lost) => {
                let outcome = match self.end_of(conversation, sink).await {
                    known @ (Outcome::Lost(_) | Outcome::OutOfMemory) => known,
                    other => Outcome::Lost(format!("the shell's keeper ended: {other:?}")),
                };
                *state = State::Over(reason(&outcome, false, &[]));
                Ok((outcome, None))
            }
            Err(error) => {
                *state = State::Over(error.to_string());
                Err(error)
            }
        };
        let exited = exited(&process, &ended);
        call.record(exited).await?;
        guard.0 = None;
        let result =
            ended.map(|(outcome, done)| captured.into_run(process, outcome, done.as_ref()));
        call.finish(result)
    }

    /// Lets the shell end, as at the end of its input, and returns how it did. What its commands have left
    /// running ends too.
    ///
    /// # Errors
    ///
    /// `Lost` if it had ended before.
    pub async fn close(self, sink: &dyn TurnEventSink) -> Result<Outcome> {
        let state = std::mem::replace(&mut *self.state.lock().await, State::Over(String::new()));
        match state {
            State::Open(mut conversation) => {
                match tokio::time::timeout(PATIENCE, conversation.close()).await {
                    Ok(closed) => closed.map_err(|error| error.with_sandbox(self.sandbox.id()))?,
                    Err(_) => {
                        let call = self.sandbox.call(sink).await?;
                        kill(&call.recorder(), &self.id).await;
                    }
                }
                Ok(self.end_of(conversation, sink).await)
            }
            State::Over(reason) => Err(self.over(&reason)),
        }
    }

    /// How the shell ended, once it has.
    async fn end_of(&self, conversation: Box<Conversation>, sink: &dyn TurnEventSink) -> Outcome {
        let ended = conversation.into_process().wait(&self.sandbox, sink);
        let run = match tokio::time::timeout(PATIENCE, ended).await {
            Ok(Ok(run)) => Some(run),
            Ok(Err(error)) => error.take_outcome::<Run>(),
            Err(_) => None,
        };
        let unknown = || Outcome::Lost("how the shell ended is not known".into());
        run.map_or_else(unknown, |run| run.outcome)
    }

    fn over(&self, reason: &str) -> Error {
        let program = self.program.to_string_lossy();
        let message = format!("the session of {program:?} is over: {reason}; open another one");
        Error::new(ErrorKind::Lost, "shell", message).with_sandbox(self.sandbox.id())
    }

    fn started(&self, process: &ProcessId, command: &ShellCommand) -> Known {
        let program = self.program.to_string_lossy().into_owned();
        let text = String::from_utf8_lossy(&command.text).into_owned();
        let argv = vec![program, "-c".into(), text];
        Known::ProcessStarted { process: process.clone(), argv, detached: false }
    }
}

/// Why a session is over.
fn reason(outcome: &Outcome, timed_out: bool, words: &[u8]) -> String {
    let how = match outcome {
        _ if timed_out => return "a command's time was over".into(),
        Outcome::Exited(code) => format!("the shell exited with {code}"),
        Outcome::Signaled(signal) => format!("signal {signal} ended the shell"),
        Outcome::OutOfMemory => "the shell was killed for want of memory".into(),
        Outcome::Lost(reason) => reason.clone(),
        other => format!("{other:?}"),
    };
    let words = String::from_utf8_lossy(words);
    let last = words.lines().rev().find(|line| !line.trim().is_empty());
    match last {
        Some(line) => {
            let line: String = line.chars().filter(|c| !c.is_control()).take(200).collect();
            format!("{how}; it said last: {line}")
        }
        None => how,
    }
}

fn exited(process: &ProcessId, ended: &Result<(Outcome, Option<ShellDone>)>) -> Known {
    let process = process.clone();
    match ended {
        Ok((outcome, _)) => {
            Known::ProcessExited { process, outcome: Some(outcome.clone()), error: None }
        }
        Err(error) => {
            Known::ProcessExited { process, outcome: None, error: Some(error.to_string()) }
        }
    }
}

/// Kills a session, if it can be reached; whoever cannot reach it finds it gone.
async fn kill(recorder: &Recorder, shell: &ProcessId) {
    if let Err(error) = signal::kill(recorder, shell).await {
        tracing::debug!(%error, "a shell session was not killed");
    }
}

/// Ends the session, and records the command's end, if the future that ran it is dropped.
struct Guard(Option<Running>);

struct Running {
    recorder: Recorder,
    shell: ProcessId,
    command: ProcessId,
}

impl Drop for Guard {
    fn drop(&mut self) {
        let Some(Running { recorder, shell, command }) = self.0.take() else { return };
        // Outside a runtime the connection ends too, and with it the session.
        let Ok(runtime) = tokio::runtime::Handle::try_current() else { return };
        runtime.spawn(async move {
            kill(&recorder, &shell).await;
            let ended = Ok((Outcome::Cancelled, None));
            if let Err(error) = recorder.record(exited(&command, &ended)).await {
                tracing::warn!(%error, "a command's end could not be recorded");
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_no_shell_reads_is_refused() {
        let error = ShellCommand::new("a\0b").check().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidSpec);
        let error = ShellCommand::new(vec![b'x'; SHELL_TEXT_LIMIT + 1]).check().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::LimitExceeded);
        ShellCommand::from("echo \u{e4}; ls").check().unwrap();
    }

    #[test]
    fn a_reason_has_the_shells_last_words() {
        let said = reason(&Outcome::Exited(2), false, b"first\nsh: bad \x1b[1mthing\n\n");
        assert_eq!(said, "the shell exited with 2; it said last: sh: bad [1mthing");
        assert_eq!(reason(&Outcome::Signaled(9), true, b"x"), "a command's time was over");
    }
}
