//! Why no sandbox can be made here: found out by trying smaller things.

use std::{
    fs, io,
    path::Path,
    process::{Command, Stdio},
};

use sandbox_core::{Error, ErrorKind};

use super::{
    error::failed,
    programs,
    shared::Shared,
    sys::{ChildSetup, Stage},
};

const OVERLAYFS: rustix::fs::FsWord = 0x794c_7630;

/// Runs bwrap as the user that sandboxes run as.
pub(crate) fn try_bwrap(
    shared: &Shared,
    program: &Path,
    args: &[&str],
) -> io::Result<std::process::Output> {
    let mut command = Command::new(program);
    command.args(args).env_clear().current_dir("/").stdin(Stdio::null());
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    let stage = shared.run_as.map(|run_as| Stage {
        at: c"/tmp".into(),
        mounts: Vec::new(),
        uid: run_as.uid,
        gid: run_as.gid,
    });
    ChildSetup { stage, ..ChildSetup::default() }.apply(&mut command);
    command.output()
}

pub(crate) fn not_run(program: &Path, error: io::Error) -> Error {
    let message = format!("{} cannot be run; install bubblewrap", program.display());
    Error::new(ErrorKind::Unavailable, "find bwrap", message).with_source(error).retryable(false)
}

/// Why a sandbox did not come up. It tries smaller things to tell what is missing; that bwrap or the
/// guest said something is passed on, never interpreted.
pub(crate) fn explain(shared: &Shared, words: &str) -> Error {
    const OPERATION: &str = "provision";
    let program = match programs::find_program(&shared.program) {
        Ok(program) => program,
        Err(error) => return error,
    };
    let name = program.to_string_lossy();
    let smallest = ["--unshare-user", "--ro-bind", "/", "/", "--", &*name, "--version"];
    let mut with_all = smallest.to_vec();
    let more =
        ["--unshare-pid", "--unshare-ipc", "--unshare-uts", "--unshare-net", "--proc", "/proc"];
    let dashes = with_all.iter().position(|word| *word == "--").unwrap_or(0);
    with_all.splice(dashes..dashes, more);
    let unavailable =
        |message: String| Error::new(ErrorKind::Unavailable, OPERATION, message).retryable(false);
    match try_bwrap(shared, &program, &smallest) {
        Err(error) => return not_run(&program, error),
        Ok(output) if !output.status.success() => {
            let said = String::from_utf8_lossy(&output.stderr);
            let message = format!(
                "bwrap cannot make a user namespace here ({}){}",
                said.trim(),
                namespace_hints(shared)
            );
            return unavailable(message);
        }
        Ok(_) => {}
    }
    match try_bwrap(shared, &program, &with_all) {
        Ok(output) if !output.status.success() => {
            let said = String::from_utf8_lossy(&output.stderr);
            let message = format!(
                "bwrap can make a user namespace here, but not all that a sandbox needs ({}); if this is \
                 inside a container, it needs an unmasked /proc (Docker: --security-opt \
                 systempaths=unconfined --security-opt seccomp=unconfined)",
                said.trim()
            );
            return unavailable(message);
        }
        _ => {}
    }
    let mut message = format!("the sandbox did not come up: {words}");
    if is_on_overlay(&shared.state.root) {
        message.push_str(&format!(
            "; the state directory {} is on an overlay itself, which cannot hold the upper layer of \
             another: name one on another filesystem, such as a volume or a tmpfs, when the backend is set up",
            shared.state.root.display()
        ));
        return unavailable(message);
    }
    failed(OPERATION, message)
}

fn is_on_overlay(path: &Path) -> bool {
    rustix::fs::statfs(path).is_ok_and(|found| found.f_type == OVERLAYFS)
}

/// What the system's settings say about a user namespace that was refused.
fn namespace_hints(shared: &Shared) -> String {
    let setting = |name: &str| {
        fs::read_to_string(Path::new("/proc/sys").join(name))
            .ok()
            .map(|text| text.trim().to_owned())
    };
    let mut hints = Vec::new();
    if setting("kernel/apparmor_restrict_unprivileged_userns").as_deref() == Some("1") {
        hints.push(
            "AppArmor restricts user namespaces: give bwrap a profile that allows `userns` (Ubuntu's \
             apparmor-profiles package has one, bwrap-userns-restrict), or set \
             kernel.apparmor_restrict_unprivileged_userns=0"
                .to_owned(),
        );
    }
    if setting("user/max_user_namespaces").as_deref() == Some("0") {
        hints
            .push("user namespaces are off: set user.max_user_namespaces, to 15000 say".to_owned());
    }
    if setting("kernel/unprivileged_userns_clone").as_deref() == Some("0") {
        hints.push(
            "only root may make user namespaces: set kernel.unprivileged_userns_clone=1".to_owned(),
        );
    }
    if Path::new("/.dockerenv").exists() || Path::new("/run/.containerenv").exists() {
        hints.push(
            "this may be a container that forbids it: start it with --security-opt seccomp=unconfined \
             and, where AppArmor is used, --security-opt apparmor=unconfined"
                .to_owned(),
        );
    }
    if let Some(run_as) = shared.run_as {
        hints.push(format!("tried as user {}, which sandboxes run as", run_as.uid));
    }
    hints.iter().map(|hint| format!("; {hint}")).collect()
}
