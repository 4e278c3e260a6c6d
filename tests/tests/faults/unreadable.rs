//! Histories that are damaged: the error names file and line, and the other sandboxes stay usable.

use std::{
    fs::{self, Permissions},
    os::unix::fs::PermissionsExt,
    path::PathBuf,
};

use libtest_mimic::Trial;
use sandbox_conformance::{Check, holds, same};
use sandbox_core::{ErrorKind, Sandbox, SandboxManager, Suppressed};

use crate::{
    place::is_root,
    scene::{NAME, Scene, mark, marker, usable},
    trial,
};

const OTHER: &str = "other";

pub(crate) fn trials() -> Vec<Trial> {
    vec![
        trial("unreadable::damage_in_the_middle", damage_in_the_middle),
        trial("unreadable::a_torn_last_line", a_torn_last_line),
        trial("unreadable::no_permission", no_permission),
    ]
}

/// Two sandboxes, and the first one's history.
async fn two(scene: &Scene) -> Check<(SandboxManager, Sandbox, PathBuf)> {
    let manager = scene.manager().await?;
    let sandbox = usable(scene, &manager, NAME).await?;
    mark(&sandbox, "one").await?;
    usable(scene, &manager, OTHER).await?;
    let history = scene.journal_dir().join(format!("history/{}.jsonl", sandbox.id()));
    Ok((manager, sandbox, history))
}

/// Every way to the first one says this; the other one is as it was.
async fn is_refused(scene: &Scene, kind: ErrorKind, said: &str) -> Check {
    // Building it settles what it can, and only warns of the rest.
    let manager = scene.manager().await?;
    let listed = manager.list().await?;
    same!(listed.len(), 1);
    let opened = manager.open(NAME).await.map(drop);
    let acquired = manager.acquire(NAME, scene.request(), &Suppressed).await.map(drop);
    for result in [opened, acquired] {
        let error = result.err().ok_or("it succeeded")?;
        same!(error.kind(), kind);
        holds!(error.to_string().contains(said), "{error} says {said}");
    }
    let other = usable(scene, &manager, OTHER).await?;
    other.snapshot("", &Suppressed).await?;
    Ok(())
}

async fn damage_in_the_middle() -> Check<Option<String>> {
    let scene = Scene::new()?;
    let (manager, sandbox, history) = two(&scene).await?;
    let whole = fs::read_to_string(&history)?;
    let mut lines: Vec<&str> = whole.lines().collect();
    for damage in ["{\"kind\":", "", "\u{0}\u{0}\u{0}", lines[0]] {
        let second = std::mem::replace(&mut lines[1], damage);
        fs::write(&history, lines.join("\n") + "\n")?;
        is_refused(&scene, ErrorKind::Journal, &format!("{}.jsonl, line 2", sandbox.id())).await?;
        lines[1] = second;
    }
    fs::write(&history, &whole)?;
    same!(marker(&usable(&scene, &scene.manager().await?, NAME).await?).await?, "one");
    scene.end(manager).await?;
    Ok(None)
}

async fn a_torn_last_line() -> Check<Option<String>> {
    let scene = Scene::new()?;
    let (manager, sandbox, history) = two(&scene).await?;
    drop(manager);
    for torn in ["{", "{\"id\":\"evt_", "\u{0}\u{0}\u{0}\n"] {
        let whole = fs::read_to_string(&history)?;
        fs::write(&history, format!("{whole}{torn}"))?;
        let manager = scene.manager().await?;
        let again = usable(&scene, &manager, NAME).await?;
        same!(again.id(), sandbox.id());
        same!(marker(&again).await?, "one");
        let repaired = fs::read_to_string(&history)?;
        holds!(repaired.starts_with(&whole), "what was whole stays");
        holds!(!repaired.contains('\0') && repaired.ends_with("}\n"), "what was torn is cut off");
    }
    let manager = scene.manager().await?;
    scene.is_consistent(&manager).await?;
    scene.end(manager).await?;
    Ok(None)
}

async fn no_permission() -> Check<Option<String>> {
    if is_root() {
        return Ok(Some("root may read every file".into()));
    }
    let scene = Scene::new()?;
    let (manager, sandbox, history) = two(&scene).await?;
    fs::set_permissions(&history, Permissions::from_mode(0o000))?;
    let refused =
        is_refused(&scene, ErrorKind::PermissionDenied, &format!("{}.jsonl", sandbox.id())).await;
    fs::set_permissions(&history, Permissions::from_mode(0o600))?;
    refused?;
    same!(marker(&usable(&scene, &scene.manager().await?, NAME).await?).await?, "one");
    scene.end(manager).await?;
    Ok(None)
}
