//! A large file goes up and down with constant memory, here and in the guest. In a process of its own, as
//! it is this process's memory that is measured.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::{fs, io::Write, path::Path};

use sandbox_bwrap::BwrapBackend;
use sandbox_core::{
    Command, CreateSandbox, DownloadOptions, SandboxManager, Suppressed, UploadOptions,
};

/// Large enough that it cannot be taken for what is on its way; no hole, which would take no time.
const SIZE: u64 = 512 << 20;

/// The largest resident set so far, in kibibytes.
fn peak(status: &str) -> u64 {
    let line = status.lines().find(|line| line.starts_with("VmHWM:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse().unwrap()
}

fn own_peak() -> u64 {
    peak(&fs::read_to_string("/proc/self/status").unwrap())
}

fn write(path: &Path) {
    let mut file = fs::File::create(path).unwrap();
    let piece: Vec<u8> = (0..=250).cycle().take(1 << 20).collect();
    for _ in 0..SIZE >> 20 {
        file.write_all(&piece).unwrap();
    }
}

#[tokio::test]
async fn a_large_file_goes_up_and_down_with_little_memory() {
    let dir = tempfile::Builder::new().prefix("sandbox-test-").tempdir().unwrap();
    let backend = BwrapBackend::builder().state_dir(dir.path().join("bwrap")).build().unwrap();
    let manager = SandboxManager::builder()
        .state_dir(dir.path().join("state"))
        .backend(backend)
        .build()
        .await
        .unwrap();
    let sandbox = manager.create(CreateSandbox::new(), &Suppressed).await.unwrap();
    let (here, back) = (dir.path().join("large"), dir.path().join("back"));
    write(&here);
    let before = own_peak();

    let files = sandbox.files();
    let up = files.upload(&here, "large", UploadOptions::new(), &Suppressed).await.unwrap();
    assert_eq!(up.bytes, SIZE);
    fs::remove_file(&here).unwrap();
    let down = files.download("large", &back, DownloadOptions::new()).await.unwrap();
    assert_eq!(down.bytes, SIZE);
    assert_eq!(fs::metadata(&back).unwrap().len(), SIZE);
    // As a stream of bytes too.
    let reader = files.reader("large", SIZE / 2).await.unwrap();
    assert_eq!(files.write_from("half", reader, &Suppressed).await.unwrap(), SIZE / 2);

    let grown = (own_peak() - before) / 1024;
    assert!(grown < 64, "the harness grew by {grown} MiB");
    let status = Command::new("cat").arg("/proc/1/status");
    let status = sandbox.exec(status, &Suppressed).await.unwrap();
    let guest = peak(&status.stdout.text()) / 1024;
    assert!(guest < 64, "the guest grew to {guest} MiB");
    sandbox.destroy(&Suppressed).await.unwrap();
}
