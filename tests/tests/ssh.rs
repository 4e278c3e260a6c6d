//! The conformance suite over SSH, on the hosts of `scripts/hosts`: as the same user and, where that is root,
//! as an ordinary account; each with bubblewrap and without.

use std::{
    io::Write,
    path::{Path, PathBuf},
    process::ExitCode,
    sync::Arc,
};

use sandbox_conformance::{Subject, main as run};
use sandbox_core::{Error, Instance, Result, SandboxBackend};
use sandbox_ssh::SshBackend;

/// Where the hosts are; `scripts/hosts env` says it.
const HOSTS: &str = "SANDBOX_SSH_HOSTS";

fn main() -> ExitCode {
    let Some(hosts) = std::env::var_os(HOSTS).map(PathBuf::from) else {
        let line = format!("no subject: {HOSTS} is not set; see scripts/hosts\n");
        let _ = std::io::stderr().write_all(line.as_bytes());
        return run(Vec::new());
    };
    let mut subjects =
        vec![subject("ssh", &hosts, "near", None), subject("ssh_bare", &hosts, "bare", None)];
    if let Some(account) = account(&hosts) {
        for (name, host) in [("ssh_user", "user"), ("ssh_account", "account")] {
            subjects.push(subject(name, &hosts, host, Some(account)));
        }
    }
    run(subjects)
}

fn subject(name: &str, hosts: &Path, host: &'static str, account: Option<u32>) -> Subject {
    let hosts = hosts.to_owned();
    Subject::new(name, move |state| backend(&hosts, host, account, state)).guest(guest)
}

/// The hosts are this machine.
fn guest(instance: &Instance) -> Option<u32> {
    instance.data["inner"]["pid"].as_u64().and_then(|pid| u32::try_from(pid).ok())
}

fn backend(
    hosts: &Path,
    host: &str,
    account: Option<u32>,
    state: &Path,
) -> Result<Arc<dyn SandboxBackend>> {
    // Another account must get there.
    if let Some(account) = account {
        let prepare = || {
            std::fs::create_dir_all(state)?;
            std::os::unix::fs::chown(state, Some(account), Some(account))?;
            open_up(state.parent().unwrap_or(state))
        };
        prepare().map_err(|error: std::io::Error| Error::io("prepare", "a state", error))?;
    }
    let programs = hosts.join(if account.is_some() { "home" } else { "cache" });
    let mut builder = SshBackend::builder()
        .host(host)
        .config_file(hosts.join("config"))
        .state_dir(state)
        .program_dir(programs);
    if matches!(host, "account" | "bare") {
        builder = builder.accept_the_account_as_the_only_isolation();
    }
    Ok(Arc::new(builder.build()?))
}

fn open_up(dir: &Path) -> std::io::Result<()> {
    use std::os::unix::fs::PermissionsExt;
    std::fs::set_permissions(dir, std::fs::Permissions::from_mode(0o711))
}

/// The ordinary account of the hosts, if there is one.
fn account(hosts: &Path) -> Option<u32> {
    use std::os::unix::fs::MetadataExt;
    std::fs::metadata(hosts.join("home")).ok().map(|home| home.uid())
}
