//! Images that nothing needs any more.

use std::collections::HashMap;

use bollard::{models::ImageInspect, query_parameters::RemoveImageOptionsBuilder};
use sandbox_core::Result;

use crate::{
    error::{asking, is_conflict, is_missing},
    helper,
    image::{KEPT, LOOKED_AT, PREPARED},
    instance::SCOPE,
    list, look,
    shared::Shared,
};

/// Whether a container or another image builds on this one.
pub(crate) async fn is_needed(
    shared: &Shared,
    operation: &'static str,
    image: &ImageInspect,
) -> Result<bool> {
    let id = image.id.clone().unwrap_or_default();
    let filters = HashMap::from([("ancestor", vec![id.clone()])]);
    if !list::containers(shared, operation, &filters).await?.is_empty() {
        return Ok(true);
    }
    let images = list::images(shared, operation, &HashMap::new()).await?;
    Ok(images.iter().any(|other| other.parent_id == id))
}

/// Removes what was kept for something that is gone now, and what a harness that has ended had looked at.
/// Another process may be about to build on it: then the engine refuses, and so it stays.
pub(crate) async fn sweep(shared: &Shared) {
    const OPERATION: &str = "clean up";
    let Ok(docker) = shared.docker(OPERATION).await else { return };
    let scope = format!("{SCOPE}={}", shared.settings.scope);
    loop {
        let names = vec![KEPT.to_owned(), LOOKED_AT.to_owned()];
        let filters = HashMap::from([("reference", names), ("label", vec![scope.clone()])]);
        let Ok(kept) = list::images(shared, OPERATION, &filters).await else { return };
        let mut removed = 0;
        for image in kept {
            let Ok(Some(found)) = look::image(shared, OPERATION, &image.id).await else { continue };
            if is_needed(shared, OPERATION, &found).await.unwrap_or(true) {
                continue;
            }
            let old = helper::is_left_over(image.created);
            let goes = |name: &&String| name.contains(KEPT) || old && name.contains(LOOKED_AT);
            for name in image.repo_tags.iter().filter(goes) {
                let options = RemoveImageOptionsBuilder::default().build();
                match docker.remove_image(name, Some(options), None).await {
                    Ok(_) => removed += 1,
                    Err(error) if is_missing(&error) || is_conflict(&error) => {}
                    Err(error) => tracing::warn!(%error, name, "an image is left over"),
                }
            }
        }
        // What one was built on may have become free.
        if removed == 0 {
            return;
        }
    }
}

/// Removes the prepared images that nothing uses.
pub(crate) async fn remove_prepared(shared: &Shared) -> Result<usize> {
    const OPERATION: &str = "remove prepared images";
    let docker = shared.docker(OPERATION).await?;
    let filters = HashMap::from([("reference", vec![PREPARED.to_owned()])]);
    let images = list::images(shared, OPERATION, &filters).await?;
    let mut removed = 0;
    for image in images {
        let Some(found) = look::image(shared, OPERATION, &image.id).await? else { continue };
        if is_needed(shared, OPERATION, &found).await? {
            continue;
        }
        for name in image.repo_tags.iter().filter(|name| name.contains(PREPARED)) {
            shared.forget(name);
            let options = RemoveImageOptionsBuilder::default().build();
            match docker.remove_image(name, Some(options), None).await {
                Ok(_) => removed += 1,
                // Somebody is using it since.
                Err(error) if is_missing(&error) || is_conflict(&error) => {}
                Err(error) => return Err(asking(OPERATION, format!("remove {name}"))(error)),
            }
        }
    }
    Ok(removed)
}
