//! The backends that this host has the programs for.

use std::{
    os::unix::{ffi::OsStrExt, fs::PermissionsExt},
    path::Path,
    sync::Arc,
};

use clap::{Args, builder::BoolishValueParser};
use sandbox_bwrap::BwrapBackend;
use sandbox_core::{Error, ErrorKind, FileJournal, Journal, Known, SandboxBackend};
use sandbox_docker::DockerBackend;
use sandbox_ssh::{Compose, SshBackend, SshBackendBuilder};
use sha2::{Digest, Sha256};

use crate::app::{App, Fail};

/// Where a container engine listens if nobody says otherwise.
const DOCKER_SOCKET: &str = "/var/run/docker.sock";

// On which host. A comment for the documentation would become the help of the commands that have it.
#[derive(Debug, Clone, Default, Args)]
pub(crate) struct OnHost {
    /// On this host, for backends that have hosts: as `ssh` knows it, an alias, a name or an address,
    /// perhaps with a user (me@host).
    #[arg(long, env = "SANDBOXER_HOST", value_name = "HOST")]
    pub(crate) host: Option<String>,
    /// Settle for a host without bubblewrap: a sandbox there is a directory, and processes of the account
    /// with all its rights. Without this such a host is refused.
    #[arg(long, env = "SANDBOXER_ACCEPT_ACCOUNT", value_parser = BoolishValueParser::new())]
    pub(crate) accept_account_as_isolation: bool,
}

/// The hosts of backends that have some.
#[derive(Debug, Clone, Default)]
pub(crate) struct Hosts {
    /// Those to make sandboxes on, the preferred ones first.
    pub(crate) wanted: Vec<String>,
    /// Whether an account there is isolation enough.
    pub(crate) accept_account: bool,
    /// Whether to look where there were sandboxes once, and not only where there are some.
    pub(crate) of_the_past: bool,
}

impl OnHost {
    /// The host that was asked for, and otherwise these.
    pub(crate) fn or(self, others: impl IntoIterator<Item = String>) -> Hosts {
        Hosts {
            wanted: self.host.map_or_else(|| others.into_iter().collect(), |host| vec![host]),
            accept_account: self.accept_account_as_isolation,
            of_the_past: false,
        }
    }
}

/// The backends that can be used, and why the others are not among them.
#[derive(Debug, Default)]
pub(crate) struct Backends {
    pub(crate) there: Vec<Arc<dyn SandboxBackend>>,
    pub(crate) missing: Vec<(&'static str, Error)>,
}

impl Backends {
    fn add<B: SandboxBackend + 'static>(&mut self, id: &'static str, made: Result<B, Error>) {
        match made {
            Ok(backend) => self.there.push(Arc::new(backend)),
            Err(error) => self.missing.push((id, error)),
        }
    }
}

impl App {
    pub(crate) async fn backends(&self, hosts: &Hosts) -> Result<Backends, Fail> {
        let state = self.state_dir()?;
        let known = known_hosts(&state, hosts.of_the_past).await?;
        let mut backends = Backends::default();
        let bwrap = BwrapBackend::builder().state_dir(state.join("bwrap")).build();
        backends.add("ext.bwrap", bwrap);
        backends.add("ext.docker", self.docker(&state));
        let ssh = self.ssh(hosts, &known);
        let machines = ssh.clone().map(SshBackendBuilder::the_machines_are_the_sandboxes);
        let compose = self.compose()?;
        let composed =
            ssh.clone().map(|ssh| ssh.compose_with_the_account_as_the_only_isolation(compose));
        for (id, builder) in
            [("ext.ssh", ssh), ("ext.vm-packer", machines), ("ext.compose-ssh", composed)]
        {
            let made = builder.and_then(SshBackendBuilder::build);
            // What was asked for is the caller's.
            if let Err(error) = &made
                && error.kind() == ErrorKind::InvalidSpec
            {
                return Err(error.clone().into());
            }
            backends.add(id, made);
        }
        Ok(backends)
    }

    /// How compose projects are brought up on other hosts.
    fn compose(&self) -> Result<Compose, Error> {
        let mut compose = Compose::new().command(self.compose.split_whitespace());
        for pair in &self.compose_env {
            let (key, value) = pair.split_once('=').ok_or_else(|| {
                let message = format!("{pair:?} is no KEY=VALUE");
                Error::new(ErrorKind::InvalidSpec, "configure compose", message)
            })?;
            compose = compose.env(key, value);
        }
        Ok(compose)
    }

    /// The container engine that the `docker` program would use, if there is one.
    fn docker(&self, state: &Path) -> Result<DockerBackend, Error> {
        let named = ["DOCKER_HOST", "DOCKER_CONTEXT"].iter().any(|v| std::env::var_os(v).is_some());
        if !named && !Path::new(DOCKER_SOCKET).exists() {
            let message = format!(
                "there is no container engine: neither DOCKER_HOST nor DOCKER_CONTEXT is set, and there is \
                 no {DOCKER_SOCKET}"
            );
            return Err(Error::new(ErrorKind::Unavailable, "connect", message));
        }
        // State directories see nothing of each other's containers.
        let digest = Sha256::digest(state.as_os_str().as_bytes());
        let scope: String = digest.iter().take(8).map(|byte| format!("{byte:02x}")).collect();
        let pulls = self.pulls();
        DockerBackend::builder()
            .scope(format!("sandboxer-{scope}"))
            .on_pull(move |progress| pulls.tell(progress))
            .build()
    }

    /// Other hosts over SSH, if there is an `ssh`: as it is configured, or by the configuration that was
    /// named.
    fn ssh(&self, hosts: &Hosts, known: &[String]) -> Result<SshBackendBuilder, Error> {
        if !is_program("ssh") {
            let message = "there is no program `ssh` in PATH";
            return Err(Error::new(ErrorKind::Unavailable, "connect", message));
        }
        let uploads = self.uploads();
        let mut ssh = SshBackend::builder().on_upload(move |progress| uploads.tell(progress));
        for host in &hosts.wanted {
            ssh = ssh.host(host);
        }
        for host in known {
            ssh = ssh.known_host(host);
        }
        if let Some(file) = &self.ssh_config {
            let file = std::path::absolute(file);
            ssh = ssh.config_file(file.map_err(|e| Error::io("connect", "--ssh-config", e))?);
        }
        if hosts.accept_account {
            ssh = ssh.accept_the_account_as_the_only_isolation();
        }
        Ok(ssh)
    }
}

/// The hosts that sandboxes of this state directory may be on.
async fn known_hosts(state: &Path, of_the_past: bool) -> Result<Vec<String>, Fail> {
    let dir = state.join("journal");
    let mut hosts = Vec::new();
    if !dir.exists() {
        return Ok(hosts);
    }
    let journal = FileJournal::open(dir)?;
    let ids = if of_the_past { journal.sandboxes().await? } else { journal.live().await? };
    for id in ids {
        // A history that cannot be read is told of where it is needed.
        let Ok(events) = journal.read(&id, 0).await else { continue };
        if let Some(Known::Requested { spec, .. }) = events.first().and_then(|event| event.known())
        {
            for host in &spec.hosts {
                // What is no host was asked for in vain.
                let is_host = || SshBackend::builder().known_host(host).build().is_ok();
                if !hosts.contains(host) && is_host() {
                    hosts.push(host.clone());
                }
            }
        }
    }
    Ok(hosts)
}

/// Whether there is a program of this name in `PATH`.
fn is_program(name: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path).any(|dir| {
        let file = dir.join(name).metadata();
        file.is_ok_and(|file| file.is_file() && file.permissions().mode() & 0o111 != 0)
    })
}
