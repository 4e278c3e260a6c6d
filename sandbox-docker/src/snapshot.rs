//! Snapshots: images that the engine keeps, each a layer on what its container was made from.

use bollard::{
    models::ContainerConfig,
    query_parameters::{
        CommitContainerOptionsBuilder, RemoveImageOptionsBuilder, TagImageOptionsBuilder,
    },
};
use sandbox_core::{
    BackendId, Error, ErrorKind, Result, SnapshotData, SnapshotId, SnapshotRequest, SnapshotTaken,
};
use serde::{Deserialize, Serialize};

use crate::{
    error::{ID, asking, failed, is_conflict, is_missing, lost},
    flatten,
    image::{self, KEPT, SNAPSHOT},
    instance::{self, Data, Kind},
    look,
    shared::{Prepared, Shared},
    sweep,
};

/// What the backend needs to find a snapshot again.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Image {
    pub(crate) image: String,
}

impl Image {
    pub(crate) fn of(snapshot: &SnapshotData) -> Result<Self> {
        serde_json::from_value(snapshot.data.clone()).map_err(|error| {
            failed("find the snapshot", "its history does not say which image it is")
                .with_source(error)
        })
    }
}

fn tag(id: &SnapshotId) -> String {
    id.to_string()
}

/// Takes a snapshot; what was begun with the same ids is finished.
pub(crate) async fn take(shared: &Shared, request: &SnapshotRequest) -> Result<SnapshotTaken> {
    const OPERATION: &str = "snapshot";
    let data = Data::of(&request.instance)?;
    data.refuse_borrowed(OPERATION)?;
    if shared.settings.read_only_root {
        let message = "with a read-only root all that a sandbox writes is in volumes, which a snapshot \
                       does not cover";
        return Err(Error::unsupported(OPERATION, message));
    }
    let tag = tag(&request.snapshot);
    let image = format!("{SNAPSHOT}:{tag}");
    if look::image(shared, OPERATION, &image).await?.is_none() {
        commit(shared, OPERATION, &data.container, (SNAPSHOT, &tag), Kind::Snapshot).await?;
    }
    let found = look::image(shared, OPERATION, &image).await?;
    let found = found.ok_or_else(|| failed(OPERATION, "somebody removed it at once"))?;
    flatten::if_deep(shared, &image, &found).await?;
    let data = SnapshotData {
        id: request.snapshot.clone(),
        backend: BackendId::new(ID),
        size: None,
        data: serde_json::to_value(Image { image }).unwrap_or_default(),
    };
    Ok(SnapshotTaken { data, successor: None })
}

/// Keeps a container's files as an image of this name.
pub(crate) async fn commit(
    shared: &Shared,
    operation: &'static str,
    container: &str,
    (repository, tag): (&str, &str),
    kind: Kind,
) -> Result<()> {
    let docker = shared.docker(operation).await?;
    let options = CommitContainerOptionsBuilder::default()
        .container(container)
        .repo(repository)
        .tag(tag)
        .pause(true)
        .build();
    let labels = instance::labels(&shared.settings.scope, kind);
    let config = ContainerConfig { labels: Some(labels), ..Default::default() };
    match docker.commit_container(options, config).await {
        Ok(_) => Ok(()),
        Err(error) if is_missing(&error) => Err(lost(operation, "the container is gone")),
        Err(error) => Err(asking(operation, "keep the container's files as an image")(error)),
    }
}

/// A snapshot's image, with this release's guest in it.
pub(crate) async fn image_of(shared: &Shared, snapshot: &SnapshotData) -> Result<Prepared> {
    const OPERATION: &str = "provision";
    let Image { image } = Image::of(snapshot)?;
    match look::image(shared, OPERATION, &image).await? {
        Some(found) => image::prepare(shared, &image, &found).await,
        None => Err(gone(OPERATION, snapshot)),
    }
}

/// How much a snapshot adds to the one below it.
pub(crate) async fn size(shared: &Shared, snapshot: &SnapshotData) -> Result<u64> {
    const OPERATION: &str = "measure the snapshot";
    let docker = shared.docker(OPERATION).await?;
    let Image { image } = Image::of(snapshot)?;
    match docker.image_history(&image).await {
        Ok(history) => {
            let newest = history.first().map_or(0, |layer| layer.size);
            Ok(u64::try_from(newest).unwrap_or(0))
        }
        Err(error) if is_missing(&error) => Err(gone(OPERATION, snapshot)),
        Err(error) => Err(asking(OPERATION, format!("the image {image}"))(error)),
    }
}

pub(crate) fn gone(operation: &'static str, snapshot: &SnapshotData) -> Error {
    let message = format!("the image of the snapshot {} is gone", snapshot.id);
    Error::new(ErrorKind::NotFound, operation, message)
}

/// Removes a snapshot. One that a container or another snapshot builds on gets another name, and goes
/// when the last of them does.
pub(crate) async fn delete(shared: &Shared, snapshot: &SnapshotData) -> Result<()> {
    const OPERATION: &str = "delete snapshot";
    let docker = shared.docker(OPERATION).await?;
    let Image { image } = Image::of(snapshot)?;
    let Some(found) = look::image(shared, OPERATION, &image).await? else { return Ok(()) };
    let mut needed = sweep::is_needed(shared, OPERATION, &found).await?;
    loop {
        if needed {
            let tag = tag(&snapshot.id);
            let options = TagImageOptionsBuilder::default().repo(KEPT).tag(&tag).build();
            docker
                .tag_image(&image, Some(options))
                .await
                .map_err(asking(OPERATION, format!("keep {image} for what builds on it")))?;
        }
        // With another name this takes the name away; without one, the image.
        let options = RemoveImageOptionsBuilder::default().build();
        match docker.remove_image(&image, Some(options), None).await {
            // A container that the engine is removing is in no list, and needs its image.
            Err(error) if is_conflict(&error) && !needed => needed = true,
            Err(error) if !is_missing(&error) => {
                return Err(asking(OPERATION, format!("remove the image {image}"))(error));
            }
            _ => break,
        }
    }
    sweep::sweep(shared).await;
    Ok(())
}
