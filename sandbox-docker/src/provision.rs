//! Making instances: a container of the pool or a new one, and a guest that serves in it.

use std::sync::Arc;

use bollard::query_parameters::CreateContainerOptionsBuilder;
use sandbox_core::{Instance, Provision, Result};

use crate::{
    container,
    error::{engine, failed, is_missing},
    image,
    instance::{self, Data},
    launch,
    pool::Pool,
    shared::{Prepared, Shared},
    snapshot,
};

/// Makes an instance whose guest serves.
pub(crate) async fn provision(
    shared: &Shared,
    pool: &Arc<Pool>,
    request: &Provision,
) -> Result<Instance> {
    const OPERATION: &str = "provision";
    container::refuse(&request.spec, &shared.settings)?;
    let prepared = match &request.from {
        Some(from) => snapshot::image_of(shared, from).await?,
        None => image::for_spec(shared, &request.spec).await?,
    };
    let (container, wire) = match pool.claim(shared, request, &prepared).await? {
        Some((container, wire)) => (container, Some(wire)),
        None => (create(shared, request, &prepared).await?, None),
    };
    let served = async {
        launch::fill(shared, request, &container).await?;
        let wire = match wire {
            Some(wire) => wire,
            None => launch::start(shared, OPERATION, &container).await?,
        };
        let setup = container::setup(request, &prepared.env, &shared.settings);
        launch::serve(shared, OPERATION, &container, wire, &setup).await
    };
    match served.await {
        Ok(stream) => {
            let stream = launch::without_engine(shared, &container, stream).await;
            shared.keep_first(&request.instance, stream);
            let data = Data { container, borrowed: false };
            Ok(instance::describe(&request.instance, &request.sandbox, &data))
        }
        Err(error) => {
            image::remove(shared, &container).await;
            Err(error)
        }
    }
}

/// A container that is not started. Returns its id.
async fn create(shared: &Shared, request: &Provision, prepared: &Prepared) -> Result<String> {
    const OPERATION: &str = "provision";
    let docker = shared.docker(OPERATION).await?;
    let name = instance::name(&request.instance);
    let mut prepared = prepared.clone();
    for again in [true, false] {
        let mut body = container::body(request, &prepared.image, &shared.settings)?;
        if let (Some(labels), None) = (&mut body.labels, &request.from) {
            labels.extend(instance::origin_labels(&prepared.image));
        }
        let options = CreateContainerOptionsBuilder::default().name(&name).build();
        match docker.create_container(Some(options), body).await {
            Ok(created) => return Ok(created.id),
            Err(error) if is_missing(&error) && again && request.from.is_none() => {
                // Somebody has removed what we remember to be there.
                shared.forget(&prepared.image);
                prepared = image::for_spec(shared, &request.spec).await?;
            }
            Err(error) => return Err(engine(OPERATION, "make the container", error)),
        }
    }
    Err(failed(OPERATION, "the prepared image is removed again and again"))
}
