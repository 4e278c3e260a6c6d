//! What is asked for: a spec, from which profile, and on whose behalf.

use std::{collections::BTreeMap, path::PathBuf, time::Duration};

use serde::{Deserialize, Serialize};

use crate::{Access, BackendId, Mount, Network, OnLost, Root, SandboxSpec, WorkspaceMode};

/// A request for a sandbox: a spec, and on whose behalf.
///
/// ```
/// use sandbox_core::{Consumer, CreateSandbox, Network};
///
/// let request = CreateSandbox::new()
///     .workspace("/src/app")
///     .network(Network::Deny)
///     .pids(512)
///     .consumer(Consumer::agent("my-harness"));
/// ```
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct CreateSandbox {
    /// What the sandbox is. With a profile, what it leaves open is the profile's.
    pub spec: SandboxSpec,
    /// Who asks.
    pub consumer: Consumer,
    /// The profile to begin with.
    pub profile: Option<String>,
    /// What the profile is about: `repo` is the directory that the workspace shows; setup commands find
    /// the others in `SANDBOX_INPUT_…`.
    pub inputs: BTreeMap<String, String>,
    /// What can be reached, if [`network`](Self::network) said so: that wins over the profile.
    pub network: Option<Network>,
}

impl CreateSandbox {
    /// The safe defaults: nothing of this host but its programs, no network, an empty workspace.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// What this profile says, as far as nothing else is said here.
    #[must_use]
    pub fn profile(id: impl Into<String>) -> Self {
        Self { profile: Some(id.into()), ..Self::default() }
    }

    /// An input: `repo` is a directory to populate the workspace from. Others are for setup commands,
    /// and refused where there are none.
    #[must_use]
    pub fn input(mut self, key: impl Into<String>, value: impl Into<String>) -> Self {
        self.inputs.insert(key.into(), value.into());
        self
    }

    /// Run this shell text in the workspace before the sandbox is ready. If it fails, so does the
    /// creation, with what it said.
    #[must_use]
    pub fn setup(mut self, text: impl Into<String>) -> Self {
        self.spec.setup.commands.push(text.into());
        self
    }

    /// Give setup commands the secret of this name, as the environment variable of this name.
    #[must_use]
    pub fn setup_secret(mut self, reference: impl Into<String>) -> Self {
        self.spec.setup.secret_refs.push(reference.into());
        self
    }

    /// On this host. Backends that make sandboxes on one machine only are then out.
    #[must_use]
    pub fn host(mut self, host: impl Into<String>) -> Self {
        self.spec.hosts = vec![host.into()];
        self
    }

    /// Show this directory as the workspace. What the sandbox changes there stays in the sandbox.
    #[must_use]
    pub fn workspace(mut self, directory: impl Into<PathBuf>) -> Self {
        self.spec.workspace = Some(directory.into());
        self
    }

    /// Show this directory itself as the workspace: what the sandbox changes there is changed on this
    /// host, and snapshots do not cover it.
    #[must_use]
    pub fn bind_workspace(mut self, directory: impl Into<PathBuf>) -> Self {
        self.spec.workspace_mode = WorkspaceMode::Bind;
        self.workspace(directory)
    }

    /// Have this directory of the host that the sandbox comes to be on as the workspace, itself. It is on
    /// that host already; what the sandbox changes in it is changed there, and snapshots do not cover it.
    /// For backends that have hosts; the path is absolute.
    #[must_use]
    pub fn remote_workspace(mut self, directory: impl Into<PathBuf>) -> Self {
        self.spec.workspace_mode = WorkspaceMode::RemoteCanonical;
        self.workspace(directory)
    }

    /// On this backend.
    #[must_use]
    pub fn backend(mut self, backend: BackendId) -> Self {
        self.spec.backend = Some(backend);
        self
    }

    /// With this filesystem below everything else.
    #[must_use]
    pub fn root(mut self, root: Root) -> Self {
        self.spec.root = root;
        self
    }

    /// Show a file or directory of this host, to look at.
    #[must_use]
    pub fn mount_read_only(self, source: impl Into<PathBuf>, target: impl Into<PathBuf>) -> Self {
        self.mount(source.into(), target.into(), Access::ReadOnly)
    }

    /// Let the sandbox change a file or directory of this host.
    #[must_use]
    pub fn mount_read_write(self, source: impl Into<PathBuf>, target: impl Into<PathBuf>) -> Self {
        self.mount(source.into(), target.into(), Access::ReadWrite)
    }

    /// What can be reached.
    #[must_use]
    pub fn network(mut self, network: Network) -> Self {
        self.spec.network = network;
        self.network = Some(network);
        self
    }

    /// Let its processes connect to this host, although they have no network: `crates.io`, `*.crates.io`
    /// (every name below it), an address; each perhaps with `:port`, else for the ports 80 and 443.
    ///
    /// They do that through a proxy for HTTP and `CONNECT`, of which the usual environment variables
    /// (`HTTPS_PROXY` …) tell them. The harness decides and connects, from its own host; while none is
    /// connected to the sandbox, nobody is let through. A name that is allowed is let through to addresses
    /// of the public internet only; one of another network has to be named itself. What goes over a
    /// connection is not looked at.
    #[must_use]
    pub fn egress(mut self, pattern: impl Into<String>) -> Self {
        self.spec.egress.push(pattern.into());
        self
    }

    /// At most so many processes and threads.
    #[must_use]
    pub fn pids(mut self, pids: u64) -> Self {
        self.spec.limits.pids = Some(pids);
        self
    }

    /// At most so much memory, in bytes.
    #[must_use]
    pub fn memory(mut self, bytes: u64) -> Self {
        self.spec.limits.memory = Some(bytes);
        self
    }

    /// At most so much CPU time, in thousandths of one CPU.
    #[must_use]
    pub fn cpu_millis(mut self, millis: u64) -> Self {
        self.spec.limits.cpu_millis = Some(millis);
        self
    }

    /// Settle for limits of each single process where the host cannot limit the sandbox as a whole: a
    /// sandbox with many processes may then use a multiple.
    #[must_use]
    pub fn accept_limits_per_process(mut self) -> Self {
        self.spec.limits.per_process_is_enough = true;
        self
    }

    /// Add to the environment of every process. Not for secrets: the spec is in the history.
    #[must_use]
    pub fn env(mut self, key: impl Into<String>, value: impl Into<String>) -> Self {
        self.spec.env.insert(key.into(), value.into());
        self
    }

    /// End it so long after it is ready; in whole seconds, at least one.
    #[must_use]
    pub fn ttl(mut self, ttl: Duration) -> Self {
        self.spec.lifetime.ttl_seconds = Some(ttl.as_secs());
        self
    }

    /// Let its time be extended to so much at most, counted from when it is ready.
    #[must_use]
    pub fn max_ttl(mut self, ttl: Duration) -> Self {
        self.spec.lifetime.max_ttl_seconds = Some(ttl.as_secs());
        self
    }

    /// End it after so long with no process and no request; in whole seconds, at least one.
    #[must_use]
    pub fn idle_limit(mut self, limit: Duration) -> Self {
        self.spec.lifetime.idle_seconds = Some(limit.as_secs());
        self
    }

    /// End it so long after the last manager that used it is gone; in whole seconds, at least one.
    #[must_use]
    pub fn lease(mut self, lease: Duration) -> Self {
        self.spec.lifetime.lease_seconds = Some(lease.as_secs());
        self
    }

    /// What happens when its instance is gone.
    #[must_use]
    pub fn on_lost(mut self, policy: OnLost) -> Self {
        self.spec.on_lost = policy;
        self
    }

    /// On whose behalf.
    #[must_use]
    pub fn consumer(mut self, consumer: Consumer) -> Self {
        self.consumer = consumer;
        self
    }

    fn mount(mut self, source: PathBuf, target: PathBuf, access: Access) -> Self {
        self.spec.mounts.push(Mount { source, target, access });
        self
    }
}

/// Who asked: recorded in the history, never passed into the sandbox.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(default)]
pub struct Consumer {
    /// What kind of caller.
    pub actor: Actor,
    /// Which project.
    pub project: Option<String>,
    /// Which run of it.
    pub run_id: Option<String>,
}

/// What kind of caller.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Actor {
    /// A person who administers.
    #[default]
    #[serde(rename = "adm")]
    Admin,
    /// An agent.
    #[serde(rename = "agt")]
    Agent,
    /// Automation, such as a CI job.
    #[serde(rename = "atm")]
    Automation,
}

impl Consumer {
    /// An agent of this project.
    pub fn agent(project: impl Into<String>) -> Self {
        Self { actor: Actor::Agent, project: Some(project.into()), run_id: None }
    }

    /// The same, in this run.
    #[must_use]
    pub fn run(mut self, run_id: impl Into<String>) -> Self {
        self.run_id = Some(run_id.into());
        self
    }
}
