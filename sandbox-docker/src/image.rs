//! Images: found or pulled, and prepared.
//!
//! A *prepared* image is an image with the guest, the workspace and the sandbox's user in it. It is made
//! once for each image, by a container that is never started; its layers are the image's and one more. So
//! a sandbox costs the making of a container and nothing else, and what a container has changed since is
//! the sandbox's doing alone.

use std::{collections::HashMap, io::Read, time::Duration};

use bollard::{
    models::{ContainerConfig, ContainerCreateBody, ImageInspect},
    query_parameters::{
        CommitContainerOptionsBuilder, CreateContainerOptionsBuilder,
        DownloadFromContainerOptionsBuilder, RemoveContainerOptionsBuilder,
        UploadToContainerOptionsBuilder,
    },
};
use futures::{StreamExt, TryStreamExt};
use sandbox_core::{Error, ErrorKind, Result, Root, SandboxSpec};
use sha2::{Digest, Sha256};

use crate::{
    archive::{Archive, Owner},
    container::{GUEST, HOME, MACHINE_ID, OWN, RUN, WORKSPACE},
    error::{asking, failed, is_conflict, is_missing},
    instance::{KIND, Kind},
    pull,
    shared::{Prepared, Shared},
};

/// Where prepared images are.
pub(crate) const PREPARED: &str = "localhost/sandboxer/prepared";
/// Where snapshots are.
pub(crate) const SNAPSHOT: &str = "localhost/sandboxer/snapshot";
/// Where those are that were deleted while something still builds on them.
pub(crate) const KEPT: &str = "localhost/sandboxer/kept";
/// Where an image is for as long as it is looked at.
pub(crate) const LOOKED_AT: &str = "localhost/sandboxer/looked-at";

/// Counted up when what is put into an image changes.
const FORMAT: u32 = 2;

/// The label that says what was put into an image; what is made from it inherits that.
const ADDITIONS: &str = "sandboxer.additions";

/// No list of users is longer.
const MOST_USERS: u64 = 1024 * 1024;

/// How long another process may take to prepare an image before it is taken to be dead.
const PATIENCE: Duration = Duration::from_secs(120);

/// The image that a spec asks for, prepared.
pub(crate) async fn for_spec(shared: &Shared, spec: &SandboxSpec) -> Result<Prepared> {
    const OPERATION: &str = "provision";
    let name = match &spec.root {
        Root::Image(name) => name.clone(),
        // A profile's, then the backend's own.
        _ => spec.image.clone().or_else(|| shared.image.clone()).ok_or_else(|| {
            let message = "no image is named: ask for one with `Root::Image`, or give the backend a \
                           standard one with `DockerBackendBuilder::image`";
            Error::new(ErrorKind::InvalidSpec, OPERATION, message)
        })?,
    };
    let found = pull::find(shared, &name).await?;
    prepare(shared, &name, &found).await
}

/// An image with the guest in it, made from this one unless it is there.
pub(crate) async fn prepare(shared: &Shared, name: &str, found: &ImageInspect) -> Result<Prepared> {
    const OPERATION: &str = "provision";
    let id = found.id.as_deref().unwrap_or(name);
    check_platform(name, found)?;
    let arch = found.architecture.as_deref().map(uname);
    let guest = shared.guests.get(arch.unwrap_or(std::env::consts::ARCH))?;
    let Owner { uid, gid } = shared.settings.user;
    let additions = format!("{FORMAT} {} {uid}:{gid}", guest.checksum());
    let labels = found.config.as_ref().and_then(|config| config.labels.as_ref());
    if labels.and_then(|labels| labels.get(ADDITIONS)) == Some(&additions) {
        // A snapshot of a sandbox of ours, or a prepared image itself.
        return Ok(Prepared { image: name.to_owned(), env: environment(found) });
    }
    let recipe = format!("{id} {additions}");
    let tag: String =
        Sha256::digest(recipe).iter().take(16).map(|byte| format!("{byte:02x}")).collect();
    let image = format!("{PREPARED}:{tag}");
    let docker = shared.docker(OPERATION).await?;
    // One at a time in this process; others are told by the container's name.
    let _one = shared.engine.preparing.lock().await;
    if let Some(prepared) = shared.known(&image) {
        return Ok(prepared);
    }
    let begin = tokio::time::Instant::now();
    loop {
        match docker.inspect_image(&image).await {
            Ok(there) => {
                let prepared = Prepared { image, env: environment(&there) };
                shared.learn(&prepared);
                return Ok(prepared);
            }
            Err(error) if is_missing(&error) => {}
            Err(error) => return Err(asking(OPERATION, format!("the image {image}"))(error)),
        }
        let container = format!("sandboxer-prepare-{tag}");
        let created = docker
            .create_container(
                Some(CreateContainerOptionsBuilder::default().name(&container).build()),
                ContainerCreateBody {
                    image: Some(id.to_owned()),
                    entrypoint: Some(vec![GUEST.to_owned()]),
                    cmd: Some(Vec::new()),
                    network_disabled: Some(true),
                    // Podman gives an image what its container has, and nothing that a commit says.
                    labels: Some(prepared_labels(&additions)),
                    ..Default::default()
                },
            )
            .await;
        match created {
            Ok(_) => {}
            Err(error) if is_conflict(&error) => {
                // Somebody else is at it, or was and died.
                if begin.elapsed() > PATIENCE {
                    remove(shared, &container).await;
                }
                tokio::time::sleep(Duration::from_millis(50)).await;
                continue;
            }
            Err(error) => {
                return Err(asking(OPERATION, format!("prepare the image {name}"))(error));
            }
        }
        let made = fill_and_commit(shared, &container, guest.bytes(), &tag, &additions).await;
        remove(shared, &container).await;
        made.map_err(|error| {
            let message = format!("the image {name} cannot be prepared for sandboxes: {error}");
            Error::new(error.kind(), OPERATION, message).with_source(error)
        })?;
    }
}

/// The labels of a prepared image.
fn prepared_labels(additions: &str) -> HashMap<String, String> {
    HashMap::from([
        (KIND.to_owned(), Kind::Prepared.as_str().to_owned()),
        (ADDITIONS.to_owned(), additions.to_owned()),
    ])
}

async fn fill_and_commit(
    shared: &Shared,
    container: &str,
    guest: &[u8],
    tag: &str,
    additions: &str,
) -> Result<()> {
    const OPERATION: &str = "provision";
    let docker = shared.docker(OPERATION).await?;
    let owner = shared.settings.user;
    let mut accounts = Vec::new();
    if owner.uid != 0 {
        let (uid, gid) = (owner.uid, owner.gid);
        for (file, id, line) in [
            ("etc/passwd", uid, format!("sandbox:x:{uid}:{gid}:sandbox:{HOME}:/bin/sh\n")),
            ("etc/group", gid, format!("sandbox:x:{gid}:\n")),
        ] {
            let text = read_file(shared, container, &format!("/{file}")).await?;
            accounts.extend(with_account(&text, id, &line).map(|text| (file, text)));
        }
    }
    let archive = overlay(guest, owner, &accounts)
        .map_err(|error| Error::io(OPERATION, "an archive in memory", error))?;
    let options = UploadToContainerOptionsBuilder::default().path("/").build();
    docker
        .upload_to_container(container, Some(options), bollard::body_full(archive.into()))
        .await
        .map_err(asking(OPERATION, "put the guest into the image"))?;
    let options = CommitContainerOptionsBuilder::default()
        .container(container)
        .repo(PREPARED)
        .tag(tag)
        .pause(false)
        .build();
    let config = ContainerConfig { labels: Some(prepared_labels(additions)), ..Default::default() };
    docker
        .commit_container(options, config)
        .await
        .map_err(asking(OPERATION, "keep the image with the guest"))?;
    Ok(())
}

/// What is laid over an image.
fn overlay(guest: &[u8], owner: Owner, accounts: &[(&str, String)]) -> std::io::Result<Vec<u8>> {
    let mut archive = Archive::new(Vec::new());
    let relative = |path: &'static str| path.trim_start_matches('/');
    archive.dir(relative(OWN), 0o755, Owner::ROOT)?;
    archive.dir(relative(RUN), 0o1777, owner)?;
    archive.file(relative(GUEST), 0o755, Owner::ROOT, guest)?;
    archive.dir(relative(WORKSPACE), 0o755, owner)?;
    if owner.uid != 0 {
        archive.dir(relative(HOME), 0o755, owner)?;
    }
    archive.dir("tmp", 0o1777, Owner::ROOT)?;
    for (file, text) in accounts {
        archive.file(file, 0o644, Owner::ROOT, text.as_bytes())?;
    }
    archive.link("etc/machine-id", MACHINE_ID)?;
    archive.finish()
}

/// The text with a line for this id, unless it has one.
fn with_account(text: &str, id: u32, line: &str) -> Option<String> {
    let id = id.to_string();
    if text.lines().any(|line| line.split(':').nth(2) == Some(&id)) {
        return None;
    }
    let newline = if text.is_empty() || text.ends_with('\n') { "" } else { "\n" };
    Some(format!("{text}{newline}{line}"))
}

/// A small file of a container; empty if there is none.
pub(crate) async fn read_file(shared: &Shared, container: &str, path: &str) -> Result<String> {
    const OPERATION: &str = "provision";
    let docker = shared.docker(OPERATION).await?;
    let options = DownloadFromContainerOptionsBuilder::default().path(path).build();
    let mut stream = docker.download_from_container(container, Some(options)).boxed();
    let mut bytes = Vec::new();
    loop {
        match stream.try_next().await {
            Ok(Some(piece)) => bytes.extend_from_slice(&piece),
            Ok(None) => break,
            Err(error) if is_missing(&error) => return Ok(String::new()),
            Err(error) => return Err(asking(OPERATION, format!("read {path}"))(error)),
        }
        if bytes.len() as u64 > MOST_USERS {
            return Err(failed(OPERATION, format!("{path} is too long to be a list of users")));
        }
    }
    let mut archive = tar::Archive::new(&bytes[..]);
    let mut text = Vec::new();
    let entries = archive.entries().map_err(|error| Error::io(OPERATION, path, error))?;
    for entry in entries {
        let mut entry = entry.map_err(|error| Error::io(OPERATION, path, error))?;
        if entry.header().entry_type().is_file() {
            entry.read_to_end(&mut text).map_err(|error| Error::io(OPERATION, path, error))?;
            break;
        }
    }
    Ok(String::from_utf8_lossy(&text).into_owned())
}

/// Removes a container of the backend's own, as well as that can be done.
pub(crate) async fn remove(shared: &Shared, container: &str) {
    let Ok(docker) = shared.docker("clean up").await else { return };
    let options = RemoveContainerOptionsBuilder::default().force(true).v(true).build();
    match docker.remove_container(container, Some(options)).await {
        Err(error) if !is_missing(&error) => {
            tracing::warn!(%error, container, "a container of the backend's own is left over");
        }
        _ => {}
    }
}

/// An image's environment.
pub(crate) fn environment(image: &ImageInspect) -> Vec<String> {
    image.config.as_ref().and_then(|config| config.env.clone()).unwrap_or_default()
}

fn check_platform(name: &str, image: &ImageInspect) -> Result<()> {
    match image.os.as_deref() {
        None | Some("linux" | "") => Ok(()),
        Some(other) => {
            let message = format!("the image {name} is for {other}; sandboxes need a Linux image");
            Err(Error::unsupported("provision", message))
        }
    }
}

/// An architecture as `uname -m` says it.
pub(crate) fn uname(architecture: &str) -> &str {
    match architecture {
        "amd64" => "x86_64",
        "arm64" => "aarch64",
        "386" => "x86",
        "" => std::env::consts::ARCH,
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_user_is_added_where_none_is() {
        let line = "sandbox:x:1000:1000::/home/sandbox:/bin/sh\n";
        assert_eq!(with_account("", 1000, line).as_deref(), Some(line));
        let text = "root:x:0:0::/root:/bin/sh";
        assert_eq!(with_account(text, 1000, line).unwrap(), format!("{text}\n{line}"));
        assert_eq!(with_account("node:x:1000:1000::/home/node:/bin/sh\n", 1000, line), None);
    }

    #[test]
    fn what_is_laid_over_an_image_is_owned_by_whom_it_must() {
        let bytes = overlay(b"elf", Owner { uid: 7, gid: 8 }, &[]).unwrap();
        let mut archive = tar::Archive::new(&bytes[..]);
        let owners: Vec<(String, u64, u32)> = archive
            .entries()
            .unwrap()
            .map(|entry| {
                let entry = entry.unwrap();
                let header = entry.header();
                let name = entry.path().unwrap().display().to_string();
                (name, header.uid().unwrap(), header.mode().unwrap())
            })
            .collect();
        assert!(owners.contains(&(".sandbox/guest".into(), 0, 0o755)), "{owners:?}");
        assert!(owners.contains(&("workspace/".into(), 7, 0o755)), "{owners:?}");
    }

    #[test]
    fn other_systems_are_refused() {
        let image = ImageInspect { os: Some("windows".into()), ..Default::default() };
        let error = check_platform("x", &image).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unsupported);
        assert_eq!((uname("arm64"), uname("riscv64")), ("aarch64", "riscv64"));
    }
}
