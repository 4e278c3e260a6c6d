//! A suite that cannot fail proves nothing: backends that are broken on purpose must fail the cases that
//! they break, and no others.

use std::{
    collections::{BTreeSet, HashMap},
    fs, io,
    path::Path,
    pin::Pin,
    process::Command,
    sync::{Arc, Mutex, PoisonError},
    task::{Context, Poll},
};

use async_trait::async_trait;
use sandbox_conformance::{
    Subject, Verdict,
    decorate::{Decorated, Decoration},
    fake::DirectoryBackend,
    run_case,
};
use sandbox_core::{
    Error, ErrorKind, Found, GuestStream, Instance, InstanceState, OwnerId, Provision, Result,
    SandboxBackend, SandboxId, SnapshotData, SnapshotId, SnapshotRequest, SnapshotTaken, Usage,
};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

/// Those that are run on each broken backend.
const CASES: &[&str] = &[
    "life::destroy_twice_succeeds_twice",
    "life::destroy_leaves_no_process",
    "life::twenty_tasks_acquire_one_sandbox",
    "life::acquire_starts_a_stopped_sandbox_with_its_files",
    "life::acquire_after_a_rewind_gives_the_restored_files",
    "life::recreate_gives_fresh_files_and_keeps_the_id",
    "lifetime::reaping_never_touches_what_lives_or_is_anothers",
    "lifetime::an_instance_that_belongs_to_no_sandbox_is_reaped",
    "loss::another_manager_notices_the_loss_when_it_is_built",
    "loss::a_killed_guest_is_lost_and_recorded_once",
    "snapshots::a_rewind_brings_back_contents_and_deletions",
    "snapshots::a_rewind_brings_back_everything_about_files",
    "snapshots::processes_go_on_after_a_snapshot",
    "lineage::forks_see_nothing_of_each_other",
    "lineage::deleting_a_snapshot_keeps_those_that_build_on_it",
    "stats::what_is_written_is_counted_where_that_is_known",
    "output::output_is_bytes",
    "detached::an_end_that_nobody_saw_is_recorded_by_the_next_manager",
];

/// What is wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Flaw {
    None,
    SnapshotsAreEmpty,
    SnapshotsForgetModes,
    SnapshotsEndProcesses,
    RewindsKeepNewFiles,
    DeletingTakesLaterSnapshots,
    ForksShareFiles,
    StopsLoseFiles,
    EachInstanceIsMadeTwice,
    TeardownsLeaveInstances,
    TeardownsLeaveProcesses,
    InventoriesAreEmpty,
    InventoriesHaveOthers,
    AllIsSaidToRun,
    UsageIsMadeUp,
    ConnectionsChangeBytes,
    InstancesEndWithAConnection,
}

#[derive(Debug)]
struct Broken {
    flaw: Flaw,
    files: DirectoryBackend,
    seen: Mutex<Seen>,
}

#[derive(Debug, Default)]
struct Seen {
    owners: Vec<OwnerId>,
    latest: HashMap<SandboxId, Instance>,
    from: HashMap<SnapshotId, Instance>,
    snapshots: Vec<SnapshotData>,
    asked: u64,
}

impl Broken {
    fn seen(&self) -> std::sync::MutexGuard<'_, Seen> {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn failed(error: io::Error) -> Error {
    Error::new(ErrorKind::Backend, "be broken", "it was not broken as it was meant")
        .with_source(error)
}

fn run(program: &str, args: &[&Path]) -> Result<()> {
    let status = Command::new(program).args(args).status().map_err(failed)?;
    assert!(status.success(), "{program} {args:?}");
    Ok(())
}

#[async_trait]
impl Decoration for Broken {
    async fn provision(&self, inner: &dyn SandboxBackend, request: &Provision) -> Result<Instance> {
        let instance = inner.provision(request).await?;
        let (before, shared) = {
            let mut seen = self.seen();
            seen.owners.push(request.owner.clone());
            let before = seen.latest.insert(request.sandbox.clone(), instance.clone());
            let shared = request.from.as_ref().and_then(|from| {
                let first = seen.from.entry(from.id.clone()).or_insert_with(|| instance.clone());
                (first.sandbox != instance.sandbox).then(|| first.clone())
            });
            (before, shared)
        };
        let workspace = self.files.workspace(&instance);
        match self.flaw {
            Flaw::RewindsKeepNewFiles if request.from.is_some() => {
                if let Some(before) = before {
                    let new =
                        [Path::new("-an"), &self.files.workspace(&before).join("."), &workspace];
                    run("cp", &new)?;
                }
            }
            Flaw::ForksShareFiles => {
                if let Some(shared) = shared {
                    fs::remove_dir_all(&workspace).map_err(failed)?;
                    let target = self.files.workspace(&shared);
                    std::os::unix::fs::symlink(target, &workspace).map_err(failed)?;
                }
            }
            Flaw::EachInstanceIsMadeTwice => {
                let mut again = request.clone();
                again.instance = sandbox_core::InstanceId::new();
                inner.provision(&again).await?;
            }
            _ => {}
        }
        Ok(instance)
    }

    async fn connect(
        &self,
        inner: &dyn SandboxBackend,
        instance: &Instance,
    ) -> Result<GuestStream> {
        let stream = inner.connect(instance).await?;
        let changes = self.flaw == Flaw::ConnectionsChangeBytes;
        let ends = (self.flaw == Flaw::InstancesEndWithAConnection)
            .then(|| (self.files.clone(), instance.clone()));
        Ok(Box::new(Bent { stream, changes, seen: 0, ends }))
    }

    async fn inspect(
        &self,
        inner: &dyn SandboxBackend,
        instance: &Instance,
    ) -> Result<InstanceState> {
        match self.flaw {
            Flaw::AllIsSaidToRun => Ok(InstanceState::Running),
            _ => inner.inspect(instance).await,
        }
    }

    async fn snapshot(
        &self,
        inner: &dyn SandboxBackend,
        request: &SnapshotRequest,
    ) -> Result<SnapshotTaken> {
        let taken = inner.snapshot(request).await?;
        self.seen().snapshots.push(taken.data.clone());
        let files = DirectoryBackend::files_of(&taken.data)?;
        match self.flaw {
            Flaw::SnapshotsAreEmpty => {
                fs::remove_dir_all(&files).map_err(failed)?;
                fs::create_dir(&files).map_err(failed)?;
            }
            Flaw::SnapshotsForgetModes => {
                run("chmod", &[Path::new("-R"), Path::new("u=rwX,go=rX"), &files])?;
            }
            Flaw::SnapshotsEndProcesses => {
                inner.stop(&request.instance).await?;
                let mut same = request.successor.clone();
                same.instance = request.instance.id.clone();
                inner.start(&request.instance, &same).await?;
            }
            _ => {}
        }
        Ok(taken)
    }

    async fn delete_snapshot(
        &self,
        inner: &dyn SandboxBackend,
        snapshot: &SnapshotData,
    ) -> Result<()> {
        if self.flaw == Flaw::DeletingTakesLaterSnapshots {
            let all = self.seen().snapshots.clone();
            for later in all.iter().skip_while(|one| one.id != snapshot.id) {
                inner.delete_snapshot(later).await?;
            }
        }
        inner.delete_snapshot(snapshot).await
    }

    async fn usage(&self, inner: &dyn SandboxBackend, instance: &Instance) -> Result<Usage> {
        let mut usage = inner.usage(instance).await?;
        if self.flaw == Flaw::UsageIsMadeUp {
            let asked = &mut self.seen().asked;
            *asked += 1;
            usage.disk = Some(*asked << 40);
        }
        Ok(usage)
    }

    async fn stop(&self, inner: &dyn SandboxBackend, instance: &Instance) -> Result<()> {
        inner.stop(instance).await?;
        if self.flaw == Flaw::StopsLoseFiles {
            let workspace = self.files.workspace(instance);
            fs::remove_dir_all(&workspace).map_err(failed)?;
            fs::create_dir(&workspace).map_err(failed)?;
        }
        Ok(())
    }

    async fn teardown(&self, inner: &dyn SandboxBackend, instance: &Instance) -> Result<()> {
        match self.flaw {
            Flaw::TeardownsLeaveInstances => Ok(()),
            Flaw::TeardownsLeaveProcesses => {
                let workspace = self.files.workspace(instance);
                let Some(dir) = workspace.parent().filter(|dir| dir.exists()) else {
                    return Ok(());
                };
                // Out of sight; the directory's owner sweeps it up at the end of the test.
                let left = dir.with_file_name(format!("left-{}", instance.id));
                fs::rename(dir, &left).map_err(failed)?;
                fs::remove_file(left.join("marks.json")).map_err(failed)
            }
            _ => inner.teardown(instance).await,
        }
    }

    async fn inventory(&self, inner: &dyn SandboxBackend) -> Result<Vec<Found>> {
        let found = inner.inventory().await?;
        Ok(match self.flaw {
            Flaw::InventoriesAreEmpty => Vec::new(),
            Flaw::InventoriesHaveOthers => {
                let owners: Vec<OwnerId> = self.seen().owners.clone();
                let owners: BTreeSet<OwnerId> = owners.into_iter().collect();
                let of =
                    |one: &Found, owner: &OwnerId| Found { owner: owner.clone(), ..one.clone() };
                found.iter().flat_map(|one| owners.iter().map(|owner| of(one, owner))).collect()
            }
            _ => found,
        })
    }
}

/// A connection that is not what it must be, if its backend is broken that way.
struct Bent {
    stream: GuestStream,
    /// Whether it changes what comes over it, after a while.
    changes: bool,
    seen: usize,
    /// What ends with it.
    ends: Option<(DirectoryBackend, Instance)>,
}

impl AsyncRead for Bent {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buffer.filled().len();
        std::task::ready!(Pin::new(&mut self.stream).poll_read(cx, buffer))?;
        let new = &mut buffer.filled_mut()[before..];
        self.seen += new.len();
        if self.changes && self.seen > 30_000 && new.len() > 1000 {
            let middle = new.len() / 2;
            new[middle] ^= 1;
        }
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for Bent {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

impl Drop for Bent {
    fn drop(&mut self) {
        let Some((files, instance)) = self.ends.take() else { return };
        // At once, and before anybody looks.
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
                let _ = runtime.map(|runtime| runtime.block_on(files.stop(&instance)));
            });
        });
    }
}

/// What is left of a case on purpose: the guests that were not ended.
struct Sweep(Arc<Mutex<Vec<DirectoryBackend>>>);

impl Drop for Sweep {
    fn drop(&mut self) {
        for backend in self.0.lock().unwrap_or_else(PoisonError::into_inner).drain(..) {
            backend.end_all();
        }
    }
}

/// The flaw fails these cases, and passes all others.
fn fails(flaw: Flaw, expected: &[&str]) {
    let made = Arc::new(Mutex::new(Vec::new()));
    let sweep = Sweep(Arc::clone(&made));
    let subject = Subject::new("broken", move |state| {
        let files = DirectoryBackend::new(state);
        made.lock().unwrap_or_else(PoisonError::into_inner).push(files.clone());
        let broken = Broken { flaw, files: files.clone(), seen: Mutex::default() };
        Ok(Decorated::new(Arc::new(files), broken) as Arc<dyn SandboxBackend>)
    });
    let mut found = Vec::new();
    for case in CASES {
        match run_case(&subject, case) {
            Verdict::Passed => {}
            Verdict::Failed(why) => found.push((*case, why)),
            Verdict::Skipped(why) => panic!("{case} was skipped: {why}"),
        }
    }
    drop(sweep);
    let names: BTreeSet<&str> = found.iter().map(|(case, _)| *case).collect();
    assert_eq!(names, expected.iter().copied().collect(), "{flaw:?}: {found:#?}");
}

#[test]
fn a_sound_backend_fails_nothing() {
    fails(Flaw::None, &[]);
}

#[test]
fn snapshots_that_are_empty_are_noticed() {
    fails(
        Flaw::SnapshotsAreEmpty,
        &[
            "life::acquire_after_a_rewind_gives_the_restored_files",
            "snapshots::a_rewind_brings_back_contents_and_deletions",
            "snapshots::a_rewind_brings_back_everything_about_files",
            "lineage::forks_see_nothing_of_each_other",
            "lineage::deleting_a_snapshot_keeps_those_that_build_on_it",
        ],
    );
}

#[test]
fn snapshots_that_forget_modes_are_noticed() {
    fails(Flaw::SnapshotsForgetModes, &["snapshots::a_rewind_brings_back_everything_about_files"]);
}

#[test]
fn snapshots_that_end_processes_are_noticed() {
    fails(Flaw::SnapshotsEndProcesses, &["snapshots::processes_go_on_after_a_snapshot"]);
}

#[test]
fn rewinds_that_keep_new_files_are_noticed() {
    fails(
        Flaw::RewindsKeepNewFiles,
        &[
            "life::acquire_after_a_rewind_gives_the_restored_files",
            "snapshots::a_rewind_brings_back_contents_and_deletions",
            "snapshots::a_rewind_brings_back_everything_about_files",
            "lineage::deleting_a_snapshot_keeps_those_that_build_on_it",
        ],
    );
}

#[test]
fn deletions_that_take_more_are_noticed() {
    fails(
        Flaw::DeletingTakesLaterSnapshots,
        &["lineage::deleting_a_snapshot_keeps_those_that_build_on_it"],
    );
}

#[test]
fn forks_that_share_files_are_noticed() {
    fails(Flaw::ForksShareFiles, &["lineage::forks_see_nothing_of_each_other"]);
}

#[test]
fn stops_that_lose_files_are_noticed() {
    fails(Flaw::StopsLoseFiles, &["life::acquire_starts_a_stopped_sandbox_with_its_files"]);
}

#[test]
fn instances_that_are_made_twice_are_noticed() {
    fails(Flaw::EachInstanceIsMadeTwice, CASES);
}

#[test]
fn teardowns_that_leave_instances_are_noticed() {
    fails(Flaw::TeardownsLeaveInstances, CASES);
}

#[test]
fn teardowns_that_leave_processes_are_noticed() {
    fails(Flaw::TeardownsLeaveProcesses, &["life::destroy_leaves_no_process"]);
}

#[test]
fn inventories_that_list_nothing_are_noticed() {
    fails(
        Flaw::InventoriesAreEmpty,
        &[
            "life::twenty_tasks_acquire_one_sandbox",
            "life::recreate_gives_fresh_files_and_keeps_the_id",
            "lifetime::reaping_never_touches_what_lives_or_is_anothers",
            "lifetime::an_instance_that_belongs_to_no_sandbox_is_reaped",
            "snapshots::a_rewind_brings_back_contents_and_deletions",
            "lineage::forks_see_nothing_of_each_other",
        ],
    );
}

#[test]
fn inventories_that_list_others_are_noticed() {
    fails(
        Flaw::InventoriesHaveOthers,
        &["lifetime::reaping_never_touches_what_lives_or_is_anothers"],
    );
}

#[test]
fn instances_that_are_said_to_run_are_noticed() {
    fails(Flaw::AllIsSaidToRun, &["loss::another_manager_notices_the_loss_when_it_is_built"]);
}

#[test]
fn usage_that_is_made_up_is_noticed() {
    fails(Flaw::UsageIsMadeUp, &["stats::what_is_written_is_counted_where_that_is_known"]);
}

#[test]
fn connections_that_change_bytes_are_noticed() {
    fails(Flaw::ConnectionsChangeBytes, &["output::output_is_bytes"]);
}

#[test]
fn instances_that_end_with_a_connection_are_noticed() {
    fails(
        Flaw::InstancesEndWithAConnection,
        &["detached::an_end_that_nobody_saw_is_recorded_by_the_next_manager"],
    );
}
