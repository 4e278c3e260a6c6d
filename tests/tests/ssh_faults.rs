//! What must hold over SSH when links are cut, keys are wrong, and harnesses are killed. On the hosts of
//! `scripts/hosts`.
#![allow(
    clippy::unwrap_used,
    reason = "these are tests, in functions that clippy cannot tell as such"
)]
#![allow(
    clippy::await_holding_lock,
    reason = "the tests that cut the link take turns, each on its own thread"
)]

mod ssh_scene;

use std::{
    fs,
    io::Write,
    os::unix::fs::{MetadataExt, PermissionsExt},
    path::{Path, PathBuf},
    process::{Command as HostCommand, Stdio},
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use sandbox_core::{
    Command, CreateSandbox, ErrorKind, Network, SandboxBackend, SandboxManager, Suppressed,
};
use sandbox_ssh::{SshBackend, UploadProgress};
use ssh_scene::{HOSTS, PATIENCE, Scene, sh, soon, until};

/// Set for a harness that is to be killed.
const VICTIM: &str = "SANDBOX_SSH_VICTIM";

/// There is one link that can be cut.
static LINK: Mutex<()> = Mutex::new(());

/// A scene whose host is far away, for whoever has its turn; `None` where there is no link that can be cut.
fn far() -> Option<(Scene, std::sync::MutexGuard<'static, ()>)> {
    let scene = Scene::new()?;
    if !scene.has("far") {
        return None;
    }
    let guard = LINK.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    Some((scene, guard))
}

fn bytes_of(chunk: sandbox_core::Chunk) -> Vec<u8> {
    match chunk {
        sandbox_core::Chunk::Stdout(bytes) | sandbox_core::Chunk::Stderr(bytes) => bytes.to_vec(),
    }
}

fn repository(at: &Path) {
    fs::create_dir(at).unwrap();
    fs::write(at.join("README"), "v1\n").unwrap();
    fs::write(at.join("run.sh"), "#!/bin/sh\necho ran\n").unwrap();
    fs::set_permissions(at.join("run.sh"), fs::Permissions::from_mode(0o755)).unwrap();
}

/// Bytes that cannot be made smaller on their way.
fn noise(at: &Path, megabytes: u64) {
    let mut random = fs::File::open("/dev/urandom").unwrap();
    let mut file = fs::File::create(at).unwrap();
    std::io::copy(&mut std::io::Read::take(&mut random, megabytes << 20), &mut file).unwrap();
}

/// Whether a directory has an entry whose name begins so.
fn has(dir: &Path, prefix: &str) -> bool {
    let entries = fs::read_dir(dir).into_iter().flatten().flatten();
    entries.into_iter().any(|entry| entry.file_name().to_string_lossy().starts_with(prefix))
}

#[tokio::test(flavor = "multi_thread")]
async fn a_link_that_is_cut_in_the_middle_of_output_loses_nothing() {
    let Some((scene, _guard)) = far() else { return };
    let manager = scene.manager(scene.builder("far").build().unwrap()).await;
    let sandbox = manager.create(CreateSandbox::new(), &Suppressed).await.unwrap();
    // It writes until it is told that the link was cut and came back.
    let text = "i=0; until [ -e stop ]; do i=$((i+1)); echo $i; sleep 0.01; done; echo end";
    let mut process = sandbox.spawn(Command::shell(text), &Suppressed).await.unwrap();
    let first = soon("output", process.next_output()).await.unwrap();
    scene.cut().await;
    // A command of its own tells that it came back; the stream is told to end then.
    let stopping = {
        let sandbox = sandbox.clone();
        tokio::spawn(async move { sh(&sandbox, ": > stop").await })
    };
    let mut output = bytes_of(first);
    while let Some(chunk) = soon("output after the cut", process.next_output()).await {
        output.extend(bytes_of(chunk));
    }
    soon("a command after the cut", stopping).await.unwrap();
    let text = String::from_utf8(output).unwrap();
    let lines: Vec<&str> = text.lines().collect();
    assert_eq!(lines.last(), Some(&"end"));
    let numbers: Vec<usize> = lines[..lines.len() - 1].iter().map(|n| n.parse().unwrap()).collect();
    let missing = numbers.iter().enumerate().find(|(at, n)| **n != at + 1);
    assert_eq!(missing, None, "nothing is missing, and nothing there twice");
    sandbox.destroy(&Suppressed).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_link_that_is_cut_in_the_middle_of_an_upload_is_taken_up_again() {
    let Some((scene, _guard)) = far() else { return };
    let manager = scene.manager(scene.builder("far").build().unwrap()).await;
    let workspace = scene.path("workspace");
    repository(&workspace);
    noise(&workspace.join("noise"), 256);
    let making = {
        let (manager, request) = (manager.clone(), CreateSandbox::new().workspace(&workspace));
        tokio::spawn(async move { manager.create(request, &Suppressed).await })
    };
    let sources = scene.path("host/sources");
    until("an upload", || has(&sources, ".new-")).await;
    scene.cut().await;
    let sandbox = soon("a sandbox", making).await.unwrap().unwrap();
    let sum = |path: &Path| {
        let said = HostCommand::new("sha256sum").arg(path).output().unwrap().stdout;
        String::from_utf8(said).unwrap().split(' ').next().unwrap().to_owned()
    };
    let there = sh(&sandbox, "sha256sum noise").await;
    assert_eq!(there.split(' ').next().unwrap(), sum(&workspace.join("noise")));
    // What the first try left is gone.
    until("nothing half", || !has(&sources, ".new-")).await;
    sandbox.destroy(&Suppressed).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_link_that_is_cut_in_the_middle_of_a_snapshot_leaves_the_sandbox_whole() {
    let Some((scene, _guard)) = far() else { return };
    let manager = scene.manager(scene.builder("far").build().unwrap()).await;
    let sandbox = manager.create(CreateSandbox::new(), &Suppressed).await.unwrap();
    sh(&sandbox, "i=0; while [ $i -lt 3000 ]; do i=$((i+1)); echo $i > f$i; done").await;
    sh(&sandbox, "head -c 300000000 /dev/urandom > noise").await;
    // Something runs, so that the files are copied.
    let process = sandbox.spawn(Command::new("sleep").arg("600"), &Suppressed).await.unwrap();
    let taking = {
        let sandbox = sandbox.clone();
        tokio::spawn(async move { sandbox.snapshot("cut", &Suppressed).await })
    };
    let layers = scene.path("host/bwrap/layers");
    until("a copy", || has(&layers, ".new-")).await;
    scene.cut().await;
    let taken = soon("the snapshot", taking).await.unwrap();
    if let Err(error) = &taken {
        assert!(error.is_retryable(), "{error}");
    }
    // Whatever became of it, the processes go on, and another one can be taken.
    assert_eq!(soon("a command", sh(&sandbox, "cat f3000")).await, "3000");
    let again = soon("another", sandbox.snapshot("again", &Suppressed)).await.unwrap();
    until("nothing half", || !has(&layers, ".new-")).await;
    sh(&sandbox, "rm f*").await;
    drop(process);
    sandbox.rewind(&again.id, &Suppressed).await.unwrap();
    assert_eq!(sh(&sandbox, "cat f1 f3000; stat -c %s noise").await, "1\n3000\n300000000");
    sandbox.destroy(&Suppressed).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_of_ours_outlives_the_manager() {
    let Some(scene) = Scene::new() else { return };
    let manager = scene.manager(scene.builder("near").build().unwrap()).await;
    let sandbox = manager.create(CreateSandbox::new(), &Suppressed).await.unwrap();
    assert_eq!(sh(&sandbox, "echo yes").await, "yes");
    assert!(!scene.connections().is_empty());
    sandbox.destroy(&Suppressed).await.unwrap();
    drop((sandbox, manager));
    scene.until_no_connection().await;
}

/// Run by the test after it, in a process of its own.
#[tokio::test(flavor = "multi_thread")]
async fn a_victim() {
    let Some(dir) = std::env::var_os(VICTIM).map(PathBuf::from) else { return };
    let hosts = PathBuf::from(std::env::var_os(HOSTS).unwrap());
    let backend = SshBackend::builder()
        .host("near")
        .config_file(dir.join("config"))
        .state_dir(dir.join("host"))
        .program_dir(hosts.join("cache"))
        .build()
        .unwrap();
    let manager = SandboxManager::builder().state_dir(dir.join("state")).backend(backend);
    let manager = manager.build().await.unwrap();
    let request = CreateSandbox::new().lease(Duration::from_secs(3));
    let sandbox = manager.acquire("leased", request, &Suppressed).await.unwrap();
    let process = sandbox.spawn(Command::new("sleep").arg("600"), &Suppressed).await.unwrap();
    fs::write(dir.join("ready"), "").unwrap();
    std::future::pending::<()>().await;
    drop(process);
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_of_a_killed_harness_stays_and_its_lease_ends_the_rest() {
    let Some(scene) = Scene::new() else { return };
    let mut victim = HostCommand::new(std::env::current_exe().unwrap())
        .args(["--exact", "a_victim"])
        .env(VICTIM, scene.dir.path())
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    until("the other harness", || scene.path("ready").exists()).await;
    assert!(!scene.connections().is_empty());
    victim.kill().unwrap();
    victim.wait().unwrap();
    scene.until_no_connection().await;
    // The guest ends by itself; a new manager finds that out, and removes what is left.
    let backend = scene.builder("near").build().unwrap();
    let manager = scene.manager(backend.clone()).await;
    let sandbox = manager.open("leased").await.unwrap();
    // Nobody uses it, so that nobody renews its lease.
    let deadline = Instant::now() + PATIENCE;
    loop {
        let found = SandboxBackend::inventory(&backend).await.unwrap();
        if found.iter().all(|one| one.state == sandbox_core::InstanceState::Stopped) {
            break;
        }
        assert!(Instant::now() < deadline, "it does not end");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    let error = sandbox.exec(Command::new("true"), &Suppressed).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Lost, "{error}");
    sandbox.destroy(&Suppressed).await.unwrap();
    let instances = fs::read_dir(scene.path("host/bwrap/instances")).unwrap();
    assert_eq!(instances.count(), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn unknown_and_changed_host_keys_are_refused_and_told_apart() {
    let Some(scene) = Scene::new() else { return };
    let (config, known) = (scene.path("config"), scene.path("known"));
    let text = fs::read_to_string(&config).unwrap();
    let own = format!("Host *\n    UserKnownHostsFile {}\n{text}", known.display());
    fs::write(&config, own).unwrap();
    let right = fs::read_to_string(scene.hosts.join("known_hosts")).unwrap();
    let right = right.lines().next().unwrap().to_owned();
    let (name, _) = right.split_once(' ').unwrap();
    let other = fs::read_to_string(scene.hosts.join("identity.pub")).unwrap();
    let other = other.split(' ').take(2).collect::<Vec<_>>().join(" ");
    for (lines, says) in [
        (String::new(), Some("is not known")),
        (format!("{name} {other}\n"), Some("has changed")),
        (format!("{right}\n"), None),
    ] {
        fs::write(&known, lines).unwrap();
        let backend = scene.builder("near").build().unwrap();
        let probed = SandboxBackend::probe(&backend).await;
        match says {
            Some(says) => {
                let error = probed.unwrap_err();
                assert_eq!(error.kind(), ErrorKind::PermissionDenied, "{error}");
                assert!(!error.is_retryable());
                assert!(error.to_string().contains(says), "{error}");
            }
            // The same with the right key: it was the key.
            None => drop(probed.unwrap()),
        }
        drop(backend);
        scene.until_no_connection().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn who_is_not_let_in_is_told_so() {
    let Some(scene) = Scene::new() else { return };
    let key = scene.path("stranger");
    let mut keygen = HostCommand::new("ssh-keygen");
    keygen.args(["-q", "-t", "ed25519", "-N", "", "-f"]).arg(&key);
    assert!(keygen.status().unwrap().success());
    let config = scene.path("config");
    let text = fs::read_to_string(&config).unwrap();
    let identity = scene.hosts.join("identity");
    let text = text.replace(identity.to_str().unwrap(), key.to_str().unwrap());
    fs::write(&config, text).unwrap();
    let backend = scene.builder("near").build().unwrap();
    let error = SandboxBackend::probe(&backend).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::PermissionDenied, "{error}");
    assert!(error.to_string().contains("does not let us in"), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_host_that_is_an_option_is_refused() {
    let Some(scene) = Scene::new() else { return };
    let made = scene.path("made");
    let name = format!("-oProxyCommand=touch${{IFS}}{}", made.display());
    let error = scene.builder(&name).build().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidSpec);
    let manager = scene.manager(scene.builder("near").build().unwrap()).await;
    let request = CreateSandbox::new().host(name);
    assert!(manager.create(request, &Suppressed).await.is_err());
    assert!(!made.exists());
}

#[tokio::test(flavor = "multi_thread")]
async fn many_at_once_bring_the_program_once() {
    let Some(scene) = Scene::new() else { return };
    let programs = scene.path("it's for programs");
    let mut all = Vec::new();
    for _ in 0..6 {
        let backend = scene.builder("near").program_dir(&programs).build().unwrap();
        all.push(tokio::spawn(async move { SandboxBackend::probe(&backend).await }));
    }
    let first = async {
        until("a program", || has(&programs, "sandbox-host-") && inode(&programs).is_some()).await;
        inode(&programs)
    };
    let first = first.await;
    for one in all {
        soon("a probe", one).await.unwrap().unwrap();
    }
    let left: Vec<_> = fs::read_dir(&programs).unwrap().map(|e| e.unwrap().file_name()).collect();
    assert_eq!(left.len(), 1, "{left:?}");
    assert_eq!(inode(&programs), first, "it was brought once");
}

/// Of the program, once it is whole.
fn inode(programs: &Path) -> Option<u64> {
    let entries = fs::read_dir(programs).ok()?.flatten();
    let whole = |name: &str| name.starts_with("sandbox-host-") && !name.contains('.');
    let mut found = entries.filter(|entry| whole(&entry.file_name().to_string_lossy()));
    Some(found.next()?.metadata().ok()?.ino())
}

#[tokio::test(flavor = "multi_thread")]
async fn what_did_not_change_is_not_sent_again() {
    let Some(scene) = Scene::new() else { return };
    let manager = scene.manager(scene.builder("near").build().unwrap()).await;
    let workspace = scene.path("workspace");
    repository(&workspace);
    let make = async || {
        let request = CreateSandbox::new().workspace(&workspace);
        manager.create(request, &Suppressed).await.unwrap()
    };
    let sources = || {
        let entries = fs::read_dir(scene.path("host/sources")).unwrap().flatten();
        entries.map(|entry| entry.path().join("tree")).collect::<Vec<_>>()
    };
    let one = make().await;
    assert_eq!(sh(&one, "cat README; ./run.sh").await, "v1\nran");
    let first = sources();
    // Nothing has changed: nothing is made.
    let two = make().await;
    assert_eq!(sources(), first);
    fs::write(workspace.join("README"), "version 2\n").unwrap();
    let three = make().await;
    assert_eq!(sh(&three, "cat README; ./run.sh").await, "version 2\nran");
    assert_eq!(sh(&one, "cat README").await, "v1");
    let second: Vec<_> = sources().into_iter().filter(|path| !first.contains(path)).collect();
    let inode = |tree: &Path, name: &str| fs::metadata(tree.join(name)).unwrap().ino();
    assert_eq!(inode(&first[0], "run.sh"), inode(&second[0], "run.sh"));
    assert_ne!(inode(&first[0], "README"), inode(&second[0], "README"));
    for sandbox in [one, two, three] {
        sandbox.destroy(&Suppressed).await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_sent_is_told() {
    let Some(scene) = Scene::new() else { return };
    let told = Arc::new(Mutex::new(Vec::<UploadProgress>::new()));
    let telling = Arc::clone(&told);
    let builder = scene.builder("near");
    let builder = builder.on_upload(move |progress| telling.lock().unwrap().push(progress.clone()));
    let manager = scene.manager(builder.build().unwrap()).await;
    let workspace = scene.path("workspace");
    repository(&workspace);
    noise(&workspace.join("noise"), 3);
    let small = 3 + "#!/bin/sh\necho ran\n".len() as u64;
    // All of it, then nothing, then what has changed.
    for (files, bytes) in [(3, small + (3 << 20)), (0, 0), (1, 10)] {
        if files == 1 {
            fs::write(workspace.join("README"), "version 2\n").unwrap();
        }
        let request = CreateSandbox::new().workspace(&workspace);
        let sandbox = manager.create(request, &Suppressed).await.unwrap();
        sandbox.destroy(&Suppressed).await.unwrap();
        let told = std::mem::take(&mut *told.lock().unwrap());
        let first = &told[0];
        assert_eq!((first.host.as_str(), &first.directory), ("near", &workspace));
        assert_eq!((first.done, first.files), (0, 0));
        assert_eq!((first.total, first.total_files), (None, None), "the host was not asked yet");
        for pair in told.windows(2) {
            assert!(pair[0].done <= pair[1].done && pair[0].files <= pair[1].files, "{pair:?}");
        }
        assert!(told[1..].iter().all(|one| one.total == Some(bytes)), "{told:?}");
        let last = told.last().unwrap();
        assert_eq!((last.done, last.files), (bytes, files));
        assert_eq!(last.total_files, Some(files));
        // Not only at the end.
        assert!(files < 3 || told.iter().any(|one| one.done > 0 && one.done < bytes), "{told:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_one_liner_works_when_pasted() {
    let Some(scene) = Scene::new() else { return };
    let root = scene.hosts.join("home").exists();
    for (host, awkward) in [("near", "host"), ("account", "it's \"here\" for $HOME")] {
        if host == "account" && !root {
            continue;
        }
        let state = scene.path(awkward);
        let mut builder = scene.builder(host).state_dir(&state);
        if host == "account" {
            fs::create_dir(&state).unwrap();
            scene.give(&state);
            builder = builder.accept_the_account_as_the_only_isolation();
        }
        let backend = builder.tunnel_hint("bridge", None).identity_hint("warden").build().unwrap();
        let manager = SandboxManager::builder().state_dir(scene.path(&format!("state-{host}")));
        let manager = manager.backend(backend).build().await.unwrap();
        let workspace = scene.path(&format!("workspace-{host}"));
        repository(&workspace);
        let network = if host == "near" { Network::Deny } else { Network::Host };
        let request = CreateSandbox::new().workspace(&workspace).network(network);
        let sandbox = manager.create(request, &Suppressed).await.unwrap();
        sh(&sandbox, "echo inside > made").await;
        let report = sandbox.reachability().await.unwrap().report();
        assert_eq!(report.local_exec_hint, None);
        let line = report.ssh_one_liner.unwrap();
        let mut pasted = HostCommand::new("/bin/sh")
            .args(["-c", &line])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        pasted
            .stdin
            .take()
            .unwrap()
            .write_all(b"while read -r line; do echo \"$line\"; done < made\n")
            .unwrap();
        let output = pasted.wait_with_output().unwrap();
        let said = String::from_utf8_lossy(&output.stdout);
        assert!(
            said.contains("inside"),
            "{line}: {said} {}",
            String::from_utf8_lossy(&output.stderr)
        );
        let json = serde_json::to_value(report.reachability).unwrap();
        assert_eq!((&json["ssh"], &json["tunnel"]), (&host.into(), &"bridge".into()));
        assert_eq!(json["identity"], "warden");
        sandbox.destroy(&Suppressed).await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn jump_hosts_and_fallbacks_are_used() {
    let Some(scene) = Scene::new() else { return };
    if !scene.has("jumped") {
        return;
    }
    let state = scene.path("host");
    fs::create_dir(&state).unwrap();
    scene.give(&state);
    // Nothing listens there.
    let config = scene.path("config");
    let text = fs::read_to_string(&config).unwrap();
    fs::write(&config, format!("Host down\n    HostName 127.0.0.1\n    Port 1\n{text}")).unwrap();
    let builder = scene.builder("down").fallback("jumped");
    let backend = builder.program_dir(scene.hosts.join("home")).build().unwrap();
    let manager = scene.manager(backend).await;
    let sandbox = manager.create(CreateSandbox::new(), &Suppressed).await.unwrap();
    assert_eq!(sh(&sandbox, "echo there").await, "there");
    let json = serde_json::to_value(sandbox.reachability().await.unwrap()).unwrap();
    assert_eq!(json["ssh"], "jumped");
    sandbox.destroy(&Suppressed).await.unwrap();
    drop((sandbox, manager));
    scene.until_no_connection().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_host_of_few_sessions_gets_more_connections() {
    let Some(scene) = Scene::new() else { return };
    let backend = scene.builder("tight").build().unwrap();
    let manager = scene.manager(backend.clone()).await;
    let mut making = tokio::task::JoinSet::new();
    for n in 0..5 {
        let manager = manager.clone();
        making.spawn(async move {
            let sandbox = manager.create(CreateSandbox::new(), &Suppressed).await.unwrap();
            assert_eq!(sh(&sandbox, &format!("echo {n}")).await, n.to_string());
            sandbox
        });
    }
    let mut sandboxes = Vec::new();
    while let Some(made) = soon("a sandbox", making.join_next()).await {
        sandboxes.push(made.unwrap());
    }
    // Each has a session of its own, and one of three is the connection's.
    assert!(scene.connections().len() > 2, "{:?}", scene.connections());
    for sandbox in sandboxes {
        sandbox.destroy(&Suppressed).await.unwrap();
    }
    drop((manager, backend));
    scene.until_no_connection().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_host_with_no_session_to_spare_is_told_of_and_not_asked_again() {
    let Some(scene) = Scene::new() else { return };
    let backend = scene.builder("single").build().unwrap();
    let mut asking = tokio::task::JoinSet::new();
    for _ in 0..5 {
        let backend = backend.clone();
        asking.spawn(async move { backend.inventory().await });
    }
    while let Some(answer) = soon("an answer", asking.join_next()).await {
        let error = answer.unwrap().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
        assert!(!error.is_retryable(), "{error}");
        assert!(error.to_string().contains("MaxSessions"), "{error}");
    }
    assert!(scene.connections().len() < 3, "{:?}", scene.connections());
}

#[tokio::test(flavor = "multi_thread")]
async fn all_who_wait_for_a_host_that_does_not_answer_hear_it_at_once() {
    let Some(scene) = Scene::new() else { return };
    // It takes connections, and says nothing.
    let silent = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = silent.local_addr().unwrap().port();
    let text = fs::read_to_string(scene.path("config")).unwrap();
    let host = format!("Host silent\n    HostName 127.0.0.1\n    Port {port}\n");
    fs::write(scene.path("config"), host + &text).unwrap();
    let tried = tokio::spawn(async move {
        let mut connections = Vec::new();
        loop {
            let next = tokio::time::timeout(Duration::from_secs(5), silent.accept()).await;
            let Ok(connection) = next else { return connections.len() };
            connections.push(connection.unwrap());
        }
    });
    let builder = scene.builder("silent").connect_timeout(Duration::from_secs(2));
    let backend = builder.build().unwrap();
    let mut asking = tokio::task::JoinSet::new();
    for _ in 0..16 {
        let backend = backend.clone();
        asking.spawn(async move { backend.inventory().await });
    }
    while let Some(answer) = soon("an answer", asking.join_next()).await {
        let error = answer.unwrap().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
    }
    let tried = soon("the end of all tries", tried).await.unwrap();
    assert!(
        (1..=2).contains(&tried),
        "what one try, or two, came to is the answer for all: {tried}"
    );
}
