//! No step of a snapshot or a rewind holds a filesystem in memory. In a process of its own, as it is
//! this process's memory that is measured.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::time::Duration;

use sandbox_bwrap::BwrapBackend;
use sandbox_core::{Command, CreateSandbox, SandboxManager, Suppressed};

/// The largest resident set so far, in kibibytes.
fn peak() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("VmHWM:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse().unwrap()
}

#[tokio::test]
async fn two_hundred_megabytes_in_two_thousand_files_take_little_memory() {
    let dir = tempfile::Builder::new().prefix("sandbox-test-").tempdir().unwrap();
    let backend = BwrapBackend::builder().state_dir(dir.path().join("bwrap")).build().unwrap();
    let manager = SandboxManager::builder()
        .state_dir(dir.path().join("state"))
        .backend(backend)
        .build()
        .await
        .unwrap();
    let sandbox = manager.create(CreateSandbox::new(), &Suppressed).await.unwrap();
    let before = peak();

    let write =
        "i=0; while [ $i -lt 2000 ]; do head -c 104858 /dev/urandom > f$i; i=$((i+1)); done";
    let run = sandbox.exec(Command::shell(write), &Suppressed).await.unwrap();
    assert!(run.outcome.is_success(), "{}", run.stderr.text());
    // While something runs the files are copied; while nothing runs they become a layer as they are.
    let runs = sandbox.spawn(Command::new("sleep").arg("1000"), &Suppressed).await.unwrap();
    let busy = sandbox.snapshot("busy", &Suppressed).await.unwrap();
    drop(runs);
    tokio::time::timeout(Duration::from_secs(60), async {
        let idle = "! grep -qs sleep /proc/[0-9]*/comm";
        while !sandbox.exec(Command::shell(idle), &Suppressed).await.unwrap().outcome.is_success() {
        }
    })
    .await
    .unwrap();
    sandbox.snapshot("idle", &Suppressed).await.unwrap();
    sandbox.rewind(&busy.id, &Suppressed).await.unwrap();
    let count = sandbox.exec(Command::shell("ls | wc -l"), &Suppressed).await.unwrap();
    assert_eq!(count.stdout.text().trim(), "2000");

    let size = sandbox.snapshot_size(&busy).await.unwrap();
    assert!(size > 200 << 20, "the busy one measures {size} bytes");
    let grown = (peak() - before) / 1024;
    assert!(grown < 64, "the harness grew by {grown} MiB");
    sandbox.destroy(&Suppressed).await.unwrap();
}
