//! How failures are made: of the system's errors, and others.

use std::io;

use rustix::io::Errno;

use super::{Failure, FailureKind};

impl Failure {
    /// A failure that is not the system's.
    #[must_use]
    pub fn new(kind: FailureKind, message: impl Into<String>) -> Self {
        Self { kind, message: message.into(), errno: None }
    }

    /// The system's failure; `what` says what was tried, on what.
    #[must_use]
    pub fn system(what: &str, error: &io::Error) -> Self {
        let kind = match error.kind() {
            io::ErrorKind::NotFound => FailureKind::NotFound,
            io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem => {
                FailureKind::PermissionDenied
            }
            io::ErrorKind::AlreadyExists | io::ErrorKind::DirectoryNotEmpty => {
                FailureKind::AlreadyExists
            }
            io::ErrorKind::NotADirectory | io::ErrorKind::IsADirectory => FailureKind::WrongType,
            io::ErrorKind::StorageFull
            | io::ErrorKind::QuotaExceeded
            | io::ErrorKind::FileTooLarge => FailureKind::LimitExceeded,
            io::ErrorKind::InvalidInput | io::ErrorKind::InvalidFilename => FailureKind::Invalid,
            _ => match Errno::from_io_error(error) {
                Some(Errno::AGAIN | Errno::NOMEM | Errno::MFILE | Errno::NFILE) => {
                    FailureKind::LimitExceeded
                }
                _ => FailureKind::System,
            },
        };
        let message = format!("{what}: {}", errno_text(error));
        Self { kind, message, errno: error.raw_os_error() }
    }
}

/// The error's text without "(os error N)".
#[must_use]
pub fn errno_text(error: &io::Error) -> String {
    let text = error.to_string();
    match text.find(" (os error") {
        Some(at) => text[..at].to_owned(),
        None => text,
    }
}
