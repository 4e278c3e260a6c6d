//! How a backend is set up.

use std::{path::PathBuf, sync::Arc, time::Duration};

use sandbox_core::{Error, ErrorKind, Result};

use crate::{
    address::Address,
    backend::SshBackend,
    compose::Compose,
    kind::Kind,
    settings::Settings,
    upload::{UploadProgress, Watcher},
};

impl SshBackend {
    /// Set up step by step.
    #[must_use]
    pub fn builder() -> SshBackendBuilder {
        SshBackendBuilder::default()
    }
}

/// Sets up an [`SshBackend`]. Made by [`SshBackend::builder`].
#[derive(Debug, Clone, Default)]
pub struct SshBackendBuilder {
    hosts: Vec<String>,
    fallbacks: Vec<String>,
    known: Vec<String>,
    settings: Settings,
}

impl SshBackendBuilder {
    /// A host to make sandboxes on: a name, an address, or an alias of the user's `ssh` configuration,
    /// perhaps with a user before it (`me@host`). Of several, the first that can be used is. A sandbox whose
    /// spec names hosts comes to be on one of those instead.
    #[must_use]
    pub fn host(mut self, name: impl Into<String>) -> Self {
        self.hosts.push(name.into());
        self
    }

    /// A host for when none of the former can be used.
    #[must_use]
    pub fn fallback(mut self, name: impl Into<String>) -> Self {
        self.fallbacks.push(name.into());
        self
    }

    /// A host that sandboxes may be on already, though no new one comes to be there unless its spec names
    /// it. Its instances are in the inventory, and what was half made there can be removed. A sandbox whose
    /// making was finished is found without this: its history says where it is.
    #[must_use]
    pub fn known_host(mut self, name: impl Into<String>) -> Self {
        self.known.push(name.into());
        self
    }

    /// The configuration of `ssh`, instead of the user's and the system's.
    #[must_use]
    pub fn config_file(mut self, file: impl Into<PathBuf>) -> Self {
        self.settings.config_file = Some(file.into());
        self
    }

    /// The OpenSSH client, instead of the first `ssh` in `PATH`.
    #[must_use]
    pub fn program(mut self, program: impl Into<PathBuf>) -> Self {
        self.settings.program = program.into();
        self
    }

    /// Where on the hosts instances and snapshots are kept, instead of `sandboxer/ssh` in the account's
    /// state directory. Absolute.
    ///
    /// With bubblewrap it must be on a filesystem that can hold the upper layer of an overlay: ext4, xfs,
    /// btrfs, tmpfs, but not another overlay, and no network filesystem.
    #[must_use]
    pub fn state_dir(mut self, directory: impl Into<PathBuf>) -> Self {
        self.settings.state_dir = Some(directory.into());
        self
    }

    /// Where on the hosts the program is put that does the work there, instead of `sandboxer` in the
    /// account's cache directory. Absolute, and on a filesystem from which programs may be run.
    #[must_use]
    pub fn program_dir(mut self, directory: impl Into<PathBuf>) -> Self {
        self.settings.program_dir = Some(directory.into());
        self
    }

    /// Settle for a host without bubblewrap: a sandbox there is a directory, and processes of the
    /// account with all its rights. Without this such a host is refused.
    #[must_use]
    pub fn accept_the_account_as_the_only_isolation(mut self) -> Self {
        self.settings.accept_account = true;
        self
    }

    /// The hosts are machines that are there for this, such as virtual ones that somebody else makes and
    /// removes: a sandbox is the account on such a machine, with all its rights, whether there is bubblewrap
    /// or not. Only its directory, with the workspace, is made and removed; the machine is left alone.
    ///
    /// The backend's id is then `vm-packer`. However well the machine is separated from others, nothing
    /// separates what runs in the sandbox from the rest of the machine: what is told is isolation by
    /// process, and a profile that asks for more is refused.
    #[must_use]
    pub fn the_machines_are_the_sandboxes(mut self) -> Self {
        self.settings.kind = Kind::Machine;
        self
    }

    /// Bring a compose project up from each sandbox's workspace, and take it down with the sandbox. The
    /// sandbox's own processes are the account's, with all its rights, in the workspace, so that they reach
    /// the services; whoever may use a container engine has mostly the rights of root besides.
    ///
    /// The backend's id is then `compose-ssh`. See [`Compose`].
    #[must_use]
    pub fn compose_with_the_account_as_the_only_isolation(mut self, compose: Compose) -> Self {
        self.settings.kind = Kind::Compose(compose);
        self
    }

    /// Leave it to the configuration of `ssh` whether an unknown host key is accepted. Without this only
    /// known keys are.
    #[must_use]
    pub fn check_host_keys_only_as_ssh_is_configured(mut self) -> Self {
        self.settings.host_keys_as_configured = true;
        self
    }

    /// How long it may take to connect to a host, instead of 15 s.
    #[must_use]
    pub fn connect_timeout(mut self, timeout: Duration) -> Self {
        self.settings.connect_timeout = timeout;
        self
    }

    /// How often a silent host is asked whether it is there, in whole seconds, and after how many such
    /// questions without an answer the link counts as cut. Instead of 5 s and 3.
    #[must_use]
    pub fn keep_alive(mut self, interval: Duration, count: u32) -> Self {
        self.settings.keep_alive = (interval, count);
        self
    }

    /// For the reachability: which tunnel leads to the hosts, and through which host.
    #[must_use]
    pub fn tunnel_hint(mut self, tunnel: impl Into<String>, via: Option<String>) -> Self {
        self.settings.tunnel = Some(tunnel.into());
        self.settings.tunnel_via = via;
        self
    }

    /// For the reachability: who gives out the identity that is let in.
    #[must_use]
    pub fn identity_hint(mut self, identity: impl Into<String>) -> Self {
        self.settings.identity = Some(identity.into());
        self
    }

    /// Is told how the sending of a workspace to a host goes on: when it begins, when the host has said what
    /// it does not have, and whenever more was sent. Where it is broken off, as by a cut link, it begins
    /// anew. It must not block.
    #[must_use]
    pub fn on_upload(mut self, tell: impl Fn(&UploadProgress) + Send + Sync + 'static) -> Self {
        self.settings.on_upload = Some(Watcher(Arc::new(tell)));
        self
    }

    /// The backend. Connects to nothing; whether sandboxes can be made,
    /// [`probe`](sandbox_core::SandboxBackend::probe) says.
    ///
    /// # Errors
    ///
    /// `InvalidSpec` if a host's name is none, a directory of the hosts is relative, or compose is asked for
    /// in a way that cannot be.
    pub fn build(self) -> Result<SshBackend> {
        let invalid = |message: String| Error::new(ErrorKind::InvalidSpec, "configure", message);
        let mut hosts = Vec::new();
        add(&mut hosts, self.hosts.iter().chain(&self.fallbacks))?;
        let own = hosts.len();
        add(&mut hosts, &self.known)?;
        let (interval, count) = self.settings.keep_alive;
        if interval.as_secs() == 0 || count == 0 {
            let message = "a link that is not looked at could be cut for ever: ask at least every second \
                           or so, and once";
            return Err(invalid(message.to_owned()));
        }
        self.settings.kind.check()?;
        let dirs = [&self.settings.state_dir, &self.settings.program_dir];
        for dir in dirs.into_iter().flatten() {
            if !dir.is_absolute() || dir.to_str().is_none() {
                let message = format!("{dir:?} must be an absolute path of the hosts, in UTF-8");
                return Err(invalid(message));
            }
        }
        Ok(SshBackend::from_parts(hosts, own, self.settings))
    }
}

/// Adds the hosts of these names that are not there yet.
fn add<'a>(hosts: &mut Vec<Address>, names: impl IntoIterator<Item = &'a String>) -> Result<()> {
    for name in names {
        let address = Address::parse(name)?;
        if !hosts.contains(&address) {
            hosts.push(address);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_option_is_no_host() {
        let error = SshBackend::builder().host("-oProxyCommand=x").build().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidSpec);
        let error = SshBackend::builder().host("a").fallback("-oProxyCommand=x").build();
        assert_eq!(error.unwrap_err().kind(), ErrorKind::InvalidSpec);
        let error = SshBackend::builder().known_host("-oProxyCommand=x").build();
        assert_eq!(error.unwrap_err().kind(), ErrorKind::InvalidSpec);
        let relative = SshBackend::builder().host("a").state_dir("b").build();
        assert_eq!(relative.unwrap_err().kind(), ErrorKind::InvalidSpec);
    }
}
