//! Looking at sandboxes.

use clap::{Args, Subcommand};
use sandbox_core::{SandboxState, SandboxStatus};

use crate::{
    app::{App, Fail, usage},
    life::{self, ActorName},
    output,
};

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Show a sandbox's status.
    #[command(after_help = "Example:\n  sandboxer get main")]
    Get {
        /// Id or name.
        id: String,
    },
    /// List the sandboxes that have not come to their end.
    #[command(after_help = "Examples:
  sandboxer list --actor agt --project glas-harness
  sandboxer list --state destroyed")]
    List(List),
    /// Show what has happened to a sandbox, a record on each line.
    #[command(after_help = "Examples:
  sandboxer history main
  sandboxer history main --after 12 --follow")]
    History {
        /// Id or name.
        id: String,
        /// Only records after this number.
        #[arg(long, default_value_t = 0)]
        after: u64,
        /// Go on with new records until the sandbox is destroyed.
        #[arg(long, short)]
        follow: bool,
    },
    /// How someone else gets in.
    #[command(subcommand)]
    Reachability(Reachability),
    /// Show what a sandbox uses.
    #[command(after_help = "Example:\n  sandboxer stats main")]
    Stats {
        /// Id or name.
        id: String,
    },
}

#[derive(Debug, Subcommand)]
pub(crate) enum Reachability {
    /// Show the way into a sandbox, and a command line to paste into a shell.
    #[command(after_help = "Example:
  sandboxer reachability show main | jq -r .local_exec_hint")]
    Show {
        /// Id or name.
        id: String,
    },
}

#[derive(Debug, Args)]
pub(crate) struct List {
    /// Only those in this state: requested, provisioning, ready, active, paused, stopped, expired, lost,
    /// failed, destroying or destroyed.
    #[arg(long)]
    state: Option<String>,
    /// Only those that this kind of caller asked for.
    #[arg(long, value_enum)]
    actor: Option<ActorName>,
    /// Only those of this project.
    #[arg(long)]
    project: Option<String>,
}

pub(crate) async fn run(app: &App, command: Command) -> Result<u8, Fail> {
    match command {
        Command::Get { id } => life::show(&app.open(&id).await?).await,
        Command::List(list) => self::list(app, list).await,
        Command::History { id, after, follow } => history(app, &id, after, follow).await,
        Command::Reachability(Reachability::Show { id }) => {
            output::document(&app.open(&id).await?.reachability().await?.report())
        }
        Command::Stats { id } => output::document(&app.open(&id).await?.stats().await?),
    }
}

async fn list(app: &App, list: List) -> Result<u8, Fail> {
    let wanted = match list.state {
        None => None,
        Some(text) => {
            let read = serde_json::from_value::<SandboxState>(text.clone().into());
            Some(read.map_err(|_| usage(format!("--state {text:?} is no state")))?)
        }
    };
    let actor = list.actor.map(Into::into);
    let manager = app.manager().await?;
    let ended = wanted.is_some_and(|state| !state.is_live());
    let infos = if ended { manager.list_all().await? } else { manager.list().await? };
    let mut found: Vec<SandboxStatus> = Vec::new();
    for info in infos {
        let fits = actor.is_none_or(|actor| info.consumer.actor == actor)
            && list.project.as_ref().is_none_or(|p| info.consumer.project.as_ref() == Some(p));
        if !fits {
            continue;
        }
        let status = manager.open(info.sandbox_id.as_str()).await?.status().await?;
        if wanted.is_none_or(|state| status.state == state) {
            found.push(status);
        }
    }
    output::document(&found)
}

async fn history(app: &App, id: &str, after: u64, follow: bool) -> Result<u8, Fail> {
    let manager = app.manager().await?;
    let sandbox = manager.open(id).await?;
    if !follow {
        for event in manager.history(sandbox.id(), after).await? {
            output::record(&event)?;
        }
        return Ok(0);
    }
    let mut watch = manager.watch(sandbox.id(), after);
    loop {
        let event = watch.next().await?;
        output::record(&event)?;
        // Nothing comes after it.
        if event.name() == "destroyed" {
            return Ok(0);
        }
    }
}
