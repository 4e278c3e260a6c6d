//! The steps of a change: each record, each name, each call of the backend. A journal and a backend around
//! others tell of them, and end their own process there, or hold up there.

use std::{
    collections::HashMap,
    fs::OpenOptions,
    io::Write,
    path::PathBuf,
    pin::pin,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    task::Poll,
};

use async_trait::async_trait;
use rustix::process::{Signal, getpid, kill_process};
use sandbox_core::{
    BackendId, Capabilities, Draft, FileJournal, Found, GuestStream, Instance, InstanceState,
    Journal, JournalLock, Name, OwnerId, Provision, Reachability, Result, SandboxBackend,
    SandboxEvent, SandboxId, SnapshotData, SnapshotRequest, SnapshotTaken, Usage,
};
use tokio::sync::Notify;

/// What to do at a step.
#[derive(Debug)]
pub(crate) enum Plan {
    /// Write its name into this file.
    Record(PathBuf),
    /// At the one of this name, end this process.
    Kill(String),
    /// At the one of this name, wait.
    Hold(String),
}

/// The steps of one process, counted from when they are armed.
#[derive(Debug)]
pub(crate) struct Steps {
    plan: Plan,
    armed: AtomicBool,
    counts: Mutex<HashMap<String, usize>>,
    reached: Notify,
    go_on: Notify,
}

impl Steps {
    pub(crate) fn new(plan: Plan) -> Arc<Self> {
        Arc::new(Self {
            plan,
            armed: AtomicBool::new(false),
            counts: Mutex::default(),
            reached: Notify::new(),
            go_on: Notify::new(),
        })
    }

    /// The plan holds from now on.
    pub(crate) fn arm(&self) {
        self.armed.store(true, Ordering::Release);
    }

    /// The plan holds no more.
    pub(crate) fn disarm(&self) {
        self.armed.store(false, Ordering::Release);
    }

    /// Waits until the step is reached at which to hold up.
    pub(crate) async fn reached(&self) {
        self.reached.notified().await;
    }

    /// Holds up no more.
    pub(crate) fn go_on(&self) {
        self.go_on.notify_one();
    }

    /// Its full name, if it is to be looked at: of several like it, `before connect`, `before connect (2)`.
    fn name(&self, step: &str) -> Option<String> {
        if !self.armed.load(Ordering::Acquire) {
            return None;
        }
        let mut counts = self.counts.lock().unwrap_or_else(PoisonError::into_inner);
        let count = counts.entry(step.to_owned()).or_default();
        *count += 1;
        Some(if *count == 1 { step.to_owned() } else { format!("{step} ({count})") })
    }

    async fn step(&self, step: &str) {
        if self.look(step) {
            self.reached.notify_one();
            self.go_on.notified().await;
        }
    }

    /// Does what the plan says; true where that is to hold up.
    fn look(&self, step: &str) -> bool {
        let Some(name) = self.name(step) else { return false };
        match &self.plan {
            Plan::Record(path) => {
                let file = OpenOptions::new().create(true).append(true).open(path);
                let written = file.and_then(|mut file| writeln!(file, "{name}"));
                assert!(written.is_ok(), "{written:?}");
            }
            Plan::Kill(at) if *at == name => {
                let _ = kill_process(getpid(), Signal::KILL);
                loop {
                    std::thread::park();
                }
            }
            Plan::Hold(at) => return *at == name,
            Plan::Kill(_) => {}
        }
        false
    }

    /// Something with a step before it and one after it.
    async fn around<T>(&self, what: &str, work: impl Future<Output = T>) -> T {
        self.step(&format!("before {what}")).await;
        let done = work.await;
        self.step(&format!("after {what}")).await;
        done
    }

    /// The same, with a step in each of the pauses that it makes. How many those are may differ from one
    /// time to the next.
    async fn throughout<T>(&self, what: &str, work: impl Future<Output = T>) -> T {
        self.step(&format!("before {what}")).await;
        let within = format!("within {what}");
        let mut work = pin!(work);
        let done = std::future::poll_fn(|context| match work.as_mut().poll(context) {
            Poll::Pending => {
                if !matches!(self.plan, Plan::Hold(_)) {
                    self.look(&within);
                }
                Poll::Pending
            }
            ready => ready,
        })
        .await;
        self.step(&format!("after {what}")).await;
        done
    }
}

/// A journal in files that tells of its steps.
#[derive(Debug)]
pub(crate) struct SteppedJournal {
    pub(crate) inner: FileJournal,
    pub(crate) steps: Arc<Steps>,
}

#[async_trait]
impl Journal for SteppedJournal {
    fn owner(&self) -> OwnerId {
        self.inner.owner()
    }

    async fn append(&self, record: Draft) -> Result<SandboxEvent> {
        let kind = serde_json::to_value(&record.kind).unwrap_or_default();
        let what = format!("record {}", kind["kind"].as_str().unwrap_or("unknown"));
        self.steps.around(&what, self.inner.append(record)).await
    }

    async fn read(&self, sandbox: &SandboxId, after: u64) -> Result<Vec<SandboxEvent>> {
        self.inner.read(sandbox, after).await
    }

    async fn sandboxes(&self) -> Result<Vec<SandboxId>> {
        self.inner.sandboxes().await
    }

    async fn live(&self) -> Result<Vec<SandboxId>> {
        self.inner.live().await
    }

    async fn retire(&self, sandbox: &SandboxId) -> Result<()> {
        self.steps.around("retire", self.inner.retire(sandbox)).await
    }

    async fn lock(&self, sandbox: &SandboxId) -> Result<JournalLock> {
        self.inner.lock(sandbox).await
    }

    async fn claim(&self, name: &Name, sandbox: &SandboxId) -> Result<Option<SandboxId>> {
        self.steps.around("claim", self.inner.claim(name, sandbox)).await
    }

    async fn resolve(&self, name: &Name) -> Result<Option<SandboxId>> {
        self.inner.resolve(name).await
    }

    async fn release(&self, name: &Name, sandbox: &SandboxId) -> Result<()> {
        self.steps.around("release", self.inner.release(name, sandbox)).await
    }
}

/// A backend that tells of its steps.
#[derive(Debug)]
pub(crate) struct SteppedBackend {
    pub(crate) inner: Arc<dyn SandboxBackend>,
    pub(crate) steps: Arc<Steps>,
}

#[async_trait]
impl SandboxBackend for SteppedBackend {
    fn id(&self) -> BackendId {
        self.inner.id()
    }

    async fn probe(&self) -> Result<Capabilities> {
        self.inner.probe().await
    }

    async fn provision(&self, request: &Provision) -> Result<Instance> {
        self.steps.throughout("provision", self.inner.provision(request)).await
    }

    async fn attach(&self, external: &str, request: &Provision) -> Result<Instance> {
        self.steps.throughout("attach", self.inner.attach(external, request)).await
    }

    async fn connect(&self, instance: &Instance) -> Result<GuestStream> {
        self.steps.around("connect", self.inner.connect(instance)).await
    }

    async fn inspect(&self, instance: &Instance) -> Result<InstanceState> {
        self.inner.inspect(instance).await
    }

    async fn reachability(&self, instance: &Instance) -> Result<Reachability> {
        self.inner.reachability(instance).await
    }

    async fn snapshot(&self, request: &SnapshotRequest) -> Result<SnapshotTaken> {
        self.steps.throughout("snapshot", self.inner.snapshot(request)).await
    }

    async fn delete_snapshot(&self, snapshot: &SnapshotData) -> Result<()> {
        self.steps.throughout("delete_snapshot", self.inner.delete_snapshot(snapshot)).await
    }

    async fn changes(
        &self,
        instance: &Instance,
        since: Option<&SnapshotData>,
    ) -> Result<Vec<sandbox_core::Change>> {
        self.inner.changes(instance, since).await
    }

    async fn snapshot_size(&self, snapshot: &SnapshotData) -> Result<u64> {
        self.inner.snapshot_size(snapshot).await
    }

    async fn usage(&self, instance: &Instance) -> Result<Usage> {
        self.inner.usage(instance).await
    }

    async fn pause(&self, instance: &Instance) -> Result<()> {
        self.steps.throughout("pause", self.inner.pause(instance)).await
    }

    async fn resume(&self, instance: &Instance) -> Result<()> {
        self.steps.throughout("resume", self.inner.resume(instance)).await
    }

    async fn stop(&self, instance: &Instance) -> Result<()> {
        self.steps.throughout("stop", self.inner.stop(instance)).await
    }

    async fn start(&self, instance: &Instance, request: &Provision) -> Result<Instance> {
        self.steps.throughout("start", self.inner.start(instance, request)).await
    }

    async fn teardown(&self, instance: &Instance) -> Result<()> {
        self.steps.throughout("teardown", self.inner.teardown(instance)).await
    }

    async fn retire(&self, instance: &Instance) -> Result<()> {
        self.steps.throughout("retire instance", self.inner.retire(instance)).await
    }

    async fn inventory(&self) -> Result<Vec<Found>> {
        self.inner.inventory().await
    }
}
