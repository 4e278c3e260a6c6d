//! Containers that are ready before anybody asks for them: each is started, its guest waits to be told
//! what it is for, and nothing has run in it. It is given away once and never comes back.

use std::{
    collections::{HashMap, VecDeque},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use bollard::{
    models::ContainerCreateBody,
    query_parameters::{CreateContainerOptionsBuilder, RenameContainerOptionsBuilder},
};
use sandbox_core::{CreateSandbox, OwnerId, Provision, Result, SandboxId, SandboxSpec};

use crate::{
    container,
    error::{asking, is_missing},
    image,
    instance::{self, KIND, Kind, SCOPE},
    launch, list,
    shared::{Prepared, Shared},
    stream::Wire,
};

const OPERATION: &str = "fill the pool";

/// How many containers to keep ready, and for what.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct PoolOptions {
    /// So many.
    pub size: usize,
    /// For sandboxes of such a spec: the same image, network, limits and mounts. The workspace, the
    /// environment and the lifetime may be others.
    pub spec: SandboxSpec,
}

impl PoolOptions {
    /// So many, for sandboxes of this spec.
    #[must_use]
    pub fn new(size: usize, like: CreateSandbox) -> Self {
        Self { size, spec: like.spec }
    }
}

/// The containers of one backend that are ready.
pub(crate) struct Pool {
    options: Option<PoolOptions>,
    ready: Mutex<VecDeque<Member>>,
    filling: tokio::sync::Mutex<()>,
}

struct Member {
    container: String,
    name: String,
    key: String,
    wire: Wire,
}

impl Pool {
    pub(crate) fn new(options: Option<PoolOptions>) -> Self {
        Self { options, ready: Mutex::default(), filling: tokio::sync::Mutex::default() }
    }

    fn ready(&self) -> MutexGuard<'_, VecDeque<Member>> {
        self.ready.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A container that is ready for this request, if there is one; another takes its place meanwhile.
    pub(crate) async fn claim(
        self: &Arc<Self>,
        shared: &Shared,
        request: &Provision,
        prepared: &Prepared,
    ) -> Result<Option<(String, Wire)>> {
        if self.options.is_none() || request.from.is_some() {
            return Ok(None);
        }
        let key = key(container::body(request, &prepared.image, &shared.settings)?);
        loop {
            let member = {
                let mut ready = self.ready();
                let at = ready.iter().position(|member| member.key == key);
                at.and_then(|at| ready.remove(at))
            };
            self.refill(shared);
            let Some(member) = member else { return Ok(None) };
            let docker = shared.docker(OPERATION).await?;
            let name = instance::claimed_name(request);
            let options = RenameContainerOptionsBuilder::default().name(&name).build();
            // By its old name: whoever is second does not find it.
            match docker.rename_container(&member.name, options).await {
                Ok(()) => return Ok(Some((member.container, member.wire))),
                Err(error) if is_missing(&error) => {}
                Err(error) => return Err(asking(OPERATION, "claim a container")(error)),
            }
        }
    }

    fn refill(self: &Arc<Self>, shared: &Shared) {
        let (pool, shared) = (Arc::clone(self), shared.clone());
        tokio::spawn(async move {
            if let Err(error) = pool.fill(&shared).await {
                tracing::warn!(%error, "the pool cannot be filled");
            }
        });
    }

    /// Makes as many as are missing.
    pub(crate) async fn fill(&self, shared: &Shared) -> Result<()> {
        let Some(options) = &self.options else { return Ok(()) };
        let _one = self.filling.lock().await;
        remove_dead(shared).await?;
        while self.ready().len() < options.size {
            let member = make(shared, &options.spec).await?;
            self.ready().push_back(member);
        }
        Ok(())
    }

    /// Removes all that are ready.
    pub(crate) async fn drain(&self, shared: &Shared) {
        let _one = self.filling.lock().await;
        let ready: Vec<Member> = self.ready().drain(..).collect();
        for member in ready {
            image::remove(shared, &member.container).await;
        }
    }
}

async fn make(shared: &Shared, spec: &SandboxSpec) -> Result<Member> {
    let prepared = image::for_spec(shared, spec).await?;
    // Somebody that nobody is, to have an id.
    let request = Provision::new(SandboxId::new(), OwnerId::new(), spec.clone());
    let mut body = container::body(&request, &prepared.image, &shared.settings)?;
    let mut labels = instance::labels(&shared.settings.scope, Kind::Pooled);
    labels.extend(instance::origin_labels(&prepared.image));
    body.labels = Some(labels);
    let key = key(body.clone());
    let docker = shared.docker(OPERATION).await?;
    let name = format!("sandboxer-pooled-{}", request.instance);
    let options = CreateContainerOptionsBuilder::default().name(&name).build();
    let created = docker
        .create_container(Some(options), body)
        .await
        .map_err(asking(OPERATION, "make a container"))?;
    match launch::start(shared, OPERATION, &created.id).await {
        Ok(wire) => Ok(Member { container: created.id, name, key, wire }),
        Err(error) => {
            image::remove(shared, &created.id).await;
            Err(error)
        }
    }
}

/// What a container is, but for whose.
fn key(mut body: ContainerCreateBody) -> String {
    body.labels = None;
    body.hostname = None;
    serde_json::to_value(body).unwrap_or_default().to_string()
}

/// The guests of a pool end when the process does that keeps it; their containers are removed by the next.
async fn remove_dead(shared: &Shared) -> Result<()> {
    let labels = vec![
        format!("{SCOPE}={}", shared.settings.scope),
        format!("{KIND}={}", Kind::Pooled.as_str()),
    ];
    let filters = HashMap::from([("label", labels), ("status", vec!["exited".to_owned()])]);
    let dead = list::containers(shared, OPERATION, &filters).await?;
    for container in dead {
        // One that was claimed is somebody's, and keeps their files.
        let names = container.names.unwrap_or_default();
        let pooled = names.iter().any(|name| name.starts_with("/sandboxer-pooled-"));
        if let (true, Some(id)) = (pooled, container.id) {
            image::remove(shared, &id).await;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whose_it_is_does_not_matter() {
        let body = |hostname: &str, image: &str| ContainerCreateBody {
            hostname: Some(hostname.to_owned()),
            image: Some(image.to_owned()),
            labels: Some([("a".to_owned(), hostname.to_owned())].into()),
            ..Default::default()
        };
        assert_eq!(key(body("one", "x")), key(body("other", "x")));
        assert_ne!(key(body("one", "x")), key(body("one", "y")));
    }
}
