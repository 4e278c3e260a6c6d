//! One project: brought up, looked at, taken down.

use std::{
    fs, io,
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use sandbox_core::{Error, ErrorKind, InstanceId, Result};
use serde::{Deserialize, Serialize};

use super::{
    engine::Engine,
    run::Tool,
    services::{Verdict, judge},
};
use crate::{error::at, message::Compose};

/// How long compose may take to take a project down.
const DOWN: Duration = Duration::from_secs(180);
/// How long a service without a health check has to run to count as one that does.
const SETTLED: Duration = Duration::from_secs(1);
/// How often the services are looked at.
const LOOKS: Duration = Duration::from_millis(250);
const NOTE: &str = "compose.json";

/// A project of an instance.
#[derive(Debug)]
pub(super) struct Project {
    name: String,
    /// The instance's directory.
    directory: PathBuf,
    settings: Compose,
    mark: String,
}

/// What is kept in the instance's directory from before compose is asked for anything.
#[derive(Debug, Serialize, Deserialize)]
struct Note {
    settings: Compose,
}

/// The project's name.
pub(super) fn name(instance: &InstanceId) -> String {
    format!("sandboxer-{}", instance.as_str().trim_start_matches("ins_"))
}

impl Project {
    /// The project of an instance that is being made, or started.
    pub(super) fn new(instance: &InstanceId, directory: PathBuf, settings: Compose) -> Self {
        Self { name: name(instance), directory, settings, mark: instance.to_string() }
    }

    /// The one that an instance's directory tells of; `None` if compose was not asked for anything yet.
    pub(super) fn find(instance: &InstanceId, directory: PathBuf) -> Result<Option<Self>> {
        const OPERATION: &str = "find the compose project";
        let path = directory.join(NOTE);
        let bytes = match fs::read(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            read => read.map_err(at(OPERATION, &path))?,
        };
        let note: Note =
            serde_json::from_slice(&bytes).map_err(|e| at(OPERATION, &path)(e.into()))?;
        Ok(Some(Self::new(instance, directory, note.settings)))
    }

    /// Brings it up from a workspace, and waits until its services run. After an error it is to be taken
    /// down.
    pub(super) async fn up(&self, workspace: &Path) -> Result<()> {
        const OPERATION: &str = "bring the compose project up";
        let end = Instant::now() + self.settings.patience;
        // An engine that does not answer is found out while there is nothing to take down yet.
        self.engine().containers(OPERATION, &self.name).await?;
        self.note()?;
        let words = self.words(&["up", "-d"]);
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        let said = self.compose().run(OPERATION, &words, workspace, left(end)).await;
        let said = match said {
            Ok(said) => said,
            Err(error) => return Err(self.with_services(OPERATION, error).await),
        };
        if !said.is_success() {
            let message = format!(
                "`{}` in {} failed: {}",
                self.compose().named(&words),
                workspace.display(),
                said.words()
            );
            let error = Error::new(ErrorKind::Setup, OPERATION, message);
            return Err(self.with_services(OPERATION, error).await);
        }
        self.until_ready(OPERATION, end).await
    }

    async fn until_ready(&self, operation: &'static str, end: Instant) -> Result<()> {
        let mut seen = None;
        loop {
            let found = self.engine().containers(operation, &self.name).await?;
            if found.is_empty() {
                let message = "compose brought nothing up: the project has no service";
                return Err(Error::new(ErrorKind::Setup, operation, message));
            }
            let containers = self.engine().inspect(operation, &found).await?;
            if containers.len() < found.len() {
                // One was removed since; or the engine does not answer, which it will be asked again.
                self.in_time(operation, end, "not all of them are there").await?;
                continue;
            }
            let why = match judge(&containers) {
                Verdict::Ready => return Ok(()),
                Verdict::Failed { container, service, why } => {
                    return Err(self.failed(operation, &container, &service, &why).await);
                }
                Verdict::Runs(run) => match &seen {
                    Some((same, since)) if *same == run => {
                        if Instant::now().duration_since(*since) >= SETTLED {
                            return Ok(());
                        }
                        "they have only just begun to run".to_owned()
                    }
                    _ => {
                        seen = Some((run, Instant::now()));
                        "they have only just begun to run".to_owned()
                    }
                },
                Verdict::NotYet(why) => why,
            };
            self.in_time(operation, end, &why).await?;
        }
    }

    /// Waits a little for what is not yet so; or the error, if that has been long enough.
    async fn in_time(&self, operation: &'static str, end: Instant, why: &str) -> Result<()> {
        if Instant::now() <= end {
            tokio::time::sleep(LOOKS).await;
            return Ok(());
        }
        let patience = self.settings.patience;
        let message =
            format!("the services of the compose project are not ready after {patience:?}: {why}");
        let error = Error::new(ErrorKind::Timeout, operation, message);
        Err(self.with_services(operation, error).await)
    }

    /// Takes it down: with its volumes, or so that it can be brought up again. A second time it does nothing.
    pub(super) async fn down(&self, workspace: Option<&Path>, volumes: bool) -> Result<()> {
        const OPERATION: &str = "take the compose project down";
        let mut words = vec!["down", "--remove-orphans"];
        words.extend(volumes.then_some("--volumes"));
        let words = self.words(&words);
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        // Orderly, if the project's files are still what they were. What that does not reach is removed
        // by its marks.
        let directory = workspace.filter(|path| path.is_dir()).unwrap_or(&self.directory);
        let orderly = match self.compose().run(OPERATION, &words, directory, DOWN).await {
            Ok(said) if said.is_success() => None,
            Ok(said) => Some(said.words()),
            Err(error) => Some(error.message().to_owned()),
        };
        let swept = self.engine().sweep(OPERATION, &self.name, volumes).await;
        match (swept, orderly) {
            (Ok(()), None) => Ok(()),
            (Ok(()), Some(why)) => {
                tracing::debug!(project = self.name, why, "it was not taken down in good order");
                Ok(())
            }
            (Err(error), why) => {
                let why = why.map(|why| format!("; `{}`: {why}", self.compose().named(&words)));
                let message = format!(
                    "something of the project {} is left: {}{}",
                    self.name,
                    error.message(),
                    why.unwrap_or_default()
                );
                Err(Error::new(error.kind(), OPERATION, message).retryable(error.is_retryable()))
            }
        }
    }

    /// Forgets a project that was taken down for good.
    pub(super) fn forget(&self) -> Result<()> {
        let path = self.directory.join(NOTE);
        match fs::remove_file(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            removed => removed.map_err(at("take the compose project down", &path)),
        }
    }

    /// Writes down what is needed to take it down.
    fn note(&self) -> Result<()> {
        let (path, new) = (self.directory.join(NOTE), self.directory.join("compose.new"));
        let write = || {
            let note = Note { settings: self.settings.clone() };
            let mut options = fs::OpenOptions::new();
            let file = options.create(true).write(true).truncate(true).mode(0o600).open(&new)?;
            serde_json::to_writer(&file, &note)?;
            file.sync_data()?;
            fs::rename(&new, &path)
        };
        let written: io::Result<()> = write();
        written.map_err(at("note the compose project", &path))
    }

    /// The error, and how those services are that are not as they should.
    async fn with_services(&self, operation: &'static str, error: Error) -> Error {
        let engine = self.engine();
        let Ok(found) = engine.containers(operation, &self.name).await else { return error };
        let Ok(containers) = engine.inspect(operation, &found).await else { return error };
        let mut message = error.message().to_owned();
        for container in containers {
            if let Verdict::Failed { container, service, why } = judge(&[container]) {
                let said = engine.last_words(operation, &container).await;
                message.push_str(&format!("; service {service}: {why}; it said last: {said}"));
            }
        }
        Error::new(error.kind(), operation, message).retryable(error.is_retryable())
    }

    async fn failed(
        &self,
        operation: &'static str,
        container: &str,
        service: &str,
        why: &str,
    ) -> Error {
        let said = self.engine().last_words(operation, container).await;
        let message = format!(
            "the service {service} of the compose project failed: {why}; it said last: {said}"
        );
        Error::new(ErrorKind::Setup, operation, message)
    }

    fn words(&self, words: &[&str]) -> Vec<String> {
        let mut all = vec!["-p".to_owned(), self.name.clone()];
        for file in &self.settings.files {
            all.extend(["-f".to_owned(), file.clone()]);
        }
        all.extend(words.iter().map(|&word| word.to_owned()));
        all
    }

    fn compose(&self) -> Tool {
        self.tool(&self.settings.command)
    }

    fn engine(&self) -> Engine {
        Engine(self.tool(&self.settings.engine))
    }

    fn tool(&self, words: &[String]) -> Tool {
        let (words, env) = (words.to_vec(), self.settings.env.clone());
        Tool { words, env, mark: Some(self.mark.clone()) }
    }
}

fn left(end: Instant) -> Duration {
    end.saturating_duration_since(Instant::now())
}
