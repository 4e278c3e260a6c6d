//! Starting guests in containers, and connecting to them.

use bollard::{
    exec::{CreateExecOptions, StartExecOptions, StartExecResults},
    query_parameters::{
        AttachContainerOptionsBuilder, StartContainerOptions, UploadToContainerOptionsBuilder,
    },
};
use sandbox_core::{
    Error, ErrorKind, GuestStream, Instance, InstanceState, Provision, Result, WorkspaceMode,
};
use sandbox_guest::Setup;
use tokio::io::AsyncWriteExt;

use crate::{
    archive,
    baseline::Baseline,
    container::{self, GUEST, OWN, SOCKET, WORKSPACE},
    direct,
    error::{asking, engine, failed, is_conflict, is_missing, lost},
    instance::Data,
    look,
    shared::Shared,
    stream::{PATIENCE, Wire},
};

/// Copies the workspace into a fresh instance's container.
pub(crate) async fn fill(shared: &Shared, request: &Provision, container: &str) -> Result<()> {
    const OPERATION: &str = "provision";
    let private = request.spec.workspace_mode == WorkspaceMode::Private;
    let (Some(source), true, None) = (&request.spec.workspace, private, &request.from) else {
        return Ok(());
    };
    let docker = shared.docker(OPERATION).await?;
    let (source, owner) = (source.clone(), shared.settings.user);
    let since = jiff::Timestamp::now().as_second() - 2;
    let named = source.display().to_string();
    // Into a root that is read-only nothing can be put but into its volumes.
    let read_only = shared.settings.read_only_root;
    let (path, at) = if read_only { (WORKSPACE, ".") } else { ("/", "workspace") };
    let pieces = archive::pieces(move |archive| {
        let mut baseline = Baseline::begin(since);
        archive.tree(&source, at, owner, &mut |seen| baseline.add(&seen))?;
        if read_only {
            return Ok(());
        }
        let path = Baseline::path();
        archive.file(path.trim_start_matches('/'), 0o644, archive::Owner::ROOT, &baseline.end())
    });
    let failure = std::sync::Arc::new(std::sync::Mutex::new(None));
    let seen = std::sync::Arc::clone(&failure);
    let pieces = futures::StreamExt::map(pieces, move |piece| {
        piece.inspect_err(|error| {
            let copy = std::io::Error::new(error.kind(), error.to_string());
            *seen.lock().unwrap_or_else(std::sync::PoisonError::into_inner) = Some(copy);
        })
    });
    let options = UploadToContainerOptionsBuilder::default().path(path).build();
    let body = bollard::body_try_stream(pieces);
    let sent = docker.upload_to_container(container, Some(options), body).await;
    let failure = failure.lock().unwrap_or_else(std::sync::PoisonError::into_inner).take();
    match (sent, failure) {
        (_, Some(error)) => {
            Err(Error::io(OPERATION, format!("copy the workspace {named}: {error}"), error))
        }
        (sent, None) => sent.map_err(asking(OPERATION, format!("copy the workspace {named}"))),
    }
}

/// Attaches to a container and starts it: its guest waits to be told what it is for.
pub(crate) async fn start(
    shared: &Shared,
    operation: &'static str,
    container: &str,
) -> Result<Wire> {
    let docker = shared.docker(operation).await?;
    let options = AttachContainerOptionsBuilder::default()
        .stream(true)
        .stdin(true)
        .stdout(true)
        .stderr(true)
        .build();
    let attached = docker
        .attach_container(container, Some(options))
        .await
        .map_err(asking(operation, "attach to the container"))?;
    docker
        .start_container(container, None::<StartContainerOptions>)
        .await
        .map_err(asking(operation, "start the container"))?;
    Ok(Wire::new(attached.output, attached.input))
}

/// Tells a waiting guest what it is for, and waits until it serves.
pub(crate) async fn serve(
    shared: &Shared,
    operation: &'static str,
    container: &str,
    mut wire: Wire,
    setup: &Setup,
) -> Result<GuestStream> {
    let text = serde_json::to_vec(setup)
        .map_err(|error| failed(operation, "the guest's set-up").with_source(error))?;
    let length =
        u32::try_from(text.len()).map_err(|_| failed(operation, "the set-up is too long"))?;
    let greeted = tokio::time::timeout(PATIENCE, async move {
        let message = [&length.to_be_bytes()[..], &text].concat();
        let written = async {
            wire.writer.write_all(&message).await?;
            wire.writer.flush().await
        };
        // A guest that cannot run takes nothing, and what it says of that is worth more.
        let written = written.await;
        match wire.until_it_serves().await {
            Ok(stream) => Ok(stream),
            Err(words) => {
                Err(written.err().map_or(words.clone(), |error| format!("{words}; {error}")))
            }
        }
    });
    match greeted.await {
        Ok(Ok(stream)) => Ok(stream),
        Ok(Err(words)) => {
            let state = look::describe_end(shared, container).await;
            let message = format!("the guest did not come up: {words}{state}");
            Err(failed(operation, message))
        }
        Err(_) => {
            let message = format!("the guest did not come up within {} s", PATIENCE.as_secs());
            Err(Error::new(ErrorKind::Timeout, operation, message))
        }
    }
}

/// A connection that does not pass the engine instead of this one, if there can be one.
pub(crate) async fn without_engine(
    shared: &Shared,
    container: &str,
    stream: GuestStream,
) -> GuestStream {
    match direct::connect(shared, container).await {
        Ok(Some(direct)) => direct,
        _ => stream,
    }
}

/// A byte stream to an instance's guest.
pub(crate) async fn connect(shared: &Shared, instance: &Instance) -> Result<GuestStream> {
    const OPERATION: &str = "connect";
    if let Some(stream) = shared.take_first(&instance.id) {
        return Ok(stream);
    }
    let data = Data::of(instance)?;
    let (guest, socket) = if data.borrowed {
        (container::borrowed_guest(&instance.id), container::borrowed_socket(&instance.id))
    } else {
        if let Some(stream) = direct::connect(shared, &data.container).await? {
            return Ok(stream);
        }
        (GUEST.to_owned(), SOCKET.to_owned())
    };
    let command = vec![guest, "connect".to_owned(), socket];
    let wire = match run(shared, &data.container, command, "0:0").await {
        Ok(wire) => wire,
        Err(error) if is_missing(&error) => {
            return Err(lost(OPERATION, "the container is gone"));
        }
        Err(error) if is_conflict(&error) => {
            return Err(not_running(shared, instance, &data.container).await?);
        }
        Err(error) => {
            // The engine has many words for a container that ends just now.
            let error = engine(OPERATION, "reach the guest", error);
            if error.kind() == ErrorKind::Unavailable {
                return Err(error);
            }
            return match look::inspect(shared, instance).await? {
                InstanceState::Running => Err(error),
                _ => Err(not_running(shared, instance, &data.container).await?),
            };
        }
    };
    match tokio::time::timeout(PATIENCE, wire.until_it_serves()).await {
        Ok(Ok(stream)) => Ok(stream),
        Ok(Err(words)) => match look::inspect(shared, instance).await? {
            InstanceState::Running => {
                let message = format!("the guest cannot be reached: {words}");
                Err(Error::new(ErrorKind::Unavailable, OPERATION, message))
            }
            _ => Err(not_running(shared, instance, &data.container).await?),
        },
        Err(_) => {
            let message = format!("the guest did not answer within {} s", PATIENCE.as_secs());
            Err(Error::new(ErrorKind::Timeout, OPERATION, message))
        }
    }
}

/// Why there is no guest to connect to.
async fn not_running(shared: &Shared, instance: &Instance, container: &str) -> Result<Error> {
    const OPERATION: &str = "connect";
    Ok(match look::inspect(shared, instance).await? {
        InstanceState::Gone => lost(OPERATION, "the container is gone"),
        InstanceState::Paused => {
            let message = "the container is paused; resume it first";
            Error::new(ErrorKind::Unavailable, OPERATION, message)
        }
        _ => {
            let state = look::describe_end(shared, container).await;
            lost(OPERATION, format!("the guest does not run{state}"))
        }
    })
}

/// Starts a program of the backend's own in a running container, with no right but that of being its user.
pub(crate) async fn run(
    shared: &Shared,
    container: &str,
    command: Vec<String>,
    user: &str,
) -> std::result::Result<Wire, bollard::errors::Error> {
    let unavailable = |error: Error| bollard::errors::Error::from(std::io::Error::other(error));
    let docker = shared.docker("connect").await.map_err(unavailable)?;
    let created = docker
        .create_exec(
            container,
            CreateExecOptions {
                attach_stdin: Some(true),
                attach_stdout: Some(true),
                attach_stderr: Some(true),
                cmd: Some(command),
                user: Some(user.to_owned()),
                working_dir: Some("/".to_owned()),
                ..Default::default()
            },
        )
        .await?;
    let options = StartExecOptions { output_capacity: Some(64 * 1024), ..Default::default() };
    match docker.start_exec(&created.id, Some(options)).await? {
        StartExecResults::Attached { output, input } => Ok(Wire::new(output, input)),
        StartExecResults::Detached => {
            Err(std::io::Error::other(format!("{OWN}: the engine did not attach")).into())
        }
    }
}
