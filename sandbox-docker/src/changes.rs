//! What a sandbox has changed: its files as an image, compared with another image's.
//!
//! Both are listed by the guest program, each in a container in which nothing else runs: it may look into
//! closed directories there, and nobody moves files under its eyes.

use bollard::{
    models::HostConfig,
    query_parameters::{DownloadFromContainerOptionsBuilder, RemoveImageOptionsBuilder},
};
use futures::TryStreamExt;
use sandbox_core::{Change, Error, Instance, Network, Result, SnapshotData, SnapshotId};

use crate::{
    baseline::Baseline,
    container::{self, OWN, WORKSPACE},
    error::{asking, is_missing, lost},
    helper,
    image::LOOKED_AT,
    instance::{self, Data, Kind},
    listing::{self, Listing, MOST_BYTES},
    look,
    shared::Shared,
    snapshot::{self, Image},
};

const OPERATION: &str = "changes";

/// What the engine or this backend puts into every container.
const NOT_ITS_DOING: [&str; 10] = [
    OWN,
    "/.dockerenv",
    "/run/.containerenv",
    "/dev",
    "/proc",
    "/sys",
    "/etc/hostname",
    "/etc/hosts",
    "/etc/mtab",
    "/etc/resolv.conf",
];

/// What an instance has that a snapshot, or a fresh instance, had not.
pub(crate) async fn changes(
    shared: &Shared,
    instance: &Instance,
    since: Option<&SnapshotData>,
) -> Result<Vec<Change>> {
    let data = Data::of(instance)?;
    data.refuse_borrowed(OPERATION)?;
    if shared.settings.read_only_root {
        let message = "with a read-only root all that a sandbox writes is in volumes, and what those had \
                       at first is not known";
        return Err(Error::unsupported(OPERATION, message));
    }
    let found = look::container(shared, OPERATION, &data.container).await?;
    let found = found.ok_or_else(|| lost(OPERATION, "the container is gone"))?;
    let labels = found.config.and_then(|config| config.labels).unwrap_or_default();
    let (origin, born) = instance::origin(&labels).ok_or_else(|| {
        let message = "the container does not say what it was made from";
        Error::unsupported(OPERATION, message)
    })?;
    let born = born.to_string();
    let then = match since {
        Some(snapshot) => {
            let Image { image } = Image::of(snapshot)?;
            if look::image(shared, OPERATION, &image).await?.is_none() {
                return Err(snapshot::gone(OPERATION, snapshot));
            }
            list(shared, &image, &born).await?
        }
        None => {
            let mut then = list(shared, &origin, &born).await?;
            if let Some(copied) = baseline(shared, &data.container).await? {
                let below = format!("{WORKSPACE}/");
                then.retain(|path, _| !path.starts_with(below.as_bytes()));
                then.extend(copied);
            }
            then
        }
    };
    let now = now(shared, &data.container, &born).await?;
    Ok(listing::differences(&then, &now))
}

/// What a container has: as an image, so that it need not run and goes on if it does.
async fn now(shared: &Shared, container: &str, born: &str) -> Result<Listing> {
    let tag = SnapshotId::new().to_string();
    let image = format!("{LOOKED_AT}:{tag}");
    snapshot::commit(shared, OPERATION, container, (LOOKED_AT, &tag), Kind::Helper).await?;
    let listed = list(shared, &image, born).await;
    let docker = shared.docker(OPERATION).await?;
    let options = RemoveImageOptionsBuilder::default().force(true).build();
    if let Err(error) = docker.remove_image(&image, Some(options), None).await {
        tracing::warn!(%error, image, "an image is left over");
    }
    listed
}

async fn list(shared: &Shared, image: &str, born: &str) -> Result<Listing> {
    let limits = sandbox_core::Limits::default();
    let mut host: HostConfig = container::host_config(Network::Deny, &limits, &shared.settings)?;
    host.readonly_rootfs = Some(true);
    // To look into directories that are closed to all but their owner; nothing can be written.
    host.cap_add = Some(vec!["DAC_READ_SEARCH".to_owned()]);
    let arguments: Vec<&str> = ["list-tree", born, "/"].into_iter().chain(NOT_ITS_DOING).collect();
    let text = helper::run(shared, OPERATION, image, &arguments, host, MOST_BYTES).await?;
    listing::parse(&text)
}

/// What the workspace was when it was copied, if it was.
async fn baseline(shared: &Shared, container: &str) -> Result<Option<Listing>> {
    let docker = shared.docker(OPERATION).await?;
    let path = Baseline::path();
    let options = DownloadFromContainerOptionsBuilder::default().path(&path).build();
    let mut stream = Box::pin(docker.download_from_container(container, Some(options)));
    let mut bytes = Vec::new();
    loop {
        match stream.try_next().await {
            Ok(Some(piece)) => bytes.extend_from_slice(&piece),
            Ok(None) => break,
            Err(error) if is_missing(&error) => return Ok(None),
            Err(error) => return Err(asking(OPERATION, "read what the workspace was")(error)),
        }
        if bytes.len() as u64 > MOST_BYTES {
            let message = "the list of what the workspace was is too long";
            return Err(Error::new(sandbox_core::ErrorKind::LimitExceeded, OPERATION, message));
        }
    }
    let odd = |error| Error::io(OPERATION, path.clone(), error);
    let mut archive = tar::Archive::new(&bytes[..]);
    let Some(entry) = archive.entries().map_err(odd)?.next() else { return Ok(None) };
    let mut text = Vec::new();
    std::io::Read::read_to_end(&mut entry.map_err(odd)?, &mut text).map_err(odd)?;
    listing::parse(&text).map(Some)
}
