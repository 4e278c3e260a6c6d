//! Containers that somebody else made: the guest is brought in beside the container's own program, and
//! leaves nothing behind when it goes.

use bollard::query_parameters::{
    ContainerArchiveInfoOptionsBuilder, UploadToContainerOptionsBuilder,
};
use sandbox_core::{Error, ErrorKind, Instance, InstanceId, InstanceState, Provision, Result};
use sandbox_guest::Setup;

use crate::{
    archive::{Archive, Owner},
    container,
    error::{asking, engine, failed, is_conflict, is_missing},
    image,
    instance::{self, Data},
    launch, look,
    shared::Shared,
};

const DETACH: &str = "detach";

/// Brings the guest into a running container.
pub(crate) async fn attach(
    shared: &Shared,
    external: &str,
    request: &Provision,
) -> Result<Instance> {
    const OPERATION: &str = "attach";
    let found = look::container(shared, OPERATION, external).await?.ok_or_else(|| {
        let message = format!("the container engine has no container {external}");
        Error::new(ErrorKind::NotFound, OPERATION, message)
    })?;
    let container = found.id.clone().unwrap_or_else(|| external.to_owned());
    let config = found.config.unwrap_or_default();
    let image = found.image.unwrap_or_default();
    bring_in(shared, OPERATION, &container, &image, &request.instance).await?;

    let data = Data { container: container.clone(), borrowed: true };
    let instance = instance::describe(&request.instance, &request.sandbox, &data);
    let user = config.user.unwrap_or_default();
    let command =
        vec![container::borrowed_guest(&request.instance), "init".into(), "--setup-stdin".into()];
    let started = async {
        let wire = launch::run(shared, &container, command, &user)
            .await
            .map_err(asking(OPERATION, "start the guest in the container"))?;
        let workspace = config.working_dir.filter(|path| !path.is_empty());
        let env = config.env.unwrap_or_default();
        let setup = Setup {
            instance: request.instance.to_string(),
            listen_path: Some(container::borrowed_socket(&request.instance)),
            // Its own user, and root, which carries connections in.
            workspace: workspace.unwrap_or_else(|| "/".to_owned()),
            env: container::setup(request, &env, &shared.settings).env,
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
            if let Err(left) = detach(shared, &instance.id, &data.container).await {
                tracing::warn!(%left, "what was brought into a container is left there");
            }
            Err(error)
        }
    }
}

/// Puts an instance's guest program into a container.
async fn bring_in(
    shared: &Shared,
    operation: &'static str,
    container: &str,
    image: &str,
    instance: &InstanceId,
) -> Result<()> {
    let docker = shared.docker(operation).await?;
    let arch = docker.inspect_image(image).await.ok().and_then(|image| image.architecture);
    let arch = arch.as_deref().map_or(std::env::consts::ARCH, image::uname);
    let guest_program = shared.guests.get(arch)?;
    let top = container::borrowed_directory(instance);
    let files = || {
        let top = top.trim_start_matches('/');
        let mut archive = Archive::new(Vec::new());
        archive.dir(top, 0o755, Owner::ROOT)?;
        archive.file(&format!("{top}/guest"), 0o755, Owner::ROOT, guest_program.bytes())?;
        // Whoever the container's user is.
        archive.dir(&format!("{top}/run"), 0o1777, Owner::ROOT)?;
        archive.finish()
    };
    let files = files().map_err(|error| Error::io(operation, "an archive in memory", error))?;
    let options = UploadToContainerOptionsBuilder::default().path("/").build();
    docker
        .upload_to_container(container, Some(options), bollard::body_full(files.into()))
        .await
        .map_err(asking(operation, "bring the guest into the container"))
}

/// Ends the guest in a borrowed container, with all that it started, and removes it. Idempotent; also for what
/// is half brought in.
pub(crate) async fn detach(shared: &Shared, instance: &InstanceId, container: &str) -> Result<()> {
    drop(shared.take_first(instance));
    leave(shared, instance, container).await?;
    if is_there(shared, instance, container).await? {
        // The guest program was not there, or not all of it: so it is brought in once more, to be the last.
        let found = look::container(shared, DETACH, container).await?;
        if look::state_of(found.as_ref()) != InstanceState::Running {
            // Nothing runs in it. What is left in its files cannot be removed from outside.
            tracing::warn!(
                container,
                directory = container::borrowed_directory(instance),
                "left in a borrowed container"
            );
            return Ok(());
        }
        let image = found.and_then(|found| found.image).unwrap_or_default();
        bring_in(shared, DETACH, container, &image, instance).await?;
        let said = leave(shared, instance, container).await?;
        if is_there(shared, instance, container).await? {
            let message = format!(
                "{} is still in the container: {said}",
                container::borrowed_directory(instance)
            );
            return Err(failed(DETACH, message));
        }
    }
    Ok(())
}

/// Has the guest leave; returns what was complained of.
async fn leave(shared: &Shared, instance: &InstanceId, container: &str) -> Result<String> {
    let command = vec![
        container::borrowed_guest(instance),
        "leave".to_owned(),
        container::borrowed_directory(instance),
    ];
    let wire = match launch::run(shared, container, command, "0:0").await {
        Ok(wire) => wire,
        Err(error) if is_missing(&error) => return Ok(String::new()),
        Err(error) => {
            let found = look::container(shared, DETACH, container).await?;
            return match look::state_of(found.as_ref()) {
                InstanceState::Paused => {
                    let message = format!(
                        "the container {container} is paused, and so is the guest in it: resume it first"
                    );
                    Err(Error::new(ErrorKind::Unavailable, DETACH, message))
                }
                // The program is not one that can be started.
                InstanceState::Running if !is_conflict(&error) => Ok(error.to_string()),
                InstanceState::Running => {
                    Err(engine(DETACH, "end the guest in the container", error))
                }
                // It is gone, or does not run: then neither does the guest.
                _ => Ok(String::new()),
            };
        }
    };
    let (_, words) = wire
        .read_to_end(4096)
        .await
        .map_err(|error| Error::io(DETACH, "the end of the guest in the container", error))?;
    Ok(words)
}

/// Whether something of an instance is in a container.
async fn is_there(shared: &Shared, instance: &InstanceId, container: &str) -> Result<bool> {
    let docker = shared.docker(DETACH).await?;
    let path = container::borrowed_directory(instance);
    let options = ContainerArchiveInfoOptionsBuilder::default().path(&path).build();
    match docker.get_container_archive_info(container, Some(options)).await {
        Ok(_) => Ok(true),
        Err(error) if is_missing(&error) => Ok(false),
        Err(error) => Err(engine(DETACH, format!("look for {path} in the container"), error)),
    }
}
