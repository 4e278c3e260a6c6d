//! The conformance suite on plain directories: what needs no isolation must hold without it.

use std::{process::ExitCode, sync::Arc};

use sandbox_conformance::{Subject, fake::DirectoryBackend, main as run};

fn main() -> ExitCode {
    run(vec![Subject::new("fake", |state| Ok(Arc::new(DirectoryBackend::new(state))))])
}
