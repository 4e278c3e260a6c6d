//! The program's commands. `init` is the guest itself; the others are small tools for the harness.

mod attach;
mod base;
mod changes;
mod connect;
mod copy_data;
mod deadline;
mod egress;
mod enter;
mod exec;
mod files;
mod filter;
mod forward;
mod freeze;
mod guest;
mod harden;
mod init;
mod kill;
mod layers;
mod list_tree;
mod log;
mod merge;
mod mounts;
mod oom;
mod process;
mod procfs;
mod pump;
mod serve;
mod shell;
mod spawn;
mod stdin;
mod supervisor;
mod sys;
mod transfer;
mod tree_copy;
mod tree_remove;
mod tree_transfer;
mod usage;
mod users;
mod watch;
mod watcher;
mod work;

use std::{ffi::OsString, io::Write, path::Path, process::ExitCode};

/// The exit code of a set-up or a tool that failed.
const FAILED: u8 = 70;

const USAGE: &str = "\
usage: sandbox-guest init --setup-fd N | --setup PATH | --setup-stdin
       sandbox-guest enter [--cwd DIR] -- COMMAND [ARGUMENT...]
       sandbox-guest connect PATH
       sandbox-guest shell -- PROGRAM [ARGUMENT...]
       sandbox-guest copy-tree SOURCE DESTINATION
       sandbox-guest remove-tree PATH
       sandbox-guest merge-layers TARGET LAYER... [-- TARGET LAYER...]...
       sandbox-guest changes {part|now|then|both|hidden|made|root-mode VALUE}...
       sandbox-guest list-tree SINCE ROOT [WITHOUT...]
       sandbox-guest report
       sandbox-guest leave DIRECTORY
       sandbox-guest --version";

pub(crate) fn main() -> ExitCode {
    let arguments: Vec<OsString> = std::env::args_os().skip(1).collect();
    let words: Vec<&[u8]> = arguments.iter().map(|word| word.as_encoded_bytes()).collect();
    let result = match words[..] {
        [b"init", b"--setup-fd", number] => init::from_fd(number),
        [b"init", b"--setup", _] => init::from_path(Path::new(&arguments[2])),
        [b"init", b"--setup-stdin"] => init::from_stdin(),
        [b"enter", ..] => return enter::main(&words[1..]),
        [b"connect", _] => connect::main(Path::new(&arguments[1])),
        [b"shell", b"--", _, ..] => return shell::main(&arguments[2..]),
        [b"copy-tree", _, _] => tree_copy::copy(Path::new(&arguments[1]), Path::new(&arguments[2])),
        [b"remove-tree", _] => tree_remove::remove(Path::new(&arguments[1])),
        [b"merge-layers", ..] => merge::main(&arguments[1..]),
        [b"changes", ..] => changes::main(&arguments[1..]),
        [b"list-tree", since, _, ..] => {
            list_tree::main(since, Path::new(&arguments[2]), &arguments[3..])
        }
        [b"report"] => list_tree::report(),
        [b"leave", _] => list_tree::leave(Path::new(&arguments[1])),
        [b"--version"] => {
            let line = concat!("sandbox-guest ", env!("CARGO_PKG_VERSION"), "\n");
            std::io::stdout().write_all(line.as_bytes()).map_err(|error| error.to_string())
        }
        _ => {
            complain(USAGE);
            return ExitCode::from(64);
        }
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(message) => {
            complain(&format!("sandbox-guest: {message}"));
            ExitCode::from(FAILED)
        }
    }
}

fn complain(line: &str) {
    let _ = std::io::stderr().write_all(format!("{line}\n").as_bytes());
}
