//! Stop, start, pause, resume, destroy.

use std::sync::Arc;

use super::{
    Inner, Recorder, Shared,
    shared::{connect, running_instance},
};
use crate::{Error, ErrorKind, Instance, Known, Result, SandboxState, record::Record};

/// Ends its processes and keeps its files.
pub(crate) async fn stop(recorder: Recorder) -> Result<()> {
    let (inner, shared) = (Arc::clone(&recorder.inner), Arc::clone(&recorder.shared));
    let _lock = inner.journal.lock(&shared.id).await?;
    let record = shared.record(&inner).await?;
    if record.state == SandboxState::Stopped {
        return Ok(());
    }
    let instance = running_instance(&record)?;
    let backend = inner.backend(&instance.backend)?;
    recorder.record(Known::StopRequested).await?;
    shared.unlink().await;
    settle(&recorder, "stop", backend.stop(&instance).await).await?;
    recorder.record(Known::Stopped).await?;
    Ok(())
}

/// Starts a stopped sandbox on the files that it had.
pub(crate) async fn start(recorder: Recorder) -> Result<()> {
    let (inner, shared) = (Arc::clone(&recorder.inner), Arc::clone(&recorder.shared));
    let _lock = inner.journal.lock(&shared.id).await?;
    let record = shared.record(&inner).await?;
    if record.state != SandboxState::Stopped {
        running_instance(&record)?;
        return Ok(());
    }
    let instance = stopped_instance(&record)?;
    let backend = inner.backend(&instance.backend)?;
    recorder.record(Known::StartRequested).await?;
    let mut request = inner.provision(&shared, record.spec.clone(), record.generation, None);
    request.instance = instance.id.clone();
    let started = async {
        let instance = backend.start(&instance, &request).await?;
        match connect(&*backend, &instance).await {
            Ok(link) => Ok((instance, link)),
            Err(error) => {
                backend.stop(&instance).await?;
                Err(error)
            }
        }
    };
    let (instance, link) = settle(&recorder, "start", started.await).await?;
    shared.relink(link).await;
    recorder.record(Known::Started { instance }).await?;
    Ok(())
}

/// Holds up its execution.
pub(crate) async fn pause(recorder: Recorder) -> Result<()> {
    let (inner, shared) = (Arc::clone(&recorder.inner), Arc::clone(&recorder.shared));
    let _lock = inner.journal.lock(&shared.id).await?;
    let record = shared.record(&inner).await?;
    if record.state == SandboxState::Paused {
        return Ok(());
    }
    let instance = running_instance(&record)?;
    inner.backend(&instance.backend)?.pause(&instance).await?;
    recorder.record(Known::Paused).await?;
    Ok(())
}

/// Lets it go on.
pub(crate) async fn resume(recorder: Recorder) -> Result<()> {
    let (inner, shared) = (Arc::clone(&recorder.inner), Arc::clone(&recorder.shared));
    let _lock = inner.journal.lock(&shared.id).await?;
    let record = shared.record(&inner).await?;
    if record.state != SandboxState::Paused {
        running_instance(&record)?;
        return Ok(());
    }
    let instance = stopped_instance(&record)?;
    inner.backend(&instance.backend)?.resume(&instance).await?;
    recorder.record(Known::Resumed).await?;
    Ok(())
}

/// Removes it, its snapshots too as far as no other sandbox needs them. Its history stays.
pub(crate) async fn destroy(recorder: Recorder) -> Result<()> {
    let (inner, shared) = (Arc::clone(&recorder.inner), Arc::clone(&recorder.shared));
    let _lock = inner.journal.lock(&shared.id).await?;
    let record = shared.record(&inner).await?;
    if !record.state.is_live() {
        return Ok(());
    }
    recorder.record(Known::Destroying).await?;
    finish_destroying(&inner, &shared, &record).await?;
    recorder.record(Known::Destroyed).await?;
    Ok(())
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
        inner
            .backend(&snapshot.data.backend)?
            .delete_snapshot(&snapshot.data)
            .await?;
    }
    if let Some(name) = &record.name {
        inner.journal.release(name, &shared.id).await?;
    }
    Ok(())
}

fn stopped_instance(record: &Record) -> Result<Instance> {
    record.instance.clone().ok_or_else(|| {
        Error::new(
            ErrorKind::Lost,
            "use the sandbox",
            "its history names no instance",
        )
    })
}

/// Records the failure of what was begun.
async fn settle<T>(recorder: &Recorder, operation: &str, result: Result<T>) -> Result<T> {
    match result {
        Err(error) => {
            let operation = operation.to_owned();
            recorder
                .record(Known::Failed {
                    operation,
                    error: error.to_string(),
                })
                .await?;
            Err(error)
        }
        done => done,
    }
}
