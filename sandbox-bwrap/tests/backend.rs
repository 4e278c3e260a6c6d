//! The backend against the real bwrap.
#![cfg(target_os = "linux")]

use std::{path::Path, process::Command};

use sandbox_bwrap::BwrapBackend;
use sandbox_core::{CreateSandbox, InstanceState, OwnerId, Provision, SandboxBackend, SandboxId};

#[tokio::test(flavor = "multi_thread")]
async fn probe_first() {
    let dir = tempfile::tempdir().unwrap();
    let backend = BwrapBackend::builder().state_dir(dir.path()).build().unwrap();
    let found = backend.probe().await.unwrap();
    eprintln!("{found:#?}");
    let request = Provision::new(SandboxId::new(), OwnerId::new(), CreateSandbox::new().spec);
    for _ in 0..10 {
        let request = Provision::new(SandboxId::new(), OwnerId::new(), CreateSandbox::new().spec);
        let begin = std::time::Instant::now();
        let i = backend.provision(&request).await.unwrap();
        let a = begin.elapsed();
        backend.teardown(&i).await.unwrap();
        eprintln!("{a:?} {:?}", begin.elapsed() - a);
    }
    let i = backend.provision(&request).await.unwrap();
    let hint = backend.reachability(&i).await.unwrap().report().local_exec_hint.unwrap();
    eprintln!("{hint}");
    let out = Command::new("sh").arg("-c").arg(format!("{hint} -c 'id; ls -la / /dev /run /run/sandbox /workspace /tmp /etc; env; cat /proc/self/status | grep -E \"Cap|Secc|NoNew|Groups|Uid\"; cat /proc/self/mountinfo; ls -la /home /proc/1/; cat /etc/machine-id /etc/hosts /etc/hostname; java -version; python3 --version; perl -v|head -2'")).output().unwrap();
    eprintln!("{}{}", String::from_utf8_lossy(&out.stdout), String::from_utf8_lossy(&out.stderr));
    assert_eq!(backend.inspect(&i).await.unwrap(), InstanceState::Running);
    backend.teardown(&i).await.unwrap();
    let _ = Path::new("/");
}
