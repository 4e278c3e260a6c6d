//! On which host a sandbox comes to be: the first that can be used.

use sandbox_core::{Error, ErrorKind, Result};

use crate::address::Address;

/// Why hosts could not be used.
#[derive(Debug, Default)]
pub(crate) struct Attempts {
    hosts: usize,
    failed: Vec<(String, Error)>,
}

impl Attempts {
    /// With so many hosts to try.
    pub(crate) fn on(hosts: usize) -> Self {
        Self { hosts, failed: Vec::new() }
    }

    /// Notes that a host failed; the next one may be tried.
    ///
    /// # Errors
    ///
    /// The error, if no other host would do better, or there is no other.
    pub(crate) fn failed(&mut self, host: &Address, error: Error) -> Result<()> {
        let is_the_hosts = matches!(
            error.kind(),
            ErrorKind::Unavailable | ErrorKind::Timeout | ErrorKind::PermissionDenied
        );
        if !is_the_hosts || self.hosts == 1 {
            return Err(error);
        }
        tracing::warn!(%host, %error, "a host cannot be used");
        self.failed.push((host.to_string(), error));
        Ok(())
    }

    /// The error when there is none left.
    pub(crate) fn none_left(self) -> Error {
        let operation = self.failed.first().map_or("choose a host", |(_, error)| error.operation());
        let why: Vec<String> = self
            .failed
            .iter()
            .map(|(name, error)| format!("{name}: {}", error.message()))
            .collect();
        let retryable = self.failed.iter().any(|(_, error)| error.is_retryable());
        let message = format!("no host can be used ({})", why.join("; "));
        Error::new(ErrorKind::Unavailable, operation, message).retryable(retryable)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn choose(names: &[&str]) -> Result<String> {
        let mut attempts = Attempts::on(names.len());
        for name in names {
            let kind = match *name {
                "down" => ErrorKind::Unavailable,
                "closed" => ErrorKind::PermissionDenied,
                "picky" => ErrorKind::Unsupported,
                name => return Ok(name.to_owned()),
            };
            let address = Address::parse(name).unwrap();
            attempts.failed(&address, Error::new(kind, "provision", "no"))?;
        }
        Err(attempts.none_left())
    }

    #[test]
    fn the_first_that_can_be_used_is() {
        assert_eq!(choose(&["down", "closed", "a", "b"]).unwrap(), "a");
        let error = choose(&["down", "closed"]).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unavailable);
        assert!(error.message().contains("down: no; closed: no"), "{error}");
        // What is wrong with the request is wrong everywhere.
        let error = choose(&["picky", "a"]).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unsupported);
    }
}
