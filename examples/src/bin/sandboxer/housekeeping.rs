//! Clearing what is left over.

use clap::{Args, Subcommand};
use sandbox_core::{Leftover, LeftoverKind, Period, ReapPolicy};
use serde_json::json;

use crate::{
    app::{App, Fail},
    backends::Hosts,
    catalog, output,
};

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Remove the sandboxes whose time is over. Without --apply they are only listed.
    #[command(after_help = "Examples:\n  sandboxer expire\n  sandboxer expire --apply")]
    Expire {
        /// Really remove them.
        #[arg(long)]
        apply: bool,
    },
    /// Remove all that is left over: sandboxes whose time is over, and instances that belong to none.
    /// Without --apply they are only listed.
    ///
    /// What another process is at work on, and what carries another owner's mark, is never touched.
    #[command(after_help = "Example:\n  sandboxer reap-stale --older-than 1h --apply")]
    ReapStale(ReapStale),
    /// Look at this host, and at what is left over on it.
    #[command(subcommand)]
    Inspect(Inspect),
}

#[derive(Debug, Args)]
pub(crate) struct ReapStale {
    /// Only what is at least so old: a number and s, m, h or d.
    #[arg(long)]
    older_than: Option<Period>,
    /// Really remove it.
    #[arg(long)]
    apply: bool,
    #[command(flatten)]
    also: Also,
}

#[derive(Debug, Args)]
pub(crate) struct Also {
    /// On this host too. Those that sandboxes of this state directory were asked for on are looked at
    /// anyway.
    #[arg(long, env = "SANDBOXER_HOST", value_name = "HOST")]
    host: Option<String>,
}

impl Also {
    fn hosts(self) -> Hosts {
        let wanted = self.host.into_iter().collect();
        Hosts { wanted, accept_account: false, of_the_past: true }
    }
}

#[derive(Debug, Subcommand)]
pub(crate) enum Inspect {
    /// Show what this host can do, and what instances are on it.
    #[command(after_help = "Example:\n  sandboxer inspect host")]
    Host(Also),
    /// List what is left over.
    #[command(after_help = "Example:\n  sandboxer inspect stale")]
    Stale(Also),
}

pub(crate) async fn run(app: &App, command: Command) -> Result<u8, Fail> {
    match command {
        Command::Expire { apply } => {
            let policy = policy(apply, None).only(LeftoverKind::Expired);
            reap(app, policy, &Hosts::default()).await
        }
        Command::ReapStale(ReapStale { older_than, apply, also }) => {
            reap(app, policy(apply, older_than), &also.hosts()).await
        }
        Command::Inspect(Inspect::Stale(also)) => {
            reap(app, policy(false, None), &also.hosts()).await
        }
        Command::Inspect(Inspect::Host(also)) => host(app, &also.hosts()).await,
    }
}

fn policy(apply: bool, older_than: Option<Period>) -> ReapPolicy {
    let policy = if apply { ReapPolicy::apply() } else { ReapPolicy::default() };
    match older_than {
        Some(age) => policy.older_than(age.duration()),
        None => policy,
    }
}

async fn reap(app: &App, policy: ReapPolicy, hosts: &Hosts) -> Result<u8, Fail> {
    let found = app.manager_on(hosts).await?.reap(policy, &app.sink()).await?;
    output::document(&found)?;
    let failed = |leftover: &&Leftover| leftover.error.is_some();
    match found.iter().filter(failed).count() {
        0 => Ok(0),
        count => Err(Fail::new(1, format!("{count} of them could not be removed"))),
    }
}

async fn host(app: &App, hosts: &Hosts) -> Result<u8, Fail> {
    let (mut instances, mut unknown) = (Vec::new(), Vec::new());
    for backend in app.backends(hosts).await?.there {
        let found = match backend.inventory().await {
            Ok(found) => found,
            Err(error) => {
                unknown.push(json!({"backend": backend.id(), "error": error.to_string()}));
                continue;
            }
        };
        for found in found {
            instances.push(json!({
                "backend": backend.id(),
                "instance": found.instance.id,
                "sandbox": found.instance.sandbox,
                "owner": found.owner,
                "state": found.state,
                "created_at": found.created_at,
            }));
        }
    }
    let kernel = std::fs::read_to_string("/proc/sys/kernel/osrelease").ok();
    output::document(&json!({
        "system": std::env::consts::OS,
        "architecture": std::env::consts::ARCH,
        "kernel": kernel.as_deref().map(str::trim),
        "state_dir": app.state_dir()?,
        "backends": catalog::probes(app, hosts).await?,
        "instances": instances,
        "unknown": unknown,
    }))
}
