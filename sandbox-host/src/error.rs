//! Making errors.

use std::{io, path::Path};

use sandbox_core::{Error, ErrorKind, Result};

/// For `map_err`: a failed operation on a file.
pub(crate) fn at<'a>(
    operation: &'static str,
    path: &'a Path,
) -> impl FnOnce(io::Error) -> Error + 'a {
    move |error| Error::io(operation, path.display().to_string(), error)
}

/// For `map_err`: a failed step that is described in words.
pub(crate) fn doing<'a>(
    operation: &'static str,
    what: &'a str,
) -> impl FnOnce(io::Error) -> Error + 'a {
    move |error| Error::io(operation, what, error)
}

/// An error of this backend that has no kind of its own.
pub(crate) fn failed(operation: &'static str, message: impl Into<String>) -> Error {
    Error::new(ErrorKind::Backend, operation, message)
}

/// Something that is gone.
pub(crate) fn lost(operation: &'static str, message: impl Into<String>) -> Error {
    Error::new(ErrorKind::Lost, operation, message)
}

/// Runs blocking work where it blocks no other task. The work is carried out to its end even if the
/// future is dropped.
pub(crate) async fn blocking<T: Send + 'static>(
    operation: &'static str,
    work: impl FnOnce() -> Result<T> + Send + 'static,
) -> Result<T> {
    match tokio::task::spawn_blocking(work).await {
        Ok(result) => result,
        Err(error) if error.is_panic() => {
            Err(failed(operation, "a fault in the backend itself").with_source(error))
        }
        Err(_) => Err(Error::new(ErrorKind::Cancelled, operation, "the runtime is shutting down")),
    }
}
