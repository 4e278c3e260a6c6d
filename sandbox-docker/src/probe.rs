//! What an engine really enforces: a container is made with limits, and the guest program in it reports
//! what it finds.

use std::collections::BTreeMap;

use bollard::query_parameters::CreateImageOptionsBuilder;
use futures::TryStreamExt;
use sandbox_core::{BackendId, Capabilities, Feature, Level, Limits, Network, Result};

use crate::{
    archive::{Archive, Owner},
    backend::Shared,
    container::{self, GUEST, OWN, RUN, WORKSPACE},
    error::{ID, asking},
    helper,
    instance::{KIND, Kind},
    snapshot,
};

const OPERATION: &str = "probe";

/// An image with the guest program and nothing else.
const PROBE: &str = "localhost/sandboxer/probe";

/// Limits that are told from others.
const PIDS: u64 = 123;
const MEMORY: u64 = 96 * 1024 * 1024;
const CPU_MILLIS: u64 = 250;

/// Looks.
pub(crate) async fn probe(shared: &Shared) -> Result<Capabilities> {
    let docker = shared.docker(OPERATION).await?;
    let version = docker.version().await.map_err(asking(OPERATION, "ask for the version"))?;
    let info = docker.info().await.map_err(asking(OPERATION, "ask for the engine's settings"))?;
    let arch = info.architecture.as_deref().unwrap_or(std::env::consts::ARCH).to_owned();
    let image = image(shared, &arch).await?;
    let mut limits = Limits::default();
    limits.pids = Some(PIDS);
    limits.memory = Some(MEMORY);
    limits.cpu_millis = Some(CPU_MILLIS);
    let host = container::host_config(Network::Deny, &limits, &shared.settings)?;
    let report = helper::run(shared, OPERATION, &image, &["report"], host, 64 * 1024).await?;
    let report = parse(&String::from_utf8_lossy(&report));

    let name = version.platform.map(|platform| platform.name).filter(|name| !name.is_empty());
    let described = format!(
        "{} {} (API {}), {}",
        name.unwrap_or_else(|| "Docker Engine".to_owned()),
        version.version.unwrap_or_default(),
        docker.client_version(),
        info.operating_system.unwrap_or_default(),
    );
    let mut found = features(&report, described);
    let support = |level, why: &str| (level, why.to_owned());
    let (snapshots, why) = if shared.settings.read_only_root {
        support(Level::None, "the root is read-only, and volumes are in no snapshot")
    } else {
        let driver = info.driver.unwrap_or_default();
        support(Level::Full, &format!("images of the storage driver {driver}; a commit pauses"))
    };
    for feature in [Feature::Snapshot, Feature::SnapshotLive] {
        found = found.with(feature, snapshots, why.clone());
    }
    found = found.with(
        Feature::SparseSnapshots,
        Level::None,
        "the engine keeps layers as archives, in which holes are zeros",
    );
    let freezer = report.get("freezer").map_or("", String::as_str);
    found = match freezer {
        "" => found.with(Feature::Pause, Level::None, "there is no freezer for control groups"),
        at => found.with(Feature::Pause, Level::Full, format!("the freezer of {at}")),
    };
    Ok(found)
}

/// What the report says of each feature.
fn features(report: &BTreeMap<String, String>, version: String) -> Capabilities {
    let said = |key: &str| report.get(key).map_or("nothing", String::as_str).to_owned();
    let check = |key: &str, wanted: &str, what: &str| {
        let seen = said(key);
        let level = if seen == wanted { Level::Full } else { Level::None };
        (level, format!("{what}: a container made with {wanted} saw {seen}"))
    };
    // Threads of the guest's own come on top.
    let pids = (PIDS + 8).to_string();
    let mut found = Capabilities::new(BackendId::new(ID), version);
    for (feature, (level, evidence)) in [
        (Feature::NetworkDeny, check("interfaces", "lo", "network interfaces")),
        (Feature::LimitPids, check("pids", &pids, "pids limit")),
        (Feature::LimitMemory, check("memory", &MEMORY.to_string(), "memory limit")),
        (Feature::LimitCpu, check("cpu_millis", &CPU_MILLIS.to_string(), "CPU limit")),
    ] {
        found = found.with(feature, level, evidence);
    }
    let (privileges, seccomp, capabilities) = (said("NoNewPrivs"), said("Seccomp"), said("CapBnd"));
    let filtered = privileges == "1" && seccomp == "2";
    let level = if filtered { Level::Full } else { Level::None };
    let evidence = format!(
        "NoNewPrivs {privileges}, Seccomp {seccomp}, CapBnd {capabilities} in a container; the guest adds \
         a filter of its own"
    );
    found = found.with(Feature::SyscallFilter, level, evidence);
    let alone = said("pid") == "1" && said("processes") == "1";
    let level = if alone { Level::Full } else { Level::None };
    let evidence = format!(
        "process id {}, {} process to be seen in a container",
        said("pid"),
        said("processes")
    );
    found = found.with(Feature::ProcessIsolation, level, evidence);
    let terminals = said("ptmx");
    let level = if terminals == "yes" { Level::Full } else { Level::None };
    found
        .with(Feature::Pty, level, format!("/dev/ptmx could be opened in a container: {terminals}"))
        .with(Feature::NetworkHost, Level::Full, "the engine's own network, for who asks for it")
        .with(Feature::Images, Level::Full, "the probe's own image was brought in and run")
        .with(Feature::OwnKernel, Level::None, "containers of one engine share its host's kernel")
        .with(Feature::Stop, Level::Full, "a stopped container keeps its files")
        .with(
            Feature::Users,
            Level::None,
            "a container has no right to change users; give the backend another user instead",
        )
}

fn parse(text: &str) -> BTreeMap<String, String> {
    let pairs = text.lines().filter_map(|line| line.split_once(' '));
    pairs.map(|(key, value)| (key.to_owned(), value.trim().to_owned())).collect()
}

/// An image with nothing but the guest in it, so that nothing need be pulled.
async fn image(shared: &Shared, arch: &str) -> Result<String> {
    let docker = shared.docker(OPERATION).await?;
    let guest = shared.guests.get(crate::image::uname(arch))?;
    let tag: String = guest.checksum().chars().take(32).collect();
    let image = format!("{PROBE}:{tag}");
    if snapshot::find(shared, OPERATION, &image).await?.is_some() {
        return Ok(image);
    }
    let files = || {
        let mut archive = Archive::new(Vec::new());
        for path in [OWN, RUN, WORKSPACE] {
            archive.dir(path.trim_start_matches('/'), 0o755, Owner::ROOT)?;
        }
        archive.file(GUEST.trim_start_matches('/'), 0o755, Owner::ROOT, guest.bytes())?;
        archive.finish()
    };
    let files = files()
        .map_err(|error| sandbox_core::Error::io(OPERATION, "an archive in memory", error))?;
    let options = CreateImageOptionsBuilder::default()
        .from_src("-")
        .repo(&image)
        .changes(vec![format!("LABEL {KIND}={}", Kind::Prepared.as_str())])
        .build();
    let body = bollard::body_full(files.into());
    docker
        .create_image(Some(options), Some(body), None)
        .try_for_each(|_| std::future::ready(Ok(())))
        .await
        .map_err(asking(OPERATION, "bring the guest in as an image"))?;
    Ok(image)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_seen_decides() {
        let report = "interfaces lo\npids 131\nmemory max\ncpu_millis 250\nNoNewPrivs 1\nSeccomp 2\n\
                      CapBnd 0000000000000000\npid 1\nprocesses 1\nptmx yes\n";
        let found = features(&parse(report), "x".into());
        assert_eq!(found.level(Feature::NetworkDeny), Level::Full);
        assert_eq!(found.level(Feature::LimitPids), Level::Full);
        assert_eq!(found.level(Feature::LimitMemory), Level::None);
        assert!(found.evidence(Feature::LimitMemory).contains("saw max"));
        assert_eq!(found.level(Feature::SyscallFilter), Level::Full);
        let nothing = features(&parse(""), "x".into());
        assert_eq!(nothing.level(Feature::ProcessIsolation), Level::None);
    }
}
