//! Making errors.

use bollard::errors::Error as Docker;
use sandbox_core::{Error, ErrorKind};

/// The backend's id, also in its errors.
pub(crate) const ID: &str = "docker";

/// For `map_err`: the engine refused, or could not be reached; `what` says what was asked of it.
pub(crate) fn asking<'a>(
    operation: &'static str,
    what: impl Into<String> + 'a,
) -> impl FnOnce(Docker) -> Error + 'a {
    move |error| engine(operation, what, error)
}

/// The same, outside of a `map_err`.
pub(crate) fn engine(operation: &'static str, what: impl Into<String>, error: Docker) -> Error {
    let what = what.into();
    let unreachable = || {
        let message = format!("{what}: the container engine cannot be reached; does it run?");
        (ErrorKind::Unavailable, message)
    };
    let (kind, message) = match &error {
        Docker::DockerResponseServerError { status_code, message } => {
            let kind = match status_code {
                401 | 403 => ErrorKind::PermissionDenied,
                404 => ErrorKind::NotFound,
                409 => ErrorKind::Conflict,
                502..=504 => ErrorKind::Unavailable,
                _ => ErrorKind::Backend,
            };
            (kind, format!("{what}: {}", message.trim()))
        }
        Docker::RequestTimeoutError => {
            (ErrorKind::Timeout, format!("{what}: the container engine did not answer in time"))
        }
        Docker::IOError { err } if err.kind() == std::io::ErrorKind::PermissionDenied => {
            let message = format!(
                "{what}: this user may not use the container engine; on Linux, the members of the group \
                 `docker` may"
            );
            (ErrorKind::PermissionDenied, message)
        }
        Docker::IOError { .. }
        | Docker::HyperResponseError { .. }
        | Docker::HyperLegacyError { .. }
        | Docker::SocketNotFoundError(_) => unreachable(),
        Docker::DockerStreamError { error } => (ErrorKind::Backend, format!("{what}: {error}")),
        _ => (ErrorKind::Backend, what),
    };
    Error::new(kind, operation, message).with_source(error)
}

/// Whether the engine says that there is no such thing.
pub(crate) fn is_missing(error: &Docker) -> bool {
    status(error) == Some(404)
}

/// Whether the engine says that it cannot be done as things are.
pub(crate) fn is_conflict(error: &Docker) -> bool {
    status(error) == Some(409)
}

fn status(error: &Docker) -> Option<u16> {
    match error {
        Docker::DockerResponseServerError { status_code, .. } => Some(*status_code),
        _ => None,
    }
}

/// An error of this backend that has no kind of its own.
pub(crate) fn failed(operation: &'static str, message: impl Into<String>) -> Error {
    Error::new(ErrorKind::Backend, operation, message)
}

/// Something that is gone.
pub(crate) fn lost(operation: &'static str, message: impl Into<String>) -> Error {
    Error::new(ErrorKind::Lost, operation, message)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_engine_that_is_away_is_worth_another_try() {
        let error: Docker = std::io::Error::from(std::io::ErrorKind::ConnectionRefused).into();
        let error = engine("inspect", "the container", error);
        assert_eq!(error.kind(), ErrorKind::Unavailable);
        assert!(error.is_retryable());
    }

    #[test]
    fn what_the_engine_says_is_passed_on() {
        let error = Docker::DockerResponseServerError {
            status_code: 404,
            message: "No such image: nope".into(),
        };
        let error = engine("provision", "the image", error);
        assert_eq!(error.kind(), ErrorKind::NotFound);
        assert!(error.to_string().contains("No such image: nope"), "{error}");
    }
}
