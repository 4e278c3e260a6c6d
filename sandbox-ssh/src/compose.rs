//! Sandboxes beside compose projects, as the harness asks for them.

use std::{collections::BTreeMap, time::Duration};

use sandbox_core::{Error, ErrorKind, Result};
use sandbox_host::message;

/// How compose projects are brought up on the hosts of an [`SshBackend`](crate::SshBackend).
///
/// A sandbox's project is brought up from its workspace when the sandbox is made, under a name of its own
/// (`sandboxer-…`, after the instance), and all of it is taken down with it, volumes too. Making the sandbox
/// waits until each service runs: one with a health check until that says so, one without for a second, and
/// one that ends with code 0 has done its work. If one fails, so does the making, with the service's name and
/// what it said last.
///
/// Commands find the project's name in `COMPOSE_PROJECT_NAME`. A stop takes the project down but for its
/// volumes, and a start brings it up again. Snapshots are of the workspace and the home alone: a rewind or a
/// fork brings up a project of its own from them, with fresh volumes, and while the old one still runs: let
/// the engine choose the ports that services publish.
///
/// Compose's files in the workspace are asked for what they say at that time. Files that services write to
/// the workspace as another user than the account can be an obstacle to snapshots and to removing it.
///
/// ```
/// use sandbox_ssh::{Compose, SshBackend};
///
/// let compose = Compose::new().command(["docker-compose"]).file("tests/compose.yaml");
/// let backend = SshBackend::builder()
///     .host("build1")
///     .compose_with_the_account_as_the_only_isolation(compose)
///     .build()?;
/// # Ok::<(), sandbox_core::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct Compose(message::Compose);

impl Default for Compose {
    fn default() -> Self {
        Self::new()
    }
}

impl Compose {
    /// `docker compose` on the host, and the files that it finds by itself.
    #[must_use]
    pub fn new() -> Self {
        Self(message::Compose {
            command: vec!["docker".to_owned(), "compose".to_owned()],
            engine: vec!["docker".to_owned()],
            env: BTreeMap::new(),
            files: Vec::new(),
            patience: Duration::from_secs(600),
        })
    }

    /// The program of compose, with its first arguments: words, not a line of a shell.
    #[must_use]
    pub fn command(mut self, words: impl IntoIterator<Item = impl Into<String>>) -> Self {
        self.0.command = words.into_iter().map(Into::into).collect();
        self
    }

    /// The program of the engine, with its first arguments, instead of `docker`. It is asked how the services
    /// are and what they said, and to remove what compose left.
    #[must_use]
    pub fn engine(mut self, words: impl IntoIterator<Item = impl Into<String>>) -> Self {
        self.0.engine = words.into_iter().map(Into::into).collect();
        self
    }

    /// Add to the environment of both programs and of the sandboxes' processes, such as `DOCKER_HOST`. Not
    /// for secrets: it is kept in a file on the host.
    #[must_use]
    pub fn env(mut self, key: impl Into<String>, value: impl Into<String>) -> Self {
        self.0.env.insert(key.into(), value.into());
        self
    }

    /// A file of the project, relative to the workspace. Of several, each adds to those before it.
    #[must_use]
    pub fn file(mut self, path: impl Into<String>) -> Self {
        self.0.files.push(path.into());
        self
    }

    /// How long it may take until the services run, images fetched and built, instead of ten minutes.
    #[must_use]
    pub fn ready_within(mut self, patience: Duration) -> Self {
        self.0.patience = patience;
        self
    }

    pub(crate) fn asked(&self) -> message::Compose {
        self.0.clone()
    }

    pub(crate) fn check(&self) -> Result<()> {
        let invalid =
            |message: String| Err(Error::new(ErrorKind::InvalidSpec, "configure compose", message));
        let message::Compose { command, engine, env, files, patience } = &self.0;
        for (what, words) in [("compose", command), ("the engine", engine)] {
            if words.first().is_none_or(String::is_empty) {
                return invalid(format!("no program is named for {what}"));
            }
        }
        if let Some(file) = files.iter().find(|file| file.is_empty()) {
            return invalid(format!("{file:?} is no file"));
        }
        for (key, value) in env {
            if key.is_empty() || key.contains(['=', '\0']) || value.contains('\0') {
                return invalid(format!("{key:?} cannot be an environment variable"));
            }
        }
        if command.iter().chain(engine).chain(files).any(|word| word.contains('\0')) {
            return invalid("a word of a command has a NUL byte".to_owned());
        }
        if patience.is_zero() {
            return invalid("no service runs at once; allow some time".to_owned());
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_cannot_be_run_is_refused() {
        Compose::new().check().unwrap();
        for (compose, says) in [
            (Compose::new().command([""; 0]), "no program is named for compose"),
            (Compose::new().engine([""]), "no program is named for the engine"),
            (Compose::new().file(""), "is no file"),
            (Compose::new().env("A=B", ""), "environment variable"),
            (Compose::new().ready_within(Duration::ZERO), "allow some time"),
        ] {
            let error = compose.check().unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidSpec);
            assert!(error.to_string().contains(says), "{error}");
        }
    }
}
