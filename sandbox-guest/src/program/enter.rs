//! A person's way in: `nsenter` arrives with every right in the sandbox's user namespace and without a
//! filter; what is started from here has no more rights than any other process of the sandbox.

use std::{
    ffi::{CString, OsStr, OsString},
    os::unix::ffi::OsStrExt,
    path::Path,
    process::ExitCode,
};

use serde::Deserialize;

use super::{
    base::errno_text,
    complain,
    harden::{self, Hardening},
    sys::{self, StringArray},
};

/// Written by the backend. It lies in the sandbox, so that it is believed in nothing that matters.
const SETTINGS: &str = "/run/sandbox/env.json";

/// More than this is not the backend's.
const MAX_SETTINGS: u64 = 1024 * 1024;

const DEFAULT_PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

const NOT_FOUND: u8 = 127;
const NOT_EXECUTABLE: u8 = 126;

#[derive(Default, Deserialize)]
#[serde(default)]
struct Settings {
    workspace: String,
    env: Vec<(String, String)>,
    max_processes: Option<u64>,
    max_address_space: Option<u64>,
}

/// Runs the command line after the word `enter`.
pub(crate) fn main(words: &[&[u8]]) -> ExitCode {
    let (cwd, command) = match words {
        [b"--cwd", cwd, b"--", command @ ..] => (Some(*cwd), command),
        [b"--", command @ ..] => (None, command),
        _ => (None, &[][..]),
    };
    if command.is_empty() {
        complain("usage: sandbox-guest enter [--cwd DIR] -- COMMAND [ARGUMENT...]");
        return ExitCode::from(64);
    }
    let (message, code) = enter(cwd, command);
    complain(&format!("sandbox-guest: {message}"));
    ExitCode::from(code)
}

/// Returns only if something failed.
fn enter(cwd: Option<&[u8]>, command: &[&[u8]]) -> (String, u8) {
    // Rights go first: nothing from inside the sandbox is looked at with more than it has itself.
    sys::close_from(3);
    if let Err(message) = harden::apply(Hardening::FULL) {
        return (message, super::FAILED);
    }
    let settings = read_settings();
    if let Err(message) = limit(&settings) {
        return (message, super::FAILED);
    }
    let env = environment(&settings);
    let cwd = cwd.unwrap_or(settings.workspace.as_bytes());
    let cwd = if cwd.is_empty() { b"/" } else { cwd };
    if let Err(error) = std::env::set_current_dir(OsStr::from_bytes(cwd)) {
        let name = Path::new(OsStr::from_bytes(cwd)).display().to_string();
        return (format!("{name}: {}", errno_text(&error)), super::FAILED);
    }
    sys::default_signals();
    execute(command, &env)
}

fn read_settings() -> Settings {
    use std::{io::Read, os::unix::fs::OpenOptionsExt};
    let mut text = Vec::new();
    // A FIFO or device in its place must not hold anyone up.
    let file = std::fs::File::options().read(true).custom_flags(libc::O_NONBLOCK).open(SETTINGS);
    let read = file.and_then(|file| file.take(MAX_SETTINGS).read_to_end(&mut text));
    if read.is_err() {
        return Settings::default();
    }
    serde_json::from_slice(&text).unwrap_or_default()
}

fn limit(settings: &Settings) -> Result<(), String> {
    for (resource, wanted) in [
        (libc::RLIMIT_NPROC, settings.max_processes),
        (libc::RLIMIT_AS, settings.max_address_space),
    ] {
        let Some(wanted) = wanted else { continue };
        let value = wanted.min(sys::limit(resource).1);
        sys::set_limit(resource, value, value).map_err(|errno| {
            let error = std::io::Error::from_raw_os_error(errno);
            format!("set a resource limit: {}", errno_text(&error))
        })?;
    }
    Ok(())
}

/// The sandbox's base environment, and of the caller's only what describes the terminal.
fn environment(settings: &Settings) -> Vec<(OsString, OsString)> {
    let mut env: Vec<(OsString, OsString)> = settings
        .env
        .iter()
        .filter(|(name, _)| !name.is_empty() && !name.contains('='))
        .map(|(name, value)| (name.into(), value.into()))
        .collect();
    if !env.iter().any(|(name, _)| name == "PATH") {
        env.push(("PATH".into(), DEFAULT_PATH.into()));
    }
    if let Some(term) = std::env::var_os("TERM") {
        env.retain(|(name, _)| name != "TERM");
        env.push(("TERM".into(), term));
    }
    env
}

fn execute(command: &[&[u8]], env: &[(OsString, OsString)]) -> (String, u8) {
    let program = command[0];
    let shown = String::from_utf8_lossy(program).into_owned();
    let strings = |all: &[Vec<u8>]| -> Vec<CString> {
        all.iter().filter_map(|one| CString::new(one.as_slice()).ok()).collect()
    };
    let argv: Vec<Vec<u8>> = command.iter().map(|word| word.to_vec()).collect();
    let envp: Vec<Vec<u8>> = env
        .iter()
        .map(|(name, value)| [name.as_bytes(), b"=", value.as_bytes()].concat())
        .collect();
    let path = env.iter().find(|(name, _)| name == "PATH").map(|(_, value)| value.as_bytes());
    let candidates: Vec<Vec<u8>> = if program.contains(&b'/') {
        vec![program.to_vec()]
    } else {
        path.unwrap_or_default()
            .split(|byte| *byte == b':')
            .map(|directory| [directory, b"/", program].concat())
            .collect()
    };
    let (argv, envp) = (StringArray::new(strings(&argv)), StringArray::new(strings(&envp)));
    let mut worst = libc::ENOENT;
    for candidate in strings(&candidates) {
        match sys::execve(&candidate, &argv, &envp) {
            libc::ENOENT | libc::ENOTDIR => {}
            errno => worst = errno,
        }
    }
    let error = std::io::Error::from_raw_os_error(worst);
    let code = if worst == libc::ENOENT { NOT_FOUND } else { NOT_EXECUTABLE };
    (format!("{shown}: {}", errno_text(&error)), code)
}
