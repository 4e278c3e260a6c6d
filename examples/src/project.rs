//! What a repository needs to be worked on: its build command and, for Rust, the toolchain in the
//! user's home.

use std::path::{Path, PathBuf};

use sandbox_core::{Command, CreateSandbox};

/// How a repository shows that it is sound.
#[must_use]
pub fn build_command(repository: &Path) -> Command {
    if repository.join("sandbox-guest/Cargo.toml").exists() {
        // This repository: a part of it that builds in seconds.
        Command::new("cargo")
            .args(["test", "--offline", "--quiet", "--package", "sandbox-guest"])
            .args(["--no-default-features", "--lib"])
    } else if repository.join("Cargo.toml").exists() {
        Command::new("cargo").args(["build", "--offline"])
    } else if repository.join("Makefile").exists() {
        Command::new("make")
    } else {
        Command::shell("find . -type f | wc -l")
    }
}

/// A request for a sandbox of this repository, with the Rust toolchain of the user's home if there is
/// one: programs and downloaded crates to look at, without the credentials beside them.
#[must_use]
pub fn request(repository: &Path) -> CreateSandbox {
    let mut request = CreateSandbox::new().workspace(repository);
    let home = std::env::var_os("HOME").map(PathBuf::from).unwrap_or_default();
    let place = |variable, default| {
        std::env::var_os(variable).map_or_else(|| home.join(default), PathBuf::from)
    };
    let cargo = place("CARGO_HOME", ".cargo");
    let rustup = place("RUSTUP_HOME", ".rustup");
    for (source, target) in [
        (cargo.join("bin"), "/opt/cargo/bin"),
        (cargo.join("registry"), "/opt/cargo/registry"),
        (rustup, "/opt/rustup"),
    ] {
        if source.is_dir() {
            request = request.mount_read_only(source, target);
        }
    }
    request
        .env("CARGO_HOME", "/opt/cargo")
        .env("RUSTUP_HOME", "/opt/rustup")
        .env("PATH", "/opt/cargo/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin")
}
