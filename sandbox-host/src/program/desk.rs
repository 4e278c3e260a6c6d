//! What is asked for, done by whoever makes sandboxes here.

use std::{
    os::unix::net::UnixStream,
    path::{Path, PathBuf},
    time::Duration,
};

use sandbox_core::{
    GuestBinaries, Instance, Provision, Result, SandboxBackend, SnapshotRequest, SnapshotTaken,
    default_state_dir,
};
use tokio::sync::watch;

use super::{
    bound, links, lock,
    sources::{self, Sources},
    tend,
};
use crate::{
    account::AccountHost,
    bwrap::BwrapHost,
    compose::ComposeHost,
    error::{blocking, failed},
    message::{Answer, Isolation, Request, Settings},
};

/// Whoever makes sandboxes here.
#[derive(Debug)]
pub(super) struct Desk {
    state: PathBuf,
    host: Host,
    abandoned: watch::Sender<bool>,
}

#[derive(Debug)]
enum Host {
    Bwrap(BwrapHost),
    Account(AccountHost),
    Compose(ComposeHost),
}

impl Desk {
    pub(super) fn open(settings: Settings) -> Result<Self> {
        let state = match settings.state_dir {
            dir if dir.as_os_str().is_empty() => default_state_dir()?.join("ssh"),
            dir => dir,
        };
        let own = state.join(settings.isolation.to_string());
        let guests = GuestBinaries::standard()?;
        let (abandoned, told) = watch::channel(false);
        let host = match settings.isolation {
            Isolation::Bwrap => {
                Host::Bwrap(BwrapHost::builder().state_dir(own).guest_binaries(guests).build()?)
            }
            name @ (Isolation::Account | Isolation::Machine) => {
                Host::Account(AccountHost::new(name, own, guests))
            }
            Isolation::Compose => {
                let account = AccountHost::new(Isolation::Compose, own, guests);
                let compose = settings.compose.ok_or_else(|| {
                    failed("call", "it is not said how compose projects are brought up")
                })?;
                Host::Compose(ComposeHost::new(account, compose, told))
            }
        };
        sources::private(&state)?;
        Ok(Self { state, host, abandoned })
    }

    pub(super) fn state(&self) -> &Path {
        &self.state
    }

    pub(super) fn connect(&self, instance: &Instance) -> Result<UnixStream> {
        match &self.host {
            Host::Bwrap(host) => host.connect_socket(instance),
            Host::Account(host) => host.connect_socket(instance),
            Host::Compose(host) => host.account().connect_socket(instance),
        }
    }

    fn host(&self) -> &dyn SandboxBackend {
        match &self.host {
            Host::Bwrap(host) => host,
            Host::Account(host) => host,
            Host::Compose(host) => host,
        }
    }

    /// Nobody waits any more for what is being done. What takes long, and undoes itself, ends.
    pub(super) fn abandon(&self) {
        let _ = self.abandoned.send(true);
    }

    /// How long work that was begun may go on that nobody waits for any more.
    pub(super) fn aftermath(&self) -> Duration {
        match self.host {
            Host::Bwrap(_) | Host::Account(_) => Duration::from_secs(60),
            // Services may take their time to end.
            Host::Compose(_) => Duration::from_secs(300),
        }
    }

    /// Whether nothing half done is left if the work is dropped in the middle.
    pub(super) fn can_be_broken_off(request: &Request) -> bool {
        match request {
            // Otherwise the instance is being replaced.
            Request::Snapshot { idle, .. } => !idle,
            Request::Changes { .. } | Request::SnapshotSize(_) | Request::Inventory => true,
            _ => false,
        }
    }

    /// What takes back a request that was carried out, and of which nobody knows.
    pub(super) fn undo<'a>(
        &'a self,
        request: &Request,
    ) -> Option<impl Future<Output = Result<()>> + use<'a>> {
        let Request::Provision(request) = request else { return None };
        let instance = Instance {
            id: request.instance.clone(),
            sandbox: request.sandbox.clone(),
            backend: self.host().id(),
            data: serde_json::Value::Null,
        };
        Some(async move { self.teardown(&instance).await })
    }

    pub(super) async fn answer(&self, request: Request) -> Result<Answer> {
        let host = self.host();
        Ok(match request {
            Request::Probe => Answer::Capabilities(host.probe().await?),
            Request::Provision(request) => {
                let request = bound::resolved(&self.state, request)?;
                Answer::Instance(self.provision(&request).await?)
            }
            Request::Inspect(instance) => Answer::State(host.inspect(&instance).await?),
            Request::Reachability(instance) => {
                Answer::Reachability(host.reachability(&instance).await?)
            }
            Request::Snapshot { instance, snapshot, idle, successor } => {
                let successor = bound::resolved(&self.state, successor)?;
                let request = SnapshotRequest::new(instance, snapshot, idle, successor);
                let SnapshotTaken { data, successor } = self.snapshot(&request).await?;
                Answer::Snapshot { data, successor }
            }
            Request::SnapshotSize(snapshot) => Answer::Size(host.snapshot_size(&snapshot).await?),
            Request::DeleteSnapshot(snapshot) => {
                host.delete_snapshot(&snapshot).await?;
                self.sources().release(snapshot.id.as_str())?;
                Answer::Done
            }
            Request::Changes { instance, since } => {
                Answer::Changes(host.changes(&instance, since.as_ref()).await?)
            }
            Request::Usage(instance) => Answer::Usage(host.usage(&instance).await?),
            Request::Pause(instance) => {
                let _held = self.hold(&instance).await?;
                host.pause(&instance).await?;
                Answer::Done
            }
            Request::Resume(instance) => {
                let _held = self.hold(&instance).await?;
                host.resume(&instance).await?;
                Answer::Done
            }
            Request::Stop(instance) => {
                let _held = self.hold(&instance).await?;
                host.stop(&instance).await?;
                Answer::Done
            }
            Request::Start { instance, request } => {
                let _held = self.hold(&instance).await?;
                let request = bound::resolved(&self.state, request)?;
                let started = host.start(&instance, &request).await?;
                if let Err(error) = self.stay_with(&started) {
                    host.stop(&started).await?;
                    return Err(error);
                }
                Answer::Instance(started)
            }
            Request::Teardown(instance) => {
                self.teardown(&instance).await?;
                Answer::Done
            }
            Request::Inventory => Answer::Inventory(host.inventory().await?),
            Request::Forget { links } => {
                let (state, sources) = (self.state.clone(), self.sources());
                blocking("end what broken connections left", move || {
                    links.iter().try_for_each(|link| links::forget(&state, link))?;
                    sources.collect()
                })
                .await?;
                Answer::Done
            }
            Request::Connect(_) | Request::Populate { .. } => {
                return Err(failed("call", "that is answered elsewhere"));
            }
        })
    }

    fn sources(&self) -> Sources {
        Sources::of(&self.state)
    }

    async fn hold(&self, instance: &Instance) -> Result<lock::Held> {
        let (state, id) = (self.state.clone(), instance.id.clone());
        blocking("change the instance", move || lock::hold(&state, &id)).await
    }

    async fn provision(&self, request: &Provision) -> Result<Instance> {
        let (state, id) = (self.state.clone(), request.instance.clone());
        let _held = blocking("provision", move || lock::hold(&state, &id)).await?;
        self.keep_source(request, request.instance.as_str())?;
        let made = async {
            let instance = self.host().provision(request).await?;
            if let Err(error) = self.stay_with(&instance) {
                self.host().teardown(&instance).await?;
                return Err(error);
            }
            Ok(instance)
        };
        let made = made.await;
        if made.is_err() {
            self.sources().release(request.instance.as_str())?;
        }
        made
    }

    async fn snapshot(&self, request: &SnapshotRequest) -> Result<SnapshotTaken> {
        let _held = self.hold(&request.instance).await?;
        self.keep_source(&request.successor, request.snapshot.as_str())?;
        self.keep_source(&request.successor, request.successor.instance.as_str())?;
        let taken = self.host().snapshot(request).await;
        let unused = match &taken {
            Ok(SnapshotTaken { successor: Some(_), .. }) => vec![request.instance.id.as_str()],
            Ok(_) => vec![request.successor.instance.as_str()],
            // It may be asked for again.
            Err(_) => Vec::new(),
        };
        for user in unused {
            self.sources().release(user)?;
        }
        taken
    }

    async fn teardown(&self, instance: &Instance) -> Result<()> {
        let _held = self.hold(instance).await?;
        self.host().teardown(instance).await?;
        self.sources().release(instance.id.as_str())?;
        self.sources().collect()
    }

    /// Has what else belongs to an instance end with it.
    fn stay_with(&self, instance: &Instance) -> Result<()> {
        match self.host {
            Host::Compose(_) => tend::begin(&self.state, &instance.id),
            Host::Bwrap(_) | Host::Account(_) => Ok(()),
        }
    }

    fn keep_source(&self, request: &Provision, user: &str) -> Result<()> {
        match &request.spec.workspace {
            Some(workspace) => self.sources().keep(workspace, user),
            None => Ok(()),
        }
    }
}
