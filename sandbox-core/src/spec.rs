//! What a sandbox is: its spec.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

use serde::{Deserialize, Serialize};

use crate::{BackendId, Error, ErrorKind, ReachabilityHints, Result};

/// What a sandbox is, as it was asked for. [`acquire`](crate::SandboxManager::acquire) compares this.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
#[non_exhaustive]
pub struct SandboxSpec {
    /// The backend; the manager's first one if it is not given.
    pub backend: Option<BackendId>,
    /// The filesystem below everything else.
    pub root: Root,
    /// A directory that the workspace shows; empty if not given. It is one of this host and never written
    /// to, unless [`workspace_mode`](Self::workspace_mode) says otherwise.
    pub workspace: Option<PathBuf>,
    /// How it is shown.
    #[serde(skip_serializing_if = "WorkspaceMode::is_default")]
    pub workspace_mode: WorkspaceMode,
    /// More of this host's files and directories.
    pub mounts: Vec<Mount>,
    /// What can be reached.
    pub network: Network,
    /// Hosts that are let through all the same where the network is denied; see
    /// [`CreateSandbox::egress`](crate::CreateSandbox::egress).
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub egress: Vec<String>,
    /// What may be used.
    pub limits: Limits,
    /// Added to the environment of every process.
    pub env: BTreeMap<String, String>,
    /// How long it may live.
    pub lifetime: Lifetime,
    /// What happens when its instance is gone.
    pub on_lost: OnLost,
    /// The profile that it was made by.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub profile: Option<ProfileRef>,
    /// The image that stands for [`Root::Standard`] on backends that run images.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub image: Option<String>,
    /// The hosts that it may be on, the preferred ones first, on backends that have hosts.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub hosts: Vec<String>,
    /// What its reachability tells those who have no way of their own to its host, on backends that have
    /// hosts.
    #[serde(skip_serializing_if = "ReachabilityHints::is_empty")]
    pub reachability: ReachabilityHints,
    /// What is done before it is ready, whenever it begins with a fresh filesystem.
    #[serde(skip_serializing_if = "Setup::is_empty")]
    pub setup: Setup,
}

/// Which profile a sandbox was made by.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProfileRef {
    /// Its id.
    pub id: String,
    /// Which version of it.
    pub version: String,
}

/// What is done before a sandbox is ready.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
#[non_exhaustive]
pub struct Setup {
    /// Shell text, run one after the other in the workspace. The first that fails fails the creation.
    pub commands: Vec<String>,
    /// Secrets that these commands get as environment variables of the same name. Names, not values.
    pub secret_refs: Vec<String>,
    /// The inputs of the request, which they get as `SANDBOX_INPUT_…`.
    pub inputs: BTreeMap<String, String>,
}

impl Setup {
    pub(crate) fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

/// How long a sandbox may live, in whole seconds. `None` is for ever.
///
/// The guest itself ends when one of these is over: a sandbox does not outlive its time even if no
/// harness ever comes back. What it leaves on disk is removed by
/// [`reap`](crate::SandboxManager::reap), or when it is destroyed.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
#[non_exhaustive]
pub struct Lifetime {
    /// From when it is ready.
    pub ttl_seconds: Option<u64>,
    /// The most that the former can be extended to, counted likewise.
    pub max_ttl_seconds: Option<u64>,
    /// With no process and no request.
    pub idle_seconds: Option<u64>,
    /// Without a manager that renews its lease. Managers do that by themselves as long as they live.
    pub lease_seconds: Option<u64>,
}

/// What happens when an instance is gone that nobody removed. It is recorded in any case.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum OnLost {
    /// Calls fail with `Lost` until somebody rewinds, recreates or destroys it.
    #[default]
    Fail,
    /// The call that notices still fails; the sandbox comes back with the files of its latest snapshot.
    /// Without a snapshot it stays lost.
    RestoreLatestSnapshot,
    /// The call that notices still fails; the sandbox comes back as it was at first.
    Recreate,
}

/// The filesystem below everything else.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Root {
    /// What the backend thinks best; the local one shows the programs and libraries of this host.
    #[default]
    Standard,
    /// An unpacked root filesystem on this host. Never written to.
    Directory(PathBuf),
    /// A container image, by name or id, for backends that make containers. Never written to.
    Image(String),
}

/// How a sandbox's workspace is the directory that it shows.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum WorkspaceMode {
    /// The sandbox has it to itself: an overlay over the directory, or a copy of it, whichever the
    /// backend makes. The directory is never written to.
    #[default]
    Private,
    /// The directory itself: what the sandbox changes there is changed on this host. Snapshots do not
    /// cover it.
    Bind,
    /// A directory of the host that the sandbox comes to be on, itself, where that is another host: it is
    /// there already and stays the truth, so that nothing is brought to it, and it is never removed.
    /// Snapshots do not cover it.
    RemoteCanonical,
}

impl WorkspaceMode {
    // `serde` wants a reference.
    #[allow(clippy::trivially_copy_pass_by_ref)]
    fn is_default(&self) -> bool {
        *self == Self::Private
    }
}

/// A file or directory of this host, shown in the sandbox.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Mount {
    /// On this host; absolute.
    pub source: PathBuf,
    /// In the sandbox; absolute.
    pub target: PathBuf,
    /// What the sandbox may do with it.
    #[serde(default)]
    pub access: Access,
}

/// What a sandbox may do with a mount.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Access {
    /// Look at it.
    #[default]
    ReadOnly,
    /// Change it, on this host, as the user who runs the harness could. Snapshots do not cover it.
    ReadWrite,
}

/// What a sandbox can reach.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Network {
    /// Its own loopback, and nothing else.
    #[default]
    Deny,
    /// All that this host reaches, this host's loopback among it.
    Host,
}

/// What a sandbox may use, all its processes together. `None` is no limit of ours.
///
/// A limit that the host cannot enforce for the sandbox as a whole is refused, unless
/// [`CreateSandbox::accept_limits_per_process`](crate::CreateSandbox::accept_limits_per_process) was asked for.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
#[non_exhaustive]
pub struct Limits {
    /// Processes and threads.
    pub pids: Option<u64>,
    /// Memory, in bytes; swap is not given on top.
    pub memory: Option<u64>,
    /// CPU time, in thousandths of one CPU.
    pub cpu_millis: Option<u64>,
    /// Settle for limits of each single process where the whole cannot be limited.
    pub per_process_is_enough: bool,
}

impl SandboxSpec {
    /// The spec with its paths of this host made absolute and free of links, checked as far as no
    /// backend is needed for it.
    pub(crate) fn resolved(mut self) -> Result<Self> {
        match (self.workspace_mode, &mut self.workspace) {
            (WorkspaceMode::RemoteCanonical, Some(workspace)) => check_remote(workspace)?,
            (_, Some(workspace)) => *workspace = directory("workspace", workspace)?,
            (WorkspaceMode::Private, None) => {}
            (WorkspaceMode::Bind, None) => {
                return Err(invalid("a workspace that is bound needs a directory".into()));
            }
            (WorkspaceMode::RemoteCanonical, None) => {
                let message = "a workspace that stays on its host (remote-canonical) needs a directory there: \
                               name it, with a profile as the input `repo`";
                return Err(invalid(message.into()));
            }
        }
        match &mut self.root {
            Root::Directory(root) => *root = directory("root", root)?,
            Root::Image(image) if image.is_empty() || image.contains(char::is_whitespace) => {
                return Err(invalid(format!("{image:?} cannot be an image's name")));
            }
            _ => {}
        }
        for mount in &mut self.mounts {
            mount.source = mount.source.canonicalize().map_err(|error| {
                let what = format!("the mount's source {}", mount.source.display());
                Error::io("create", what, error)
            })?;
            check_target(&mount.target)?;
        }
        for (key, value) in &self.env {
            if key.is_empty() || key.contains(['=', '\0']) || value.contains('\0') {
                return Err(invalid(format!("{key:?} cannot be an environment variable")));
            }
        }
        crate::manager::egress::check(&self)?;
        let Limits { pids, memory, cpu_millis, .. } = self.limits;
        if pids == Some(0) || memory == Some(0) || cpu_millis == Some(0) {
            return Err(invalid(
                "a limit of 0 leaves nothing to run in; leave it out for none".into(),
            ));
        }
        Ok(self)
    }

    /// A hash of the spec that is the same in every release that knows the same fields: 64 hexadecimal
    /// digits.
    #[must_use]
    pub fn fingerprint(&self) -> String {
        use sha2::{Digest, Sha256};
        // Maps are sorted by their keys.
        let value = serde_json::to_value(self).unwrap_or_default();
        Sha256::digest(value.to_string()).iter().map(|byte| format!("{byte:02x}")).collect()
    }

    /// The names of the fields in which two specs differ.
    pub(crate) fn differences(&self, other: &Self) -> Vec<String> {
        let value = |spec: &Self| serde_json::to_value(spec).unwrap_or_default();
        let mut found = Vec::new();
        compare(&value(self), &value(other), "", &mut found);
        found
    }
}

fn compare(a: &serde_json::Value, b: &serde_json::Value, at: &str, found: &mut Vec<String>) {
    use serde_json::Value::Object;
    let (Object(left), Object(right)) = (a, b) else {
        if a != b {
            found.push(at.to_owned());
        }
        return;
    };
    let null = serde_json::Value::Null;
    let keys: std::collections::BTreeSet<_> = left.keys().chain(right.keys()).collect();
    for key in keys {
        let path = if at.is_empty() { key.clone() } else { format!("{at}.{key}") };
        compare(left.get(key).unwrap_or(&null), right.get(key).unwrap_or(&null), &path, found);
    }
}

fn directory(field: &str, path: &Path) -> Result<PathBuf> {
    let resolved = path
        .canonicalize()
        .map_err(|error| Error::io("create", format!("the {field} {}", path.display()), error))?;
    if !resolved.is_dir() {
        return Err(invalid(format!("the {field} {} is not a directory", path.display())));
    }
    Ok(resolved)
}

/// What there is on another host, only that host can say.
fn check_remote(workspace: &Path) -> Result<()> {
    use std::path::Component;
    let plain =
        workspace.components().all(|c| matches!(c, Component::RootDir | Component::Normal(_)));
    if workspace.is_absolute() && plain && workspace.parent().is_some() {
        return Ok(());
    }
    let message = format!(
        "a workspace on another host must be an absolute and plain path, not {workspace:?}"
    );
    Err(invalid(message))
}

fn check_target(target: &Path) -> Result<()> {
    use std::path::Component;
    let plain = target.components().all(|c| matches!(c, Component::RootDir | Component::Normal(_)));
    if !target.is_absolute() || !plain || target.parent().is_none() {
        let message = format!("a mount's target must be absolute and plain, not {target:?}");
        return Err(invalid(message));
    }
    for taken in ["/proc", "/dev", "/run/sandbox"] {
        if target.starts_with(taken) {
            return Err(invalid(format!("nothing can be mounted at {}", target.display())));
        }
    }
    Ok(())
}

fn invalid(message: String) -> Error {
    Error::new(ErrorKind::InvalidSpec, "create", message)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::CreateSandbox;

    #[test]
    fn differing_fields_are_named() {
        let a = CreateSandbox::new().pids(10).env("A", "1").spec;
        let b =
            CreateSandbox::new().pids(20).env("A", "1").env("B", "2").network(Network::Host).spec;
        assert_eq!(a.differences(&b), ["env.B", "limits.pids", "network"]);
        let c = CreateSandbox::new().pids(10).env("A", "1").egress("crates.io").spec;
        assert_eq!(a.differences(&c), ["egress"]);
        assert_ne!(a.fingerprint(), c.fingerprint());
        assert!(a.differences(&a).is_empty());
    }

    #[test]
    fn a_fingerprint_is_of_the_whole_spec_and_stable() {
        let spec = CreateSandbox::new().pids(10).env("B", "2").env("A", "1").spec;
        let same = CreateSandbox::new().env("A", "1").env("B", "2").pids(10).spec;
        assert_eq!(spec.fingerprint(), same.fingerprint());
        assert_ne!(spec.fingerprint(), SandboxSpec::default().fingerprint());
        insta::assert_snapshot!(SandboxSpec::default().fingerprint());
    }

    #[test]
    fn bad_requests_say_what_is_wrong() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("file");
        std::fs::write(&file, "").unwrap();
        for (request, kind, says) in [
            (CreateSandbox::new().workspace("/nope"), ErrorKind::NotFound, "workspace /nope"),
            (CreateSandbox::new().workspace(&file), ErrorKind::InvalidSpec, "not a directory"),
            (
                CreateSandbox::new().mount_read_only(&file, "relative"),
                ErrorKind::InvalidSpec,
                "must be absolute",
            ),
            (
                CreateSandbox::new().mount_read_only(&file, "/proc/x"),
                ErrorKind::InvalidSpec,
                "nothing can be mounted",
            ),
            (
                CreateSandbox::new().remote_workspace("below/home"),
                ErrorKind::InvalidSpec,
                "an absolute and plain path",
            ),
            (
                CreateSandbox::new().remote_workspace("/srv/../etc"),
                ErrorKind::InvalidSpec,
                "an absolute and plain path",
            ),
            (CreateSandbox::new().env("A=B", ""), ErrorKind::InvalidSpec, "\"A=B\""),
            (CreateSandbox::new().pids(0), ErrorKind::InvalidSpec, "limit of 0"),
            (CreateSandbox::new().egress("*"), ErrorKind::InvalidSpec, "allow the network"),
            (
                CreateSandbox::new().egress("a").network(Network::Host),
                ErrorKind::InvalidSpec,
                "where the network is denied",
            ),
        ] {
            let error = request.spec.resolved().unwrap_err();
            assert_eq!(error.kind(), kind, "{error}");
            assert!(error.to_string().contains(says), "{error}");
        }
    }
}
