//! What an engine really enforces: a container is made with limits, and the guest program in it reports
//! what it finds. What it keeps: that container has a file when it has ended, and so has an image of it.

use std::{collections::BTreeMap, time::Duration};

use bollard::{
    models::HostConfig,
    query_parameters::{
        CreateImageOptionsBuilder, RemoveImageOptionsBuilder, UploadToContainerOptionsBuilder,
    },
};
use futures::TryStreamExt;
use sandbox_core::{BackendId, Capabilities, Feature, Level, Limits, Network, Result, SnapshotId};

use crate::{
    archive::{Archive, Owner},
    container::{self, GUEST, OWN, RUN, WORKSPACE},
    error::{ID, asking},
    helper::{self, Tool},
    image::{self, LOOKED_AT},
    instance::{KIND, Kind},
    look,
    shared::Shared,
    snapshot,
};

const OPERATION: &str = "probe";

/// An image with the guest program and nothing else.
const PROBE: &str = "localhost/sandboxer/probe";

/// Limits that are told from others.
const PIDS: u64 = 123;
const MEMORY: u64 = 96 * 1024 * 1024;
const CPU_MILLIS: u64 = 250;

/// No report is longer.
const MOST: u64 = 64 * 1024;

/// A file that is put into a container, to see what becomes of it.
const FILE: &str = "/.sandbox/kept";
const CONTENTS: &str = "kept\n";
/// How often it is looked for before it counts as lost.
const TRIES: u32 = 10;

/// Looks.
pub(crate) async fn probe(shared: &Shared) -> Result<Capabilities> {
    let docker = shared.docker(OPERATION).await?;
    let version = docker.version().await.map_err(asking(OPERATION, "ask for the version"))?;
    let info = docker.info().await.map_err(asking(OPERATION, "ask for the engine's settings"))?;
    let arch = info.architecture.as_deref().unwrap_or(std::env::consts::ARCH).to_owned();
    let image = own_image(shared, &arch).await?;
    let mut limits = Limits::default();
    limits.pids = Some(PIDS);
    limits.memory = Some(MEMORY);
    limits.cpu_millis = Some(CPU_MILLIS);
    let denied = container::host_config(Network::Deny, &limits, &shared.settings)?;
    let open = container::host_config(Network::Host, &limits, &shared.settings)?;
    let open = helper::run(shared, OPERATION, &image, &["report"], open, MOST);
    let (tried, open) = tokio::join!(keeping(shared, &image, denied), open);
    let (report, kept) = tried?;
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
    let freezer = report.get("freezer").map_or("", String::as_str);
    found = match freezer {
        "" => found.with(Feature::Pause, Level::None, "there is no freezer for control groups"),
        at => found.with(Feature::Pause, Level::Full, format!("there is a freezer: {at}")),
    };
    found = match open {
        Ok(open) => {
            let open = parse(&String::from_utf8_lossy(&open));
            let seen = open.get("interfaces").map_or("none", String::as_str);
            let evidence = format!("a container with the engine's own network saw {seen}");
            found.with(Feature::NetworkHost, Level::Full, evidence)
        }
        Err(error) => {
            let evidence =
                format!("no container with the engine's own network can be run: {error}");
            found.with(Feature::NetworkHost, Level::None, evidence)
        }
    };
    let (level, evidence) = kept.ended;
    found = found.with(Feature::Stop, level, evidence);
    let driver = info.driver.unwrap_or_default();
    let (level, evidence) = kept.image;
    let evidence = format!("{evidence}; storage driver {driver}");
    found = found.with(Feature::Snapshot, level, evidence.clone());
    found = match (level, freezer) {
        (Level::Full, "") => {
            let evidence = "there is no freezer to hold processes up with meanwhile";
            found.with(Feature::SnapshotLive, Level::None, evidence)
        }
        (level, at) => {
            let evidence = format!("{evidence}; processes are held up by the freezer {at}");
            found.with(Feature::SnapshotLive, level, evidence)
        }
    };
    found = found.with(
        Feature::SparseSnapshots,
        Level::None,
        "the engine keeps layers as archives, in which holes are zeros",
    );
    Ok(found)
}

/// What was seen of what an engine keeps.
struct Kept {
    /// In a container that has ended.
    ended: (Level, String),
    /// In an image of it.
    image: (Level, String),
}

/// Runs the guest program in a container that has been given a file; returns what it reports, and what then
/// became of the file.
async fn keeping(shared: &Shared, image: &str, host: HostConfig) -> Result<(Vec<u8>, Kept)> {
    let tool = Tool::new(shared, OPERATION, image, &["report"], host).await?;
    let tried = async {
        if shared.settings.read_only_root {
            let report = tool.run(shared, MOST).await?;
            let ended = "not tried: the root is read-only, and volumes go with their container";
            let image = "the root is read-only, and volumes are in no snapshot";
            let ended = (Level::Full, ended.to_owned());
            return Ok((report, Kept { ended, image: (Level::None, image.to_owned()) }));
        }
        put(shared, &tool.container).await?;
        let report = tool.run(shared, MOST).await?;
        let text = after_its_end(shared, &tool.container).await?;
        let image = in_an_image(shared, &tool.container).await;
        Ok((
            report,
            Kept {
                ended: seen("a container that has ended", Ok(text)),
                image: seen("an image of a container", image),
            },
        ))
    };
    let tried = tried.await;
    tool.remove(shared).await;
    tried
}

/// What a container that has ended has of the file. Some engines take a moment to have it again.
async fn after_its_end(shared: &Shared, container: &str) -> Result<String> {
    let mut tries = 0;
    loop {
        tries += 1;
        let text = image::read_file(shared, container, FILE).await;
        if tries == TRIES || text.as_ref().is_ok_and(|text| text == CONTENTS) {
            return text;
        }
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
}

/// Whether the file was there, as evidence.
fn seen(place: &str, text: Result<String>) -> (Level, String) {
    match text {
        Ok(text) if text == CONTENTS => {
            (Level::Full, format!("{place} had a file that was put there before"))
        }
        Ok(_) => (Level::None, format!("{place} did not have a file that was put there before")),
        Err(error) => (Level::None, format!("{place}: {error}")),
    }
}

async fn put(shared: &Shared, container: &str) -> Result<()> {
    let docker = shared.docker(OPERATION).await?;
    let archive = || {
        let mut archive = Archive::new(Vec::new());
        archive.file(FILE.trim_start_matches('/'), 0o644, Owner::ROOT, CONTENTS.as_bytes())?;
        archive.finish()
    };
    let archive = archive()
        .map_err(|error| sandbox_core::Error::io(OPERATION, "an archive in memory", error))?;
    let options = UploadToContainerOptionsBuilder::default().path("/").build();
    docker
        .upload_to_container(container, Some(options), bollard::body_full(archive.into()))
        .await
        .map_err(asking(OPERATION, "put a file into a container"))
}

/// What an image of a container has of the file: as a container that is made from it says.
async fn in_an_image(shared: &Shared, container: &str) -> Result<String> {
    let tag = SnapshotId::new().to_string();
    let image = format!("{LOOKED_AT}:{tag}");
    snapshot::commit(shared, OPERATION, container, (LOOKED_AT, &tag), Kind::Helper).await?;
    let read = async {
        let made = Tool::new(shared, OPERATION, &image, &["report"], HostConfig::default()).await?;
        let text = image::read_file(shared, &made.container, FILE).await;
        made.remove(shared).await;
        text
    };
    let read = read.await;
    let docker = shared.docker(OPERATION).await?;
    let options = RemoveImageOptionsBuilder::default().force(true).build();
    let removed = docker.remove_image(&image, Some(options), None).await;
    removed.map_err(asking(OPERATION, format!("remove the image {image}")))?;
    read
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
        .with(Feature::Images, Level::Full, "the probe's own image was brought in and run")
        .with(Feature::OwnKernel, Level::None, "containers of one engine share its host's kernel")
        .with(
            Feature::Users,
            Level::None,
            format!(
                "root in a container had CapEff {}: no right to change users; give the backend another user \
                 instead",
                said("CapEff")
            ),
        )
}

fn parse(text: &str) -> BTreeMap<String, String> {
    let pairs = text.lines().filter_map(|line| line.split_once(' '));
    pairs.map(|(key, value)| (key.to_owned(), value.trim().to_owned())).collect()
}

/// An image with nothing but the guest in it, so that nothing need be pulled.
async fn own_image(shared: &Shared, arch: &str) -> Result<String> {
    let docker = shared.docker(OPERATION).await?;
    let guest = shared.guests.get(image::uname(arch))?;
    let tag: String = guest.checksum().chars().take(32).collect();
    let image = format!("{PROBE}:{tag}");
    if look::image(shared, OPERATION, &image).await?.is_some() {
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
