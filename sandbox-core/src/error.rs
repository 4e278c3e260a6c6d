//! The one error of the SDK.

use std::{
    any::Any,
    error::Error as StdError,
    fmt,
    sync::{Arc, Mutex, PoisonError},
};

use serde::{Deserialize, Serialize};

use crate::{BackendId, SandboxId};

/// What the SDK's calls return.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What kind of failure; the thing to branch on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum ErrorKind {
    /// A sandbox, snapshot, process, program, file, directory or user that does not exist.
    NotFound,
    /// A live sandbox has this name already.
    NameTaken,
    /// A live sandbox of this name was asked for with another spec; the message names the fields.
    SpecMismatch,
    /// The request makes no sense, whatever the host.
    InvalidSpec,
    /// This backend or host cannot do it, and does not do something weaker instead.
    Unsupported,
    /// What is needed is not there now: a daemon, a host, a program.
    Unavailable,
    /// It took longer than it may.
    Timeout,
    /// The caller took it back.
    Cancelled,
    /// The instance, or what ran in it, is gone.
    Lost,
    /// Another manager's sandbox, or a borrowed one.
    NotOwned,
    /// The sandbox is in a state in which this cannot be done.
    Conflict,
    /// A limit was met; the message names it.
    LimitExceeded,
    /// The system, or the sandbox's system, does not allow it.
    PermissionDenied,
    /// The call was carried out, but a sink refused an event of it: [`Error::take_outcome`] has the result,
    /// and the event is offered again.
    EventDelivery,
    /// The guest broke the protocol, or failed in a way that has no kind of its own.
    Guest,
    /// A setup command failed; the message has what it said.
    Setup,
    /// The journal cannot be read or written.
    Journal,
    /// The backend failed in a way that has no kind of its own.
    Backend,
}

/// What failed, for which sandbox, why, and what to do.
///
/// Opaque and cheap to clone. [`kind`](Self::kind) is for programs, the message for people; causes are
/// in the [source](StdError::source) chain.
#[derive(Clone)]
pub struct Error(Arc<Inner>);

/// A refused call's result, until it is taken.
type Carried = Option<Box<dyn Any + Send>>;

#[derive(Clone)]
struct Inner {
    kind: ErrorKind,
    operation: &'static str,
    message: String,
    sandbox: Option<SandboxId>,
    backend: Option<BackendId>,
    retryable: Option<bool>,
    outcome: Option<Arc<Mutex<Carried>>>,
    source: Option<Arc<dyn StdError + Send + Sync>>,
}

impl Error {
    /// An error of an operation (`"provision"`, `"snapshot"` …); the message says why and what to do.
    pub fn new(kind: ErrorKind, operation: &'static str, message: impl Into<String>) -> Self {
        Self(Arc::new(Inner {
            kind,
            operation,
            message: message.into(),
            sandbox: None,
            backend: None,
            retryable: None,
            outcome: None,
            source: None,
        }))
    }

    /// What a backend or host cannot do, and why not.
    pub fn unsupported(operation: &'static str, reason: impl Into<String>) -> Self {
        Self::new(ErrorKind::Unsupported, operation, reason)
    }

    /// A failed system call or file operation: the kind follows from the cause, the message says on what.
    pub fn io(operation: &'static str, what: impl Into<String>, source: std::io::Error) -> Self {
        use std::io::ErrorKind as Io;
        let kind = match source.kind() {
            Io::NotFound => ErrorKind::NotFound,
            Io::PermissionDenied | Io::ReadOnlyFilesystem => ErrorKind::PermissionDenied,
            Io::TimedOut => ErrorKind::Timeout,
            Io::StorageFull | Io::QuotaExceeded => ErrorKind::LimitExceeded,
            Io::ConnectionRefused | Io::ConnectionReset | Io::BrokenPipe | Io::NotConnected => {
                ErrorKind::Unavailable
            }
            _ => ErrorKind::Backend,
        };
        Self::new(kind, operation, what).with_source(source)
    }

    /// The same error, about this sandbox.
    #[must_use]
    pub fn with_sandbox(self, sandbox: &SandboxId) -> Self {
        self.edit(|inner| {
            inner.sandbox.get_or_insert_with(|| sandbox.clone());
        })
    }

    /// The same error, of this backend.
    #[must_use]
    pub fn with_backend(self, backend: &BackendId) -> Self {
        self.edit(|inner| {
            inner.backend.get_or_insert_with(|| backend.clone());
        })
    }

    /// The same error, with its cause.
    #[must_use]
    pub fn with_source(self, source: impl StdError + Send + Sync + 'static) -> Self {
        self.edit(|inner| inner.source = Some(Arc::new(source)))
    }

    /// The same error, said to be worth another try or not.
    #[must_use]
    pub fn retryable(self, retryable: bool) -> Self {
        self.edit(|inner| inner.retryable = Some(retryable))
    }

    /// The same error, with the result of the call that was carried out all the same.
    #[must_use]
    pub fn with_outcome<T: Any + Send>(self, outcome: T) -> Self {
        self.edit(|inner| inner.outcome = Some(Arc::new(Mutex::new(Some(Box::new(outcome))))))
    }

    /// What kind of failure.
    #[must_use]
    pub fn kind(&self) -> ErrorKind {
        self.0.kind
    }

    /// What was being done.
    #[must_use]
    pub fn operation(&self) -> &'static str {
        self.0.operation
    }

    /// The sandbox that it is about.
    #[must_use]
    pub fn sandbox(&self) -> Option<&SandboxId> {
        self.0.sandbox.as_ref()
    }

    /// The backend that it is about.
    #[must_use]
    pub fn backend(&self) -> Option<&BackendId> {
        self.0.backend.as_ref()
    }

    /// Why, without the context that `Display` adds.
    #[must_use]
    pub fn message(&self) -> &str {
        &self.0.message
    }

    /// Whether the same call may succeed a little later.
    #[must_use]
    pub fn is_retryable(&self) -> bool {
        self.0
            .retryable
            .unwrap_or(matches!(self.0.kind, ErrorKind::Unavailable | ErrorKind::Timeout))
    }

    /// With [`ErrorKind::EventDelivery`]: what the call would have returned. It can be taken once; asking
    /// for another type leaves it.
    #[must_use]
    pub fn take_outcome<T: Any>(&self) -> Option<T> {
        let mut slot = self.0.outcome.as_ref()?.lock().unwrap_or_else(PoisonError::into_inner);
        match slot.take()?.downcast::<T>() {
            Ok(outcome) => Some(*outcome),
            Err(other) => {
                *slot = Some(other);
                None
            }
        }
    }

    fn edit(mut self, change: impl FnOnce(&mut Inner)) -> Self {
        change(Arc::make_mut(&mut self.0));
        self
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0.operation)?;
        if let Some(sandbox) = &self.0.sandbox {
            write!(f, " of {sandbox}")?;
        }
        if let Some(backend) = &self.0.backend {
            write!(f, " ({backend})")?;
        }
        write!(f, ": {}", self.0.message)?;
        if let Some(source) = &self.0.source {
            write!(f, ": {source}")?;
        }
        Ok(())
    }
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Error {{ {:?}, {self} }}", self.0.kind)
    }
}

impl StdError for Error {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        self.0.source.as_deref().map(|source| source as _)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_says_what_for_which_and_why() {
        let id = SandboxId::new();
        let cause = std::io::Error::other("disk on fire");
        let error = Error::io("snapshot", "/var/x", cause)
            .with_sandbox(&id)
            .with_backend(&BackendId::new("bwrap"));
        assert_eq!(error.to_string(), format!("snapshot of {id} (bwrap): /var/x: disk on fire"));
        assert!(!error.is_retryable());
        assert!(error.source().is_some());
    }

    #[test]
    fn an_outcome_comes_back_as_what_it_was() {
        let error = Error::new(ErrorKind::EventDelivery, "exec", "no").with_outcome(7_u32);
        assert_eq!(error.take_outcome::<u64>(), None);
        assert_eq!(error.take_outcome::<u32>(), Some(7));
        assert_eq!(error.take_outcome::<u32>(), None);
    }
}
