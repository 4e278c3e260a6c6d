//! The conformance suite on Docker, with the engine and the image that `scripts/containers` provides.

use std::{
    process::ExitCode,
    sync::{Arc, OnceLock},
};

use sandbox_conformance::{Subject, main as run};
use sandbox_core::Result;
use sandbox_docker::{DockerBackend, PullPolicy};

/// Set to have all cases on Podman too.
const WHOLE: &str = "SANDBOX_PODMAN_WHOLE";

/// What Podman does as Docker does. It stumbles over images that others remove at that moment, and over
/// containers that are started again while their end is still being noted.
fn part(case: &str) -> bool {
    ["starts::", "output::", "ends::", "files::"].iter().any(|about| case.starts_with(about))
}

fn main() -> ExitCode {
    let mut subjects = Vec::new();
    for (name, variable) in [("docker", "SANDBOX_DOCKER_HOST"), ("podman", "SANDBOX_PODMAN_HOST")] {
        let host = std::env::var(variable);
        match (host, std::env::var("SANDBOX_TEST_IMAGE")) {
            (Ok(host), Ok(image)) => {
                let subject = subject(name, host, image);
                let whole = name == "docker" || std::env::var_os(WHOLE).is_some();
                subjects.push(if whole { subject } else { subject.part(part) });
            }
            _ => sandbox_conformance::left_out(name, &format!("{variable} is not set")),
        }
    }
    run(subjects)
}

fn subject(name: &'static str, host: String, image: String) -> Subject {
    // What an engine enforces is found out once; each case has a scope of its own.
    let backend: OnceLock<Result<DockerBackend>> = OnceLock::new();
    Subject::new(name, move |state| {
        let first = backend.get_or_init(|| {
            let mut builder =
                DockerBackend::builder().host(&host).image(&image).pull(PullPolicy::Never);
            if name == "podman" {
                // It gives each process more than this host may have, unless it is told.
                builder = builder.ulimit("nofile", 4096).ulimit("nproc", 4096);
            }
            builder.build()
        });
        let scope = state.to_string_lossy().replace('/', "-");
        Ok(Arc::new(first.clone()?.in_scope(scope.trim_start_matches('-'))))
    })
}
