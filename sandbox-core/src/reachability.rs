//! How someone else can get into a sandbox.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

/// How someone else can get into a sandbox.
///
/// Serialized it is flat: `pid` and `workspace_dir` for a local one, `container` and `workspace_dir` for a
/// container, `ssh` and `remote_dir` for one on another host. A consumer branches on which field is
/// present.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
#[non_exhaustive]
pub enum Reachability {
    /// Through a process of this host.
    Local(LocalReach),
    /// Through a container engine.
    Container(ContainerReach),
    /// Over SSH.
    Ssh(SshReach),
}

/// Over SSH.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct SshReach {
    /// What `ssh` is to connect to, as it was configured: a host's name or alias, perhaps with a user.
    pub ssh: String,
    /// The host alone.
    pub host: String,
    /// The workspace, as it is seen once there.
    pub remote_dir: PathBuf,
    /// The configuration of `ssh`, where it is not the user's own.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub config_file: Option<PathBuf>,
    /// What runs a shell in the sandbox, as a command line of the host; without one, a shell in
    /// `remote_dir` is in it.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub command: Option<String>,
    /// Which tunnel leads there: a hint for whoever has no way of their own.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub tunnel: Option<String>,
    /// Through which host it leads.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub tunnel_via: Option<String>,
    /// Who gives out the identity that is let in there: a hint too.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub identity: Option<String>,
}

/// Through a container engine.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct ContainerReach {
    /// The container's id.
    pub container: String,
    /// The workspace, inside.
    pub workspace_dir: PathBuf,
    /// Where the engine listens, as `docker --host` takes it, where that is not its standard place.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub engine: Option<String>,
    /// The user and group inside that the sandbox's processes run as.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub user: Option<(u32, u32)>,
}

/// Through a process of this host.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct LocalReach {
    /// The process that holds the namespaces, as this host counts.
    pub pid: u32,
    /// The workspace, inside.
    pub workspace_dir: PathBuf,
    /// The user and group of this host that the sandbox runs as, where it is not the harness's own:
    /// whoever enters as root must become it first.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub run_as: Option<(u32, u32)>,
    /// It has this host's network, so that there is none of its own to enter.
    #[serde(skip_serializing_if = "std::ops::Not::not", default)]
    pub shares_network: bool,
    /// The program inside that gives up the rights that entering brings, before it runs a command.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub enter_program: Option<PathBuf>,
}

/// What a person can paste into a shell: exactly one of the two is present.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReachabilityReport {
    /// The fields of [`Reachability`].
    #[serde(flatten)]
    pub reachability: Reachability,
    /// A command line that logs in over SSH.
    pub ssh_one_liner: Option<String>,
    /// A command line that runs a shell inside, with no more rights than the sandbox has. Everything
    /// before its last word also runs any other command.
    pub local_exec_hint: Option<String>,
}

impl LocalReach {
    /// Through this process, into this workspace.
    pub fn new(pid: u32, workspace_dir: impl Into<PathBuf>) -> Self {
        Self {
            pid,
            workspace_dir: workspace_dir.into(),
            run_as: None,
            shares_network: false,
            enter_program: None,
        }
    }
}

impl ContainerReach {
    /// Into this container, into this workspace.
    pub fn new(container: impl Into<String>, workspace_dir: impl Into<PathBuf>) -> Self {
        let (container, workspace_dir) = (container.into(), workspace_dir.into());
        Self { container, workspace_dir, engine: None, user: None }
    }

    /// The command line. The engine gives what it starts the rights of the container, and no more.
    fn exec_hint(&self) -> String {
        let mut words = vec!["docker".to_owned()];
        if let Some(engine) = &self.engine {
            words.extend(["--host".to_owned(), quoted(Path::new(engine))]);
        }
        words.extend(["exec".to_owned(), "--interactive".to_owned(), "--tty".to_owned()]);
        if let Some((uid, gid)) = self.user {
            words.push(format!("--user={uid}:{gid}"));
        }
        words.push(format!("--workdir={}", quoted(&self.workspace_dir)));
        words.extend([quoted(Path::new(&self.container)), "/bin/sh".to_owned()]);
        words.join(" ")
    }
}

impl SshReach {
    /// To this destination, into this workspace.
    pub fn new(ssh: impl Into<String>, remote_dir: impl Into<PathBuf>) -> Self {
        let ssh = ssh.into();
        let host = ssh.rsplit_once('@').map_or(ssh.as_str(), |(_, host)| host).to_owned();
        Self {
            ssh,
            host,
            remote_dir: remote_dir.into(),
            config_file: None,
            command: None,
            tunnel: None,
            tunnel_via: None,
            identity: None,
        }
    }

    /// The command line. The host's shell sees the command once more, so that it is quoted twice.
    fn one_liner(&self) -> String {
        let mut words = vec!["ssh".to_owned(), "-t".to_owned()];
        if let Some(file) = &self.config_file {
            words.extend(["-F".to_owned(), quoted(file)]);
        }
        let command = match &self.command {
            Some(command) => command.clone(),
            None => format!("cd {} && exec \"$SHELL\"", quoted(&self.remote_dir)),
        };
        words.extend([quoted(Path::new(&self.ssh)), quoted(Path::new(&command))]);
        words.join(" ")
    }
}

impl Reachability {
    /// The same as command lines.
    #[must_use]
    pub fn report(&self) -> ReachabilityReport {
        let (ssh_one_liner, local_exec_hint) = match self {
            Self::Local(local) => (None, Some(local.exec_hint())),
            Self::Container(container) => (None, Some(container.exec_hint())),
            Self::Ssh(ssh) => (Some(ssh.one_liner()), None),
        };
        ReachabilityReport { reachability: self.clone(), ssh_one_liner, local_exec_hint }
    }
}

impl LocalReach {
    /// The command line.
    ///
    /// Entering the user namespace as root of the host would bring along root's groups, and as its
    /// owner every capability in it: so the sandbox's own user enters, and the program inside drops the
    /// capabilities and loads the system-call filter before it runs the command.
    fn exec_hint(&self) -> String {
        let mut words: Vec<String> = Vec::new();
        if let Some((uid, gid)) = self.run_as {
            words.extend(
                [
                    "setpriv",
                    &format!("--reuid={uid}"),
                    &format!("--regid={gid}"),
                    "--clear-groups",
                    "--",
                ]
                .map(str::to_owned),
            );
        }
        words.extend(["nsenter".into(), "--target".into(), self.pid.to_string()]);
        if self.enter_program.is_some() {
            words.extend(["--user".into(), "--preserve-credentials".into()]);
        }
        words.extend(["--mount", "--pid"].map(str::to_owned));
        if !self.shares_network {
            words.push("--net".into());
        }
        words.extend(["--uts", "--ipc", "--"].map(str::to_owned));
        if let Some(program) = &self.enter_program {
            words.extend([quoted(program), "enter".into(), "--".into()]);
        }
        words.push("/bin/sh".into());
        words.join(" ")
    }
}

/// A path as one word of a shell.
fn quoted(path: &Path) -> String {
    let text = path.display().to_string();
    let plain = |c: char| c.is_ascii_alphanumeric() || "/._-:@".contains(c);
    if !text.is_empty() && text.chars().all(plain) {
        text
    } else {
        format!("'{}'", text.replace('\'', r"'\''"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_local_form_is_flat() {
        let reach = Reachability::Local(LocalReach::new(4242, "/workspace"));
        let json = serde_json::to_value(reach.report()).unwrap();
        assert_eq!(
            json,
            serde_json::json!({
                "pid": 4242,
                "workspace_dir": "/workspace",
                "ssh_one_liner": null,
                "local_exec_hint":
                    "nsenter --target 4242 --mount --pid --net --uts --ipc -- /bin/sh",
            })
        );
    }

    #[test]
    fn a_container_is_entered_through_its_engine() {
        let mut container = ContainerReach::new("0123abc", "/workspace");
        container.engine = Some("unix:///run/other docker.sock".into());
        container.user = Some((1000, 1000));
        let json = serde_json::to_value(Reachability::Container(container).report()).unwrap();
        assert_eq!(
            json["local_exec_hint"],
            "docker --host 'unix:///run/other docker.sock' exec --interactive --tty \
             --user=1000:1000 --workdir=/workspace 0123abc /bin/sh"
        );
        let read: Reachability = serde_json::from_value(json).unwrap();
        assert!(matches!(read, Reachability::Container(_)));
    }

    #[test]
    fn whoever_enters_becomes_the_sandbox_first() {
        let mut local = LocalReach::new(7, "/workspace");
        local.run_as = Some((1_900_000_000, 1_900_000_000));
        local.enter_program = Some("/run/sandbox/guest".into());
        assert_eq!(
            local.exec_hint(),
            "setpriv --reuid=1900000000 --regid=1900000000 --clear-groups -- nsenter --target 7 \
             --user --preserve-credentials --mount --pid --net --uts --ipc -- /run/sandbox/guest \
             enter -- /bin/sh"
        );
    }

    #[test]
    fn the_ssh_form_survives_two_shells() {
        let place = tempfile::tempdir().unwrap();
        let dir = place.path().join("it's a \"place\" for $HOME");
        std::fs::create_dir(&dir).unwrap();
        let mut ssh = SshReach::new("me@build1", &dir);
        ssh.tunnel = Some("ops-bridge".into());
        let report = Reachability::Ssh(ssh).report();
        assert_eq!(report.local_exec_hint, None);
        // As ssh does: the words that are left are put together for the host's shell.
        let pasted = format!(
            "ssh() {{ [ \"$1 $2\" = '-t me@build1' ] && shift 2 && /bin/sh -c \"$*\"; }}; {}",
            report.ssh_one_liner.as_deref().unwrap()
        );
        let mut shell = std::process::Command::new("/bin/sh");
        let said = shell.args(["-c", &pasted]).env("SHELL", "pwd").output().unwrap();
        assert_eq!(String::from_utf8_lossy(&said.stdout).trim_end(), dir.to_str().unwrap());
        let json = serde_json::to_value(&report).unwrap();
        assert_eq!(json["ssh"], "me@build1");
        assert_eq!(json["host"], "build1");
        assert_eq!(json["tunnel"], "ops-bridge");
        assert_eq!(serde_json::from_value::<ReachabilityReport>(json).unwrap(), report);
    }
}
