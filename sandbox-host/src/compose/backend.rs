//! What the contract of a backend asks for.

use std::time::Duration;

use async_trait::async_trait;
use sandbox_core::{
    BackendId, Capabilities, Change, Error, ErrorKind, Feature, Found, GuestStream, Instance,
    InstanceState, Level, Provision, Reachability, Result, SandboxBackend, SnapshotData,
    SnapshotRequest, SnapshotTaken, Usage,
};
use tokio::sync::watch;

use super::{
    engine::Engine,
    project::{Project, name},
    run::{Said, Tool},
};
use crate::{account::AccountHost, message::Compose};

/// Makes sandboxes of the account beside compose projects.
#[derive(Debug, Clone)]
pub(crate) struct ComposeHost {
    account: AccountHost,
    settings: Compose,
    /// Nobody waits any more for what is being brought up.
    abandoned: watch::Receiver<bool>,
}

impl ComposeHost {
    /// With the account's sandboxes, which are this backend's alone.
    pub(crate) fn new(
        account: AccountHost,
        settings: Compose,
        abandoned: watch::Receiver<bool>,
    ) -> Self {
        Self { account, settings, abandoned }
    }

    /// The sandboxes themselves.
    pub(crate) fn account(&self) -> &AccountHost {
        &self.account
    }

    /// The request, with what leads the sandbox's processes to the project.
    fn beside(&self, request: &Provision) -> Provision {
        let mut request = request.clone();
        let project = ("COMPOSE_PROJECT_NAME".to_owned(), name(&request.instance));
        for (key, value) in self.settings.env.clone().into_iter().chain([project]) {
            request.spec.env.entry(key).or_insert(value);
        }
        request
    }

    async fn bring_up(&self, operation: &'static str, instance: &Instance) -> Result<()> {
        let directory = self.account.directory(instance);
        let workspace = self.account.workspace(instance)?.ok_or_else(|| gone(operation))?;
        let project = Project::new(&instance.id, directory, self.settings.clone());
        let mut abandoned = self.abandoned.clone();
        tokio::select! {
            up = project.up(&workspace) => up,
            // Its sender lives as long as the program.
            Ok(_) = abandoned.wait_for(|abandoned| *abandoned) => {
                let message = "nobody waits for it any more";
                Err(Error::new(ErrorKind::Cancelled, operation, message))
            }
        }
    }

    /// Takes an instance's project down if there may be one.
    pub(crate) async fn take_down(
        account: &AccountHost,
        instance: &Instance,
        for_good: bool,
    ) -> Result<()> {
        let directory = account.directory(instance);
        let Some(project) = Project::find(&instance.id, directory)? else { return Ok(()) };
        let workspace = account.workspace(instance)?;
        project.down(workspace.as_deref(), for_good).await?;
        if for_good { project.forget() } else { Ok(()) }
    }

    fn tool(&self, words: &[String]) -> Tool {
        Tool { words: words.to_vec(), env: self.settings.env.clone(), mark: None }
    }
}

fn gone(operation: &'static str) -> Error {
    Error::new(ErrorKind::Lost, operation, "the instance is gone")
}

#[async_trait]
impl SandboxBackend for ComposeHost {
    fn id(&self) -> BackendId {
        self.account.id()
    }

    async fn probe(&self) -> Result<Capabilities> {
        const OPERATION: &str = "probe";
        let found = self.account.probe().await?;
        let compose = self.tool(&self.settings.command);
        let version = compose.ask(OPERATION, &["version"], Duration::from_secs(60)).await?;
        if !version.is_success() {
            let message = format!("compose does not run: {}", version.words());
            return Err(Error::new(ErrorKind::Unavailable, OPERATION, message).retryable(false));
        }
        // Whether the engine answers.
        Engine(self.tool(&self.settings.engine)).containers(OPERATION, "none").await?;
        let version = format!("{}; {}", first_line(&version), found.version);
        let files = "the workspace and the home are copied; the services, their containers and their volumes \
                     are in no snapshot";
        let live = "the sandbox's processes are held still meanwhile; the services are not";
        Ok(Capabilities { version, ..found }
            .with(Feature::Snapshot, Level::Full, files)
            .with(Feature::SnapshotLive, Level::Full, live)
            .with(
                Feature::Stop,
                Level::Full,
                "the services' containers are removed; their volumes stay",
            ))
    }

    async fn provision(&self, request: &Provision) -> Result<Instance> {
        let instance = self.account.provision(&self.beside(request)).await?;
        let error = match self.bring_up("provision", &instance).await {
            Ok(()) => return Ok(instance),
            Err(error) => error,
        };
        match self.teardown(&instance).await {
            Ok(()) => Err(error),
            Err(leftover) => {
                let message = format!(
                    "{}; and it could not be removed: {}",
                    error.message(),
                    leftover.message()
                );
                Err(Error::new(error.kind(), error.operation(), message))
            }
        }
    }

    async fn attach(&self, external: &str, request: &Provision) -> Result<Instance> {
        self.account.attach(external, request).await
    }

    async fn connect(&self, instance: &Instance) -> Result<GuestStream> {
        self.account.connect(instance).await
    }

    async fn inspect(&self, instance: &Instance) -> Result<InstanceState> {
        self.account.inspect(instance).await
    }

    async fn reachability(&self, instance: &Instance) -> Result<Reachability> {
        self.account.reachability(instance).await
    }

    async fn snapshot(&self, request: &SnapshotRequest) -> Result<SnapshotTaken> {
        self.account.snapshot(request).await
    }

    async fn delete_snapshot(&self, snapshot: &SnapshotData) -> Result<()> {
        self.account.delete_snapshot(snapshot).await
    }

    async fn snapshot_size(&self, snapshot: &SnapshotData) -> Result<u64> {
        self.account.snapshot_size(snapshot).await
    }

    async fn changes(
        &self,
        instance: &Instance,
        since: Option<&SnapshotData>,
    ) -> Result<Vec<Change>> {
        self.account.changes(instance, since).await
    }

    async fn usage(&self, instance: &Instance) -> Result<Usage> {
        self.account.usage(instance).await
    }

    async fn pause(&self, instance: &Instance) -> Result<()> {
        self.account.pause(instance).await
    }

    async fn resume(&self, instance: &Instance) -> Result<()> {
        self.account.resume(instance).await
    }

    async fn stop(&self, instance: &Instance) -> Result<()> {
        // Ends compose too, should it still be at work for somebody who is gone.
        self.account.stop(instance).await?;
        Self::take_down(&self.account, instance, false).await
    }

    async fn start(&self, instance: &Instance, request: &Provision) -> Result<Instance> {
        let mut request = request.clone();
        request.instance = instance.id.clone();
        let started = self.account.start(instance, &self.beside(&request)).await?;
        let error = match self.bring_up("start", instance).await {
            Ok(()) => return Ok(started),
            Err(error) => error,
        };
        if let Err(leftover) = self.stop(instance).await {
            tracing::warn!(error = %leftover, "what could not be started could not be stopped");
        }
        Err(error)
    }

    async fn teardown(&self, instance: &Instance) -> Result<()> {
        self.account.stop(instance).await?;
        Self::take_down(&self.account, instance, true).await?;
        self.account.teardown(instance).await
    }

    async fn inventory(&self) -> Result<Vec<Found>> {
        self.account.inventory().await
    }
}

fn first_line(said: &Said) -> String {
    said.lines().into_iter().next().unwrap_or_default()
}
