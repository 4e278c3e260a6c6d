//! The conformance suite on the backend that is an example: what it cannot do is skipped, with its reason.

use std::{process::ExitCode, sync::Arc};

use sandbox_conformance::{Subject, main as run};
use sandbox_examples::custom_backend::CustomBackend;

fn main() -> ExitCode {
    run(vec![Subject::new("custom", |state| Ok(Arc::new(CustomBackend::new(state)?)))])
}
