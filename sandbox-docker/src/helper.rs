//! Small tools of the backend's own, each in a container that nothing else runs in.

use std::time::Duration;

use bollard::{
    models::{ContainerCreateBody, HostConfig},
    query_parameters::{
        AttachContainerOptionsBuilder, CreateContainerOptionsBuilder, StartContainerOptions,
    },
};
use sandbox_core::{Error, ErrorKind, Result, SnapshotId};

use crate::{
    container::GUEST,
    error::{asking, engine, failed, is_missing},
    image,
    instance::{self, Kind},
    shared::Shared,
    stream::Wire,
};

/// No tool takes longer, unless it hangs.
const PATIENCE: Duration = Duration::from_secs(300);

/// Whether what was made for a tool at this time, in seconds, is of no use any more: its harness has ended.
pub(crate) fn is_left_over(made_at: i64) -> bool {
    let longest = i64::try_from(12 * PATIENCE.as_secs()).unwrap_or(i64::MAX);
    jiff::Timestamp::now().as_second().saturating_sub(made_at) > longest
}

/// Runs the guest program with these arguments in a container of its own, and returns what it wrote.
pub(crate) async fn run(
    shared: &Shared,
    operation: &'static str,
    image: &str,
    arguments: &[&str],
    host: HostConfig,
    most: u64,
) -> Result<Vec<u8>> {
    let tool = Tool::new(shared, operation, image, arguments, host).await?;
    let output = tool.run(shared, most).await;
    tool.remove(shared).await;
    output
}

/// A container for one run of the guest program. It is there until it is removed.
pub(crate) struct Tool {
    operation: &'static str,
    pub(crate) container: String,
}

impl Tool {
    /// One that has not run yet.
    pub(crate) async fn new(
        shared: &Shared,
        operation: &'static str,
        image: &str,
        arguments: &[&str],
        host: HostConfig,
    ) -> Result<Self> {
        let docker = shared.docker(operation).await?;
        let container = format!("sandboxer-helper-{}", SnapshotId::new());
        let command = std::iter::once(GUEST).chain(arguments.iter().copied());
        let body = ContainerCreateBody {
            image: Some(image.to_owned()),
            entrypoint: Some(command.map(str::to_owned).collect()),
            cmd: Some(Vec::new()),
            user: Some("0:0".to_owned()),
            working_dir: Some("/".to_owned()),
            attach_stdout: Some(true),
            attach_stderr: Some(true),
            labels: Some(instance::labels(&shared.settings.scope, Kind::Helper)),
            host_config: Some(host),
            ..Default::default()
        };
        let options = CreateContainerOptionsBuilder::default().name(&container).build();
        docker.create_container(Some(options), body).await.map_err(|error| {
            let missing = is_missing(&error);
            let error = engine(operation, "make a container for a tool", error);
            if missing {
                Error::new(ErrorKind::NotFound, operation, error.to_string())
            } else {
                error
            }
        })?;
        Ok(Self { operation, container })
    }

    /// Runs it; returns what it wrote.
    pub(crate) async fn run(&self, shared: &Shared, most: u64) -> Result<Vec<u8>> {
        let output = output(shared, self.operation, &self.container, most);
        tokio::time::timeout(PATIENCE, output).await.unwrap_or_else(|_| {
            let message = format!("a tool did not end within {} s", PATIENCE.as_secs());
            Err(Error::new(ErrorKind::Timeout, self.operation, message))
        })
    }

    pub(crate) async fn remove(self, shared: &Shared) {
        image::remove(shared, &self.container).await;
    }
}

async fn output(
    shared: &Shared,
    operation: &'static str,
    container: &str,
    most: u64,
) -> Result<Vec<u8>> {
    let docker = shared.docker(operation).await?;
    let options =
        AttachContainerOptionsBuilder::default().stream(true).stdout(true).stderr(true).build();
    let attached = docker
        .attach_container(container, Some(options))
        .await
        .map_err(asking(operation, "attach to a tool"))?;
    docker
        .start_container(container, None::<StartContainerOptions>)
        .await
        .map_err(asking(operation, "start a tool"))?;
    let (output, words) = Wire::new(attached.output, attached.input)
        .read_to_end(most.saturating_add(1))
        .await
        .map_err(|error| Error::io(operation, "what a tool says", error))?;
    if !words.is_empty() {
        return Err(failed(operation, words));
    }
    if output.len() as u64 > most {
        let message = format!("a tool has more to say than {most} bytes");
        return Err(Error::new(ErrorKind::LimitExceeded, operation, message));
    }
    Ok(output)
}
