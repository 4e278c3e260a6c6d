//! The conversation with the keeper of a shell, over the keeper's standard input and output.

use std::time::Duration;

use sandbox_guest::{
    SHELL_INPUT_WINDOW, ShellDone, ShellEvent, ShellRequest,
    frame::{self, Channel, Decoder, Frame},
};
use tokio::time::Instant;

use super::ShellCommand;
use crate::{
    Chunk, Error, ErrorKind, Outcome, Process, ProcessId, Result, Run,
    guest::{failed, garbage},
    outcome::Capture,
};

/// How long a shell that is told to stop may take to be gone.
const STOP: Duration = Duration::from_secs(5);

/// The conversation.
#[derive(Debug)]
pub(super) struct Conversation {
    process: Process,
    decoder: Decoder,
    /// Of the command that was run last.
    number: u64,
}

/// How a command ended.
#[derive(Debug)]
pub(super) enum End {
    /// The shell goes on.
    Done(ShellDone),
    /// The shell has ended: with this command, or (`None`) before it.
    Over { done: Option<ShellDone>, timed_out: bool, words: Vec<u8> },
    /// Its time was over, and the keeper does not answer.
    Stuck,
    /// The keeper is gone.
    Lost,
}

impl Conversation {
    pub(super) fn new(process: Process) -> Self {
        Self { process, decoder: Decoder::default(), number: 0 }
    }

    pub(super) fn into_process(self) -> Process {
        self.process
    }

    /// Makes sure that it is a shell.
    pub(super) async fn greet(&mut self) -> Result<()> {
        let mut nothing = Captures::new(0);
        let end = self.run(ShellCommand::new(":"), &mut nothing).await?;
        let message = match end {
            End::Done(done) if done.status == 0 => return Ok(()),
            End::Done(done) => format!("told to run nothing, it says {}", done.status),
            End::Over { words, .. } => {
                let words = String::from_utf8_lossy(&words).into_owned();
                format!("it ended at once, and said last: {:?}", words.trim())
            }
            End::Stuck => "it does not answer".to_owned(),
            End::Lost => {
                return Err(Error::new(ErrorKind::Lost, "shell", "it was killed at once"));
            }
        };
        Err(Error::unsupported("shell", format!("this is no shell that can be used: {message}")))
    }

    /// Runs a command. What it says is captured as it comes. The conversation is spoilt if this is
    /// cancelled.
    pub(super) async fn run(
        &mut self,
        command: ShellCommand,
        captured: &mut Captures,
    ) -> Result<End> {
        let Some(timeout) = command.timeout else {
            return self.converse(command, None, captured).await;
        };
        let deadline = Instant::now() + timeout;
        let ended = self.converse(command, Some(deadline), captured);
        // A keeper that is held up answers nothing.
        match tokio::time::timeout_at(deadline + STOP, ended).await {
            Ok(end) => end,
            Err(_) => Ok(End::Stuck),
        }
    }

    async fn converse(
        &mut self,
        command: ShellCommand,
        deadline: Option<Instant>,
        captured: &mut Captures,
    ) -> Result<End> {
        self.number += 1;
        let (number, text) = (self.number, command.text.into());
        let run = ShellRequest::Run { number, text, stdin: command.stdin.is_some() };
        let mut input = Input { bytes: command.stdin.unwrap_or_default(), sent: 0, ended: true };
        input.ended = !matches!(run, ShellRequest::Run { stdin: true, .. });
        // A keeper that is gone says so on the other side.
        let _ = self.say(&run).await;
        self.feed(&mut input, 0).await;
        let (mut stopped, mut done) = (false, None);
        loop {
            let frame = tokio::select! {
                frame = self.next_frame() => frame?,
                () = until(deadline), if !stopped => {
                    stopped = true;
                    let _ = self.say(&ShellRequest::Stop).await;
                    continue;
                }
            };
            let event = match frame {
                Some(Frame::Data(Channel::Out, bytes)) => {
                    captured.stdout.push(&bytes);
                    continue;
                }
                Some(Frame::Data(Channel::Err, bytes)) => {
                    captured.stderr.push(&bytes);
                    continue;
                }
                Some(Frame::Data(Channel::In, _)) => return Err(strange("input")),
                Some(Frame::Message(message)) => frame::decode(&message).map_err(garbage)?,
                None => return Ok(End::Lost),
            };
            match event {
                ShellEvent::Took { stdin } => self.feed(&mut input, stdin).await,
                ShellEvent::Done(ended) if ended.number == self.number => {
                    if !input.ended {
                        let _ = self.say(&ShellRequest::End).await;
                        input.ended = true;
                    }
                    // Told to stop at its last moment, the shell ends all the same.
                    if !stopped {
                        return Ok(End::Done(ended));
                    }
                    done = Some(ended);
                }
                ShellEvent::Ended { command, words, .. } => {
                    let timed_out = stopped && done.is_none();
                    let done = done.or(command.filter(|done| done.number == self.number));
                    return Ok(End::Over { done, timed_out, words: words.into_vec() });
                }
                ShellEvent::Failed(failure) => return Err(failed(failure)),
                other => return Err(strange(&format!("{other:?}"))),
            }
        }
    }

    /// Lets the shell end, and waits until it has.
    pub(super) async fn close(&mut self) -> Result<()> {
        self.process.end_stdin().await?;
        while let Some(frame) = self.next_frame().await? {
            if let Frame::Message(message) = frame
                && let ShellEvent::Ended { .. } = frame::decode(&message).map_err(garbage)?
            {
                break;
            }
        }
        Ok(())
    }

    /// Sends as much of a command's input as there is room for.
    async fn feed(&mut self, input: &mut Input, taken: u64) {
        while !input.ended {
            let room = taken.saturating_add(SHELL_INPUT_WINDOW).saturating_sub(input.sent);
            let rest = &input.bytes[input.sent as usize..];
            let now = &rest[..rest.len().min(room as usize).min(frame::MAX_DATA)];
            let told = if rest.is_empty() {
                input.ended = true;
                self.say(&ShellRequest::End).await
            } else if now.is_empty() {
                return;
            } else {
                let mut data = frame::data_head(Channel::In, now.len()).to_vec();
                data.extend_from_slice(now);
                input.sent += now.len() as u64;
                self.process.write_stdin(&data).await
            };
            if told.is_err() {
                // The other side tells why.
                input.ended = true;
            }
        }
    }

    async fn say(&mut self, request: &ShellRequest) -> Result<()> {
        let encoded = frame::encode(request).map_err(garbage)?;
        self.process.write_stdin(&encoded).await
    }

    /// The next frame; `None` at the keeper's end. Safe to cancel.
    async fn next_frame(&mut self) -> Result<Option<Frame>> {
        loop {
            if let Some(frame) = self.decoder.next_frame().map_err(garbage)? {
                return Ok(Some(frame));
            }
            match self.process.next_output().await {
                Some(Chunk::Stdout(bytes)) => self.decoder.push(&bytes),
                // A keeper has nothing to say there.
                Some(Chunk::Stderr(_)) => {}
                None => return Ok(None),
            }
        }
    }
}

/// A command's standard input, as far as it has been sent.
struct Input {
    bytes: Vec<u8>,
    sent: u64,
    ended: bool,
}

/// What a command says, within limits.
#[derive(Debug)]
pub(super) struct Captures {
    stdout: Capture,
    stderr: Capture,
}

impl Captures {
    pub(super) fn new(limit: usize) -> Self {
        Self { stdout: Capture::new(limit), stderr: Capture::new(limit) }
    }

    pub(super) fn into_run(
        self,
        process: ProcessId,
        outcome: Outcome,
        done: Option<&ShellDone>,
    ) -> Run {
        let figure = |of: fn(&ShellDone) -> u64| Duration::from_micros(done.map_or(0, of));
        Run {
            process,
            outcome,
            stdout: self.stdout.finish(),
            stderr: self.stderr.finish(),
            output_open: done.is_some_and(|done| done.output_open),
            duration: figure(|done| done.duration_us),
            cpu: figure(|done| done.cpu_us),
            max_memory: 0,
        }
    }
}

async fn until(deadline: Option<Instant>) {
    match deadline {
        Some(deadline) => tokio::time::sleep_until(deadline).await,
        None => std::future::pending().await,
    }
}

fn strange(what: &str) -> Error {
    let what: String = what.chars().take(200).collect();
    Error::new(
        ErrorKind::Guest,
        "shell",
        format!("the shell's keeper sent what it must not: {what}"),
    )
}
