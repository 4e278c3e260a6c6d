//! The disk of the state directory is full: every call says so, nothing is damaged, and with room again
//! everything goes on.

use std::{
    fs::{self, File},
    io::Write,
    process::Command as Program,
};

use libtest_mimic::Trial;
use sandbox_conformance::{Check, holds, same};
use sandbox_core::{Command, Error, ErrorKind, Sandbox, SandboxEvent, SandboxManager, Suppressed};

use crate::{
    child,
    place::is_root,
    scene::{NAME, Scene, mark, marker, sh, usable},
    trial,
};

/// Of the disk, in MiB.
const SIZE: usize = 40;

pub(crate) fn trials() -> Vec<Trial> {
    vec![trial("disk::a_full_disk_is_an_error_and_no_more", a_full_disk)]
}

/// In a mount namespace of its own, so that the small disk is nobody else's and goes with it.
async fn a_full_disk() -> Check<Option<String>> {
    if !is_root() {
        return Ok(Some("it takes root to mount a small disk".into()));
    }
    let scene = Scene::new()?;
    fs::create_dir(scene.dir().join("state"))?;
    let mut program = Program::new("unshare");
    program.args(["--mount", "--propagation", "private"]).arg(std::env::current_exe()?);
    child::environment(&mut program, "disk", &scene);
    let output = match program.output() {
        Err(error) => return Ok(Some(format!("unshare cannot be run: {error}"))),
        Ok(output) => output,
    };
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    holds!(output.status.success(), "{}{said}", String::from_utf8_lossy(&output.stdout));
    Ok(None)
}

/// What happens in that namespace.
pub(crate) async fn on_a_small_disk(scene: &Scene) -> Check {
    let state = scene.dir().join("state");
    let options = format!("size={SIZE}m,mode=700");
    let mut mount = Program::new("mount");
    let mounted = mount.args(["-t", "tmpfs", "-o", &options, "tmpfs"]).arg(&state).status()?;
    holds!(mounted.success(), "a small disk is mounted: {mounted}");

    let manager = scene.manager().await?;
    let sandbox = usable(scene, &manager, NAME).await?;
    mark(&sandbox, "one").await?;
    // What is wanted back when nothing else is left: without a record of it nothing is done.
    let reserve = Filler::of(scene, "reserve", 2 << 20)?;
    the_sandbox_writes_until_it_is_full(&sandbox).await?;
    reserve.free()?;
    a_snapshot_has_no_room(&sandbox).await?;
    sh(&sandbox, "rm big").await?;
    scene.is_consistent(&manager).await?;
    a_journal_has_no_room(scene, &sandbox).await?;
    same!(marker(&sandbox).await?, "one");
    scene.is_consistent(&manager).await?;
    a_creation_has_no_room(scene, &manager).await?;
    let sandbox = usable(scene, &manager, NAME).await?;
    same!(marker(&sandbox).await?, "one");
    scene.end_here(manager).await
}

async fn the_sandbox_writes_until_it_is_full(sandbox: &Sandbox) -> Check {
    let fill = Command::shell("dd if=/dev/zero of=big bs=65536 2>&1; echo x >> big");
    let run = sandbox.exec(fill, &Suppressed).await?;
    holds!(!run.outcome.is_success(), "there is an end to it");
    holds!(run.stdout.text().contains("No space left"), "it is told so: {}", run.stdout.text());
    let written = sandbox.files().write("/workspace/more", vec![1; 1 << 20], &Suppressed).await;
    let error = written.err().ok_or("there was room")?;
    println!("a file: {error:?}");
    says_that_it_is_full(&error)?;
    same!(marker_file(sandbox).await?, "one");
    Ok(())
}

/// There is room for the record, but not for the copy.
async fn a_snapshot_has_no_room(sandbox: &Sandbox) -> Check {
    sh(sandbox, "(sleep 86400) >/dev/null 2>&1 </dev/null &").await?;
    let error = sandbox.snapshot("live", &Suppressed).await.err().ok_or("there was room")?;
    println!("a snapshot: {error:?}");
    holds!(error.to_string().contains("No space left"), "{error:?} says why");
    same!(sandbox.snapshots().await?.len(), 0);
    same!(marker(sandbox).await?, "one");
    sh(sandbox, "pkill sleep || kill %1 || true").await?;
    Ok(())
}

async fn a_journal_has_no_room(scene: &Scene, sandbox: &Sandbox) -> Check {
    let filler = Filler::new(scene)?;
    // The last page of the history may have room for some records.
    let mut refused = None;
    for _ in 0..200 {
        if let Err(error) = sandbox.exec(Command::new("/bin/true"), &Suppressed).await {
            refused = Some(error);
            break;
        }
    }
    let error = refused.ok_or("the journal had room")?;
    println!("a journal: {error:?}");
    same!(error.kind(), ErrorKind::Journal);
    says_that_it_is_full(&error)?;
    // Longer than what was refused: a shorter record may have room in the last page.
    let label = "x".repeat(256);
    let taken = sandbox.snapshot(&label, &Suppressed).await.err().ok_or("the journal had room")?;
    same!(taken.kind(), ErrorKind::Journal);
    // Reading goes on.
    same!(marker_file(sandbox).await?, "one");
    filler.free()?;
    let manager = scene.manager().await?;
    let history = manager.history(sandbox.id(), 0).await?;
    let seqs: Vec<u64> = history.iter().map(|event| event.seq).collect();
    same!(seqs, (1..=history.len() as u64).collect::<Vec<_>>());
    Ok(())
}

async fn a_creation_has_no_room(scene: &Scene, manager: &SandboxManager) -> Check {
    let filler = Filler::new(scene)?;
    let made = manager.acquire("second", scene.request(), &Suppressed).await;
    let error = made.err().ok_or("there was room")?;
    println!("a creation: {error:?}");
    says_that_it_is_full(&error)?;
    filler.free()?;
    for history in scene.histories(&scene.manager().await?).await? {
        println!("{:?}", history.iter().map(SandboxEvent::name).collect::<Vec<_>>());
    }
    scene.is_consistent(manager).await?;
    usable(scene, manager, "second").await?.destroy(&Suppressed).await?;
    Ok(())
}

async fn marker_file(sandbox: &Sandbox) -> Check<String> {
    Ok(String::from_utf8(sandbox.files().read("/workspace/marker").await?)?)
}

fn says_that_it_is_full(error: &Error) -> Check {
    let kinds = [ErrorKind::LimitExceeded, ErrorKind::Journal];
    holds!(kinds.contains(&error.kind()), "{error:?} is of a kind that says so");
    holds!(error.to_string().contains("No space left"), "{error:?} says why");
    Ok(())
}

/// Takes all the room that there is.
struct Filler(std::path::PathBuf);

impl Filler {
    fn new(scene: &Scene) -> Check<Self> {
        let all = Self::of(scene, "filler", 0)?;
        let mut file = File::create(&all.0)?;
        for size in [1 << 16, 1 << 12, 1] {
            while file.write_all(&vec![0; size]).is_ok() {}
        }
        Ok(all)
    }

    /// So much room.
    fn of(scene: &Scene, name: &str, size: usize) -> Check<Self> {
        let path = scene.dir().join("state").join(name);
        fs::write(&path, vec![0; size])?;
        Ok(Self(path))
    }

    fn free(self) -> Check {
        Ok(fs::remove_file(self.0)?)
    }
}
