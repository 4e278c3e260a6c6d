//! Builds the guest program statically, for the library to embed.
//!
//! The program is this package's own binary, built by a second cargo in a target directory of its own:
//! with other features, another profile, and linked so that it runs in any Linux userland.

use std::{
    env,
    error::Error,
    fs,
    path::{Path, PathBuf},
    process::Command,
};

type Result<T> = std::result::Result<T, Box<dyn Error>>;

/// How the program is built; a package from a registry has no workspace to say so.
const PROFILE: &[&str] = &[
    "profile.guest.inherits=\"release\"",
    "profile.guest.opt-level=\"s\"",
    "profile.guest.lto=\"fat\"",
    "profile.guest.codegen-units=1",
    "profile.guest.strip=true",
    "profile.guest.panic=\"abort\"",
];

fn main() -> Result<()> {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rustc-check-cfg=cfg(no_bundled_guest)");
    if env::var_os("CARGO_FEATURE_BUNDLED").is_none() {
        return Ok(());
    }
    for input in ["src", "Cargo.toml"] {
        println!("cargo::rerun-if-changed={input}");
    }
    let arch = env::var("CARGO_CFG_TARGET_ARCH")?;
    if env::var("CARGO_CFG_TARGET_OS")? != "linux" || !env::var("HOST")?.contains("linux") {
        println!(
            "cargo::warning=no guest is built in: it is a Linux program, and this is not Linux. Give \
             the harness one built on Linux (SANDBOX_GUEST_DIR)"
        );
        println!("cargo::rustc-cfg=no_bundled_guest");
        return Ok(());
    }
    let out = PathBuf::from(env::var_os("OUT_DIR").ok_or("OUT_DIR is not set")?);
    let program = build(&target(&arch)?, &target_dir(&out))?;
    fs::copy(&program, out.join("sandbox-guest.bin"))
        .map_err(|error| format!("copy {}: {error}", program.display()))?;
    Ok(())
}

/// musl where it is installed, else glibc, which can be linked statically too.
fn target(arch: &str) -> Result<String> {
    let musl = format!("{arch}-unknown-linux-musl");
    let rustc = env::var_os("RUSTC").ok_or("RUSTC is not set")?;
    let output =
        Command::new(rustc).args(["--print", "target-libdir", "--target", &musl]).output()?;
    let libdir = String::from_utf8_lossy(&output.stdout).trim().to_owned();
    if output.status.success() && Path::new(&libdir).exists() {
        Ok(musl)
    } else {
        Ok(format!("{arch}-unknown-linux-gnu"))
    }
}

/// One directory for all profiles and for clippy, beside theirs: `<target>/[<triple>/]<profile>/build/…`.
fn target_dir(out: &Path) -> PathBuf {
    let build = out.ancestors().find(|path| path.ends_with("build"));
    match build.and_then(Path::parent).and_then(Path::parent) {
        Some(above) => above.join("sandbox-guest-build"),
        None => out.join("guest"),
    }
}

fn build(target: &str, target_dir: &Path) -> Result<PathBuf> {
    let manifest = PathBuf::from(env::var_os("CARGO_MANIFEST_DIR").ok_or("no CARGO_MANIFEST_DIR")?)
        .join("Cargo.toml");
    let mut cargo = Command::new(env::var_os("CARGO").ok_or("CARGO is not set")?);
    cargo
        .args(["build", "--bin", "sandbox-guest", "--no-default-features"])
        .args(["--features", "program", "--profile", "guest", "--target", target])
        .arg("--manifest-path")
        .arg(&manifest)
        .arg("--target-dir")
        .arg(target_dir);
    for setting in PROFILE {
        cargo.args(["--config", setting]);
    }
    // What the outer build is told is not meant for this one: wrappers would loop or check instead of
    // build, and flags would link differently.
    for (name, _) in env::vars_os() {
        let Some(text) = name.to_str() else { continue };
        let keep = ["CARGO", "CARGO_HOME", "CARGO_NET_OFFLINE", "CARGO_TERM_COLOR"].contains(&text)
            || text.starts_with("CARGO_HTTP_")
            || text.starts_with("CARGO_NET_")
            || text.starts_with("CARGO_REGISTR");
        let inherited = text.starts_with("CARGO") && !keep
            || text.starts_with("RUSTC")
            || ["RUSTFLAGS", "RUSTDOCFLAGS", "CLIPPY_ARGS", "TARGET", "HOST"].contains(&text);
        if inherited {
            cargo.env_remove(&name);
        }
    }
    if let Some(rustc) = env::var_os("RUSTC") {
        cargo.env("RUSTC", rustc);
    }
    cargo.env("CARGO_ENCODED_RUSTFLAGS", "-Ctarget-feature=+crt-static");
    let output = cargo.output()?;
    if !output.status.success() {
        let log = String::from_utf8_lossy(&output.stderr);
        return Err(format!("{log}\n{}", advice(target, &log)).into());
    }
    Ok(target_dir.join(target).join("guest/sandbox-guest"))
}

fn advice(target: &str, log: &str) -> String {
    if !log.contains("linking with") && !log.contains("can't find crate") {
        return "the guest program could not be built; see above".to_owned();
    }
    let musl = target.replace("-gnu", "-musl");
    format!(
        "the guest program could not be linked statically. Install the static C library (Debian and \
         Ubuntu: libc6-dev, Fedora and RHEL: glibc-static), or the musl target: rustup target add {musl}"
    )
}
