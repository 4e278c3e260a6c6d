//! `sandboxer`: sandboxes from the command line.
//!
//! Every call is a process of its own on the same state directory, so each one shows that a sandbox can be
//! picked up by another process. JSON goes to standard output, one document, or one line for each record
//! where a stream is meant; progress and messages go to standard error.
//!
//! Exit codes: 0 done, 1 failed, 2 not understood. `exec` passes on the command's own.
#![allow(clippy::print_stdout, clippy::print_stderr, reason = "programs talk to people")]

mod app;
mod backends;
mod catalog;
mod exec;
mod files;
mod forward;
mod housekeeping;
mod life;
mod looking;
mod output;
mod processes;
mod progress;
mod snapshots;
mod terminal;

use std::{path::PathBuf, process::ExitCode};

use app::{App, Fail};
use clap::{CommandFactory, Parser, Subcommand};

/// Sandboxes for agents: made, used, snapshotted and rewound from the command line.
///
/// State is kept in $SANDBOXER_STATE_DIR, else in the user's state directory. Every call is a process of
/// its own; any number of them may work on the same sandbox at once.
#[derive(Debug, Parser)]
#[command(name = "sandboxer", version, propagate_version = true, after_long_help = MORE)]
struct Cli {
    /// Where state is kept.
    #[arg(long, global = true, env = "SANDBOXER_STATE_DIR", value_name = "DIR")]
    state_dir: Option<PathBuf>,
    /// A directory of profiles, which win over those that are shipped.
    #[arg(long, global = true, env = "SANDBOXER_PROFILES", value_name = "DIR")]
    profiles_dir: Option<PathBuf>,
    /// The configuration of `ssh`, instead of the user's own.
    #[arg(long, global = true, env = "SANDBOXER_SSH_CONFIG", value_name = "FILE")]
    ssh_config: Option<PathBuf>,
    /// The compose command of other hosts, for sandboxes beside compose projects: words, with spaces between
    /// them.
    #[arg(long, global = true, env = "SANDBOXER_COMPOSE", value_name = "COMMAND")]
    #[arg(default_value = "docker compose")]
    compose: String,
    /// Added there to the environment of compose, its engine and the sandbox; may be given again.
    #[arg(long, global = true, env = "SANDBOXER_COMPOSE_ENV", value_name = "KEY=VALUE")]
    compose_env: Vec<String>,
    /// No progress, only errors.
    #[arg(long, short, global = true)]
    quiet: bool,
    #[command(subcommand)]
    command: Command,
}

const MORE: &str = "\
Exit codes:
  0  done
  1  failed; the message says why
  2  the command line was not understood
  `exec` exits as its command did: its own code, 128 and the signal's number, 124 timed out, 125 the
  sandbox or the way to it failed, 126 not executable, 127 not found

Example, one turn of an agent:
  sandboxer create --profile profile.agent-dev --input repo=. --name main
  sandboxer exec main -- make test
  sandboxer snapshot main --label 'before the refactor'
  sandboxer exec main -- ./refactor.sh
  sandboxer rewind main snp_…
  sandboxer destroy main

Environment:
  SANDBOXER_STATE_DIR       where state is kept
  SANDBOXER_PROFILES        a directory of profiles
  SANDBOXER_SECRET_<REF>    the secret REF, if no variable REF is set
  SANDBOXER_HOST            --host, where that is not given: sandboxes are made there, over SSH
  SANDBOXER_ACCEPT_ACCOUNT  1 is --accept-account-as-isolation
  SANDBOXER_SSH_CONFIG      the configuration of `ssh`; without it, the user's own
  SANDBOXER_COMPOSE         the compose command of other hosts; without it, `docker compose`
  SANDBOXER_COMPOSE_ENV     KEY=VALUE, for that command
  DOCKER_HOST, DOCKER_CONTEXT  the container engine, as the `docker` program takes them";

#[derive(Debug, Subcommand)]
enum Command {
    #[command(flatten)]
    Life(life::Command),
    #[command(flatten)]
    Exec(exec::Command),
    #[command(flatten)]
    Processes(processes::Command),
    #[command(flatten)]
    Files(files::Command),
    #[command(flatten)]
    Forward(forward::Command),
    #[command(flatten)]
    Snapshots(snapshots::Command),
    #[command(flatten)]
    Looking(looking::Command),
    #[command(flatten)]
    Housekeeping(housekeeping::Command),
    #[command(flatten)]
    Catalog(catalog::Command),
    /// Print the completions for a shell.
    #[command(
        after_help = "Example:\n  sandboxer completions bash > ~/.local/share/bash-completion/completions/sandboxer"
    )]
    Completions {
        /// Which.
        shell: clap_complete::Shell,
    },
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    if let Command::Completions { shell } = cli.command {
        clap_complete::generate(shell, &mut Cli::command(), "sandboxer", &mut std::io::stdout());
        return ExitCode::SUCCESS;
    }
    let runtime = match tokio::runtime::Builder::new_multi_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => return Fail::new(1, format!("no runtime: {error}")).tell(),
    };
    let code = runtime.block_on(run(cli));
    // Somebody may still read from the terminal; nobody waits for that.
    runtime.shutdown_background();
    match code {
        Ok(code) => ExitCode::from(code),
        Err(fail) => fail.tell(),
    }
}

async fn run(cli: Cli) -> Result<u8, Fail> {
    let Cli { state_dir, profiles_dir, ssh_config, compose, compose_env, quiet, command } = cli;
    let app = App { state_dir, profiles_dir, ssh_config, compose, compose_env, quiet };
    match command {
        Command::Life(command) => life::run(&app, command).await,
        Command::Exec(command) => exec::run(&app, command).await,
        Command::Processes(command) => processes::run(&app, command).await,
        Command::Files(command) => files::run(&app, command).await,
        Command::Forward(command) => forward::run(&app, command).await,
        Command::Snapshots(command) => snapshots::run(&app, command).await,
        Command::Looking(command) => looking::run(&app, command).await,
        Command::Housekeeping(command) => housekeeping::run(&app, command).await,
        Command::Catalog(command) => catalog::run(&app, command).await,
        Command::Completions { .. } => Ok(0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn every_command_has_an_example() {
        fn check(command: &clap::Command, path: &str) {
            let path = format!("{path} {}", command.get_name());
            let help = command.get_after_help().or(command.get_after_long_help());
            let help = help.map(ToString::to_string).unwrap_or_default();
            if command.get_subcommands().next().is_none() {
                assert!(help.contains("Example"), "{path} has no example");
            }
            for below in command.get_subcommands().filter(|below| below.get_name() != "help") {
                check(below, &path);
            }
        }
        check(&Cli::command(), "");
    }
}
