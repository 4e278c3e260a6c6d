//! Workspaces that move between backends.

use std::{os::unix::fs::PermissionsExt, sync::Arc};

use sandbox_bwrap::BwrapBackend;
use sandbox_core::{
    BackendId, Command, CreateSandbox, ErrorKind, Network, SandboxManager, Suppressed,
};

use crate::engine::{Scene, given};

#[tokio::test(flavor = "multi_thread")]
async fn a_workspace_moves_between_bwrap_and_docker() {
    let Some(given) = given() else { return };
    let scene = Scene::new(&given.host, &given.busybox).await;
    let bwrap = BwrapBackend::builder().state_dir(scene.dir.path().join("bwrap")).build().unwrap();
    let manager = SandboxManager::builder()
        .state_dir(scene.dir.path().join("both"))
        .shared_backend(Arc::new(bwrap))
        .shared_backend(Arc::new(scene.backend.clone()))
        .build()
        .await
        .unwrap();
    std::fs::set_permissions(scene.dir.path(), std::fs::Permissions::from_mode(0o755)).unwrap();
    let on = |name: &str| CreateSandbox::new().network(Network::Deny).backend(BackendId::new(name));
    let (sink, script) = (
        &scene.sink,
        "cat README; cat dir/deep; readlink link; stat -c %a run; ls -A; [ one -ef two ] && echo same",
    );
    for (from, to) in [("bwrap", "docker"), ("docker", "bwrap"), ("docker", "docker")] {
        let source = manager.create(on(from).workspace(scene.repository()), sink).await.unwrap();
        let text = "mkdir -p dir; echo 1 > dir/deep; ln -s nowhere link; echo > run; chmod 750 run; \
                    echo > one; ln one two; echo v2 > README";
        source.exec(Command::shell(text), sink).await.unwrap();
        let snapshot = source.snapshot("", sink).await.unwrap();
        source.exec(Command::shell("echo v3 > README"), sink).await.unwrap();
        let mut archive = Vec::new();
        manager.export(&snapshot.id, &mut archive, sink).await.unwrap();
        assert_eq!(manager.list().await.unwrap().len(), 1, "what was made in passing is gone");
        let made = manager.import(Some("moved"), on(to), &archive[..], sink).await.unwrap();
        let run = made.exec(Command::shell(script), &Suppressed).await.unwrap();
        let expected = "v2\n1\nnowhere\n750\nREADME\ndir\nlink\none\nrun\ntwo\nsame\n";
        assert_eq!(run.stdout.text(), expected, "{from} to {to}: {}", run.stderr.text());
        let taken = made.snapshot("imported", sink).await.unwrap();
        made.rewind(&taken.id, sink).await.unwrap();
        made.destroy(sink).await.unwrap();
        // Half an archive is no workspace, and leaves none.
        let cut = &archive[..archive.len() / 2];
        let error = manager.import(None, on(to), cut, sink).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidSpec, "{error}");
        let error = manager.import(None, on(to), &b"something else"[..], sink).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidSpec);
        source.destroy(sink).await.unwrap();
        assert_eq!(manager.list().await.unwrap().len(), 0);
    }
    assert_eq!(scene.leftovers(), "");
}
