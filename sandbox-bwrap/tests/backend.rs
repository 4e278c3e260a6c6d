//! The backend against the real bwrap: as root, where the tests run as root, and as an ordinary user.
#![cfg(target_os = "linux")]

mod support;

use std::{
    fs,
    os::unix::fs::{MetadataExt, PermissionsExt, symlink},
    path::Path,
    time::{Duration, Instant},
};

use sandbox_core::{
    CreateSandbox, ErrorKind, Feature, InstanceState, Level, Network, Outcome, Root, SandboxBackend,
};
use sandbox_guest::preamble;
use support::{Place, as_everybody, here, is_root};

#[test]
fn it_comes_up_without_rights_and_goes_without_a_trace() {
    as_everybody("it_comes_up_without_rights_and_goes_without_a_trace", async |place| {
        let (instance, request) = place.up(CreateSandbox::new()).await;
        let backend = &place.backend;
        assert_eq!(backend.inspect(&instance).await.unwrap(), InstanceState::Running);
        let mut stream = backend.connect(&instance).await.unwrap();
        preamble::exchange(&mut stream).await.unwrap();

        let status = place.sh(&instance, "id -u; id -G; cat /proc/self/status").await;
        for line in
            ["1000", "CapEff:\t0000000000000000", "NoNewPrivs:\t1", "Seccomp:\t2", "Groups:\t "]
        {
            assert!(status.lines().any(|l| l.trim_end() == line.trim_end()), "{line}:\n{status}");
        }
        let env = place.sh(&instance, "env").await;
        assert!(!env.contains("CARGO") && env.contains("HOME=/home/sandbox"), "{env}");
        let identity =
            place.sh(&instance, "cat /etc/hostname /etc/machine-id; uname -n; pwd").await;
        let (name, id) = (&request.hostname, &request.machine_id);
        assert_eq!(identity, format!("{name}\n{id}\n{name}\n/workspace"));
        // PID 1 has nothing open but what it needs: its own descriptors, and none of the harness's.
        let pid = instance.data["pid"].as_u64().unwrap();
        for entry in fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten() {
            let target = fs::read_link(entry.unwrap().path()).unwrap();
            let known = ["socket:", "anon_inode:", "/dev/null", "/memfd:", "pipe:"];
            let log = target.ends_with("launch.log");
            let text = target.to_string_lossy();
            assert!(log || known.iter().any(|known| text.starts_with(known)), "{text}");
        }

        backend.teardown(&instance).await.unwrap();
        backend.teardown(&instance).await.unwrap();
        assert_eq!(backend.inspect(&instance).await.unwrap(), InstanceState::Gone);
        // It has ended; whoever started it may not have noticed yet.
        let deadline = Instant::now() + Duration::from_secs(5);
        while Path::new(&format!("/proc/{pid}")).exists() {
            assert!(Instant::now() < deadline, "process {pid} is still there");
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        let error = backend.connect(&instance).await.err().unwrap();
        assert_eq!(error.kind(), ErrorKind::Lost);
        assert_eq!(backend.reachability(&instance).await.unwrap_err().kind(), ErrorKind::Lost);
        // Closed only now: it was served until the end.
        drop(stream);
    });
}

#[test]
fn nothing_of_the_host_or_of_the_set_up_is_in_reach() {
    as_everybody("nothing_of_the_host_or_of_the_set_up_is_in_reach", async |place| {
        fs::write(place.dir.join("secret"), "x").unwrap();
        let (instance, _) = place.up(CreateSandbox::new()).await;
        let secret = place.dir.join("secret");
        let lines = [
            "test ! -e /.sbx && test ! -e /old_root && test ! -e /etc/shadow".to_owned(),
            format!("test ! -e '{}'", secret.display()),
            "! umount /workspace 2>/dev/null && ! mount -t tmpfs x /mnt 2>/dev/null".to_owned(),
            "! unshare -Ur true 2>/dev/null".to_owned(),
            "! touch /run/sandbox/x 2>/dev/null && ! mv /run/sandbox /run/y 2>/dev/null".to_owned(),
            "! mv /run /y 2>/dev/null && ! rm -f /run/sandbox/guest 2>/dev/null".to_owned(),
            "! touch /usr/x 2>/dev/null && ! touch /dev/x 2>/dev/null".to_owned(),
            "! touch /etc/hostname 2>/dev/null".to_owned(),
            "touch /etc/mine /tmp/mine /home/sandbox/mine /dev/shm/mine /run/mine".to_owned(),
            "test \"$(ls /proc | grep -c '^[0-9]*$')\" -lt 8".to_owned(),
            "! cat /proc/1/environ 2>/dev/null && ! ls /proc/1/root/ 2>/dev/null".to_owned(),
            "test \"$(tail -n +3 /proc/net/dev | cut -d: -f1 | tr -d ' ')\" = lo".to_owned(),
        ];
        for line in lines {
            place.sh(&instance, &line).await;
        }
        place.down(&instance).await;
    });
}

#[test]
fn a_workspace_is_changed_inside_and_never_outside() {
    as_everybody("a_workspace_is_changed_inside_and_never_outside", async |place| {
        let source = place.dir.join("repo with 'odd', :name");
        fs::create_dir_all(source.join("sub/deep")).unwrap();
        fs::write(source.join("edit"), "before\n").unwrap();
        fs::write(source.join("sub/delete"), "x").unwrap();
        fs::write(source.join("sub/deep/secret"), "private\n").unwrap();
        let mode = |path: &str, mode| {
            fs::set_permissions(source.join(path), fs::Permissions::from_mode(mode)).unwrap();
        };
        mode("sub/deep/secret", 0o600);
        mode("sub/deep", 0o700);
        mode("", 0o700);
        let link = place.dir.join("link");
        symlink(&source, &link).unwrap();

        let (instance, _) = place.up(CreateSandbox::new().workspace(&link)).await;
        let seen = place.sh(&instance, "cat edit sub/deep/secret; stat -c %U edit sub").await;
        assert_eq!(seen, "before\nprivate\nsandbox\nsandbox");
        let line = "echo after >> edit; rm sub/delete; mkdir new; echo n > new/file; chmod 755 edit; \
                    mv sub/deep/secret moved; cat edit; ls sub";
        assert_eq!(place.sh(&instance, line).await, "before\nafter\ndeep");
        place.down(&instance).await;

        assert_eq!(fs::read_to_string(source.join("edit")).unwrap(), "before\n");
        assert!(source.join("sub/delete").exists() && source.join("sub/deep/secret").exists());
        assert_eq!(fs::read_dir(&source).unwrap().count(), 2);
    });
}

#[test]
fn a_bound_workspace_is_the_directory_itself() {
    as_everybody("a_bound_workspace_is_the_directory_itself", async |place| {
        let source = place.dir.join("repo with 'odd', :name");
        fs::create_dir_all(source.join("sub")).unwrap();
        fs::write(source.join("sub/edit"), "before\n").unwrap();
        fs::set_permissions(&source, fs::Permissions::from_mode(0o700)).unwrap();
        let (first, request) = place.up(CreateSandbox::new().bind_workspace(&source)).await;
        let line = "cat sub/edit; echo after >> sub/edit; echo new > new; echo 1 > ~/kept";
        assert_eq!(place.sh(&first, line).await, "before");
        assert_eq!(fs::read_to_string(source.join("sub/edit")).unwrap(), "before\nafter\n");
        let (made, owner) =
            (fs::metadata(source.join("new")).unwrap(), fs::metadata(&source).unwrap());
        assert_eq!((made.uid(), made.gid()), (owner.uid(), owner.gid()));

        // No layer has anything of it.
        let changes = place.backend.changes(&first, None).await.unwrap();
        let paths: Vec<_> = changes.iter().map(|change| change.path.as_path()).collect();
        assert_eq!(paths, [Path::new("/home/sandbox/kept")]);
        let (snapshot, second) = place.sealed(&first, &request).await;
        place.sh(&second, "echo later > later; echo 2 > ~/kept").await;
        let mut fork = Place::request(CreateSandbox::new().bind_workspace(&source));
        fork.from = Some(snapshot);
        let third = place.backend.provision(&fork).await.unwrap();
        assert_eq!(place.sh(&third, "cat later ~/kept").await, "later\n1");
        for instance in [&second, &third] {
            place.down(instance).await;
        }
        assert_eq!(fs::read_dir(&source).unwrap().count(), 3);
    });
}

#[test]
fn mounts_are_shown_with_the_access_asked_for() {
    as_everybody("mounts_are_shown_with_the_access_asked_for", async |place| {
        let (tool, data, file) =
            (place.dir.join("tool"), place.dir.join("data"), place.dir.join("file"));
        for dir in [&tool, &data] {
            fs::create_dir(dir).unwrap();
            fs::set_permissions(dir, fs::Permissions::from_mode(0o700)).unwrap();
        }
        fs::write(tool.join("t"), "tool").unwrap();
        fs::write(&file, "one").unwrap();
        fs::set_permissions(&file, fs::Permissions::from_mode(0o600)).unwrap();
        let spec = CreateSandbox::new()
            .mount_read_write(&data, "/opt/tool/inner/data")
            .mount_read_only(&tool, "/opt/tool")
            .mount_read_write(&file, "/workspace/sub/file");
        fs::create_dir_all(tool.join("inner/data")).unwrap();
        let (instance, _) = place.up(spec).await;
        let line = "cat /opt/tool/t; ! touch /opt/tool/x 2>/dev/null; echo new > /opt/tool/inner/data/d; \
                    echo two > sub/file";
        assert_eq!(place.sh(&instance, line).await, "tool");
        place.down(&instance).await;
        assert_eq!(fs::read_to_string(&file).unwrap(), "two\n");
        let made = fs::metadata(data.join("d")).unwrap();
        let owner = fs::metadata(&data).unwrap();
        assert_eq!((made.uid(), made.gid()), (owner.uid(), owner.gid()));
        assert_eq!(fs::read_dir(&tool).unwrap().count(), 2);

        for target in ["/usr/share/no/such", "/run", "/etc"] {
            let request = Place::request(CreateSandbox::new().mount_read_only(&tool, target));
            let error = place.backend.provision(&request).await.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidSpec, "{error}");
        }
    });
}

#[test]
fn a_stopped_one_starts_with_its_files() {
    as_everybody("a_stopped_one_starts_with_its_files", async |place| {
        let source = place.dir.join("src");
        fs::create_dir(&source).unwrap();
        fs::write(source.join("gone"), "x").unwrap();
        let (instance, request) = place.up(CreateSandbox::new().workspace(&source)).await;
        place.sh(&instance, "rm gone; echo 1 > kept; echo 2 > ~/home; mkdir -m 0 shut").await;
        for _ in 0..2 {
            place.backend.stop(&instance).await.unwrap();
        }
        assert_eq!(place.backend.inspect(&instance).await.unwrap(), InstanceState::Stopped);
        let error = place.backend.connect(&instance).await.err().unwrap();
        assert_eq!(error.kind(), ErrorKind::Lost);

        let again = place.backend.start(&instance, &request).await.unwrap();
        assert_eq!(again.id, instance.id);
        assert_ne!(again.data["pid"], instance.data["pid"]);
        // What was known before still leads to it, and a second start changes nothing.
        assert_eq!(place.sh(&instance, "ls; cat kept ~/home").await, "kept\nshut\n1\n2");
        assert_eq!(place.backend.start(&instance, &request).await.unwrap(), again);
        place.down(&instance).await;
        let error = place.backend.start(&instance, &request).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Lost);
    });
}

#[test]
fn limits_hold_for_the_whole_or_are_refused() {
    as_everybody("limits_hold_for_the_whole_or_are_refused", async |place| {
        let can = place.backend.probe().await.unwrap();
        assert_eq!(
            can.level(Feature::LimitPids),
            Level::Full,
            "{}",
            can.evidence(Feature::LimitPids)
        );
        let run = place.run_in(CreateSandbox::new().pids(20), BOMB).await;
        let started: usize = run.stdout.text().trim().parse().unwrap();
        assert!((5..20).contains(&started), "{started} processes");
        // The same without a limit: the line does start more where it may.
        let run = place.run_in(CreateSandbox::new(), BOMB).await;
        assert_eq!(run.stdout.text().trim(), "40");

        for (feature, spec) in [
            (Feature::LimitMemory, CreateSandbox::new().memory(64 << 20)),
            (Feature::LimitCpu, CreateSandbox::new().cpu_millis(500)),
        ] {
            if can.level(feature) != Level::Full {
                let refused = place.backend.provision(&Place::request(spec)).await.unwrap_err();
                assert_eq!(refused.kind(), ErrorKind::Unsupported, "{refused}");
            }
        }
        let grab = |mebibytes| format!("exec python3 -c 'x = bytearray({mebibytes} << 20)'");
        if can.level(Feature::LimitMemory) == Level::Full {
            let spec = || CreateSandbox::new().memory(64 << 20);
            let run = place.run_in(spec(), &grab(200)).await;
            assert_eq!(run.outcome, Outcome::OutOfMemory);
            assert!(place.run_in(spec(), &grab(10)).await.outcome.is_success());
        } else {
            let spec = CreateSandbox::new().memory(256 << 20).accept_limits_per_process();
            assert_eq!(place.run_in(spec, &grab(500)).await.outcome, Outcome::Exited(1));
        }
        if can.level(Feature::LimitCpu) == Level::Full {
            let spec = CreateSandbox::new().cpu_millis(200);
            let spin = "timeout 1 sh -c 'while :; do :; done'";
            let run = place.run_in(spec, spin).await;
            assert!(run.cpu < Duration::from_millis(600), "{:?}", run.cpu);
        }
    });
}

/// Says how many of 40 processes could be started.
const BOMB: &str = "python3 -c '
import os, time
started = 0
for _ in range(40):
    try:
        if os.fork() == 0: time.sleep(2); os._exit(0)
        started += 1
    except OSError: break
print(started)'";

#[test]
fn a_paused_one_stands_still() {
    as_everybody("a_paused_one_stands_still", async |place| {
        let backend = &place.backend;
        let can = backend.probe().await.unwrap();
        let (instance, _) = place.up(CreateSandbox::new()).await;
        if can.level(Feature::Pause) == Level::Full {
            backend.pause(&instance).await.unwrap();
            assert_eq!(backend.inspect(&instance).await.unwrap(), InstanceState::Paused);
            backend.resume(&instance).await.unwrap();
            assert_eq!(place.sh(&instance, "echo on").await, "on");
            // One that is paused can be ended.
            backend.pause(&instance).await.unwrap();
        } else {
            let error = backend.pause(&instance).await.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Unsupported);
        }
        place.down(&instance).await;
    });
}

#[test]
fn whatever_was_left_in_it_is_removed() {
    as_everybody("whatever_was_left_in_it_is_removed", async |place| {
        let (instance, _) = place.up(CreateSandbox::new()).await;
        let line = "mkdir -p a/b; touch a/b/c; chmod 0 a/b a; cd /tmp; \
                    for i in $(seq 2000); do mkdir d && cd -P d || exit 1; done; \
                    setsid sleep 1000 > /dev/null 2>&1 &";
        place.sh(&instance, line).await;
        place.down(&instance).await;
        assert_eq!(place.backend.inspect(&instance).await.unwrap(), InstanceState::Gone);
    });
}

#[test]
fn half_made_and_half_removed_ones_are_found() {
    as_everybody("half_made_and_half_removed_ones_are_found", async |place| {
        let backend = &place.backend;
        let (instance, request) = place.up(CreateSandbox::new()).await;
        let dir = place.state.join("instances").join(instance.id.as_str());
        let found = backend.inventory().await.unwrap();
        assert_eq!(found.len(), 1);
        assert_eq!((&found[0].owner, found[0].state), (&request.owner, InstanceState::Running));
        assert_eq!(found[0].instance, instance);

        // As after a crash before bwrap said anything, and as after one in the middle of a removal.
        backend.stop(&instance).await.unwrap();
        fs::remove_file(dir.join("bwrap.json")).unwrap();
        let trash = dir.with_file_name(format!(".trash-{}", instance.id));
        for half in [dir.clone(), trash.clone()] {
            if half == trash {
                fs::rename(&dir, &trash).unwrap();
            }
            let found = backend.inventory().await.unwrap();
            assert_eq!(found.len(), 1, "{half:?}");
            assert_eq!(found[0].instance.id, instance.id);
            assert_eq!(found[0].state, InstanceState::Stopped);
        }
        let found = backend.inventory().await.unwrap();
        place.down(&found[0].instance).await;
        assert!(backend.inventory().await.unwrap().is_empty());
    });
}

#[test]
fn a_dropped_provision_leaves_nothing() {
    as_everybody("a_dropped_provision_leaves_nothing", async |place| {
        // Everything that is made once is made, so that the times below are those of an instance.
        let (instance, _) = place.up(CreateSandbox::new()).await;
        place.down(&instance).await;
        let mark = format!("dropped-{}", std::process::id());
        for tenths in 0..60 {
            let mut request = Place::request(CreateSandbox::new());
            request.hostname = mark.clone();
            let bound = Duration::from_micros(tenths * 400);
            let made = tokio::time::timeout(bound, place.backend.provision(&request)).await;
            if let Ok(made) = made {
                place.down(&made.unwrap()).await;
            }
        }
        let begin = Instant::now();
        while fs::read_dir(place.state.join("instances")).unwrap().count() > 0 {
            assert!(begin.elapsed() < Duration::from_secs(10), "an instance is left");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        let left = || {
            let entries = fs::read_dir("/proc").unwrap().flatten();
            let lines = entries.map(|e| fs::read(e.path().join("cmdline")).unwrap_or_default());
            lines.filter(|line| String::from_utf8_lossy(line).contains(&mark)).count()
        };
        while left() > 0 {
            assert!(begin.elapsed() < Duration::from_secs(10), "a process is left");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    });
}

#[test]
fn a_root_of_its_own() {
    as_everybody("a_root_of_its_own", async |place| {
        let busybox =
            ["/usr/bin/busybox", "/bin/busybox"].into_iter().find(|p| fs::exists(p).unwrap());
        let Some(busybox) = busybox else {
            eprintln!("skipped: there is no busybox");
            return;
        };
        let root = place.dir.join("root");
        fs::create_dir_all(root.join("bin")).unwrap();
        fs::copy(busybox, root.join("bin/busybox")).unwrap();
        symlink("busybox", root.join("bin/sh")).unwrap();
        let spec = CreateSandbox::new().root(Root::Directory(root.clone()));
        let (instance, _) = place.up(spec).await;
        let line = "busybox ls /usr 2>/dev/null; echo x > /new; busybox cat /new /etc/hostname";
        let seen = place.sh(&instance, line).await;
        assert!(seen.starts_with("x\nsbx-"), "{seen}");
        place.down(&instance).await;
        assert_eq!(fs::read_dir(&root).unwrap().count(), 1);
    });
}

#[test]
fn a_network_is_there_only_if_asked_for() {
    as_everybody("a_network_is_there_only_if_asked_for", async |place| {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let line = format!("bash -c 'exec 3<>/dev/tcp/127.0.0.1/{port}' && tail -1 /etc/hosts");
        let denied = place.run_in(CreateSandbox::new().network(Network::Deny), &line).await;
        assert_eq!(denied.outcome, Outcome::Exited(1), "{}", denied.stderr.text());
        let shared = place.run_in(CreateSandbox::new().network(Network::Host), &line).await;
        assert!(shared.outcome.is_success(), "{}", shared.stderr.text());
        assert!(shared.stdout.text().starts_with("127.0.1.1\tsbx-"), "{}", shared.stdout.text());
    });
}

#[test]
fn what_is_missing_is_said_in_one_message() {
    here(async |place| {
        let backend = sandbox_bwrap::BwrapBackend::builder()
            .state_dir(&place.state)
            .program("no-such-bwrap")
            .build()
            .unwrap();
        for error in [
            backend.probe().await.unwrap_err(),
            backend.provision(&Place::request(CreateSandbox::new())).await.unwrap_err(),
        ] {
            assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
            assert!(error.to_string().contains("install bubblewrap"), "{error}");
            assert!(!error.is_retryable());
        }
        assert!(backend.inventory().await.unwrap().is_empty());
    });
}

#[test]
fn a_failure_inside_says_what_failed() {
    as_everybody("a_failure_inside_says_what_failed", async |place| {
        // A file where the guest has to make a directory.
        let root = place.dir.join("root");
        fs::create_dir_all(&root).unwrap();
        fs::write(root.join("proc"), "").unwrap();
        let spec = CreateSandbox::new().root(Root::Directory(root));
        let error = place.backend.provision(&Place::request(spec)).await.unwrap_err();
        let text = error.to_string();
        assert!(text.contains("move the mount /proc to /.sbx/root/proc"), "{text}");
        assert!(text.contains(" of sbx_") && text.contains("(bwrap)"), "{text}");
    });
}

#[test]
fn a_root_harness_never_runs_a_sandbox_as_root() {
    if !is_root() {
        return;
    }
    here(async |place| {
        let (instance, _) = place.up(CreateSandbox::new()).await;
        let status = fs::read_to_string(format!("/proc/{}/status", instance.data["pid"])).unwrap();
        let uid = status.lines().find(|line| line.starts_with("Uid:")).unwrap();
        assert_eq!(uid, "Uid:\t1900000000\t1900000000\t1900000000\t1900000000");
        let groups = status.lines().find(|line| line.starts_with("Groups:")).unwrap();
        assert_eq!(groups.trim(), "Groups:");
        place.down(&instance).await;
    });
}

#[test]
fn another_process_picks_it_up() {
    as_everybody("another_process_picks_it_up", async |place| {
        let (instance, _) = place.up(CreateSandbox::new()).await;
        let text = serde_json::to_string(&instance).unwrap();
        let read: sandbox_core::Instance = serde_json::from_str(&text).unwrap();
        let other = sandbox_bwrap::BwrapBackend::builder().state_dir(&place.state).build().unwrap();
        assert_eq!(other.inspect(&read).await.unwrap(), InstanceState::Running);
        other.teardown(&read).await.unwrap();
        assert_eq!(place.backend.inspect(&instance).await.unwrap(), InstanceState::Gone);
    });
}
