//! What is done in a fresh instance before its sandbox is ready.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use super::{Fresh, Recorder};
use crate::{
    Command, Error, ErrorKind, Known, Outcome, OutputPiece, ProcessId, Result,
    secret::{self, Secret, Secrets},
    session::{Input, Outlet, Session},
    spec::{SandboxSpec, Setup},
    way::Way,
};

/// How long all setup commands together may take.
pub(super) const LIMIT: Duration = Duration::from_secs(1800);

/// How often it is looked whether anybody still waits.
const LOOK: Duration = Duration::from_millis(200);

/// How much of what a failed command said is told, in bytes.
const TOLD: usize = 8 * 1024;

/// Secrets and their names.
pub(super) type Resolved = Vec<(String, Secret)>;

/// The secrets that the commands need; done before anything is made, so that a missing one leaves
/// nothing behind.
pub(super) async fn resolve(setup: &Setup, secrets: &dyn Secrets) -> Result<Resolved> {
    let mut resolved = Vec::new();
    for reference in &setup.secret_refs {
        let value = secret::resolve(secrets, reference).await?;
        resolved.push((reference.clone(), value));
    }
    Ok(resolved)
}

/// Runs the commands one after the other.
pub(super) async fn run(
    recorder: &Recorder,
    fresh: &Arc<Fresh>,
    spec: &SandboxSpec,
    secrets: &Resolved,
) -> Result<()> {
    let deadline = Instant::now() + LIMIT;
    let count = spec.setup.commands.len();
    for (number, text) in spec.setup.commands.iter().enumerate() {
        let mut command = Command::shell(text)
            .timeout(deadline.saturating_duration_since(Instant::now()))
            .secrets_resolved(secrets);
        for (key, value) in &spec.setup.inputs {
            command = command.env(variable(key), value);
        }
        let process = ProcessId::new();
        let started = Known::ProcessStarted {
            process: process.clone(),
            argv: command.argv(),
            detached: false,
        };
        recorder.record(started).await?;
        let mut output = Tail::default();
        let start = command.to_start(&process)?;
        let ended = run_one(recorder, fresh, process.clone(), start, &mut output).await;
        let (outcome, error) = match &ended {
            Ok(outcome) => (Some(outcome.clone()), None),
            Err(error) => (None, Some(error.to_string())),
        };
        recorder.record(Known::ProcessExited { process, outcome, error }).await?;
        let outcome = ended?;
        if !outcome.is_success() {
            let how = match &outcome {
                Outcome::Exited(code) => format!("exited with {code}"),
                Outcome::TimedOut => format!("took longer than {} s", LIMIT.as_secs()),
                other => format!("ended otherwise: {other:?}"),
            };
            let message = format!(
                "setup command {} of {count} {how}: {text}\n{}",
                number + 1,
                output.told(secrets)
            );
            return Err(Error::new(ErrorKind::Setup, "set up", message));
        }
    }
    Ok(())
}

/// An input's environment variable.
fn variable(key: &str) -> String {
    format!("SANDBOX_INPUT_{}", key.to_ascii_uppercase().replace('-', "_"))
}

/// Runs one command to its end, as long as somebody waits for it. A connection that is cut is made anew.
async fn run_one(
    recorder: &Recorder,
    fresh: &Arc<Fresh>,
    process: ProcessId,
    start: sandbox_guest::Start,
    output: &mut Tail,
) -> Result<Outcome> {
    let run = async {
        let way = Way::Fresh(Arc::clone(fresh));
        let mut session = Session::start(way, process, start, Input::default(), None).await?;
        match session.run(output).await?.outcome {
            Outcome::Lost(reason) => Err(Error::new(ErrorKind::Lost, "set up", reason)),
            outcome => Ok(outcome),
        }
    };
    let abandoned = async {
        while !recorder.is_abandoned() {
            tokio::time::sleep(LOOK).await;
        }
    };
    tokio::select! {
        ended = run => ended,
        () = abandoned => {
            let message = "the caller went away before it was made";
            Err(Error::new(ErrorKind::Cancelled, "set up", message))
        }
    }
}

/// The end of what a command says.
#[derive(Default)]
struct Tail {
    bytes: Vec<u8>,
    cut: bool,
}

impl Outlet for Tail {
    async fn give(&mut self, piece: OutputPiece) {
        self.push(&piece.bytes);
    }
}

impl Tail {
    /// How much is kept, so that what is told stays whole when secrets are taken out of it.
    const KEPT: usize = 16 * TOLD;

    fn push(&mut self, bytes: &[u8]) {
        self.bytes.extend_from_slice(bytes);
        let surplus = self.bytes.len().saturating_sub(Self::KEPT);
        // Not for every byte.
        if surplus > Self::KEPT {
            self.bytes.drain(..surplus);
            self.cut = true;
        }
    }

    /// As text, without secrets.
    fn told(&self, secrets: &Resolved) -> String {
        let longest = secrets.iter().map(|(_, secret)| secret.expose().len()).max().unwrap_or(0);
        // What is left of a secret that was cut at the beginning is one too.
        let from = if self.cut { longest.min(self.bytes.len()) } else { 0 };
        let clean = secret::redact(&self.bytes[from..], secrets);
        let last = &clean[clean.len().saturating_sub(TOLD)..];
        let text = String::from_utf8_lossy(last);
        if self.cut || last.len() < clean.len() {
            format!("[…] {text}")
        } else {
            text.into_owned()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_told_is_the_end_without_secrets() {
        let secrets = vec![("KEY".to_owned(), Secret::new("topsecret"))];
        let mut tail = Tail::default();
        tail.push(b"a topsecret b");
        assert_eq!(tail.told(&secrets), "a [secret KEY] b");
        let mut tail = Tail::default();
        for _ in 0..100_000 {
            tail.push(b"topsecret ");
        }
        let told = tail.told(&secrets);
        assert!(told.len() < TOLD + 100 && told.starts_with("[…] "), "{}", told.len());
        for part in ["topsecret", "opsecret", "psecret", "tops"] {
            assert!(!told.contains(part), "{part} is left of it");
        }
    }

    #[test]
    fn an_input_is_a_variable() {
        assert_eq!(variable("base-ref"), "SANDBOX_INPUT_BASE_REF");
    }
}
