//! Running compose and the engine's program.

use std::{
    collections::BTreeMap,
    io,
    path::Path,
    process::{ExitStatus, Stdio},
    time::Duration,
};

use rustix::process::{Pid, Signal, kill_process_group};
use sandbox_core::{Error, ErrorKind, Result};
use tokio::{
    io::{AsyncRead, AsyncReadExt},
    process::Command,
};

use crate::account::MARK;

/// The most that is taken of what a program answers.
const MOST: usize = 8 << 20;
/// How much is kept of what it says beside that.
const WORDS: usize = 16 << 10;

/// A program with its first arguments, and all that it is run with.
#[derive(Debug, Clone)]
pub(super) struct Tool {
    pub(super) words: Vec<String>,
    pub(super) env: BTreeMap<String, String>,
    /// The instance that it is run for.
    pub(super) mark: Option<String>,
}

/// What a program said, and how it ended.
#[derive(Debug)]
pub(super) struct Said {
    status: ExitStatus,
    /// The answer.
    pub(super) out: Vec<u8>,
    /// The last of what was said beside it.
    err: Vec<u8>,
}

impl Tool {
    /// Runs it to its end for its answer, which is short, and for no longer than this. Dropping the future
    /// kills it, and what it started.
    pub(super) async fn ask(
        &self,
        operation: &'static str,
        arguments: &[&str],
        patience: Duration,
    ) -> Result<Said> {
        let said = self.run(operation, arguments, Path::new("/"), patience).await?;
        if said.out.len() < MOST {
            return Ok(said);
        }
        let message = format!("`{}` says more than can be taken", self.named(arguments));
        Err(Error::new(ErrorKind::LimitExceeded, operation, message))
    }

    /// Runs it to its end for what it does, in this directory and for no longer than this. Only the last of
    /// what it says is kept. Dropping the future kills it, and what it started.
    pub(super) async fn run(
        &self,
        operation: &'static str,
        arguments: &[&str],
        directory: &Path,
        patience: Duration,
    ) -> Result<Said> {
        let [program, first @ ..] = &self.words[..] else {
            let message = "no program is named for compose or its engine";
            return Err(Error::new(ErrorKind::InvalidSpec, operation, message));
        };
        let mut command = Command::new(program);
        command.args(first).args(arguments).current_dir(directory).envs(&self.env);
        if let Some(mark) = &self.mark {
            command.env(MARK, mark);
        }
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command.process_group(0).kill_on_drop(true);
        let mut child = command.spawn().map_err(|error| {
            let message = format!("the program {program} cannot be run on this host");
            let (missing, denied) = (io::ErrorKind::NotFound, io::ErrorKind::PermissionDenied);
            let kind = match error.kind() {
                kind if kind == missing || kind == denied => ErrorKind::Unavailable,
                _ => ErrorKind::Backend,
            };
            Error::new(kind, operation, message).with_source(error).retryable(false)
        })?;
        let mut group = Group(child.id());
        let (out, err) = (child.stdout.take(), child.stderr.take());
        let running = async {
            let (out, err) = tokio::join!(tail(out, MOST), tail(err, WORDS));
            Ok::<_, io::Error>((child.wait().await?, out, err))
        };
        match tokio::time::timeout(patience, running).await {
            Ok(Ok((status, out, err))) => {
                group.ended();
                Ok(Said { status, out, err })
            }
            Ok(Err(error)) => Err(Error::io(operation, self.named(arguments), error)),
            Err(_) => {
                let message = format!("`{}` takes longer than {patience:?}", self.named(arguments));
                Err(Error::new(ErrorKind::Timeout, operation, message))
            }
        }
    }

    /// The command line, for messages. The environment is not in it.
    pub(super) fn named(&self, arguments: &[&str]) -> String {
        let words = self.words.iter().map(String::as_str).chain(arguments.iter().copied());
        words.collect::<Vec<_>>().join(" ")
    }
}

impl Said {
    pub(super) fn is_success(&self) -> bool {
        self.status.success()
    }

    /// The lines of the answer.
    pub(super) fn lines(&self) -> Vec<String> {
        let text = String::from_utf8_lossy(&self.out);
        text.lines().map(str::trim).filter(|line| !line.is_empty()).map(str::to_owned).collect()
    }

    /// The last of what it said, as text in one line, and how it ended.
    pub(super) fn words(&self) -> String {
        let said = if self.err.iter().all(u8::is_ascii_whitespace) { &self.out } else { &self.err };
        format!("{} ({})", last_lines(said), self.status)
    }

    /// All that it said, both ways.
    pub(super) fn all(&self) -> Vec<u8> {
        [&self.out[..], &self.err[..]].concat()
    }
}

/// The last lines of what a program said, as text in one line.
pub(super) fn last_lines(said: &[u8]) -> String {
    const LINES: usize = 12;
    const MOST: usize = 1500;
    let text = String::from_utf8_lossy(said);
    let clean = |line: &str| line.chars().filter(|c| !c.is_control()).collect::<String>();
    let lines: Vec<String> =
        text.lines().map(clean).filter(|line| !line.trim().is_empty()).collect();
    let last = lines[lines.len().saturating_sub(LINES)..].join("; ");
    match last.char_indices().rev().nth(MOST) {
        Some((at, _)) => format!("…{}", &last[at..]),
        None => last,
    }
}

async fn tail(from: Option<impl AsyncRead + Unpin>, most: usize) -> Vec<u8> {
    let mut kept = Vec::new();
    let Some(mut from) = from else { return kept };
    let mut buffer = vec![0; 64 << 10];
    while let Ok(count @ 1..) = from.read(&mut buffer).await {
        kept.extend_from_slice(&buffer[..count]);
        let much = kept.len().saturating_sub(most);
        kept.drain(..much);
    }
    kept
}

/// A program that runs, and what it started: all of it is killed with this.
struct Group(Option<u32>);

impl Group {
    /// From now on its number may be another's.
    fn ended(&mut self) {
        self.0 = None;
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        let pid = self.0.and_then(|pid| Pid::from_raw(i32::try_from(pid).ok()?));
        if let Some(pid) = pid {
            let _ = kill_process_group(pid, Signal::KILL);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(text: &str) -> Tool {
        let words = ["sh", "-c", text].map(str::to_owned).into();
        Tool { words, env: BTreeMap::new(), mark: Some("ins_x".to_owned()) }
    }

    const LONG: Duration = Duration::from_secs(60);

    #[tokio::test]
    async fn what_a_program_says_is_told_apart_from_its_answer() {
        let mut tool = shell("echo \"$A $SANDBOX_INSTANCE\"; echo 1 >&2; echo 2 >&2; exit 3");
        tool.env.insert("A".into(), "b c".into());
        let said = tool.ask("try", &[], LONG).await.unwrap();
        assert_eq!(said.lines(), ["b c ins_x"]);
        assert!(!said.is_success());
        assert_eq!(said.words(), "1; 2 (exit status: 3)");
    }

    #[tokio::test]
    async fn a_missing_program_is_named() {
        let tool = Tool { words: vec!["no-such".into()], ..shell("") };
        let error = tool.ask("try", &["up"], LONG).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unavailable);
        assert!(error.to_string().contains("no-such"), "{error}");
    }

    #[tokio::test]
    async fn what_takes_too_long_is_ended_with_all_that_it_started() {
        let place = tempfile::tempdir().unwrap();
        let tool = shell("sleep 600 & echo $! > pid; wait");
        let patience = Duration::from_secs(2);
        let error = tool.run("try", &[], place.path(), patience).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Timeout, "{error}");
        let pid = std::fs::read_to_string(place.path().join("pid")).unwrap();
        let runs = || crate::process::start_time(pid.trim().parse().unwrap()).unwrap().is_some();
        while runs() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }
}
