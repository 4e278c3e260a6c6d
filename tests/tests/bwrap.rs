//! The conformance suite on bwrap: as whoever runs it and, where that is root, as an ordinary user too.

use std::{process::ExitCode, sync::Arc};

use sandbox_bwrap::BwrapBackend;
use sandbox_conformance::{Subject, main as run};

fn main() -> ExitCode {
    let subject = |name| {
        Subject::new(name, |state| Ok(Arc::new(BwrapBackend::builder().state_dir(state).build()?)))
    };
    // The owner of `/` is root, and a root harness sees it as itself.
    let root = std::fs::metadata("/proc/self").is_ok_and(|this| {
        use std::os::unix::fs::MetadataExt;
        this.uid() == 0
    });
    let mut subjects = vec![subject("bwrap")];
    if root || std::env::var_os("SANDBOX_CONFORMANCE_CHILD").is_some() {
        subjects.push(subject("bwrap_user").run_as(65534));
    }
    run(subjects)
}
