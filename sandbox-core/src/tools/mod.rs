//! Tools for an agent's own control of its sandbox: their definitions, and one dispatcher.
//!
//! The harness decides which of them it offers, and offers them in its model's way: a [`ToolDefinition`]
//! has what every model's interface wants. When the model calls one, the harness passes name and
//! arguments on to [`Tools::call`], with the sandbox and the turn's sink.
//!
//! ```no_run
//! # async fn turn(sandbox: sandbox_core::Sandbox, sink: &dyn sandbox_core::TurnEventSink) {
//! use sandbox_core::tools::{Tool, Tools};
//! use serde_json::json;
//!
//! // This agent may look, and go back to where it was; it cannot fork.
//! let tools = Tools::of([Tool::GetSandboxStatus, Tool::SnapshotSandbox, Tool::RewindSandbox]);
//! for definition in tools.definitions() {
//!     println!("{}: {}", definition.name, definition.description);
//! }
//! let arguments = json!({"label": "before the refactor"});
//! match tools.call(&sandbox, "snapshot_sandbox", arguments, sink).await {
//!     Ok(result) => println!("{result}"),
//!     // Something that the model can act on.
//!     Err(error) => println!("{}", error.to_json()),
//! }
//! # }
//! ```

mod call;
mod definition;
mod error;

use std::collections::BTreeSet;

pub use definition::{Tool, ToolDefinition};
pub use error::{ToolError, ToolErrorKind};

/// The tools that an agent was granted.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Tools {
    granted: BTreeSet<Tool>,
}

impl Tools {
    /// All of them.
    #[must_use]
    pub fn all() -> Self {
        Self::of(Tool::ALL)
    }

    /// These.
    #[must_use]
    pub fn of(tools: impl IntoIterator<Item = Tool>) -> Self {
        Self { granted: tools.into_iter().collect() }
    }

    /// The same without this one.
    #[must_use]
    pub fn without(mut self, tool: Tool) -> Self {
        self.granted.remove(&tool);
        self
    }

    /// Whether it was granted.
    #[must_use]
    pub fn has(&self, tool: Tool) -> bool {
        self.granted.contains(&tool)
    }

    /// What the model is told of them.
    #[must_use]
    pub fn definitions(&self) -> Vec<ToolDefinition> {
        self.granted.iter().map(|tool| tool.definition()).collect()
    }
}
