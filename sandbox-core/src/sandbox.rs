//! The handle to a sandbox.

use std::{sync::Arc, time::Duration};

use jiff::Timestamp;

use crate::{
    Change, Command, Consumer, Error, ErrorKind, Files, Process, ProcessId, ProcessInfo,
    ProcessRef, Reachability, Result, Retention, Run, SandboxId, SandboxInfo, SandboxManager,
    SandboxState, SandboxStatus, Shell, ShellOptions, Snapshot, SnapshotId, Stats, TurnEventSink,
    exec,
    info::info,
    manager::{Call, Inner, Recorder, Shared},
    processes, status,
};

/// A handle to a sandbox: an id and a manager. Cheap to clone, and never stale: after a rewind it
/// reaches the new instance.
///
/// Changes of its life (snapshot, rewind, stop …) take place one after the other, whoever asks;
/// commands and file operations run at the same time. A change that was begun is finished or undone
/// even if its future is dropped; a command whose future is dropped is killed.
#[derive(Debug, Clone)]
pub struct Sandbox {
    inner: Arc<Inner>,
    shared: Arc<Shared>,
}

impl Sandbox {
    pub(crate) fn new(inner: Arc<Inner>, shared: Arc<Shared>) -> Self {
        Self { inner, shared }
    }

    /// Its id.
    #[must_use]
    pub fn id(&self) -> &SandboxId {
        &self.shared.id
    }

    /// How it is, as its history says.
    ///
    /// # Errors
    ///
    /// `Journal` if the history cannot be read.
    pub async fn info(&self) -> Result<SandboxInfo> {
        let record = self.shared.record(&self.inner).await?;
        Ok(info(&record))
    }

    /// How it is, for whoever asks from outside: with the way in, while it runs, and told apart whether
    /// something runs in it.
    ///
    /// # Errors
    ///
    /// `Journal` if the history cannot be read. What its guest or its backend cannot tell now is left out.
    pub async fn status(&self) -> Result<SandboxStatus> {
        let info = self.info().await?;
        if info.state != SandboxState::Ready {
            let state = info.state;
            return Ok(SandboxStatus::of(info, state, None));
        }
        let runs = status::something_runs(&self.inner, &self.shared).await;
        // It may have been found to be lost just now.
        let info = self.info().await?;
        let (state, reachability) = match info.state {
            SandboxState::Ready => {
                let state = if runs { SandboxState::Active } else { SandboxState::Ready };
                (state, self.reachability().await.ok())
            }
            other => (other, None),
        };
        Ok(SandboxStatus::of(info, state, reachability))
    }

    /// The manager that it belongs to.
    #[must_use]
    pub fn manager(&self) -> SandboxManager {
        SandboxManager::of(Arc::clone(&self.inner))
    }

    /// The snapshot that its present filesystem came from: the one that was taken or rewound to last.
    ///
    /// # Errors
    ///
    /// `Journal` if the history cannot be read.
    pub async fn based_on(&self) -> Result<Option<SnapshotId>> {
        Ok(self.shared.record(&self.inner).await?.based_on.clone())
    }

    /// Runs a command to its end and returns how it ended and what it said.
    ///
    /// A non-zero exit is a result, not an error. Dropping the future kills the command and everything
    /// that it started; the history then says `Cancelled`.
    ///
    /// # Errors
    ///
    /// `NotFound` for a program, directory or user that does not exist, `PermissionDenied` for a program
    /// that cannot be executed; `Conflict` if the sandbox is stopped or paused, `Lost` if it is gone.
    pub async fn exec(&self, command: Command, sink: &dyn TurnEventSink) -> Result<Run> {
        exec::exec(self.call(sink).await?, command).await
    }

    /// Starts a command and returns a handle to it, for output as it comes. A command that is
    /// [`detached`](Command::detached) goes on when the handle is dropped, also if the future is; any other
    /// is killed.
    ///
    /// # Errors
    ///
    /// As [`exec`](Self::exec).
    pub async fn spawn(&self, command: Command, sink: &dyn TurnEventSink) -> Result<Process> {
        exec::spawn(self.call(sink).await?, command).await
    }

    /// Opens a shell session: one shell, in which command after command is run, its state kept in between.
    ///
    /// # Errors
    ///
    /// As [`exec`](Self::exec); `Unsupported` if the program is no shell.
    pub async fn shell(&self, options: ShellOptions, sink: &dyn TurnEventSink) -> Result<Shell> {
        Shell::open(self, options, sink).await
    }

    /// The processes that were started here, by this manager or another, oldest first: those that run, and
    /// detached ones that have ended and are still known, some thousand at most.
    ///
    /// # Errors
    ///
    /// `Conflict` if the sandbox is stopped or paused, `Lost` if it is gone.
    pub async fn processes(&self) -> Result<Vec<ProcessInfo>> {
        processes::list(&self.inner, &self.shared).await
    }

    /// A process that was started here, by this manager or another: to read its output, wait for it, signal
    /// or kill it.
    ///
    /// # Errors
    ///
    /// `NotFound` if there is none of this id; `Lost` if it went with an instance of the sandbox (a rewind,
    /// a stop …), or if it ended so long ago that only the history knows; as
    /// [`processes`](Self::processes).
    pub async fn process(&self, id: &ProcessId) -> Result<ProcessRef> {
        processes::open(&self.inner, &self.shared, id).await
    }

    /// Its files.
    #[must_use]
    pub fn files(&self) -> Files {
        Files::new(Arc::clone(&self.inner), Arc::clone(&self.shared))
    }

    /// Takes a snapshot of its filesystem. Where processes run, they are held up meanwhile and go on
    /// afterwards.
    ///
    /// # Errors
    ///
    /// What the backend says; the sandbox is as it was. `Lost` if it is not.
    pub async fn snapshot(
        &self,
        label: impl Into<String> + Send,
        sink: &dyn TurnEventSink,
    ) -> Result<Snapshot> {
        let label = label.into();
        self.change(sink, |recorder| crate::manager::snapshot(recorder, label)).await
    }

    /// Its snapshots, oldest first. Each names its parent: they form a tree.
    ///
    /// # Errors
    ///
    /// `Journal` if the history cannot be read.
    pub async fn snapshots(&self) -> Result<Vec<Snapshot>> {
        Ok(self.shared.record(&self.inner).await?.snapshots.clone())
    }

    /// What its filesystem has that one of its snapshots had not, sorted by path; without a snapshot, what
    /// a fresh sandbox had not (of a fork, then, all that came with it). The sandbox may be stopped; what
    /// runs in it goes on, and may change more meanwhile.
    ///
    /// # Errors
    ///
    /// `NotFound` if it has no such snapshot; `Lost` if it is gone; `Unsupported` or `Conflict`, with the
    /// reason, if its filesystem cannot be compared with that; `LimitExceeded` if there are too many
    /// changes to tell.
    pub async fn changes(&self, since: Option<&SnapshotId>) -> Result<Vec<Change>> {
        const OPERATION: &str = "changes";
        // A snapshot or a rewind would take the instance away meanwhile.
        let _lock = self.inner.journal.lock(&self.shared.id).await?;
        let record = self.shared.record(&self.inner).await?;
        let error = |kind, message: String| Error::new(kind, OPERATION, message);
        let snapshot = match since {
            Some(id) => {
                let kept = record.snapshots.iter().find(|kept| kept.id == *id);
                let missing = || error(ErrorKind::NotFound, format!("it has no snapshot {id}"));
                Some(&kept.ok_or_else(missing).map_err(|e| e.with_sandbox(self.id()))?.data)
            }
            None => None,
        };
        let Some(instance) = record.instance.as_ref().filter(|_| record.state.is_live()) else {
            let message = "it has no filesystem any more, or not yet".to_owned();
            return Err(error(ErrorKind::Lost, message).with_sandbox(self.id()));
        };
        let backend = self.inner.backend(&instance.backend)?;
        let mut changes = backend
            .changes(instance, snapshot)
            .await
            .map_err(|error| error.with_sandbox(self.id()).with_backend(&backend.id()))?;
        changes.sort();
        Ok(changes)
    }

    /// How much a snapshot adds to the one below it, in bytes on disk. Looks at each of its files where
    /// the backend does not know it anyway.
    ///
    /// # Errors
    ///
    /// What the backend says.
    pub async fn snapshot_size(&self, snapshot: &Snapshot) -> Result<u64> {
        crate::manager::size(&self.inner, snapshot).await
    }

    /// Gives it the filesystem of one of its snapshots: the same id and name, a new instance, a longer
    /// history. Its processes end. The new instance answers before the old one is removed.
    ///
    /// # Errors
    ///
    /// `NotFound` if it has no such snapshot. If the new instance cannot be made, the sandbox is as it
    /// was, and the history says so.
    pub async fn rewind(&self, snapshot: &SnapshotId, sink: &dyn TurnEventSink) -> Result<()> {
        let snapshot = snapshot.clone();
        self.change(sink, |recorder| crate::manager::rewind(recorder, snapshot)).await
    }

    /// Removes one of its snapshots. What other snapshots and sandboxes build on stays usable.
    ///
    /// # Errors
    ///
    /// `NotFound` if it has no such snapshot; `Conflict` if it runs from it.
    pub async fn delete_snapshot(
        &self,
        snapshot: &SnapshotId,
        sink: &dyn TurnEventSink,
    ) -> Result<()> {
        let snapshot = snapshot.clone();
        self.change(sink, |recorder| crate::manager::delete(recorder, snapshot)).await
    }

    /// Removes the snapshots that a policy does not keep, and returns their ids.
    ///
    /// # Errors
    ///
    /// What the backend says; what was removed until then is in the history.
    pub async fn prune_snapshots(
        &self,
        policy: Retention,
        sink: &dyn TurnEventSink,
    ) -> Result<Vec<SnapshotId>> {
        self.change(sink, |recorder| crate::manager::prune(recorder, policy)).await
    }

    /// Gives it a fresh filesystem, as at first: the same id and name, a new instance, its snapshots
    /// kept. The new instance answers before the old one is removed.
    ///
    /// # Errors
    ///
    /// What the backend says; the sandbox is then as it was.
    pub async fn recreate(&self, sink: &dyn TurnEventSink) -> Result<()> {
        self.change(sink, crate::manager::recreate).await
    }

    /// Lets it end so much later than it would have, and returns when that is.
    ///
    /// # Errors
    ///
    /// `Conflict` if it has no TTL; `LimitExceeded` past its maximum, and then nothing is changed.
    pub async fn extend_ttl(&self, by: Duration, sink: &dyn TurnEventSink) -> Result<Timestamp> {
        self.change(sink, |recorder| crate::manager::extend_ttl(recorder, by)).await
    }

    /// Renews its lease now. Managers do that by themselves for the sandboxes that they have used, as
    /// long as they live.
    ///
    /// # Errors
    ///
    /// `Conflict` if it has no lease; `Lost` if it was over.
    pub async fn renew_lease(&self) -> Result<()> {
        crate::manager::renew_lease(&self.inner, &self.shared).await
    }

    /// Ends its processes and keeps its files. Stopping a stopped one is no error.
    ///
    /// # Errors
    ///
    /// What the backend says.
    pub async fn stop(&self, sink: &dyn TurnEventSink) -> Result<()> {
        self.change(sink, crate::manager::stop).await
    }

    /// Starts it after a stop, with its files. Starting a running one is no error.
    ///
    /// # Errors
    ///
    /// What the backend says; it is then still stopped.
    pub async fn start(&self, sink: &dyn TurnEventSink) -> Result<()> {
        self.change(sink, crate::manager::start).await
    }

    /// Holds up its execution, in memory.
    ///
    /// # Errors
    ///
    /// `Unsupported` where the host has nothing for it.
    pub async fn pause(&self, sink: &dyn TurnEventSink) -> Result<()> {
        self.change(sink, crate::manager::pause).await
    }

    /// Lets it go on after a pause.
    ///
    /// # Errors
    ///
    /// What the backend says.
    pub async fn resume(&self, sink: &dyn TurnEventSink) -> Result<()> {
        self.change(sink, crate::manager::resume).await
    }

    /// Removes it. Its history stays; its snapshots stay as long as another sandbox needs them.
    /// Destroying it twice succeeds twice.
    ///
    /// # Errors
    ///
    /// What the backend says, if something could not be removed; destroying it again tries again.
    pub async fn destroy(&self, sink: &dyn TurnEventSink) -> Result<()> {
        self.change(sink, crate::manager::destroy).await
    }

    /// Takes the guest out of a borrowed place, with all that it started; the place itself goes on as it
    /// was before. Detaching twice succeeds twice.
    ///
    /// # Errors
    ///
    /// `Conflict` if it was not attached but made; what the backend says, if something could not be removed.
    pub async fn detach(&self, sink: &dyn TurnEventSink) -> Result<()> {
        self.change(sink, crate::manager::detach).await
    }

    /// How someone else gets in.
    ///
    /// # Errors
    ///
    /// `Conflict` if it is stopped, `Lost` if it is gone.
    pub async fn reachability(&self) -> Result<Reachability> {
        let record = self.shared.record(&self.inner).await?;
        let instance = crate::manager::running_instance(&record)?;
        let backend = self.inner.backend(&instance.backend)?;
        let reach = backend.reachability(instance).await;
        reach.map_err(|error| error.with_sandbox(self.id()).with_backend(&backend.id()))
    }

    /// What it uses and may use, and how long nothing has been going on in it. What cannot be told on
    /// this backend is `None`. Asking is no use of it: its idle time goes on.
    ///
    /// # Errors
    ///
    /// `Conflict` if it is stopped or paused, `Lost` if it is gone.
    pub async fn stats(&self) -> Result<Stats> {
        crate::stats::stats(&self.inner, &self.shared).await
    }

    async fn change<T, F>(
        &self,
        sink: &dyn TurnEventSink,
        work: impl FnOnce(Recorder) -> F,
    ) -> Result<T>
    where
        T: Send + 'static,
        F: Future<Output = Result<T>> + Send + 'static,
    {
        self.call(sink).await?.drive(work).await
    }

    pub(crate) fn parts(&self) -> (Arc<Inner>, Arc<Shared>) {
        (Arc::clone(&self.inner), Arc::clone(&self.shared))
    }

    /// A connection to its guest.
    pub(crate) async fn link(&self) -> Result<Arc<crate::guest::Link>> {
        self.shared.link(&self.inner).await
    }

    pub(crate) async fn call<'a>(&self, sink: &'a dyn TurnEventSink) -> Result<Call<'a>> {
        let consumer: Consumer = self.shared.record(&self.inner).await?.consumer.clone();
        Ok(Call::new(&self.inner, &self.shared, consumer, sink))
    }
}
