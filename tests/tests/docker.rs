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

/// What connections carry, and what becomes of it when they are cut.
fn carried(case: &str) -> bool {
    ["starts::", "output::", "ends::", "streams::", "connection::", "detached::"]
        .iter()
        .any(|about| case.starts_with(about))
}

fn main() -> ExitCode {
    let mut subjects = Vec::new();
    for (name, variable) in [
        ("docker", "SANDBOX_DOCKER_HOST"),
        // All connections through the engine, as where it is elsewhere.
        ("docker_carried", "SANDBOX_DOCKER_HOST"),
        ("podman", "SANDBOX_PODMAN_HOST"),
    ] {
        let host = std::env::var(variable);
        match (host, std::env::var("SANDBOX_TEST_IMAGE")) {
            (Ok(host), Ok(image)) => {
                let subject = subject(name, host, image);
                let whole = std::env::var_os(WHOLE).is_some();
                subjects.push(match name {
                    "docker_carried" => subject.part(carried),
                    "podman" if !whole => subject.part(part),
                    _ => subject,
                });
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
            if name == "docker_carried" {
                builder = builder.direct_connections(false);
            }
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
