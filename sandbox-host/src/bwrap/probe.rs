//! What this host can do, found out by doing it.

use std::fs;

use sandbox_core::{
    Capabilities, CreateSandbox, Error, ErrorKind, Feature, Instance, Level, OwnerId, Provision,
    Result, SandboxBackend, SandboxId,
};

use super::{
    ID,
    cgroup::Controller,
    error::{blocking, failed},
    explain::{not_run, try_bwrap},
    instance::InstanceDir,
    launch, programs,
    shared::Shared,
};

/// Makes a sandbox, looks at it, and removes it.
pub(crate) async fn probe(shared: &Shared, backend: &dyn SandboxBackend) -> Result<Capabilities> {
    let version = {
        let shared = shared.clone();
        blocking("probe", move || version(&shared)).await?
    };
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
        look(shared, &instance, paused).await
    };
    let seen = seen.await;
    let removed = backend.teardown(&instance).await;
    let seen = seen?;
    removed?;
    Ok(describe(shared, version, &seen))
}

/// What was seen of a sandbox from outside.
struct Seen {
    status: String,
    mounts: String,
    own_namespaces: Vec<&'static str>,
    paused: bool,
}

async fn look(shared: &Shared, instance: &Instance, paused: bool) -> Result<Seen> {
    let dir = InstanceDir::of(&shared.state, &instance.id);
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
