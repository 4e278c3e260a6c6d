//! What this host can do, found out by doing it; and, where it fails, why.

use std::{
    fs, io,
    path::Path,
    process::{Command, Stdio},
};

use sandbox_core::{
    Capabilities, CreateSandbox, Error, ErrorKind, Feature, Instance, Level, OwnerId, Provision,
    Result, SandboxBackend, SandboxId,
};

use super::{
    ID,
    backend::{BwrapHost, Shared},
    cgroup::Controller,
    error::{blocking, failed},
    instance::InstanceDir,
    launch, programs,
    sys::{ChildSetup, Stage},
};

const OVERLAYFS: rustix::fs::FsWord = 0x794c_7630;

/// Makes a sandbox, looks at it, and removes it.
pub(crate) async fn probe(backend: &BwrapHost) -> Result<Capabilities> {
    let shared = backend.shared().clone();
    let version = blocking("probe", move || version(&shared)).await?;
    let request = Provision::new(SandboxId::new(), OwnerId::new(), CreateSandbox::new().spec);
    let instance = backend.provision(&request).await.map_err(|error| {
        // Whatever was wrong, here it means that no sandbox can be made at all.
        let message = error.message().to_owned();
        Error::new(ErrorKind::Unavailable, "probe", message).with_source(error).retryable(false)
    })?;
    let seen = async {
        let paused = match backend.pause(&instance).await {
            Ok(()) => backend.resume(&instance).await.map(|()| true)?,
            Err(_) => false,
        };
        look(backend, &instance, paused).await
    };
    let seen = seen.await;
    let removed = backend.teardown(&instance).await;
    let seen = seen?;
    removed?;
    let shared = backend.shared().clone();
    Ok(describe(&shared, version, &seen))
}

/// What was seen of a sandbox from outside.
struct Seen {
    status: String,
    mounts: String,
    own_namespaces: Vec<&'static str>,
    paused: bool,
}

async fn look(backend: &BwrapHost, instance: &Instance, paused: bool) -> Result<Seen> {
    let dir = InstanceDir::of(&backend.shared().state, &instance.id);
    blocking("probe", move || {
        let failed = |error| Error::io("probe", "looking at the trial sandbox", error);
        let guest = dir.guest().map_err(failed)?;
        let guest = guest.ok_or_else(|| super::error::lost("probe", "the trial sandbox ended"))?;
        let own = |name: &&'static str| {
            let link = |pid: &str| fs::read_link(format!("/proc/{pid}/ns/{name}"));
            matches!((link("self"), link(&guest.pid.to_string())), (Ok(a), Ok(b)) if a != b)
        };
        let read = |file| fs::read_to_string(format!("/proc/{}/{file}", guest.pid));
        Ok(Seen {
            status: read("status").map_err(failed)?,
            mounts: read("mountinfo").map_err(failed)?,
            own_namespaces: ["user", "mnt", "pid", "net", "ipc", "uts", "cgroup"]
                .into_iter()
                .filter(own)
                .collect(),
            paused,
        })
    })
    .await
}

fn describe(shared: &Shared, version: String, seen: &Seen) -> Capabilities {
    let available = shared.available();
    let status = |key: &str| {
        let line = seen.status.lines().find_map(|line| line.strip_prefix(key));
        line.map_or("", |line| line.trim_start_matches(':').trim())
    };
    let has = |name| seen.own_namespaces.contains(&name);
    let full_if = |yes| if yes { Level::Full } else { Level::None };
    let namespaces = format!("the guest's own namespaces: {}", seen.own_namespaces.join(", "));
    let mount = |what: &str| seen.mounts.lines().any(|line| line.contains(what));

    let mut found = Capabilities::new(sandbox_core::BackendId::new(ID), version)
        .with(Feature::NetworkDeny, full_if(has("net")), &*namespaces)
        .with(Feature::NetworkHost, Level::Full, "the network namespace is left as it is")
        .with(Feature::ProcessIsolation, full_if(has("pid") && has("mnt")), &*namespaces)
        .with(
            Feature::SyscallFilter,
            full_if(status("Seccomp") == "2"),
            format!(
                "the guest's status: Seccomp {}, NoNewPrivs {}, CapEff {}",
                status("Seccomp"),
                status("NoNewPrivs"),
                status("CapEff")
            ),
        )
        .with(
            Feature::Pty,
            full_if(mount(" /dev/pts ")),
            "the guest mounted terminals of its own at /dev/pts",
        )
        .with(
            Feature::Snapshot,
            full_if(mount(" / / ") && mount(" - overlay ")),
            format!(
                "an overlay with its upper layer in {} can be written to",
                shared.state.root.display()
            ),
        )
        .with(
            Feature::SnapshotLive,
            full_if(mount(" - overlay ")),
            "the upper layer of the overlays is copied while the guest holds its processes",
        )
        .with(
            Feature::SparseSnapshots,
            full_if(mount(" - overlay ")),
            "layers are kept as they are, and copied with their holes",
        )
        .with(Feature::Stop, Level::Full, "the upper layer outlives the guest")
        .with(Feature::Users, Level::None, "one user id is mapped into the sandbox");

    let pids = match available.evidence(Controller::Pids) {
        Ok(evidence) => (Level::Full, evidence),
        Err(why) if launch::counts_by_namespace() => (
            Level::Full,
            format!("RLIMIT_NPROC, which this kernel counts for each user namespace; {why}"),
        ),
        Err(why) => (Level::None, why),
    };
    let memory = match available.evidence(Controller::Memory) {
        Ok(evidence) => (Level::Full, evidence),
        Err(why) => (Level::PerProcess, format!("RLIMIT_AS; {why}")),
    };
    let cpu = match available.evidence(Controller::Cpu) {
        Ok(evidence) => (Level::Full, evidence),
        Err(why) => (Level::None, why),
    };
    let pause = match available.evidence(Controller::Freezer) {
        Ok(evidence) if seen.paused => (Level::Full, evidence),
        Ok(evidence) => (Level::None, format!("the trial sandbox could not be paused; {evidence}")),
        Err(why) => (Level::None, why),
    };
    for (feature, (level, evidence)) in [
        (Feature::LimitPids, pids),
        (Feature::LimitMemory, memory),
        (Feature::LimitCpu, cpu),
        (Feature::Pause, pause),
    ] {
        found = found.with(feature, level, evidence);
    }
    found
}

/// What bwrap says it is.
fn version(shared: &Shared) -> Result<String> {
    let program = programs::find_program(&shared.program)?;
    let output =
        try_bwrap(shared, &program, &["--version"]).map_err(|error| not_run(&program, error))?;
    let said = String::from_utf8_lossy(&output.stdout).trim().to_owned();
    if output.status.success() { Ok(said) } else { Err(failed("probe", format!("bwrap: {said}"))) }
}

/// Runs bwrap as the user that sandboxes run as.
fn try_bwrap(shared: &Shared, program: &Path, args: &[&str]) -> io::Result<std::process::Output> {
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

fn not_run(program: &Path, error: io::Error) -> Error {
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
