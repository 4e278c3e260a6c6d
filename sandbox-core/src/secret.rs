//! Secrets: looked up at the last moment, shown to nobody.

use std::{fmt, sync::Arc};

use async_trait::async_trait;

use crate::{Error, ErrorKind, Result};

/// A secret's value. It has no `Display`, is not serialized, and `Debug` does not show it.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(Arc<[u8]>);

impl Secret {
    /// This one.
    pub fn new(value: impl AsRef<[u8]>) -> Self {
        Self(value.as_ref().into())
    }

    /// The value, for whoever hands it on to the process that it is for.
    #[must_use]
    pub fn expose(&self) -> &[u8] {
        &self.0
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(…)")
    }
}

/// Where secrets come from.
#[async_trait]
pub trait Secrets: Send + Sync + fmt::Debug {
    /// The secret of this name; `None` if there is none.
    ///
    /// # Errors
    ///
    /// If that cannot be found out. No message may hold a value.
    async fn find(&self, reference: &str) -> Result<Option<Secret>>;

    /// Where a missing one was looked for, for the message about it.
    fn places(&self, reference: &str) -> String;
}

/// Secrets in this process's environment: the variable of the reference's name, else
/// `SANDBOXER_SECRET_` and the reference.
#[derive(Debug, Clone, Copy, Default)]
pub struct EnvSecrets;

#[async_trait]
impl Secrets for EnvSecrets {
    async fn find(&self, reference: &str) -> Result<Option<Secret>> {
        use std::os::unix::ffi::OsStrExt;
        check_reference(reference)?;
        let found = std::env::var_os(reference).or_else(|| std::env::var_os(second(reference)));
        Ok(found.map(|value| Secret::new(value.as_bytes())))
    }

    fn places(&self, reference: &str) -> String {
        format!("neither {reference} nor {} is in the environment", second(reference))
    }
}

fn second(reference: &str) -> String {
    format!("SANDBOXER_SECRET_{reference}")
}

/// No secrets; what a manager has unless it is given some.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct NoSecrets;

#[async_trait]
impl Secrets for NoSecrets {
    async fn find(&self, _: &str) -> Result<Option<Secret>> {
        Ok(None)
    }

    fn places(&self, _: &str) -> String {
        "this manager was built without secrets".into()
    }
}

/// The secret of this name; a missing one is an error that names it.
pub(crate) async fn resolve(secrets: &dyn Secrets, reference: &str) -> Result<Secret> {
    check_reference(reference)?;
    secrets.find(reference).await?.ok_or_else(|| {
        let message = format!("the secret {reference} is missing: {}", secrets.places(reference));
        Error::new(ErrorKind::NotFound, "find the secret", message)
    })
}

/// Secrets are called what environment variables can be called.
pub(crate) fn check_reference(reference: &str) -> Result<()> {
    let plain = |c: char| c.is_ascii_alphanumeric() || c == '_';
    let digit = reference.starts_with(|c: char| c.is_ascii_digit());
    if reference.is_empty() || reference.len() > 128 || digit || !reference.chars().all(plain) {
        let message =
            format!("{reference:?} cannot be a secret's name: use letters, digits and '_'");
        return Err(Error::new(ErrorKind::InvalidSpec, "find the secret", message));
    }
    Ok(())
}

/// Takes the values of secrets out of text that others will see.
pub(crate) fn redact(text: &[u8], secrets: &[(String, Secret)]) -> Vec<u8> {
    let mut longest_first: Vec<_> =
        secrets.iter().filter(|(_, secret)| !secret.expose().is_empty()).collect();
    longest_first.sort_by_key(|(_, secret)| std::cmp::Reverse(secret.expose().len()));
    let mut clean = Vec::with_capacity(text.len());
    let mut rest = text;
    while !rest.is_empty() {
        match longest_first.iter().find(|(_, secret)| rest.starts_with(secret.expose())) {
            Some((name, secret)) => {
                clean.extend_from_slice(format!("[secret {name}]").as_bytes());
                rest = &rest[secret.expose().len()..];
            }
            None => {
                clean.push(rest[0]);
                rest = &rest[1..];
            }
        }
    }
    clean
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_is_never_shown() {
        let secret = Secret::new("hunter2");
        assert_eq!(format!("{secret:?}"), "Secret(…)");
        let secrets = [("A".to_owned(), secret), ("B".to_owned(), Secret::new("hunter2-and-more"))];
        let text = redact(b"x hunter2-and-more, hunter2!", &secrets);
        assert_eq!(String::from_utf8_lossy(&text), "x [secret B], [secret A]!");
        assert_eq!(redact(b"nothing", &[]), b"nothing");
    }

    #[test]
    fn names_are_what_variables_can_be_called() {
        for good in ["TOKEN", "_a1"] {
            assert!(check_reference(good).is_ok());
        }
        for bad in ["", "1A", "A=B", "a b", "ä", &"x".repeat(129)] {
            assert!(check_reference(bad).is_err(), "{bad}");
        }
    }

    #[tokio::test]
    async fn a_missing_one_is_named_with_where_it_was_looked_for() {
        // PATH is there in every environment that runs tests.
        assert!(resolve(&EnvSecrets, "PATH").await.is_ok());
        let error = resolve(&EnvSecrets, "SURELY_NOT_THERE").await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::NotFound);
        assert!(error.message().contains("SANDBOXER_SECRET_SURELY_NOT_THERE"), "{error}");
        let error = resolve(&NoSecrets, "X").await.unwrap_err();
        assert!(error.message().contains("without secrets"), "{error}");
    }
}
