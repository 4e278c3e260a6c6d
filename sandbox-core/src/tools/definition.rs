//! What the tools are called, what they do, and what they take.

use serde::Serialize;
use serde_json::{Map, Value, json};

/// A tool.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum Tool {
    /// How the sandbox is.
    GetSandboxStatus,
    /// Its snapshots.
    ListSandboxSnapshots,
    /// Take a snapshot.
    SnapshotSandbox,
    /// Go back to one.
    RewindSandbox,
    /// Make another sandbox from one.
    ForkSandbox,
    /// What has happened.
    SandboxHistory,
    /// Run a command.
    SandboxExec,
    /// Read a file.
    SandboxReadFile,
    /// Write a file.
    SandboxWriteFile,
}

/// What a model is told of a tool.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[non_exhaustive]
pub struct ToolDefinition {
    /// What it is called.
    pub name: &'static str,
    /// What it does, and when to use it.
    pub description: &'static str,
    /// What it takes, as a JSON schema of an object.
    pub input_schema: Value,
    /// Whether it changes nothing.
    pub read_only: bool,
    /// Whether it may take away what was done before.
    pub destructive: bool,
}

/// One argument: name, schema, whether it is required.
type Argument = (&'static str, Value, bool);

impl Tool {
    /// Every tool.
    pub const ALL: [Self; 9] = [
        Self::GetSandboxStatus,
        Self::ListSandboxSnapshots,
        Self::SnapshotSandbox,
        Self::RewindSandbox,
        Self::ForkSandbox,
        Self::SandboxHistory,
        Self::SandboxExec,
        Self::SandboxReadFile,
        Self::SandboxWriteFile,
    ];

    /// What it is called.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::GetSandboxStatus => "get_sandbox_status",
            Self::ListSandboxSnapshots => "list_sandbox_snapshots",
            Self::SnapshotSandbox => "snapshot_sandbox",
            Self::RewindSandbox => "rewind_sandbox",
            Self::ForkSandbox => "fork_sandbox",
            Self::SandboxHistory => "sandbox_history",
            Self::SandboxExec => "sandbox_exec",
            Self::SandboxReadFile => "sandbox_read_file",
            Self::SandboxWriteFile => "sandbox_write_file",
        }
    }

    /// The tool of this name.
    #[must_use]
    pub fn by_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|tool| tool.name() == name)
    }

    /// What a model is told of it.
    #[must_use]
    pub fn definition(self) -> ToolDefinition {
        let looks = matches!(
            self,
            Self::GetSandboxStatus
                | Self::ListSandboxSnapshots
                | Self::SandboxHistory
                | Self::SandboxReadFile
        );
        ToolDefinition {
            name: self.name(),
            description: self.description(),
            input_schema: schema(&self.arguments()),
            read_only: looks,
            destructive: matches!(
                self,
                Self::RewindSandbox | Self::SandboxExec | Self::SandboxWriteFile
            ),
        }
    }

    fn description(self) -> &'static str {
        match self {
            Self::GetSandboxStatus => {
                "Tells how your sandbox is: its state, which generation of it this is, where the \
                 workspace is, its latest snapshot, and when it ends by itself."
            }
            Self::ListSandboxSnapshots => {
                "Lists the snapshots of your sandbox, oldest first. Each has the snapshot it was taken \
                 after as its parent; one is marked as what the present files came from."
            }
            Self::SnapshotSandbox => {
                "Remembers the present state of all files of your sandbox, so that rewind_sandbox can \
                 bring it back. Take one before a risky change; it is cheap. Running processes go on."
            }
            Self::RewindSandbox => {
                "Gives your sandbox the files that it had when a snapshot was taken. What was changed \
                 since is lost unless it is in another snapshot, and running processes end. The history \
                 stays."
            }
            Self::ForkSandbox => {
                "Makes another sandbox with the files of one of your snapshots, to try something beside \
                 this one. It is told by its id; your own sandbox goes on as it is."
            }
            Self::SandboxHistory => {
                "Tells what has happened to your sandbox, in order: commands, file changes, snapshots, \
                 rewinds and failures. Nothing is ever removed from it."
            }
            Self::SandboxExec => {
                "Runs a command in your sandbox and returns how it ended and what it said. Give either \
                 `command`, shell text, or `argv`, a program and its arguments. A non-zero exit code is a \
                 result, not a failure of the tool."
            }
            Self::SandboxReadFile => {
                "Reads a file of your sandbox, or a part of it. Relative paths begin at the workspace. \
                 What is not UTF-8 text comes as base64."
            }
            Self::SandboxWriteFile => {
                "Writes a file of your sandbox as a whole, or adds to its end. Directories above it are \
                 made. Relative paths begin at the workspace."
            }
        }
    }

    fn arguments(self) -> Vec<Argument> {
        match self {
            Self::GetSandboxStatus | Self::ListSandboxSnapshots => Vec::new(),
            Self::SnapshotSandbox => vec![(
                "label",
                json!({"type": "string", "maxLength": 200, "description": "Why, in a few words."}),
                true,
            )],
            Self::RewindSandbox => vec![snapshot_id("The snapshot to go back to.")],
            Self::ForkSandbox => vec![
                snapshot_id("The snapshot to begin from."),
                (
                    "name",
                    json!({
                        "type": "string",
                        "maxLength": 64,
                        "description": "A name for the new sandbox: letters, digits, '-', '_' and '.'.",
                    }),
                    false,
                ),
            ],
            Self::SandboxHistory => vec![
                (
                    "after",
                    json!({
                        "type": "integer",
                        "minimum": 0,
                        "description": "Only records after this number. Without it, the last ones.",
                    }),
                    false,
                ),
                (
                    "limit",
                    json!({
                        "type": "integer",
                        "minimum": 1,
                        "maximum": super::call::HISTORY_MOST,
                        "description": "How many records at most; 50 if not given.",
                    }),
                    false,
                ),
            ],
            Self::SandboxExec => vec![
                (
                    "command",
                    json!({"type": "string", "description": "Shell text, run by /bin/sh -c."}),
                    false,
                ),
                (
                    "argv",
                    json!({
                        "type": "array",
                        "items": {"type": "string"},
                        "minItems": 1,
                        "description": "A program and its arguments, without a shell.",
                    }),
                    false,
                ),
                (
                    "cwd",
                    json!({
                        "type": "string",
                        "description": "The directory to run in; the workspace if not given.",
                    }),
                    false,
                ),
                (
                    "env",
                    json!({
                        "type": "object",
                        "additionalProperties": {"type": "string"},
                        "description": "More environment variables.",
                    }),
                    false,
                ),
                ("stdin", json!({"type": "string", "description": "What it reads."}), false),
                (
                    "timeout_seconds",
                    json!({
                        "type": "integer",
                        "minimum": 1,
                        "maximum": super::call::TIMEOUT_MOST,
                        "description": "It is ended after this; 120 if not given.",
                    }),
                    false,
                ),
            ],
            Self::SandboxReadFile => vec![
                path(),
                (
                    "offset",
                    json!({"type": "integer", "minimum": 0, "description": "The first byte; 0 if not given."}),
                    false,
                ),
                (
                    "length",
                    json!({
                        "type": "integer",
                        "minimum": 1,
                        "maximum": super::call::READ_MOST,
                        "description": "How many bytes at most; 65536 if not given.",
                    }),
                    false,
                ),
            ],
            Self::SandboxWriteFile => vec![
                path(),
                ("content", json!({"type": "string", "description": "What to write."}), true),
                (
                    "encoding",
                    json!({
                        "type": "string",
                        "enum": ["utf8", "base64"],
                        "description": "What `content` is; utf8 if not given.",
                    }),
                    false,
                ),
                (
                    "append",
                    json!({
                        "type": "boolean",
                        "description": "Add to the end instead of replacing the file.",
                    }),
                    false,
                ),
            ],
        }
    }

    /// What it takes, in words: for the message about arguments that are not that.
    pub(super) fn takes(self) -> String {
        let arguments = self.arguments();
        if arguments.is_empty() {
            return "no arguments".into();
        }
        let words = arguments.iter().map(|(name, schema, required)| {
            let kind = schema["type"].as_str().unwrap_or("value");
            let need = if *required { "required" } else { "optional" };
            format!("{name} ({kind}, {need})")
        });
        words.collect::<Vec<_>>().join(", ")
    }
}

fn snapshot_id(description: &str) -> Argument {
    let description = format!("{description} An id of list_sandbox_snapshots, such as snp_0198….");
    ("snapshot_id", json!({"type": "string", "description": description}), true)
}

fn path() -> Argument {
    ("path", json!({"type": "string", "description": "The file's path in the sandbox."}), true)
}

fn schema(arguments: &[Argument]) -> Value {
    let required: Vec<&str> =
        arguments.iter().filter(|(_, _, required)| *required).map(|(name, ..)| *name).collect();
    let properties: Map<String, Value> =
        arguments.iter().map(|(name, schema, _)| ((*name).to_owned(), schema.clone())).collect();
    json!({
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": false,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tools::Tools;

    #[test]
    fn names_lead_back_to_their_tools() {
        for tool in Tool::ALL {
            assert_eq!(Tool::by_name(tool.name()), Some(tool));
        }
        assert_eq!(Tool::by_name("rm"), None);
        assert_eq!(Tools::all().definitions().len(), Tool::ALL.len());
    }

    #[test]
    fn the_definitions_are_what_models_are_told() {
        insta::assert_json_snapshot!(Tools::all().definitions());
    }

    #[test]
    fn what_was_not_granted_is_not_told() {
        let tools = Tools::all().without(Tool::SandboxExec);
        assert!(!tools.has(Tool::SandboxExec));
        assert!(tools.definitions().iter().all(|definition| definition.name != "sandbox_exec"));
    }
}
