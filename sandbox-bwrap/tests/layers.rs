//! What a sandbox changed, lineages without end, and roots of somebody else's, on the real bwrap.
#![cfg(target_os = "linux")]
#![allow(
    clippy::unwrap_used,
    clippy::print_stderr,
    reason = "these are tests, partly in functions that clippy cannot tell as such"
)]

#[allow(dead_code, reason = "the tests share more than each of them needs")]
mod support;

use std::{
    fs,
    os::unix::fs::{PermissionsExt, symlink},
    path::Path,
};

use sandbox_core::{
    ChangeKind, CreateSandbox, ErrorKind, Instance, InstanceState, Root, SandboxBackend,
    SnapshotData, SnapshotRequest,
};
use support::{Place, as_everybody};

/// The changes, sorted, each with a letter.
async fn changes(place: &Place, instance: &Instance, since: Option<&SnapshotData>) -> Vec<String> {
    let mut changes = place.backend.changes(instance, since).await.unwrap();
    changes.sort();
    let line = |change: &sandbox_core::Change| {
        let letter = match change.kind {
            ChangeKind::Added => 'A',
            ChangeKind::Modified => 'M',
            ChangeKind::Deleted => 'D',
        };
        format!("{letter} {}", change.path.display())
    };
    changes.iter().map(line).collect()
}

#[test]
fn a_snapshot_of_an_idle_one_is_its_layer() {
    as_everybody("a_snapshot_of_an_idle_one_is_its_layer", async |place| {
        let source = place.dir.join("src");
        fs::create_dir_all(source.join("dir")).unwrap();
        fs::write(source.join("dir/old"), "0").unwrap();
        let backend = &place.backend;
        let (first, request) = place.up(CreateSandbox::new().workspace(&source)).await;
        place.sh(&first, "echo 1 > v; rm -r dir; mkdir dir; echo 1 > dir/new; chmod 750 .").await;
        let (a, second) = place.sealed(&first, &request).await;
        assert_eq!(backend.inspect(&first).await.unwrap(), InstanceState::Gone);
        assert_eq!(place.sh(&second, "cat v; ls dir; stat -c %a .").await, "1\nnew\n750");
        place.sh(&second, "echo 2 > v; rm dir/new; echo x > /tmp/x").await;
        let (b, third) = place.sealed(&second, &request).await;
        place.sh(&third, "echo 3 > v").await;

        // What each snapshot shows, and that a later writer changes none of it.
        for _ in 0..2 {
            for (snapshot, shows) in [(&a, "1\nnew"), (&b, "2\n/tmp/x")] {
                let mut fork = Place::request(CreateSandbox::new().workspace(&source));
                fork.from = Some(snapshot.clone());
                let instance = backend.provision(&fork).await.unwrap();
                let line = "cat v; ls dir; ls /tmp/x 2>/dev/null; echo changed > v; true";
                assert_eq!(place.sh(&instance, line).await, shows);
                place.down(&instance).await;
            }
        }

        // What others stand on stays as long as they do.
        backend.delete_snapshot(&a).await.unwrap();
        backend.delete_snapshot(&a).await.unwrap();
        assert!(place.state.join("layers").join(a.id.as_str()).exists());
        backend.delete_snapshot(&b).await.unwrap();
        assert_eq!(place.sh(&third, "cat v; ls -A dir").await, "3");
        place.down(&third).await;
        assert_eq!(fs::read_dir(place.state.join("layers")).unwrap().count(), 0);
        let mut request = request;
        request.from = Some(b);
        assert_eq!(backend.provision(&request).await.unwrap_err().kind(), ErrorKind::NotFound);
    });
}

#[test]
fn a_snapshot_of_a_busy_one_is_a_copy() {
    as_everybody("a_snapshot_of_a_busy_one_is_a_copy", async |place| {
        let source = place.dir.join("src");
        fs::create_dir_all(source.join("dir")).unwrap();
        fs::write(source.join("dir/old"), "0").unwrap();
        let (instance, request) = place.up(CreateSandbox::new().workspace(&source)).await;
        let line = "echo 1 > v; rm -r dir; mkdir dir; mkdir shut; echo 1 > shut/x; chmod 0 shut; \
                    ln v hard; ln -s v soft; mkfifo fifo; truncate -s 1M sparse";
        place.sh(&instance, line).await;
        let taken = place.snapshot(&instance, &request, false).await;
        assert!(taken.successor.is_none());
        assert_eq!(place.sh(&instance, "cat v; echo 2 > v; ls dir").await, "1");

        let mut fork = Place::request(CreateSandbox::new().workspace(&source));
        fork.from = Some(taken.data.clone());
        let other = place.backend.provision(&fork).await.unwrap();
        let line = "cat v soft; ls -A dir; stat -c %h:%b v; stat -c %b sparse; test -p fifo; \
                    stat -c %a shut; chmod 700 shut; cat shut/x";
        assert_eq!(place.sh(&other, line).await, "1\n1\n2:8\n0\n0\n1");
        place.down(&other).await;
        place.down(&instance).await;
        place.backend.delete_snapshot(&taken.data).await.unwrap();
        assert_eq!(fs::read_dir(place.state.join("layers")).unwrap().count(), 0);
    });
}

#[test]
fn an_interrupted_snapshot_is_finished_or_adopted() {
    as_everybody("an_interrupted_snapshot_is_finished_or_adopted", async |place| {
        let backend = &place.backend;
        let (instance, request) = place.up(CreateSandbox::new()).await;
        place.sh(&instance, "echo 1 > v").await;
        // As it is after a crash between the two renames of a seal.
        backend.stop(&instance).await.unwrap();
        let (data, _) = {
            // The layer's directory of a real one, taken from another sandbox.
            let (other, other_request) = place.up(CreateSandbox::new()).await;
            let (data, successor) = place.sealed(&other, &other_request).await;
            place.down(&successor).await;
            (data, ())
        };
        let layers = place.state.join("layers");
        let id = sandbox_core::SnapshotId::new();
        let half = layers.join(format!(".new-{id}"));
        fs::rename(layers.join(data.id.as_str()), &half).unwrap();
        for part in ["root", "workspace"] {
            fs::remove_dir_all(half.join(part)).unwrap();
        }
        let meta = fs::read_to_string(half.join("meta.json")).unwrap();
        let mut meta: serde_json::Value = serde_json::from_str(&meta).unwrap();
        meta["id"] = id.as_str().into();
        meta["stack"] = serde_json::json!([id.as_str()]);
        meta["sealed_from"] = instance.id.as_str().into();
        fs::write(half.join("meta.json"), meta.to_string()).unwrap();
        let upper = place.state.join("instances").join(instance.id.as_str()).join("fs/upper");
        fs::rename(upper.join("root"), half.join("root")).unwrap();

        // A start makes the layer whole and goes on above it.
        let again = backend.start(&instance, &request).await.unwrap();
        assert_eq!(place.sh(&again, "cat v; echo 2 > v").await, "1");
        assert_eq!(again.data["layers"], serde_json::json!([id.as_str()]));

        // The same snapshot asked for twice is the same snapshot, with the same successor.
        let mut successor = request.clone();
        successor.instance = sandbox_core::InstanceId::new();
        let snapshot = sandbox_core::SnapshotId::new();
        let wanted = SnapshotRequest::new(again.clone(), snapshot, true, successor);
        let first = backend.snapshot(&wanted).await.unwrap();
        let second = backend.snapshot(&wanted).await.unwrap();
        assert_eq!((&first.data, &first.successor), (&second.data, &second.successor));
        let last = first.successor.unwrap();
        assert_eq!(place.sh(&last, "cat v").await, "2");
        place.down(&last).await;
    });
}

#[test]
fn a_long_lineage_stays_usable() {
    as_everybody("a_long_lineage_stays_usable", async |place| {
        let (mut instance, request) = place.up(CreateSandbox::new()).await;
        let mut snapshots = Vec::new();
        for n in 0..60 {
            let line = format!("echo {n} > v; echo {n} > f{n}; rm -f f{}", n - 2);
            place.sh(&instance, &line).await;
            let (data, successor) = place.sealed(&instance, &request).await;
            snapshots.push(data);
            instance = successor;
        }
        assert_eq!(place.sh(&instance, "cat v; ls").await, "59\nf58\nf59\nv");
        place.down(&instance).await;
        for n in [0, 29, 59] {
            let mut request = Place::request(CreateSandbox::new());
            request.from = Some(snapshots[n].clone());
            let instance = place.backend.provision(&request).await.unwrap();
            assert_eq!(place.sh(&instance, "cat v").await, n.to_string());
            place.down(&instance).await;
        }
    });
}

#[test]
fn changes_are_told_in_the_whole_filesystem() {
    as_everybody("changes_are_told_in_the_whole_filesystem", async |place| {
        let (source, tool) = (place.dir.join("src"), place.dir.join("tool"));
        fs::create_dir_all(source.join("sub")).unwrap();
        fs::write(source.join("sub/file"), "x").unwrap();
        fs::set_permissions(&source, fs::Permissions::from_mode(0o700)).unwrap();
        fs::create_dir(&tool).unwrap();
        let spec = CreateSandbox::new()
            .workspace(&source)
            .mount_read_write(&tool, "/opt/a/tool")
            .mount_read_only(&tool, "/workspace/made/tool");
        let (instance, request) = place.up(spec).await;
        assert_eq!(changes(&place, &instance, None).await, [""; 0]);
        let line = "echo 1 > /opt/a/tool/mounted; echo 1 > /tmp/x; echo 1 > ~/y; echo 1 > /run/z; \
                    echo >> /etc/passwd; mkdir -p /new/deep; chmod 0 /new/deep /new; chmod 711 .; \
                    rm /etc/nsswitch.conf; echo 1 > /opt/a/z; rm sub/file; echo 1 > made/z; \
                    mkdir deep; cd deep; n=$(printf %0100d 0); \
                    for i in $(seq 60); do mkdir $n && cd -P $n || exit 1; done";
        place.sh(&instance, line).await;
        let found = changes(&place, &instance, None).await;
        let (deep, found): (Vec<_>, Vec<_>) =
            found.into_iter().partition(|change| change.starts_with("A /workspace/deep"));
        let wanted = [
            "D /etc/nsswitch.conf",
            "M /etc/passwd",
            "A /home/sandbox/y",
            "A /new",
            "A /new/deep",
            "A /opt/a/z",
            "A /tmp/x",
            "M /workspace",
            "A /workspace/made/z",
            "D /workspace/sub/file",
        ];
        assert_eq!(found, wanted);
        // As deep as a path can name.
        assert!((35..45).contains(&deep.len()), "{}", deep.len());

        place.sh(&instance, "rm -rf deep").await;
        let (snapshot, instance) = place.sealed(&instance, &request).await;
        assert_eq!(changes(&place, &instance, Some(&snapshot)).await, [""; 0]);
        assert_eq!(changes(&place, &instance, None).await, wanted);
        place.sh(&instance, "chmod 755 .; echo 1 > /etc/nsswitch.conf").await;
        let found = changes(&place, &instance, Some(&snapshot)).await;
        assert_eq!(found, ["A /etc/nsswitch.conf", "M /workspace"]);
        place.down(&instance).await;
    });
}

#[test]
fn a_lineage_goes_on_without_limit() {
    as_everybody("a_lineage_goes_on_without_limit", async |place| {
        let source = place.dir.join("src");
        fs::create_dir_all(source.join("old")).unwrap();
        fs::write(source.join("old/file"), "x").unwrap();
        fs::write(source.join("deleted"), "x").unwrap();
        let spec = || CreateSandbox::new().workspace(&source);
        let (mut instance, request) = place.up(spec()).await;
        let line = "rm deleted; rm -r old; mkdir old; echo 1 > old/new; mkdir shut; echo 1 > shut/x; \
                    chmod 0 shut; echo 1 > one; ln one two; touch -d @1 one; echo r > /tmp/root";
        place.sh(&instance, line).await;
        let mut snapshots = Vec::new();
        for n in 0..106 {
            if n > 0 {
                place
                    .sh(&instance, &format!("echo {n} > v; echo {n} > f{n}; rm -f f{}", n - 2))
                    .await;
            }
            let (data, successor) = place.sealed(&instance, &request).await;
            snapshots.push(data);
            instance = successor;
        }
        let tall = |n: usize| snapshots[n].data["layers"].as_array().unwrap().len();
        assert_eq!([99, 100, 105].map(tall), [100, 1, 6]);
        assert_eq!(instance.data["layers"].as_array().unwrap().len(), 6);
        let line = "cat v /tmp/root; ls; ls old; stat -c '%h %Y' two; stat -c %a shut; chmod 700 shut; \
                    cat shut/x; chmod 0 shut";
        let shows = "105\nr\nf104\nf105\nold\none\nshut\ntwo\nv\nnew\n2 1\n0\n1";
        assert_eq!(place.sh(&instance, line).await, shows);

        // What a merge made is what was merged.
        assert_eq!(changes(&place, &instance, Some(&snapshots[105])).await, [""; 0]);
        let since = changes(&place, &instance, Some(&snapshots[99])).await;
        let gone = [98, 99].map(|n| format!("D /workspace/f{n}"));
        let new = [104, 105].map(|n| format!("A /workspace/f{n}"));
        let mut wanted = [&new[..], &gone[..], &["M /workspace/v".to_owned()]].concat();
        wanted.sort_by_key(|line| line[2..].to_owned());
        assert_eq!(since, wanted);

        // One in which something runs is merged just the same, and stays where it is.
        place.down(&instance).await;
        let mut fork = Place::request(spec());
        fork.from = Some(snapshots[99].clone());
        let busy = place.backend.provision(&fork).await.unwrap();
        place.sh(&busy, "echo busy > v").await;
        let taken = place.snapshot(&busy, &fork, false).await;
        assert!(taken.successor.is_none());
        assert_eq!(taken.data.data["layers"].as_array().unwrap().len(), 1);
        assert_eq!(changes(&place, &busy, Some(&taken.data)).await, [""; 0]);
        place.down(&busy).await;

        // The merged ones need none of the others.
        for snapshot in &snapshots[..100] {
            place.backend.delete_snapshot(snapshot).await.unwrap();
        }
        assert_eq!(fs::read_dir(place.state.join("layers")).unwrap().count(), 7);
        for (snapshot, shows) in [(&snapshots[100], "100\nnew"), (&taken.data, "busy\nnew")] {
            let mut fork = Place::request(spec());
            fork.from = Some(snapshot.clone());
            let instance = place.backend.provision(&fork).await.unwrap();
            let line = "cat v; ls old; test ! -e deleted";
            assert_eq!(place.sh(&instance, line).await, shows);
            place.down(&instance).await;
        }
    });
}

/// A root with a static shell; `None` where there is none.
fn root(place: &Place, name: &str) -> Option<std::path::PathBuf> {
    let busybox = ["/usr/bin/busybox", "/bin/busybox"].into_iter().find(|p| Path::new(p).exists());
    let Some(busybox) = busybox else {
        eprintln!("skipped: there is no busybox");
        return None;
    };
    let root = place.dir.join(name);
    fs::create_dir_all(root.join("bin")).unwrap();
    fs::copy(busybox, root.join("bin/busybox")).unwrap();
    symlink("busybox", root.join("bin/sh")).unwrap();
    Some(root)
}

#[test]
fn links_in_a_root_lead_nowhere_else() {
    as_everybody("links_in_a_root_lead_nowhere_else", async |place| {
        let Some(good) = root(&place, "good") else { return };
        let outside = place.dir.join("outside");
        fs::create_dir(&outside).unwrap();
        fs::create_dir_all(good.join("settings")).unwrap();
        symlink("/settings", good.join("etc")).unwrap();
        symlink("../run/systemd/resolve/stub.conf", good.join("settings/resolv.conf")).unwrap();
        symlink(outside.join("hosts"), good.join("settings/hosts")).unwrap();
        symlink("var/home", good.join("home")).unwrap();
        let spec = CreateSandbox::new().root(Root::Directory(good));
        let (instance, _) = place.up(spec).await;
        let line = "busybox cat /etc/hosts /etc/resolv.conf /etc/hostname; busybox id -un; \
                    busybox test -d ~ && busybox grep -c : /etc/passwd";
        let seen = place.sh(&instance, line).await;
        for part in ["127.0.0.1\tlocalhost", "no network", "sbx-", "\nsandbox\n1"] {
            assert!(seen.contains(part), "{part}: {seen}");
        }
        assert_eq!(changes(&place, &instance, None).await, [""; 0]);
        place.sh(&instance, "busybox rm /etc/x 2>/dev/null; echo 1 > /etc/own").await;
        assert_eq!(changes(&place, &instance, None).await, ["A /settings/own"]);
        place.down(&instance).await;
        assert_eq!(fs::read_dir(&outside).unwrap().count(), 0);

        for name in ["run", "proc", "dev", "workspace"] {
            let odd = root(&place, &format!("odd-{name}")).unwrap();
            symlink(&outside, odd.join(name)).unwrap();
            let spec = CreateSandbox::new().root(Root::Directory(odd));
            let error = place.backend.provision(&Place::request(spec)).await.unwrap_err();
            let text = error.to_string();
            // Of one that leads to itself, as where temporary files are below it, the kernel says so.
            let says =
                [format!("symbolic link at /{name}"), format!("/{name} in the root: Too many")];
            assert!(says.iter().any(|says| text.contains(says)), "{text}");
        }
        for leads_to in ["/run/sandbox", "/proc/self/root/dev", "/workspace"] {
            let odd = root(&place, &format!("etc{}", leads_to.replace('/', "-"))).unwrap();
            symlink(leads_to, odd.join("etc")).unwrap();
            let spec = CreateSandbox::new().root(Root::Directory(odd));
            // Whatever it is, it is not taken for a sandbox with the wrong files in the wrong places.
            match place.backend.provision(&Place::request(spec)).await {
                Ok(instance) => {
                    let line =
                        "busybox test -x /run/sandbox/guest -a -d /proc/self -a -c /dev/null";
                    place.sh(&instance, line).await;
                    place.down(&instance).await;
                }
                Err(error) => assert!(error.to_string().contains("/hostname"), "{error}"),
            }
        }
        assert_eq!(fs::read_dir(&outside).unwrap().count(), 0);
    });
}

#[test]
fn a_root_that_knows_the_user_keeps_its_users() {
    as_everybody("a_root_that_knows_the_user_keeps_its_users", async |place| {
        let Some(root) = root(&place, "root") else { return };
        fs::create_dir(root.join("etc")).unwrap();
        fs::write(root.join("etc/passwd"), "dev:x:1000:1000::/home/dev:/bin/sh\n").unwrap();
        let spec = CreateSandbox::new().root(Root::Directory(root.clone()));
        let (instance, _) = place.up(spec).await;
        let line = "busybox id -un; busybox id -gn; echo x >> /etc/passwd; ! echo x >> /etc/group";
        assert_eq!(place.sh(&instance, line).await, "dev\nsandbox");
        assert_eq!(changes(&place, &instance, None).await, ["M /etc/passwd"]);
        place.down(&instance).await;
        assert!(!root.join("etc/group").exists());
    });
}
