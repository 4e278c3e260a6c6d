//! What the engine says of a container or an image.

use bollard::{
    models::{ContainerInspectResponse, ContainerStateStatusEnum, ImageInspect},
    query_parameters::InspectContainerOptions,
};
use sandbox_core::{Instance, InstanceState, Result};

use crate::{
    error::{asking, is_missing},
    instance::Data,
    shared::Shared,
};

/// A container, as the engine sees it; `None` if there is none.
pub(crate) async fn container(
    shared: &Shared,
    operation: &'static str,
    id: &str,
) -> Result<Option<ContainerInspectResponse>> {
    let docker = shared.docker(operation).await?;
    match docker.inspect_container(id, None::<InspectContainerOptions>).await {
        Ok(found) => Ok(Some(found)),
        Err(error) if is_missing(&error) => Ok(None),
        Err(error) => Err(asking(operation, "look at the container")(error)),
    }
}

/// An image, as the engine sees it; `None` if there is none.
pub(crate) async fn image(
    shared: &Shared,
    operation: &'static str,
    name: &str,
) -> Result<Option<ImageInspect>> {
    let docker = shared.docker(operation).await?;
    match docker.inspect_image(name).await {
        Ok(found) => Ok(Some(found)),
        Err(error) if is_missing(&error) => Ok(None),
        Err(error) => Err(asking(operation, format!("the image {name}"))(error)),
    }
}

/// How a container is, by what was seen of it.
pub(crate) fn state_of(found: Option<&ContainerInspectResponse>) -> InstanceState {
    let Some(found) = found else { return InstanceState::Gone };
    match found.state.as_ref().and_then(|state| state.status) {
        Some(ContainerStateStatusEnum::RUNNING | ContainerStateStatusEnum::RESTARTING) => {
            InstanceState::Running
        }
        Some(ContainerStateStatusEnum::PAUSED) => InstanceState::Paused,
        Some(ContainerStateStatusEnum::REMOVING) => InstanceState::Gone,
        _ => InstanceState::Stopped,
    }
}

/// How an instance is.
pub(crate) async fn inspect(shared: &Shared, instance: &Instance) -> Result<InstanceState> {
    let data = Data::of(instance)?;
    let found = container(shared, "inspect", &data.container).await?;
    Ok(state_of(found.as_ref()))
}

/// How a container that does not run came to its end, to be put behind a message.
pub(crate) async fn describe_end(shared: &Shared, id: &str) -> String {
    let Ok(Some(found)) = container(shared, "inspect", id).await else {
        return String::new();
    };
    let Some(state) = found.state else { return String::new() };
    let mut said = String::new();
    if state.oom_killed == Some(true) {
        said += "; the kernel killed it for want of memory";
    }
    if let Some(code) = state.exit_code {
        said += &format!("; its exit code is {code}");
    }
    if let Some(error) = state.error.filter(|error| !error.is_empty()) {
        said += &format!("; the engine says: {error}");
    }
    said
}

/// The environment that a container's image asks for.
pub(crate) async fn image_environment(shared: &Shared, id: &str) -> Result<Vec<String>> {
    let found = container(shared, "start", id).await?;
    Ok(found.and_then(|found| found.config).and_then(|config| config.env).unwrap_or_default())
}
