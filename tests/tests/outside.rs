//! A harness outside this workspace: made with `cargo new` and `cargo add --path`, it builds and runs the
//! README's first program.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::{
    path::{Path, PathBuf},
    process::Command,
};

fn workspace() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..").canonicalize().unwrap()
}

fn succeed(command: &mut Command) -> String {
    let output = command.output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(
        output.status.success(),
        "{command:?}: {said}{}",
        String::from_utf8_lossy(&output.stderr)
    );
    said
}

#[test]
fn the_readmes_first_program_runs_outside_the_workspace() {
    let readme = std::fs::read_to_string(workspace().join("README.md")).unwrap();
    let (_, program) = readme.split_once("```rust,no_run\n").unwrap();
    let (program, _) = program.split_once("```").unwrap();

    let dir = tempfile::Builder::new().prefix("sandbox-test-").tempdir().unwrap();
    let harness = dir.path().join("harness");
    let cargo = |directory: &Path| {
        let mut command = Command::new(env!("CARGO"));
        command
            .current_dir(directory)
            // Where most of what it needs has been built already.
            .env("CARGO_TARGET_DIR", Path::new(env!("CARGO_TARGET_TMPDIR")).join(".."))
            .env("XDG_STATE_HOME", dir.path().join("state"))
            .env_remove("RUSTFLAGS")
            .env_remove("CARGO_ENCODED_RUSTFLAGS");
        command
    };
    succeed(cargo(dir.path()).args(["new", "--quiet", "--vcs", "none", "harness"]));
    for member in ["sandbox-core", "sandbox-bwrap"] {
        succeed(cargo(&harness).args(["add", "--quiet", "--path"]).arg(workspace().join(member)));
    }
    succeed(cargo(&harness).args(["add", "--quiet", "tokio", "--features", "full"]));
    std::fs::write(harness.join("src/main.rs"), program).unwrap();
    // The versions that have been tried; cargo leaves out what this crate does not need.
    std::fs::copy(workspace().join("Cargo.lock"), harness.join("Cargo.lock")).unwrap();

    let said = succeed(cargo(&harness).args(["run", "--quiet"]));
    assert!(said.contains("Cargo.toml"), "the files are back after the rewind: {said}");
    assert!(said.contains("Exited(0)"), "{said}");
    assert!(said.contains("rewound") && said.contains("destroyed"), "{said}");
    assert!(harness.join("src/main.rs").exists(), "the host's files were never touched");
}
