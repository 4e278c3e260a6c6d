//! What the engine itself is asked: which containers a project has, how they are, and to remove what is left.

use std::time::Duration;

use sandbox_core::{Error, ErrorKind, Result};

use super::{
    run::{Said, Tool, last_lines},
    services::Container,
};

/// How long the engine may take to answer a question.
const PATIENCE: Duration = Duration::from_secs(60);
/// How long it may take to remove something.
const REMOVAL: Duration = Duration::from_secs(120);

/// The engine's own program.
#[derive(Debug, Clone)]
pub(super) struct Engine(pub(super) Tool);

impl Engine {
    /// The containers of a project, by their ids; those that have ended too. All of compose's
    /// implementations mark them with its name.
    pub(super) async fn containers(
        &self,
        operation: &'static str,
        project: &str,
    ) -> Result<Vec<String>> {
        self.list(operation, &["ps", "--all", "--quiet", "--no-trunc"], project).await
    }

    /// How containers are; those that are gone meanwhile are left out.
    pub(super) async fn inspect(
        &self,
        operation: &'static str,
        containers: &[String],
    ) -> Result<Vec<Container>> {
        if containers.is_empty() {
            return Ok(Vec::new());
        }
        let mut words = vec!["container", "inspect"];
        words.extend(containers.iter().map(String::as_str));
        // It says what it found even where it did not find all.
        let said = self.0.ask(operation, &words, PATIENCE).await?;
        serde_json::from_slice(&said.out).map_err(|error| {
            let message =
                format!("the engine's answer to `inspect` is no description: {}", said.words());
            Error::new(ErrorKind::Backend, operation, message).with_source(error)
        })
    }

    /// The last that a container said, as text in one line.
    pub(super) async fn last_words(&self, operation: &'static str, container: &str) -> String {
        let said = self.0.ask(operation, &["logs", "--tail", "20", container], PATIENCE).await;
        match said {
            Ok(said) => last_lines(&said.all()),
            Err(error) => format!("(what it said is not known: {})", error.message()),
        }
    }

    /// Removes what compose has left of a project: containers and networks, and volumes if those shall go.
    pub(super) async fn sweep(
        &self,
        operation: &'static str,
        project: &str,
        volumes: bool,
    ) -> Result<()> {
        let containers = self.containers(operation, project).await?;
        self.remove(operation, &["rm", "--force", "--volumes"], &containers).await?;
        let networks = self.list(operation, &["network", "ls", "--quiet"], project).await?;
        self.remove(operation, &["network", "rm"], &networks).await?;
        if volumes {
            let volumes = self.list(operation, &["volume", "ls", "--quiet"], project).await?;
            self.remove(operation, &["volume", "rm"], &volumes).await?;
        }
        Ok(())
    }

    async fn list(
        &self,
        operation: &'static str,
        question: &[&str],
        project: &str,
    ) -> Result<Vec<String>> {
        let filter = format!("label=com.docker.compose.project={project}");
        let words = [question, &["--filter", filter.as_str()]].concat();
        let said = self.0.ask(operation, &words, PATIENCE).await?;
        match said.is_success() {
            true => Ok(said.lines()),
            false => Err(self.failed(operation, question, &said)),
        }
    }

    async fn remove(&self, operation: &'static str, how: &[&str], what: &[String]) -> Result<()> {
        if what.is_empty() {
            return Ok(());
        }
        let what: Vec<&str> = what.iter().map(String::as_str).collect();
        let said = self.0.run(operation, &[how, &what[..]].concat(), "/".as_ref(), REMOVAL).await?;
        match said.is_success() {
            true => Ok(()),
            false => Err(self.failed(operation, how, &said)),
        }
    }

    fn failed(&self, operation: &'static str, asked: &[&str], said: &Said) -> Error {
        let message = format!("`{}` failed: {}", self.0.named(asked), said.words());
        Error::new(ErrorKind::Unavailable, operation, message)
    }
}
