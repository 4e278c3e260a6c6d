//! Builds the host program statically, for the library to embed.

use std::{env, error::Error, ffi::OsString};

use sandbox_build::Program;

/// It is sent to other hosts: rather small than fast.
const PROFILE: &[(&str, &str)] = &[
    ("inherits", "\"release\""),
    ("opt-level", "\"s\""),
    ("lto", "\"thin\""),
    ("strip", "true"),
    ("panic", "\"abort\""),
];

fn main() -> Result<(), Box<dyn Error>> {
    // The guest that it brings along is built already.
    let guest = env::var_os("DEP_SANDBOX_GUEST_PROGRAM");
    let env: Vec<(&str, OsString)> =
        guest.map(|guest| ("SANDBOX_GUEST_PROGRAM", guest)).into_iter().collect();
    let program = Program {
        name: "sandbox-host",
        profile: "host",
        settings: PROFILE,
        env: &env,
        inputs: &[
            "../sandbox-core/src",
            "../sandbox-core/Cargo.toml",
            "../sandbox-guest/src",
            "../sandbox-guest/Cargo.toml",
        ],
    };
    program.bundle()?;
    Ok(())
}
