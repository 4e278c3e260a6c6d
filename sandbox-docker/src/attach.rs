//! Containers that somebody else made: the guest is brought in beside the container's own program, and
//! leaves nothing behind when it goes.

use bollard::query_parameters::UploadToContainerOptionsBuilder;
use sandbox_core::{Error, ErrorKind, Instance, InstanceId, Provision, Result};
use sandbox_guest::Setup;

use crate::{
    archive::{Archive, Owner},
    backend::Shared,
    error::{asking, engine, failed, is_conflict, is_missing},
    instance::{self, Data},
    launch, life,
};

/// The guest's own directory in a borrowed container.
fn directory(instance: &InstanceId) -> String {
    format!("/.sandbox-{instance}")
}

/// Where the guest listens in a borrowed container.
pub(crate) fn socket(instance: &InstanceId) -> String {
    format!("{}/run/socket", directory(instance))
}

/// The guest program in a borrowed container.
pub(crate) fn guest(instance: &InstanceId) -> String {
    format!("{}/guest", directory(instance))
}

/// Brings the guest into a running container.
pub(crate) async fn attach(
    shared: &Shared,
    external: &str,
    request: &Provision,
) -> Result<Instance> {
    const OPERATION: &str = "attach";
    let found = life::look(shared, OPERATION, external).await?.ok_or_else(|| {
        let message = format!("the container engine has no container {external}");
        Error::new(ErrorKind::NotFound, OPERATION, message)
    })?;
    let container = found.id.clone().unwrap_or_else(|| external.to_owned());
    let config = found.config.unwrap_or_default();
    let image = found.image.unwrap_or_default();
    let docker = shared.docker(OPERATION).await?;
    let arch = docker.inspect_image(&image).await.ok().and_then(|image| image.architecture);
    let arch = arch.as_deref().map_or(std::env::consts::ARCH, crate::image::uname);
    let guest_program = shared.guests.get(arch)?;

    let top = directory(&request.instance);
    let files = || {
        let top = top.trim_start_matches('/');
        let mut archive = Archive::new(Vec::new());
        archive.dir(top, 0o755, Owner::ROOT)?;
        archive.file(&format!("{top}/guest"), 0o755, Owner::ROOT, guest_program.bytes())?;
        // Whoever the container's user is.
        archive.dir(&format!("{top}/run"), 0o1777, Owner::ROOT)?;
        archive.finish()
    };
    let files = files().map_err(|error| Error::io(OPERATION, "an archive in memory", error))?;
    let options = UploadToContainerOptionsBuilder::default().path("/").build();
    docker
        .upload_to_container(&container, Some(options), bollard::body_full(files.into()))
        .await
        .map_err(asking(OPERATION, "bring the guest into the container"))?;

    let data = Data { container: container.clone(), borrowed: true };
    let instance = instance::describe(&request.instance, &request.sandbox, &data);
    let user = config.user.unwrap_or_default();
    let command = vec![guest(&request.instance), "init".into(), "--setup-stdin".into()];
    let started = async {
        let wire = launch::run(shared, &container, command, &user)
            .await
            .map_err(asking(OPERATION, "start the guest in the container"))?;
        let workspace = config.working_dir.filter(|path| !path.is_empty());
        let env = config.env.unwrap_or_default();
        let setup = Setup {
            instance: request.instance.to_string(),
            listen_path: Some(socket(&request.instance)),
            // Its own user, and root, which carries connections in.
            workspace: workspace.unwrap_or_else(|| "/".to_owned()),
            env: crate::container::setup(request, &env, &shared.settings).env,
            ..Setup::default()
        };
        launch::serve(shared, OPERATION, &container, wire, &setup).await
    };
    match started.await {
        Ok(stream) => {
            shared.keep_first(&request.instance, stream);
            Ok(instance)
        }
        Err(error) => {
            if let Err(left) = detach(shared, &instance, &data).await {
                tracing::warn!(%left, "what was brought into a container is left there");
            }
            Err(error)
        }
    }
}

/// Ends the guest in a borrowed container, with all that it started, and removes it. Idempotent.
pub(crate) async fn detach(shared: &Shared, instance: &Instance, data: &Data) -> Result<()> {
    const OPERATION: &str = "detach";
    drop(shared.take_first(&instance.id));
    let top = directory(&instance.id);
    let command = vec![guest(&instance.id), "leave".to_owned(), top];
    let wire = match launch::run(shared, &data.container, command, "0:0").await {
        Ok(wire) => wire,
        // It is gone, or does not run: then neither does the guest.
        Err(error) if is_missing(&error) || is_conflict(&error) => return Ok(()),
        Err(error) => return Err(engine(OPERATION, "end the guest in the container", error)),
    };
    let (_, words) = wire
        .read_to_end(4096)
        .await
        .map_err(|error| Error::io(OPERATION, "the end of the guest in the container", error))?;
    // The engine says so where the program is not there any more.
    if words.is_empty() || words.contains("no such file") {
        return Ok(());
    }
    Err(failed(OPERATION, words))
}
