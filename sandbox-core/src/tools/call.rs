//! Calling a tool.

use std::{collections::BTreeMap, time::Duration};

use base64::{Engine, engine::general_purpose::STANDARD as BASE64};
use serde::{Deserialize, de::DeserializeOwned};
use serde_json::{Map, Value, json};

use super::{Tool, ToolError, ToolErrorKind, Tools};
use crate::{
    Captured, Command, Error, ErrorKind, Outcome, Run, Sandbox, SandboxEvent, Snapshot, SnapshotId,
    TurnEventSink,
};

/// How many records of the history are told at most.
pub(super) const HISTORY_MOST: u64 = 500;

/// How many if nothing is said.
const HISTORY: u64 = 50;

/// How many bytes of a file are told at most.
pub(super) const READ_MOST: u64 = 1024 * 1024;

/// How many if nothing is said.
const READ: u64 = 64 * 1024;

/// How many bytes of each of a command's output streams are told.
const OUTPUT: usize = 32 * 1024;

/// How long a command may take at most, in seconds.
pub(super) const TIMEOUT_MOST: u64 = 3600;

/// How long if nothing is said.
const TIMEOUT: u64 = 120;

type Answer = Result<Value, ToolError>;

impl Tools {
    /// Does what the model asks for, in this sandbox, for this turn.
    ///
    /// Whatever it does to the sandbox is in the history and is told to the sink, as with every call of the
    /// harness. Dropping the future is as dropping that of the call behind the tool: a command is killed,
    /// a snapshot or rewind is finished all the same.
    ///
    /// # Errors
    ///
    /// A [`ToolError`] whose message says what to do instead; `EventDelivery`, with the result in it, if
    /// it was done and the sink refused an event.
    pub async fn call(
        &self,
        sandbox: &Sandbox,
        name: &str,
        arguments: Value,
        sink: &dyn TurnEventSink,
    ) -> Answer {
        let granted = Tool::by_name(name).filter(|tool| self.has(*tool));
        let Some(tool) = granted else {
            let names: Vec<&str> = self.granted.iter().map(|tool| tool.name()).collect();
            let names = if names.is_empty() { "none".into() } else { names.join(", ") };
            let message = format!("there is no tool {name:?}; there are: {names}");
            return Err(ToolError::new(ToolErrorKind::UnknownTool, message));
        };
        match tool {
            Tool::GetSandboxStatus => {
                let Nothing {} = read(tool, arguments)?;
                status(sandbox).await
            }
            Tool::ListSandboxSnapshots => {
                let Nothing {} = read(tool, arguments)?;
                list(sandbox).await
            }
            Tool::SnapshotSandbox => snapshot(sandbox, read(tool, arguments)?, sink).await,
            Tool::RewindSandbox => rewind(sandbox, read(tool, arguments)?, sink).await,
            Tool::ForkSandbox => fork(sandbox, read(tool, arguments)?, sink).await,
            Tool::SandboxHistory => history(sandbox, read(tool, arguments)?).await,
            Tool::SandboxExec => exec(sandbox, read(tool, arguments)?, sink).await,
            Tool::SandboxReadFile => read_file(sandbox, read(tool, arguments)?).await,
            Tool::SandboxWriteFile => write_file(sandbox, read(tool, arguments)?, sink).await,
        }
    }
}

/// The arguments, or what the tool takes instead.
fn read<T: DeserializeOwned>(tool: Tool, arguments: Value) -> Result<T, ToolError> {
    // Models leave arguments out where there are none.
    let arguments = if arguments.is_null() { json!({}) } else { arguments };
    serde_json::from_value(arguments).map_err(|error| {
        let takes = tool.takes();
        ToolError::invalid(format!("{}: {error}. It takes {takes}", tool.name()))
    })
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Nothing {}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Label {
    label: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Rewind {
    snapshot_id: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Fork {
    snapshot_id: String,
    name: Option<String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct History {
    after: Option<u64>,
    limit: Option<u64>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Exec {
    command: Option<String>,
    argv: Option<Vec<String>>,
    cwd: Option<String>,
    #[serde(default)]
    env: BTreeMap<String, String>,
    stdin: Option<String>,
    timeout_seconds: Option<u64>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ReadFile {
    path: String,
    #[serde(default)]
    offset: u64,
    length: Option<u64>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct WriteFile {
    path: String,
    content: String,
    #[serde(default)]
    encoding: Encoding,
    #[serde(default)]
    append: bool,
}

#[derive(Deserialize, Default)]
#[serde(rename_all = "lowercase")]
enum Encoding {
    #[default]
    Utf8,
    Base64,
}

/// What an agent may know of its sandbox: not who asked for it, and nothing of the host.
async fn status(sandbox: &Sandbox) -> Answer {
    let info = sandbox.info().await.map_err(plain)?;
    let snapshots = sandbox.snapshots().await.map_err(plain)?;
    Ok(json!({
        "sandbox_id": info.sandbox_id,
        "name": info.name,
        "state": info.state,
        "generation": info.generation,
        "workspace": info.workspace,
        "created_at": info.created_at,
        "ready_at": info.ready_at,
        "ttl": info.ttl,
        "expires_at": info.expires_at,
        "latest_snapshot": info.latest_snapshot,
        "snapshots": snapshots.len(),
    }))
}

async fn list(sandbox: &Sandbox) -> Answer {
    let current = sandbox.based_on().await.map_err(plain)?;
    let snapshots = sandbox.snapshots().await.map_err(plain)?;
    let told = snapshots.iter().map(|snapshot| {
        let mut told = describe(snapshot);
        told["current"] = json!(current.as_ref() == Some(&snapshot.id));
        told
    });
    Ok(json!({"snapshots": told.collect::<Vec<_>>()}))
}

fn describe(snapshot: &Snapshot) -> Value {
    json!({
        "snapshot_id": snapshot.id,
        "label": snapshot.label,
        "parent": snapshot.parent,
        "taken_at": snapshot.taken_at,
    })
}

async fn snapshot(sandbox: &Sandbox, Label { label }: Label, sink: &dyn TurnEventSink) -> Answer {
    if label.chars().count() > 200 {
        return Err(ToolError::invalid("snapshot_sandbox: the label has more than 200 characters"));
    }
    answer(sandbox.snapshot(label, sink).await, |snapshot| describe(&snapshot))
}

async fn rewind(sandbox: &Sandbox, asked: Rewind, sink: &dyn TurnEventSink) -> Answer {
    let snapshot = known(sandbox, &asked.snapshot_id).await?;
    let rewound = sandbox.rewind(&snapshot, sink).await;
    let generation = sandbox.info().await.map_err(plain)?.generation;
    answer(rewound, |()| json!({"snapshot_id": snapshot, "generation": generation}))
}

async fn fork(sandbox: &Sandbox, asked: Fork, sink: &dyn TurnEventSink) -> Answer {
    let snapshot = known(sandbox, &asked.snapshot_id).await?;
    let forked = sandbox.manager().fork(&snapshot, asked.name.as_deref(), sink).await;
    let name = asked.name;
    answer(forked, |fork| json!({"sandbox_id": fork.id(), "name": name, "snapshot_id": snapshot}))
}

/// A snapshot of this sandbox: an agent has no business with others'.
async fn known(sandbox: &Sandbox, id: &str) -> Result<SnapshotId, ToolError> {
    let snapshots = sandbox.snapshots().await.map_err(plain)?;
    if let Some(found) = snapshots.iter().find(|snapshot| snapshot.id.as_str() == id) {
        return Ok(found.id.clone());
    }
    let has = match &snapshots[..] {
        [] => "it has none yet; take one with snapshot_sandbox".to_owned(),
        some => {
            let newest = some.iter().rev().take(10);
            let words = newest.map(|kept| format!("{} ({:?})", kept.id, kept.label));
            format!("its newest are {}", words.collect::<Vec<_>>().join(", "))
        }
    };
    Err(ToolError::invalid(format!("this sandbox has no snapshot {id:?}; {has}")))
}

async fn history(sandbox: &Sandbox, asked: History) -> Answer {
    let limit = within("limit", asked.limit, HISTORY, HISTORY_MOST)?;
    let limit = usize::try_from(limit).unwrap_or(usize::MAX);
    let manager = sandbox.manager();
    let mut events =
        manager.history(sandbox.id(), asked.after.unwrap_or(0)).await.map_err(plain)?;
    let count = events.len();
    match asked.after {
        Some(_) => events.truncate(limit),
        None => drop(events.drain(..count.saturating_sub(limit))),
    }
    let more = asked.after.is_some() && count > events.len();
    let told: Vec<Value> = events.iter().map(record).collect();
    Ok(json!({"events": told, "more": more}))
}

/// What an agent may know of a record: what happened to it, not who asked, and nothing of the host.
fn record(event: &SandboxEvent) -> Value {
    const TOLD: [&str; 17] = [
        "name",
        "label",
        "snapshot",
        "parent",
        "process",
        "argv",
        "detached",
        "outcome",
        "error",
        "reason",
        "operation",
        "path",
        "generation",
        "expires_at",
        "what",
        "into",
        "backend",
    ];
    let all = serde_json::to_value(&event.kind).unwrap_or_default();
    let mut told = Map::new();
    told.insert("seq".into(), json!(event.seq));
    told.insert("at".into(), json!(event.at));
    told.insert("kind".into(), json!(event.name()));
    for key in TOLD {
        if !all[key].is_null() {
            told.insert(key.to_owned(), all[key].clone());
        }
    }
    Value::Object(told)
}

async fn exec(sandbox: &Sandbox, asked: Exec, sink: &dyn TurnEventSink) -> Answer {
    let mut command = match (asked.command, asked.argv) {
        (Some(text), None) => Command::shell(text),
        (None, Some(argv)) => {
            let [program, arguments @ ..] = &argv[..] else {
                return Err(ToolError::invalid(
                    "sandbox_exec: `argv` is empty; its first is the program",
                ));
            };
            Command::new(program).args(arguments)
        }
        (Some(_), Some(_)) => {
            let message = "sandbox_exec: give `command` or `argv`, not both";
            return Err(ToolError::invalid(message));
        }
        (None, None) => {
            let message =
                "sandbox_exec: give `command` (shell text) or `argv` (program and arguments)";
            return Err(ToolError::invalid(message));
        }
    };
    let seconds = within("timeout_seconds", asked.timeout_seconds, TIMEOUT, TIMEOUT_MOST)?;
    command = command.timeout(Duration::from_secs(seconds)).output_limit(OUTPUT);
    for (key, value) in &asked.env {
        command = command.env(key, value);
    }
    if let Some(cwd) = asked.cwd {
        command = command.current_dir(cwd);
    }
    if let Some(stdin) = asked.stdin {
        command = command.stdin(stdin);
    }
    answer(sandbox.exec(command, sink).await, |run| ended(&run))
}

fn ended(run: &Run) -> Value {
    let mut told = json!({
        "exit_code": run.outcome.code(),
        "outcome": run.outcome,
        "duration_ms": run.duration.as_millis() as u64,
        "stdout": run.stdout.text(),
        "stderr": run.stderr.text(),
    });
    let cut = |captured: &Captured| captured.is_cut();
    if cut(&run.stdout) || cut(&run.stderr) {
        told["note"] = json!(
            "output was left out in the middle; write it to a file and read parts of that to see all"
        );
    }
    if run.outcome == Outcome::TimedOut {
        told["note"] = json!("it took too long and was ended, with all that it had started");
    }
    told
}

async fn read_file(sandbox: &Sandbox, asked: ReadFile) -> Answer {
    let length = within("length", asked.length, READ, READ_MOST)?;
    let files = sandbox.files();
    let size = files.metadata(&asked.path).await.map_err(plain)?.size;
    // One byte more tells whether there is more.
    let mut part = files.read_range(&asked.path, asked.offset, length + 1).await.map_err(plain)?;
    let more = part.len() as u64 > length;
    part.truncate(usize::try_from(length).unwrap_or(usize::MAX));
    let (encoding, content) = match String::from_utf8(part) {
        Ok(text) => ("utf8", text),
        Err(error) => ("base64", BASE64.encode(error.as_bytes())),
    };
    Ok(json!({
        "path": asked.path,
        "size": size,
        "offset": asked.offset,
        "encoding": encoding,
        "content": content,
        "more": more,
    }))
}

async fn write_file(sandbox: &Sandbox, asked: WriteFile, sink: &dyn TurnEventSink) -> Answer {
    let bytes = match asked.encoding {
        Encoding::Utf8 => asked.content.into_bytes(),
        Encoding::Base64 => BASE64.decode(asked.content).map_err(|error| {
            ToolError::invalid(format!("sandbox_write_file: `content` is no base64: {error}"))
        })?,
    };
    let files = sandbox.files();
    let written = if asked.append {
        files.append(&asked.path, &bytes, sink).await
    } else {
        files.write(&asked.path, &bytes, sink).await
    };
    answer(written, |()| json!({"path": asked.path, "bytes_written": bytes.len()}))
}

/// A number within its bounds.
fn within(name: &str, asked: Option<u64>, usual: u64, most: u64) -> Result<u64, ToolError> {
    match asked.unwrap_or(usual) {
        number if (1..=most).contains(&number) => Ok(number),
        number => Err(ToolError::invalid(format!("{name} must be 1 to {most}, not {number}"))),
    }
}

/// A call's result as the model is told it, also where the sink refused an event of it.
fn answer<T: std::any::Any + Send>(
    result: crate::Result<T>,
    tell: impl FnOnce(T) -> Value,
) -> Answer {
    match result {
        Ok(done) => Ok(tell(done)),
        Err(error) if error.kind() == ErrorKind::EventDelivery => {
            let result = error.take_outcome::<T>().map(tell);
            Err(ToolError::undelivered(error, result))
        }
        Err(error) => Err(plain(error)),
    }
}

/// The sandbox's own error, with what an agent can do about it.
fn plain(error: Error) -> ToolError {
    let advice = match error.kind() {
        ErrorKind::Lost => Some(
            "What ran is gone; rewind_sandbox to one of list_sandbox_snapshots may bring the files back",
        ),
        ErrorKind::Unavailable | ErrorKind::Timeout => Some("Trying again may help"),
        _ => None,
    };
    ToolError::failed(error, advice)
}
