//! For build scripts: building a package's own program statically, for its library to embed.
//!
//! The program is built by a second cargo in a target directory of its own: with other features, another
//! profile, and linked so that it runs in any Linux userland.
#![allow(clippy::print_stdout, reason = "it is how a build script speaks to cargo")]

use std::{
    env,
    error::Error,
    ffi::OsString,
    fs,
    path::{Path, PathBuf},
    process::Command,
};

/// What a build script's steps return.
pub type Result<T> = std::result::Result<T, Box<dyn Error>>;

/// A program of the package whose build script this is.
#[derive(Debug)]
pub struct Program<'a> {
    /// The binary's name; it is there when the package's feature `program` is on.
    pub name: &'a str,
    /// The name that its profile has. A package from a registry has no workspace to define it.
    pub profile: &'a str,
    /// What the profile says: keys and values of TOML.
    pub settings: &'a [(&'a str, &'a str)],
    /// For the build script of the program's own build.
    pub env: &'a [(&'a str, OsString)],
    /// What it is made of besides the package's own `src`, relative to the package.
    pub inputs: &'a [&'a str],
}

impl Program<'_> {
    /// Builds the program if the feature `bundled` is on, and copies it to `NAME.bin` in `OUT_DIR`. Sets
    /// `cfg(no_bundled)` where it cannot be built, as it is a Linux program and this is not Linux.
    ///
    /// # Errors
    ///
    /// If cargo does not succeed; the message says what to install where that can be told.
    pub fn bundle(&self) -> Result<Option<PathBuf>> {
        println!("cargo::rerun-if-changed=build.rs");
        println!("cargo::rustc-check-cfg=cfg(no_bundled)");
        if env::var_os("CARGO_FEATURE_BUNDLED").is_none() {
            return Ok(None);
        }
        for input in ["src", "Cargo.toml"].iter().chain(self.inputs) {
            // In a registry's package there is nothing beside it.
            if Path::new(input).exists() {
                println!("cargo::rerun-if-changed={input}");
            }
        }
        let arch = env::var("CARGO_CFG_TARGET_ARCH")?;
        if env::var("CARGO_CFG_TARGET_OS")? != "linux" || !env::var("HOST")?.contains("linux") {
            println!(
                "cargo::warning={} is not built in: it is a Linux program, and this is not Linux. Give \
                 the harness one built on Linux (SANDBOX_GUEST_DIR)",
                self.name
            );
            println!("cargo::rustc-cfg=no_bundled");
            return Ok(None);
        }
        let out = PathBuf::from(env::var_os("OUT_DIR").ok_or("OUT_DIR is not set")?);
        let program = self.build(&target(&arch)?, &self.target_dir(&out))?;
        let bundled = out.join(format!("{}.bin", self.name));
        fs::copy(&program, &bundled)
            .map_err(|error| format!("copy {}: {error}", program.display()))?;
        Ok(Some(bundled))
    }

    /// One directory for all profiles and for clippy, beside theirs:
    /// `<target>/[<triple>/]<profile>/build/…`.
    fn target_dir(&self, out: &Path) -> PathBuf {
        let build = out.ancestors().find(|path| path.ends_with("build"));
        match build.and_then(Path::parent).and_then(Path::parent) {
            Some(above) => above.join(format!("{}-build", self.name)),
            None => out.join(self.name),
        }
    }

    fn build(&self, target: &str, target_dir: &Path) -> Result<PathBuf> {
        let manifest = env::var_os("CARGO_MANIFEST_DIR").ok_or("no CARGO_MANIFEST_DIR")?;
        let manifest = PathBuf::from(manifest).join("Cargo.toml");
        let mut cargo = Command::new(env::var_os("CARGO").ok_or("CARGO is not set")?);
        cargo
            .args(["build", "--bin", self.name, "--no-default-features"])
            .args(["--features", "program", "--profile", self.profile, "--target", target])
            .arg("--manifest-path")
            .arg(&manifest)
            .arg("--target-dir")
            .arg(target_dir);
        for (key, value) in self.settings {
            cargo.args(["--config", &format!("profile.{}.{key}={value}", self.profile)]);
        }
        // What the outer build is told is not meant for this one: wrappers would loop or check instead
        // of build, and flags would link differently.
        for (name, _) in env::vars_os() {
            let Some(text) = name.to_str() else { continue };
            let keep = ["CARGO", "CARGO_HOME", "CARGO_NET_OFFLINE", "CARGO_TERM_COLOR"]
                .contains(&text)
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
        cargo.envs(self.env.iter().map(|(name, value)| (name, value)));
        let output = cargo.output()?;
        if !output.status.success() {
            let log = String::from_utf8_lossy(&output.stderr);
            return Err(format!("{log}\n{}", self.advice(target, &log)).into());
        }
        Ok(target_dir.join(target).join(self.profile).join(self.name))
    }

    fn advice(&self, target: &str, log: &str) -> String {
        if !log.contains("linking with") && !log.contains("can't find crate") {
            return format!("the program {} could not be built; see above", self.name);
        }
        let musl = target.replace("-gnu", "-musl");
        format!(
            "the program {} could not be linked statically. Install the static C library (Debian and \
             Ubuntu: libc6-dev, Fedora and RHEL: glibc-static), or the musl target: rustup target add \
             {musl}",
            self.name
        )
    }
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
