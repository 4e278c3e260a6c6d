//! Making sandboxes, with or without a name.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use sandbox_guest::Request;

use super::{
    Call, Fresh, Inner, Recorder, SandboxManager, life,
    lifetime::{self, later},
    setup,
    shared::running_instance,
};
use crate::{
    CreateSandbox, Error, ErrorKind, ForkedFrom, Instance, Known, Name, Provision, Reachability,
    Result, Sandbox, SandboxBackend, SandboxId, SandboxSpec, SandboxState, SnapshotData,
    SnapshotId, TurnEventSink,
    profile::{Prepared, prepare},
    route::{self, Out, Plan},
};

/// How long a guest may take to answer so that its answer counts as a measurement.
const MEASURING: Duration = Duration::from_secs(1);

/// What a new sandbox is made from.
pub(super) struct Blueprint {
    name: Option<Name>,
    spec: SandboxSpec,
    from: Option<(ForkedFrom, SnapshotData)>,
    /// The backends that may make it, if it is not just one.
    plan: Option<Plan>,
    secrets: setup::Resolved,
}

impl SandboxManager {
    pub(super) async fn create_new(
        &self,
        name: Option<Name>,
        request: CreateSandbox,
        sink: &dyn TurnEventSink,
    ) -> Result<Sandbox> {
        let Prepared { spec, consumer, plan } = prepare(request, &self.inner.profiles)?;
        let secrets = setup::resolve(&spec.setup, &*self.inner.secrets).await?;
        let shared = self.inner.shared(&SandboxId::new());
        let call = Call::new(&self.inner, &shared, consumer, sink);
        let blueprint = Blueprint { name, spec, from: None, plan, secrets };
        let handle = self.handle(&shared);
        let undo = Undo::of(&blueprint, &call);
        let made = call.drive(|recorder| make(recorder, blueprint, handle)).await;
        undo.disarm();
        made
    }

    pub(super) async fn acquire_named(
        &self,
        name: Name,
        request: CreateSandbox,
        sink: &dyn TurnEventSink,
    ) -> Result<Sandbox> {
        let wanted = prepare(request.clone(), &self.inner.profiles)?.spec;
        loop {
            let Some(holder) = self.inner.journal.resolve(&name).await? else {
                match self.create_new(Some(name.clone()), request.clone(), sink).await {
                    // Somebody else was faster: theirs it is.
                    Err(error) if error.kind() == ErrorKind::NameTaken => continue,
                    made => return made,
                }
            };
            // Whoever is making it holds this lock until it is made.
            let shared = self.inner.shared(&holder);
            let lock = self.inner.journal.lock(&holder).await?;
            let record = match shared.try_record(&self.inner).await? {
                Some(record) if record.state.is_live() => record,
                // Its maker died before or after it was one: the name is free.
                _ => {
                    self.inner.journal.release(&name, &holder).await?;
                    continue;
                }
            };
            let differing = record.spec.differences(&wanted);
            if !differing.is_empty() {
                let message = format!(
                    "the sandbox named {name} was made with another spec; these fields differ: {}. \
                     Ask for the same, or destroy it first",
                    differing.join(", ")
                );
                let error = Error::new(ErrorKind::SpecMismatch, "acquire", message);
                return Err(error.with_sandbox(&holder));
            }
            drop(lock);
            let sandbox = self.handle(&shared);
            if record.state == SandboxState::Stopped {
                sandbox.start(sink).await?;
            } else {
                running_instance(&record)?;
                let mut call = Call::new(&self.inner, &shared, record.consumer.clone(), sink);
                call.deliver().await;
                return call.finish(Ok(sandbox));
            }
            return Ok(sandbox);
        }
    }

    pub(super) async fn fork_snapshot(
        &self,
        snapshot: &SnapshotId,
        name: Option<Name>,
        sink: &dyn TurnEventSink,
    ) -> Result<Sandbox> {
        let (source, found) = self.find_snapshot(snapshot).await?;
        let origin = ForkedFrom { sandbox: source.id.clone(), snapshot: snapshot.clone() };
        let record = source.record(&self.inner).await?;
        let blueprint = Blueprint {
            name,
            spec: record.spec.clone(),
            from: Some((origin, found.data)),
            plan: None,
            secrets: Vec::new(),
        };
        let shared = self.inner.shared(&SandboxId::new());
        let call = Call::new(&self.inner, &shared, record.consumer.clone(), sink);
        let forked = Known::Forked { snapshot: snapshot.clone(), into: shared.id.clone() };
        let handle = self.handle(&shared);
        let undo = Undo::of(&blueprint, &call);
        let made = async {
            let made = call.drive(|recorder| make(recorder, blueprint, handle)).await;
            let there = match &made {
                Ok(_) => true,
                // Made all the same.
                Err(error) => error.kind() == ErrorKind::EventDelivery,
            };
            if !there {
                return made;
            }
            let mut call = Call::new(&self.inner, &source, record.consumer.clone(), sink);
            call.record(forked).await?;
            call.finish(Ok(()))?;
            made
        };
        let made = made.await;
        undo.disarm();
        made
    }
}

/// Removes a sandbox without a name if its caller goes away before having it: nobody could find it. One
/// with a name stays, as somebody else may have acquired it by now.
struct Undo(Option<Recorder>);

impl Undo {
    fn of(blueprint: &Blueprint, call: &Call<'_>) -> Self {
        Self(blueprint.name.is_none().then(|| call.recorder()))
    }

    fn disarm(mut self) {
        self.0 = None;
    }
}

impl Drop for Undo {
    fn drop(&mut self) {
        let Some(recorder) = self.0.take() else { return };
        // Outside a runtime the work has ended too; reconcile settles it.
        let Ok(runtime) = tokio::runtime::Handle::try_current() else { return };
        runtime.spawn(async move {
            // Waits for the work on it, which undoes itself if it can; then there is nothing left to do.
            match life::destroy(recorder).await {
                Err(error) if error.kind() != ErrorKind::NotFound => {
                    tracing::warn!(%error, "a sandbox that nobody waits for could not be removed");
                }
                _ => {}
            }
        });
    }
}

/// Makes a sandbox: the record of what was asked for, an instance, and a guest that answers.
async fn make(recorder: Recorder, blueprint: Blueprint, handle: Sandbox) -> Result<Sandbox> {
    let (inner, shared) = (Arc::clone(&recorder.inner), Arc::clone(&recorder.shared));
    let Blueprint { name, spec, from, plan, secrets } = blueprint;
    let _lock = inner.journal.lock(&shared.id).await?;
    if let Some(name) = &name
        && let Some(holder) = claim(&inner, name, &shared.id).await?
    {
        let message = format!("the name {name} is {holder}'s");
        return Err(Error::new(ErrorKind::NameTaken, "create", message));
    }
    let made = async {
        let (origin, data) = from.unzip();
        let requested = Known::Requested { name: name.clone(), spec: spec.clone(), from: origin };
        recorder.record(requested).await?;
        match plan {
            Some(plan) => bring_up_somewhere(&recorder, spec, &plan, &secrets).await,
            None => {
                // A snapshot can only be used by the backend that has it.
                let wanted = data.as_ref().map(|data| &data.backend).or(spec.backend.as_ref());
                let backend = match wanted {
                    Some(id) => inner.backend(id)?,
                    None => Arc::clone(&inner.backends[0]),
                };
                bring_up(&recorder, &backend, spec, data, &secrets).await
            }
        }
    };
    let result = made.await;
    if let Err(error) = &result {
        let recorded = recorder.failed("create", error).await;
        if let Some(name) = &name {
            inner.journal.release(name, &shared.id).await?;
        }
        recorded?;
        inner.journal.retire(&shared.id).await?;
    }
    result.map(|()| handle)
}

/// Takes a name; the sandbox that has it, if one has it rightfully.
async fn claim(inner: &Arc<Inner>, name: &Name, sandbox: &SandboxId) -> Result<Option<SandboxId>> {
    let Some(holder) = inner.journal.claim(name, sandbox).await? else { return Ok(None) };
    // Whoever is just making it holds this lock.
    let _lock = inner.journal.lock(&holder).await?;
    match inner.shared(&holder).try_record(inner).await? {
        Some(record) if record.state.is_live() => Ok(Some(holder)),
        // Its maker died between claiming the name and recording why.
        _ => {
            inner.journal.release(name, &holder).await?;
            inner.journal.claim(name, sandbox).await
        }
    }
}

/// The first instance of a sandbox, by the first backend of its route that can make one.
async fn bring_up_somewhere(
    recorder: &Recorder,
    spec: SandboxSpec,
    plan: &Plan,
    secrets: &setup::Resolved,
) -> Result<()> {
    let inner = &recorder.inner;
    let chosen =
        route::choose(plan, &spec, &inner.backends, &inner.probes, &inner.measurements).await;
    let mut out = chosen.out;
    let mut last = None;
    for backend in chosen.order {
        match bring_up(recorder, &backend, spec.clone(), None, secrets).await {
            // Another backend would not change these.
            Err(error)
                if !matches!(
                    error.kind(),
                    ErrorKind::Setup | ErrorKind::Cancelled | ErrorKind::Journal
                ) && !recorder.is_abandoned() =>
            {
                let (backend, why) = (backend.id(), error.to_string());
                inner.measurements.failed(&backend);
                recorder
                    .record(Known::BackendFailed { backend: backend.clone(), error: why.clone() })
                    .await?;
                out.push(Out { backend, why });
                last = Some(error);
            }
            done => return done,
        }
    }
    Err(route::nothing_left(&out, last.as_ref()))
}

/// The first instance of a sandbox.
async fn bring_up(
    recorder: &Recorder,
    backend: &Arc<dyn SandboxBackend>,
    spec: SandboxSpec,
    from: Option<SnapshotData>,
    secrets: &setup::Resolved,
) -> Result<()> {
    let (inner, shared) = (&recorder.inner, &recorder.shared);
    let ttl = spec.lifetime.ttl_seconds;
    let before = if spec.setup.commands.is_empty() { 0 } else { setup::LIMIT.as_secs() };
    let mut provision = inner.provision(shared, spec, 1, from);
    // Counted from when it is ready; until then, the guest ends by itself should we vanish.
    provision.expires_at =
        ttl.map(|ttl| later(ttl.saturating_add(lifetime::PROVISIONING + before)));
    recorder
        .record(Known::Provisioning {
            backend: backend.id(),
            instance: provision.instance.clone(),
            generation: provision.generation,
        })
        .await?;
    let (fresh, reachability) = make_instance(recorder, backend, &provision, secrets).await?;
    if recorder.is_abandoned() {
        backend.teardown(fresh.instance()).await?;
        let message = "the caller went away before it was made";
        return Err(Error::new(ErrorKind::Cancelled, "create", message));
    }
    let expires_at = ttl.map(later);
    if expires_at.is_some() {
        fresh.ask(lifetime::deadline(expires_at, None)).await?;
    }
    let (instance, link) = fresh.parts().await;
    shared.relink(link).await;
    let generation = provision.generation;
    recorder.record(Known::Ready { instance, generation, reachability, expires_at }).await?;
    Ok(())
}

/// A fresh or restored instance, a fresh one set up. After an error nothing of it is left.
pub(super) async fn make_instance(
    recorder: &Recorder,
    backend: &Arc<dyn SandboxBackend>,
    provision: &Provision,
    secrets: &setup::Resolved,
) -> Result<(Arc<Fresh>, Option<Reachability>)> {
    let begun = Instant::now();
    let made = provision_and_greet(recorder, backend, provision).await?;
    let fresh = &made.0;
    let creation = begun.elapsed();
    let round_trip = measure(fresh).await;
    recorder.inner.measurements.made(&backend.id(), creation, round_trip);
    if provision.from.is_none()
        && let Err(error) = setup::run(recorder, fresh, &provision.spec, secrets).await
    {
        if let Err(leftover) = backend.teardown(fresh.instance()).await {
            tracing::warn!(%leftover, "what could not be set up could not be removed");
        }
        return Err(error.with_backend(&backend.id()));
    }
    Ok(made)
}

/// How long a guest takes to answer, if it does.
async fn measure(fresh: &Fresh) -> Option<Duration> {
    let link = fresh.link().await.ok()?;
    let begun = Instant::now();
    let answered = tokio::time::timeout(MEASURING, link.call(Request::Status)).await;
    matches!(answered, Ok(Ok(_))).then(|| begun.elapsed())
}

/// An instance whose guest has answered. After an error nothing of it is left.
pub(super) async fn provision_and_greet(
    recorder: &Recorder,
    backend: &Arc<dyn SandboxBackend>,
    provision: &Provision,
) -> Result<(Arc<Fresh>, Option<Reachability>)> {
    let named = |error: Error| error.with_backend(&backend.id());
    let instance = backend.provision(provision).await.map_err(named)?;
    match Fresh::greet(recorder, backend, instance.clone(), provision.spec.clone()).await {
        Ok(fresh) => {
            let reachability = reachability(&**backend, fresh.instance()).await;
            Ok((Arc::new(fresh), reachability))
        }
        Err(error) => {
            if let Err(leftover) = backend.teardown(&instance).await {
                tracing::warn!(%leftover, "what was half made could not be removed");
            }
            Err(error)
        }
    }
}

/// How someone else gets in, where that is known. Not knowing it is no reason to fail.
pub(super) async fn reachability(
    backend: &dyn SandboxBackend,
    instance: &Instance,
) -> Option<Reachability> {
    match backend.reachability(instance).await {
        Ok(reachability) => Some(reachability),
        Err(error) => {
            tracing::debug!(%error, "reachability is not known");
            None
        }
    }
}
