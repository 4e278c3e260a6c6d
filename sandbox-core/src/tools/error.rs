//! What a model is told when a tool did not do what it wanted.

use std::{error::Error as StdError, fmt};

use serde::Serialize;
use serde_json::{Value, json};

use crate::Error;

/// What kind of failure.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum ToolErrorKind {
    /// There is no such tool, or it was not granted.
    UnknownTool,
    /// The arguments are not what the tool takes; the message says what it takes.
    InvalidArguments,
    /// The sandbox could not do it; the message says why and what to do.
    Failed,
    /// It was done, but the turn's sink refused an event: a matter of the harness, not of the model.
    /// [`ToolError::result`] has what the tool would have answered.
    EventDelivery,
}

/// Why a tool did not do what the model wanted, in words that it can act on.
#[derive(Debug, Clone)]
pub struct ToolError {
    kind: ToolErrorKind,
    message: String,
    source: Option<Error>,
    result: Option<Value>,
}

impl ToolError {
    pub(super) fn new(kind: ToolErrorKind, message: impl Into<String>) -> Self {
        Self { kind, message: message.into(), source: None, result: None }
    }

    pub(super) fn invalid(message: impl Into<String>) -> Self {
        Self::new(ToolErrorKind::InvalidArguments, message)
    }

    pub(super) fn failed(error: Error, advice: Option<&str>) -> Self {
        let mut message = error.to_string();
        if let Some(advice) = advice {
            message = format!("{message}. {advice}");
        }
        Self { kind: ToolErrorKind::Failed, message, source: Some(error), result: None }
    }

    pub(super) fn undelivered(error: Error, result: Option<Value>) -> Self {
        let kind = ToolErrorKind::EventDelivery;
        Self { kind, message: error.to_string(), source: Some(error), result }
    }

    /// What kind of failure.
    #[must_use]
    pub fn kind(&self) -> ToolErrorKind {
        self.kind
    }

    /// The sandbox's own error, if it is one.
    #[must_use]
    pub fn sandbox_error(&self) -> Option<&Error> {
        self.source.as_ref()
    }

    /// What the tool would have answered, if only the events could not be delivered.
    #[must_use]
    pub fn result(&self) -> Option<&Value> {
        self.result.as_ref()
    }

    /// As the document that a model is given.
    #[must_use]
    pub fn to_json(&self) -> Value {
        let retryable = self.source.as_ref().is_some_and(Error::is_retryable);
        json!({"error": {"kind": self.kind, "message": self.message, "retryable": retryable}})
    }
}

impl fmt::Display for ToolError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl StdError for ToolError {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        self.source.as_ref().map(|source| source as _)
    }
}
