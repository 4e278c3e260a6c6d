//! What a harness elsewhere has done on this host.

#[cfg(target_os = "linux")]
fn main() -> std::process::ExitCode {
    sandbox_host::main()
}

#[cfg(not(target_os = "linux"))]
fn main() {}
