//! What becomes of a container once it is made.

use std::{collections::HashMap, time::Duration};

use bollard::{
    models::ContainerSummaryStateEnum,
    query_parameters::{
        InspectContainerOptionsBuilder, RemoveContainerOptionsBuilder, StatsOptionsBuilder,
        StopContainerOptionsBuilder,
    },
};
use futures::TryStreamExt;
use sandbox_core::{
    ContainerReach, Error, ErrorKind, Found, Instance, InstanceState, Provision, Reachability,
    Result, Usage,
};
use serde_json::Value;

use crate::{
    attach,
    container::{self, OWN_THREADS, WORKSPACE},
    direct,
    error::{asking, failed, is_conflict, is_missing, lost},
    helper, image,
    instance::{self, Data, KIND, Kind, SCOPE},
    launch, list, look,
    shared::Shared,
    sweep,
};

/// How long the engine may take to be done with a removal that somebody else began.
const PATIENCE: Duration = Duration::from_secs(60);

/// How often a container that was stopped is started, if its guest does not come up.
const STARTS: u32 = 4;

/// Between the first two of these times; then longer.
const SETTLING: Duration = Duration::from_millis(100);

/// How someone else gets in.
pub(crate) async fn reachability(shared: &Shared, instance: &Instance) -> Result<Reachability> {
    const OPERATION: &str = "reachability";
    let data = Data::of(instance)?;
    let found = look::container(shared, OPERATION, &data.container).await?;
    let Some(found) = found.filter(|found| look::state_of(Some(found)) == InstanceState::Running)
    else {
        return Err(lost(OPERATION, "the container does not run"));
    };
    let workspace = if data.borrowed { "/" } else { WORKSPACE };
    let mut reach = ContainerReach::new(found.id.unwrap_or(data.container), workspace);
    reach.engine = shared.endpoint.host();
    if !data.borrowed {
        let user = shared.settings.user;
        reach.user = Some((user.uid, user.gid));
    }
    Ok(Reachability::Container(reach))
}

/// What only the engine knows of what an instance uses and may use.
pub(crate) async fn usage(shared: &Shared, instance: &Instance) -> Result<Usage> {
    const OPERATION: &str = "usage";
    let data = Data::of(instance)?;
    let docker = shared.docker(OPERATION).await?;
    let options = InspectContainerOptionsBuilder::default().size(true).build();
    let found = match docker.inspect_container(&data.container, Some(options)).await {
        Ok(found) => found,
        Err(error) if is_missing(&error) => return Err(lost(OPERATION, "the container is gone")),
        Err(error) => return Err(asking(OPERATION, "look at the container")(error)),
    };
    let positive =
        |number: Option<i64>| number.and_then(|n| u64::try_from(n).ok()).filter(|n| *n > 0);
    let mut usage = Usage::default();
    usage.disk = found.size_rw.and_then(|size| u64::try_from(size).ok());
    if let Some(host) = &found.host_config {
        usage.memory_limit = positive(host.memory);
        usage.pids_limit = positive(host.pids_limit).map(|limit| limit - OWN_THREADS.min(limit));
    }
    if look::state_of(Some(&found)) == InstanceState::Running {
        let options = StatsOptionsBuilder::default().stream(false).one_shot(true).build();
        let mut stats = Box::pin(docker.stats(&data.container, Some(options)));
        if let Ok(Some(now)) = stats.try_next().await {
            usage.memory_peak = now.memory_stats.and_then(|memory| memory.max_usage);
        }
    }
    Ok(usage)
}

pub(crate) async fn pause(shared: &Shared, instance: &Instance) -> Result<()> {
    const OPERATION: &str = "pause";
    let data = Data::of(instance)?;
    data.refuse_borrowed(OPERATION)?;
    match look::inspect(shared, instance).await? {
        InstanceState::Paused => return Ok(()),
        InstanceState::Running => {}
        _ => return Err(lost(OPERATION, "the container does not run")),
    }
    let docker = shared.docker(OPERATION).await?;
    docker.pause_container(&data.container).await.map_err(asking(OPERATION, "pause the container"))
}

pub(crate) async fn resume(shared: &Shared, instance: &Instance) -> Result<()> {
    const OPERATION: &str = "resume";
    let data = Data::of(instance)?;
    data.refuse_borrowed(OPERATION)?;
    match look::inspect(shared, instance).await? {
        InstanceState::Running => return Ok(()),
        InstanceState::Paused => {}
        _ => return Err(lost(OPERATION, "the container does not run")),
    }
    let docker = shared.docker(OPERATION).await?;
    let resumed = docker.unpause_container(&data.container).await;
    resumed.map_err(asking(OPERATION, "resume the container"))
}

/// Ends what runs in a container; its files stay. Idempotent.
pub(crate) async fn stop(shared: &Shared, instance: &Instance) -> Result<()> {
    const OPERATION: &str = "stop";
    let data = Data::of(instance)?;
    data.refuse_borrowed(OPERATION)?;
    drop(shared.take_first(&instance.id));
    let docker = shared.docker(OPERATION).await?;
    if look::inspect(shared, instance).await? == InstanceState::Paused {
        // What is paused cannot end.
        let resumed = docker.unpause_container(&data.container).await;
        match resumed {
            Err(error) if !is_missing(&error) && !is_conflict(&error) => {
                return Err(asking(OPERATION, "resume the container")(error));
            }
            _ => {}
        }
    }
    let options = StopContainerOptionsBuilder::default().signal("KILL").t(0).build();
    match docker.stop_container(&data.container, Some(options)).await {
        Err(error) if !is_missing(&error) => Err(asking(OPERATION, "stop the container")(error)),
        _ => Ok(()),
    }
}

/// A stopped instance's guest again, on the same files.
pub(crate) async fn start_again(
    shared: &Shared,
    instance: &Instance,
    request: &Provision,
) -> Result<Instance> {
    const OPERATION: &str = "start";
    let data = Data::of(instance)?;
    data.refuse_borrowed(OPERATION)?;
    match look::inspect(shared, instance).await? {
        InstanceState::Gone => {
            return Err(lost(OPERATION, "the container is gone, with its files"));
        }
        // As after a crash in the middle of this: there may be nobody to take its first connection.
        InstanceState::Running | InstanceState::Paused => stop(shared, instance).await?,
        _ => {}
    }
    let mut request = request.clone();
    request.instance = instance.id.clone();
    let env = look::image_environment(shared, &data.container).await?;
    let setup = container::setup(&request, &env, &shared.settings);
    let mut tries = 1;
    loop {
        let started = async {
            let wire = launch::start(shared, OPERATION, &data.container).await?;
            launch::serve(shared, OPERATION, &data.container, wire, &setup).await
        };
        match started.await {
            Ok(stream) => {
                let stream = launch::without_engine(shared, &data.container, stream).await;
                shared.keep_first(&instance.id, stream);
                return Ok(instance.clone());
            }
            Err(error) => {
                stop(shared, instance).await?;
                if tries == STARTS || error.kind() == ErrorKind::Timeout {
                    return Err(error);
                }
            }
        }
        // Podman may still be at work on the container's former end, and take down what is started meanwhile.
        tokio::time::sleep(SETTLING * tries).await;
        tries += 1;
    }
}

/// Removes a container and what only it needed, and waits for what was there before it. Idempotent.
pub(crate) async fn teardown(shared: &Shared, instance: &Instance) -> Result<()> {
    dismantle(shared, instance).await?;
    shared.leaving.wait_for(&instance.sandbox).await;
    Ok(())
}

/// The same for one whose place another has taken: returns when nothing runs in it any more. By then the
/// engine is at its removal, and needs nobody to wait for that.
pub(crate) async fn retire(shared: &Shared, instance: &Instance) -> Result<()> {
    let data = Data::of(instance)?;
    // One at a time.
    shared.leaving.wait_for(&instance.sandbox).await;
    let process = direct::process(shared, &data.container).await;
    let Some(process) = process.filter(|_| !data.borrowed) else {
        return dismantle(shared, instance).await;
    };
    let (owned, of) = (shared.clone(), instance.clone());
    let mut removal = tokio::spawn(async move {
        let removed = dismantle(&owned, &of).await;
        if let Err(error) = &removed {
            // Whoever reaps finds it by its marks.
            tracing::warn!(%error, "a container whose place another has taken is left over");
        }
        removed
    });
    let ended = tokio::select! {
        ended = process.ends_within(PATIENCE) => ended.unwrap_or(false),
        removed = &mut removal => return removed.map_err(interrupted)?,
    };
    if ended {
        shared.leaving.add(&instance.sandbox, removal);
        return Ok(());
    }
    removal.await.map_err(interrupted)?
}

fn interrupted(error: tokio::task::JoinError) -> Error {
    failed("teardown", "the removal of the container was broken off").with_source(error)
}

/// Takes an instance's container away; from one that is borrowed, what was brought into it.
async fn dismantle(shared: &Shared, instance: &Instance) -> Result<()> {
    drop(shared.take_first(&instance.id));
    match &instance.data {
        // It is half made: whoever made it has ended before the history said where it is.
        Value::Null => {
            for container in of_instance(shared, instance).await? {
                remove(shared, &container).await?;
            }
        }
        Value::String(borrowed) => {
            return attach::detach(shared, &instance.id, borrowed).await;
        }
        _ => {
            let data = Data::of(instance)?;
            if data.borrowed {
                return attach::detach(shared, &instance.id, &data.container).await;
            }
            remove(shared, &data.container).await?;
        }
    }
    sweep::sweep(shared).await;
    Ok(())
}

/// The containers that have an instance's id in their names: one, or none.
async fn of_instance(shared: &Shared, instance: &Instance) -> Result<Vec<String>> {
    let scope = format!("{SCOPE}={}", shared.settings.scope);
    let name = instance::name(&instance.id);
    let filters = HashMap::from([("label", vec![scope]), ("name", vec![name])]);
    let listed = list::containers(shared, "teardown", &filters).await?;
    Ok(listed.into_iter().filter_map(|container| container.id).collect())
}

async fn remove(shared: &Shared, container: &str) -> Result<()> {
    const OPERATION: &str = "teardown";
    let docker = shared.docker(OPERATION).await?;
    let begin = tokio::time::Instant::now();
    loop {
        let options = RemoveContainerOptionsBuilder::default().force(true).v(true).build();
        match docker.remove_container(container, Some(options)).await {
            Ok(()) => return Ok(()),
            Err(error) if is_missing(&error) => return Ok(()),
            // Somebody else is removing it.
            Err(error) if is_conflict(&error) && begin.elapsed() < PATIENCE => {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
            Err(error) => {
                return Err(asking(OPERATION, format!("remove the container {container}"))(error));
            }
        }
    }
}

/// Every instance of this scope. A tool's container that a harness which has ended left is removed.
pub(crate) async fn inventory(shared: &Shared) -> Result<Vec<Found>> {
    const OPERATION: &str = "inventory";
    shared.leaving.wait_for_all().await;
    let scope = format!("{SCOPE}={}", shared.settings.scope);
    let filters = HashMap::from([("label", vec![scope])]);
    let listed = list::containers(shared, OPERATION, &filters).await?;
    for container in &listed {
        let kind = container.labels.as_ref().and_then(|labels| labels.get(KIND));
        let made_at = container.created.unwrap_or(i64::MAX);
        if kind.is_some_and(|kind| kind == Kind::Helper.as_str()) && helper::is_left_over(made_at) {
            image::remove(shared, container.id.as_deref().unwrap_or_default()).await;
        }
    }
    let found = listed.into_iter().filter_map(|container| {
        let state = match container.state? {
            ContainerSummaryStateEnum::RUNNING | ContainerSummaryStateEnum::RESTARTING => {
                InstanceState::Running
            }
            ContainerSummaryStateEnum::PAUSED => InstanceState::Paused,
            ContainerSummaryStateEnum::REMOVING => return None,
            _ => InstanceState::Stopped,
        };
        let names = container.names.unwrap_or_default();
        let labels = container.labels.unwrap_or_default();
        let created = container.created.unwrap_or_default();
        instance::found(&container.id?, &names, &labels, state, created)
    });
    Ok(found.collect())
}
