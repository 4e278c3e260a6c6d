//! A state directory with what lives in it, and what must hold there whatever has happened.

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, Instant},
};

use sandbox_conformance::{Check, holds, same};
use sandbox_core::{
    Command, CreateSandbox, FileJournal, Instance, Known, ReapPolicy, Result, Sandbox,
    SandboxBackend, SandboxEvent, SandboxManager, SandboxState, Suppressed,
};
use tempfile::TempDir;

use crate::{
    place::Place,
    steps::{SteppedBackend, SteppedJournal, Steps},
};

/// How long to wait for what must come. Nothing measures it; it tells a hang.
pub(crate) const SOON: Duration = Duration::from_secs(30);
/// The name of the sandbox that it is about.
pub(crate) const NAME: &str = "main";
const MARKER: &str = "/workspace/marker";

/// A state directory, and what its sandboxes are made of.
#[derive(Debug)]
pub(crate) struct Scene {
    dir: PathBuf,
    place: Place,
    owned: Option<TempDir>,
}

impl Drop for Scene {
    fn drop(&mut self) {
        // Of a case that failed: what it has left on an engine that others use too.
        if self.owned.is_some() {
            self.place.clear(&self.dir);
        }
    }
}

impl Scene {
    /// A new one, on this host.
    pub(crate) fn new() -> Check<Self> {
        Self::on(Place::here())
    }

    /// A new one, whose sandboxes are there.
    pub(crate) fn on(place: Place) -> Check<Self> {
        let owned = tempfile::Builder::new().prefix("sandbox-test-").tempdir()?;
        let scene = Self { dir: owned.path().to_owned(), place, owned: Some(owned) };
        fs::create_dir(scene.repository())?;
        fs::write(scene.repository().join("README"), "v1\n")?;
        Ok(scene)
    }

    /// One that another process has made.
    pub(crate) fn of(dir: &Path, place: Place) -> Self {
        Self { dir: dir.to_owned(), place, owned: None }
    }

    pub(crate) fn dir(&self) -> &Path {
        &self.dir
    }

    pub(crate) fn place(&self) -> &Place {
        &self.place
    }

    pub(crate) fn journal_dir(&self) -> PathBuf {
        self.dir.join("state/journal")
    }

    pub(crate) fn repository(&self) -> PathBuf {
        self.dir.join("repository")
    }

    pub(crate) fn backend(&self) -> Result<Arc<dyn SandboxBackend>> {
        self.place.backend(&self.dir)
    }

    /// A manager as any harness has one.
    pub(crate) async fn manager(&self) -> Result<SandboxManager> {
        let builder = SandboxManager::builder().state_dir(self.dir.join("state"));
        builder.shared_backend(self.backend()?).build().await
    }

    /// A manager whose steps are told of.
    pub(crate) async fn stepped_manager(&self, steps: &Arc<Steps>) -> Result<SandboxManager> {
        let journal = SteppedJournal {
            inner: FileJournal::open(self.journal_dir())?,
            steps: Arc::clone(steps),
        };
        let backend = SteppedBackend { inner: self.backend()?, steps: Arc::clone(steps) };
        SandboxManager::builder().journal(journal).backend(backend).build().await
    }

    pub(crate) fn request(&self) -> CreateSandbox {
        CreateSandbox::new().workspace(self.repository())
    }

    /// Every history, as it is on the disk.
    pub(crate) async fn histories(
        &self,
        manager: &SandboxManager,
    ) -> Check<Vec<Vec<SandboxEvent>>> {
        let mut found = Vec::new();
        for info in manager.list_all().await? {
            found.push(manager.history(&info.sandbox_id, 0).await?);
        }
        Ok(found)
    }

    /// Nothing is there but what live sandboxes have, and they know it.
    pub(crate) async fn is_consistent(&self, manager: &SandboxManager) -> Check {
        let mut expected = BTreeSet::new();
        for history in self.histories(manager).await? {
            let kinds: Vec<String> = history.iter().map(SandboxEvent::name).collect();
            let seqs: Vec<u64> = history.iter().map(|event| event.seq).collect();
            same!(seqs, (1..=history.len() as u64).collect::<Vec<_>>());
            holds!(is_settled(&history), "everything that was begun is settled: {kinds:?}");
            let id = &history[0].sandbox_id;
            let state = manager.open(id.as_str()).await?.info().await?.state;
            let settled = [
                SandboxState::Ready,
                SandboxState::Paused,
                SandboxState::Stopped,
                SandboxState::Failed,
                SandboxState::Destroyed,
            ];
            holds!(settled.contains(&state), "{state:?} is an end, after {kinds:?}");
            if state.is_live() {
                let instance = instance(&history).ok_or("it has no instance")?;
                expected.insert(instance.id.to_string());
            }
        }
        manager.reap(ReapPolicy::apply(), &Suppressed).await?;
        let inventory = self.backend()?.inventory().await?;
        let found: BTreeSet<String> =
            inventory.iter().map(|found| found.instance.id.to_string()).collect();
        same!(found, expected);
        Ok(())
    }

    /// Removes every sandbox; then nothing of them must be left but histories.
    pub(crate) async fn end(mut self, manager: SandboxManager) -> Check {
        self.end_here(manager).await?;
        if let Some(owned) = self.owned.take() {
            owned.close()?;
        }
        Ok(())
    }

    /// The same, and leaves the directory to whoever has made it.
    pub(crate) async fn end_here(&self, manager: SandboxManager) -> Check {
        for info in manager.list().await?.into_iter().rev() {
            manager.open(info.sandbox_id.as_str()).await?.destroy(&Suppressed).await?;
        }
        for history in self.histories(&manager).await? {
            let instances = instances(&history);
            until("its control groups are gone", || Ok(control_groups(&instances)?.is_empty()))
                .await?;
        }
        drop(manager);
        self.is_empty().await
    }

    /// Whether somebody is changing a sandbox's life just now.
    pub(crate) fn is_busy(&self) -> Check<bool> {
        let locks = self.journal_dir().join("locks");
        for name in entries(&locks)? {
            if fs::File::open(locks.join(name))?.try_lock().is_err() {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// The same, with a manager of its own.
    pub(crate) async fn end_all(self) -> Check {
        let manager = self.manager().await?;
        self.end(manager).await
    }

    async fn is_empty(&self) -> Check {
        for part in ["bwrap/instances", "bwrap/layers", "journal/names", "journal/live"] {
            let left = entries(&self.dir.join("state").join(part))?;
            holds!(left.is_empty(), "{part} is empty: {left:?}");
        }
        until("nothing of it is left", || Ok(self.place.left(&self.dir)?.is_empty())).await?;
        let mounts = fs::read_to_string("/proc/self/mounts")?;
        let here = self.dir.to_string_lossy().into_owned();
        // The disk that a test has put there is not a sandbox's.
        let own = format!("{here}/state ");
        let left: Vec<&str> =
            mounts.lines().filter(|line| line.contains(&here) && !line.contains(&own)).collect();
        holds!(left.is_empty(), "no mount is left: {left:?}");
        Ok(())
    }
}

/// Writes the marker file.
pub(crate) async fn mark(sandbox: &Sandbox, text: &str) -> Result<()> {
    sandbox.files().write(MARKER, text, &Suppressed).await
}

/// What the marker file says; `none` if there is none.
pub(crate) async fn marker(sandbox: &Sandbox) -> Check<String> {
    sh(sandbox, "cat marker 2>/dev/null || echo none").await
}

/// Runs shell text and expects success.
pub(crate) async fn sh(sandbox: &Sandbox, text: &str) -> Check<String> {
    let command = Command::shell(text).timeout(SOON);
    let run = tokio::time::timeout(SOON * 2, sandbox.exec(command, &Suppressed)).await??;
    if !run.outcome.is_success() {
        return Err(format!("{text:?} ended as {:?}: {}", run.outcome, run.stderr.text()).into());
    }
    Ok(run.stdout.text().trim_end().to_owned())
}

/// The sandbox of the name, usable, whatever has happened to the one before.
pub(crate) async fn usable(scene: &Scene, manager: &SandboxManager, name: &str) -> Check<Sandbox> {
    let sandbox = manager.acquire(name, scene.request(), &Suppressed).await?;
    let run = sandbox.exec(Command::new("/bin/true"), &Suppressed).await?;
    holds!(run.outcome.is_success(), "/bin/true ended as {:?}", run.outcome);
    Ok(sandbox)
}

/// Looks again and again until it is so.
pub(crate) async fn until(what: &str, mut so: impl FnMut() -> Check<bool>) -> Check {
    let deadline = Instant::now() + SOON;
    while !so()? {
        if Instant::now() > deadline {
            return Err(format!("not so, however long one waits: {what}").into());
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    Ok(())
}

/// Whether everything that was begun in a history has come to an end there.
pub(crate) fn is_settled(history: &[SandboxEvent]) -> bool {
    let mut open = false;
    for known in history.iter().filter_map(SandboxEvent::known) {
        match known {
            Known::Requested { .. }
            | Known::Provisioning { .. }
            | Known::Attaching { .. }
            | Known::StopRequested
            | Known::StartRequested
            | Known::SnapshotRequested { .. }
            | Known::RewindRequested { .. }
            | Known::Destroying => open = true,
            Known::Ready { .. }
            | Known::Attached { .. }
            | Known::Stopped
            | Known::Started { .. }
            | Known::Snapshotted { .. }
            | Known::Rewound { .. }
            | Known::Recovered { .. }
            | Known::Lost { .. }
            | Known::Expired { .. }
            | Known::Destroyed
            | Known::Detached
            | Known::Failed { .. } => open = false,
            _ => {}
        }
    }
    !open
}

/// Every instance that a history names, in order.
fn named(history: &[SandboxEvent]) -> impl DoubleEndedIterator<Item = &Instance> {
    history.iter().filter_map(SandboxEvent::known).filter_map(|known| match known {
        Known::Ready { instance, .. }
        | Known::Started { instance }
        | Known::Rewound { instance, .. } => Some(instance),
        Known::Snapshotted { instance, .. } | Known::Recovered { instance, .. } => {
            instance.as_ref()
        }
        _ => None,
    })
}

fn instance(history: &[SandboxEvent]) -> Option<&Instance> {
    named(history).next_back()
}

/// The ids of all instances that a history tells of, those that were only begun too.
fn instances(history: &[SandboxEvent]) -> BTreeSet<String> {
    let mut found: BTreeSet<String> = named(history).map(|one| one.id.to_string()).collect();
    found.extend(history.iter().filter_map(SandboxEvent::known).filter_map(|known| match known {
        Known::Provisioning { instance, .. }
        | Known::RewindRequested { instance, .. }
        | Known::SnapshotRequested { successor: instance, .. } => Some(instance.to_string()),
        _ => None,
    }));
    found
}

/// The control groups of these instances.
fn control_groups(instances: &BTreeSet<String>) -> Check<Vec<PathBuf>> {
    let mut found = Vec::new();
    let mut places = vec![(PathBuf::from("/sys/fs/cgroup"), 0)];
    while let Some((place, depth)) = places.pop() {
        let Ok(inside) = fs::read_dir(&place) else { continue };
        for entry in inside.flatten().filter(|entry| entry.path().is_dir()) {
            let name = entry.file_name().to_string_lossy().into_owned();
            if instances.iter().any(|id| name.contains(id.as_str())) {
                found.push(entry.path());
            } else if depth < 3 {
                places.push((entry.path(), depth + 1));
            }
        }
    }
    Ok(found)
}

/// The names of what is in a directory; none if it is missing.
pub(crate) fn entries(dir: &Path) -> Check<Vec<String>> {
    match fs::read_dir(dir) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(Vec::new()),
        inside => inside?
            .map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned()))
            .collect::<Check<Vec<_>>>(),
    }
}
