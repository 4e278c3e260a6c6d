//! Builds the guest program statically, for the library to embed.

use std::{env, error::Error, fs, path::PathBuf};

use sandbox_build::Program;

/// Set for the build of a program that brings the guest along: the guest, built already.
const BUILT: &str = "SANDBOX_GUEST_PROGRAM";

/// Small, as thousands of guests may run.
const PROFILE: &[(&str, &str)] = &[
    ("inherits", "\"release\""),
    ("opt-level", "\"z\""),
    ("lto", "\"fat\""),
    ("codegen-units", "1"),
    ("strip", "true"),
    ("panic", "\"abort\""),
];

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo::rerun-if-env-changed={BUILT}");
    if let Some(built) = env::var_os(BUILT) {
        println!("cargo::rustc-check-cfg=cfg(no_bundled)");
        let built = PathBuf::from(built);
        println!("cargo::rerun-if-changed={}", built.display());
        let out = PathBuf::from(env::var_os("OUT_DIR").ok_or("OUT_DIR is not set")?);
        fs::copy(&built, out.join("sandbox-guest.bin"))
            .map_err(|error| format!("copy {}: {error}", built.display()))?;
        return Ok(());
    }
    let program = Program {
        name: "sandbox-guest",
        profile: "guest",
        settings: PROFILE,
        env: &[],
        inputs: &[],
    };
    if let Some(bundled) = program.bundle()? {
        // For the build scripts of packages that bring it along.
        println!("cargo::metadata=program={}", bundled.display());
    }
    Ok(())
}
