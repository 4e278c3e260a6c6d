//! What an engine has. It may stumble over what somebody else removes at that moment, or be in the middle of
//! something that has no name in its interface: then it is asked again.

use std::{
    collections::HashMap,
    time::{Duration, Instant},
};

use bollard::{
    errors::Error as Docker,
    models::{ContainerSummary, ImageSummary},
    query_parameters::{ListContainersOptionsBuilder, ListImagesOptionsBuilder},
};
use sandbox_core::Result;

use crate::{error::asking, shared::Shared};

/// For how long it is asked. Podman looks at one image after the other and gives up at the first that is gone:
/// where many are removed, that may take it a number of times.
const PATIENCE: Duration = Duration::from_secs(30);

/// Between two times, at first; each is twice the one before, up to the longest.
const PAUSE: Duration = Duration::from_millis(5);
const LONGEST_PAUSE: Duration = Duration::from_millis(200);

pub(crate) type Filters = HashMap<&'static str, Vec<String>>;

/// The containers, also those that do not run.
pub(crate) async fn containers(
    shared: &Shared,
    operation: &'static str,
    filters: &Filters,
) -> Result<Vec<ContainerSummary>> {
    let docker = shared.docker(operation).await?;
    let ask = || {
        let options = ListContainersOptionsBuilder::default().all(true).filters(filters).build();
        docker.list_containers(Some(options))
    };
    again(ask).await.map_err(asking(operation, "list the containers"))
}

/// The images; without filters also those that only others are made of.
pub(crate) async fn images(
    shared: &Shared,
    operation: &'static str,
    filters: &Filters,
) -> Result<Vec<ImageSummary>> {
    let docker = shared.docker(operation).await?;
    let ask = || {
        let options = ListImagesOptionsBuilder::default().all(filters.is_empty());
        docker.list_images(Some(options.filters(filters).build()))
    };
    again(ask).await.map_err(asking(operation, "list the images"))
}

async fn again<T, F>(ask: impl Fn() -> F) -> std::result::Result<T, Docker>
where
    F: Future<Output = std::result::Result<T, Docker>>,
{
    let begun = Instant::now();
    let mut pause = PAUSE;
    loop {
        let patient = begun.elapsed() < PATIENCE;
        match ask().await {
            Err(Docker::JsonDataError { .. }) if patient => {}
            Err(Docker::DockerResponseServerError { status_code: 500, .. }) if patient => {}
            answered => return answered,
        }
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(LONGEST_PAUSE);
    }
}
