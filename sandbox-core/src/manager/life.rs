//! Stop, start, pause, resume, destroy.

use std::{pin::Pin, sync::Arc};

use super::{
    Inner, Recorder, Shared,
    create::{make_instance, provision_and_greet, reachability},
    ends, setup,
    shared::{connect, refuse_borrowed, running_instance},
};
use crate::{
    Error, ErrorKind, Instance, Known, OnLost, Result, SandboxState, guest::Link, record::Record,
};

/// Ends its processes and keeps its files.
pub(crate) async fn stop(recorder: Recorder) -> Result<()> {
    let (inner, shared) = (Arc::clone(&recorder.inner), Arc::clone(&recorder.shared));
    let _lock = inner.journal.lock(&shared.id).await?;
    let record = shared.record(&inner).await?;
    refuse_borrowed(&record, "stop")?;
    if record.state == SandboxState::Stopped {
        return Ok(());
    }
    let instance = running_instance(&record)?;
    let backend = inner.backend(&instance.backend)?;
    ends::collect(&recorder, &record).await;
    recorder.record(Known::StopRequested).await?;
    shared.unlink().await;
    settle(&recorder, "stop", backend.stop(instance).await).await?;
    recorder.record(Known::Stopped).await?;
    ends::lose(&recorder).await
}

/// Starts a stopped sandbox on the files that it had.
pub(crate) async fn start(recorder: Recorder) -> Result<()> {
    let (inner, shared) = (Arc::clone(&recorder.inner), Arc::clone(&recorder.shared));
    let _lock = inner.journal.lock(&shared.id).await?;
    let record = shared.record(&inner).await?;
    refuse_borrowed(&record, "start")?;
    if record.state != SandboxState::Stopped {
        running_instance(&record)?;
        return Ok(());
    }
    let instance = stopped_instance(&record)?;
    let backend = inner.backend(&instance.backend)?;
    recorder.record(Known::StartRequested).await?;
    let mut request = inner.provision_again(&shared, &record, record.generation, None);
    request.instance = instance.id.clone();
    let started = async {
        let instance = backend.start(&instance, &request).await?;
        let linked = async {
            let link = connect(&*backend, &instance).await?;
            shared.put_to_use(&inner, link, &record.spec).await
        };
        match linked.await {
            Ok(link) => Ok((instance, link)),
            Err(error) => {
                backend.stop(&instance).await?;
                Err(error)
            }
        }
    };
    let (instance, link) = settle(&recorder, "start", started.await).await?;
    shared.relink(Some(link)).await;
    recorder.record(Known::Started { instance }).await?;
    ends::lose(&recorder).await
}

/// Holds up its execution.
pub(crate) async fn pause(recorder: Recorder) -> Result<()> {
    let (inner, shared) = (Arc::clone(&recorder.inner), Arc::clone(&recorder.shared));
    let _lock = inner.journal.lock(&shared.id).await?;
    let record = shared.record(&inner).await?;
    refuse_borrowed(&record, "pause")?;
    if record.state == SandboxState::Paused {
        return Ok(());
    }
    let instance = running_instance(&record)?;
    inner.backend(&instance.backend)?.pause(instance).await?;
    recorder.record(Known::Paused).await?;
    Ok(())
}

/// Lets it go on.
pub(crate) async fn resume(recorder: Recorder) -> Result<()> {
    let (inner, shared) = (Arc::clone(&recorder.inner), Arc::clone(&recorder.shared));
    let _lock = inner.journal.lock(&shared.id).await?;
    let record = shared.record(&inner).await?;
    refuse_borrowed(&record, "resume")?;
    if record.state != SandboxState::Paused {
        running_instance(&record)?;
        return Ok(());
    }
    let instance = stopped_instance(&record)?;
    inner.backend(&instance.backend)?.resume(&instance).await?;
    recorder.record(Known::Resumed).await?;
    Ok(())
}

/// Gives it a fresh instance, as at first: makes before it breaks.
pub(crate) async fn recreate(recorder: Recorder) -> Result<()> {
    let (inner, shared) = (Arc::clone(&recorder.inner), Arc::clone(&recorder.shared));
    let _lock = inner.journal.lock(&shared.id).await?;
    let record = shared.record(&inner).await?;
    refuse_borrowed(&record, "recreate")?;
    if !matches!(record.state, SandboxState::Stopped | SandboxState::Lost | SandboxState::Paused) {
        running_instance(&record)?;
    }
    let (instance, link, generation) = make_fresh(&recorder, &record).await?;
    ends::collect(&recorder, &record).await;
    let backend = inner.backend(&instance.backend)?;
    let reachability = reachability(&*backend, &instance).await;
    let expires_at = record.expires_at;
    recorder.record(Known::Ready { instance, generation, reachability, expires_at }).await?;
    shared.relink(link).await;
    remove_old(&inner, &record).await;
    ends::lose(&recorder).await
}

/// A fresh instance of a sandbox that exists; its failure is recorded.
async fn make_fresh(
    recorder: &Recorder,
    record: &Record,
) -> Result<(Instance, Option<Arc<Link>>, u32)> {
    let (inner, shared) = (&recorder.inner, &recorder.shared);
    let id = record.backend.clone().unwrap_or_else(|| inner.backends[0].id());
    let backend = inner.backend(&id)?;
    let secrets = setup::resolve(&record.spec.setup, &*inner.secrets).await?;
    let generation = record.generation + 1;
    let provision = inner.provision_again(shared, record, generation, None);
    let instance = provision.instance.clone();
    recorder.record(Known::Provisioning { backend: id, instance, generation }).await?;
    let made = make_instance(recorder, &backend, &provision, &secrets).await;
    let (fresh, _) = settle(recorder, "recreate", made).await?;
    let (instance, link) = fresh.parts().await;
    Ok((instance, link, generation))
}

/// Removes the instance that another one has taken the place of.
pub(super) async fn remove_old(inner: &Inner, record: &Record) {
    let Some(old) = &record.instance else { return };
    let removed = async { inner.backend(&old.backend)?.retire(old).await };
    if let Err(error) = removed.await {
        // It is not the sandbox's any more; whoever reaps finds it by its marks.
        tracing::warn!(%error, "the instance before could not be removed");
    }
}

/// What its policy says is to be done about a lost sandbox. The lock is held, `lost` is recorded.
///
/// Boxed, as a session may find a loss, and setting up the instance in its place takes a session.
pub(super) fn recover<'a>(
    recorder: &'a Recorder,
    record: &'a Record,
) -> Pin<Box<dyn Future<Output = Result<()>> + Send + 'a>> {
    Box::pin(replace(recorder, record))
}

async fn replace(recorder: &Recorder, record: &Record) -> Result<()> {
    let (inner, shared) = (&recorder.inner, &recorder.shared);
    let (instance, link, generation, snapshot, what) = match record.spec.on_lost {
        OnLost::Fail => return Ok(()),
        OnLost::RestoreLatestSnapshot => {
            let Some(latest) = record.snapshots.last() else {
                return Ok(());
            };
            let generation = record.generation + 1;
            let from = Some(latest.data.clone());
            let provision = inner.provision_again(shared, record, generation, from);
            let (snapshot, instance) = (latest.id.clone(), provision.instance.clone());
            let requested =
                Known::RewindRequested { snapshot: snapshot.clone(), instance, generation };
            recorder.record(requested).await?;
            let backend = inner.backend(&latest.data.backend)?;
            let made = provision_and_greet(recorder, &backend, &provision).await;
            let (fresh, _) = settle(recorder, "restore", made).await?;
            let (instance, link) = fresh.parts().await;
            (instance, link, generation, Some(snapshot), "restored from its latest snapshot")
        }
        OnLost::Recreate => {
            let (instance, link, generation) = make_fresh(recorder, record).await?;
            (instance, link, generation, None, "made anew")
        }
    };
    recorder
        .record(Known::Recovered {
            what: what.into(),
            instance: Some(instance),
            snapshot,
            generation,
        })
        .await?;
    shared.relink(link).await;
    remove_old(inner, record).await;
    ends::lose(recorder).await
}

/// Removes it, its snapshots too as far as no other sandbox needs them. Its history stays.
pub(crate) async fn destroy(recorder: Recorder) -> Result<()> {
    let (inner, shared) = (Arc::clone(&recorder.inner), Arc::clone(&recorder.shared));
    let _lock = inner.journal.lock(&shared.id).await?;
    let record = shared.record(&inner).await?;
    if !record.state.is_live() {
        return Ok(());
    }
    refuse_borrowed(&record, "destroy")?;
    ends::collect(&recorder, &record).await;
    recorder.record(Known::Destroying).await?;
    finish_destroying(&inner, &shared, &record).await?;
    ends::lose(&recorder).await?;
    recorder.record(Known::Destroyed).await?;
    inner.journal.retire(&shared.id).await
}

/// What is left to do once `destroying` is recorded; it may be done again.
pub(super) async fn finish_destroying(
    inner: &Inner,
    shared: &Shared,
    record: &Record,
) -> Result<()> {
    shared.unlink().await;
    if let Some(instance) = &record.instance {
        inner.backend(&instance.backend)?.teardown(instance).await?;
    }
    for snapshot in record.snapshots.iter().rev() {
        inner.backend(&snapshot.data.backend)?.delete_snapshot(&snapshot.data).await?;
    }
    if let Some(name) = &record.name {
        inner.journal.release(name, &shared.id).await?;
    }
    Ok(())
}

fn stopped_instance(record: &Record) -> Result<Instance> {
    record.instance.clone().ok_or_else(|| {
        Error::new(ErrorKind::Lost, "use the sandbox", "its history names no instance")
    })
}

/// Records the failure of what was begun.
async fn settle<T>(recorder: &Recorder, operation: &str, result: Result<T>) -> Result<T> {
    match result {
        Err(error) => {
            recorder.failed(operation, &error).await?;
            Err(error)
        }
        done => done,
    }
}
