//! Making sandboxes, and what happens to them until they are removed.

use clap::{Args, Subcommand, ValueEnum};
use sandbox_core::{
    Actor, BackendId, Consumer, CreateSandbox, Period, Root, Sandbox, SandboxStatus,
};

use crate::{
    app::{App, Fail, usage},
    backends::{Hosts, OnHost},
    output,
};

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Make a sandbox; with --name, the one of that name if there is one.
    ///
    /// Prints its status when its guest has answered and its setup is done.
    #[command(after_help = "Examples:
  sandboxer create --profile profile.agent-dev --input repo=. --actor agt --project glas-harness
  sandboxer create --name main --input repo=/src/app --ttl 2h
  sandboxer create --host me@build1 --input repo=.
  sandboxer create --egress '*.crates.io' --input repo=.")]
    Create(Create),
    /// End its processes and keep its files.
    #[command(after_help = "Example:\n  sandboxer stop main")]
    Stop(One),
    /// Start it after a stop, with its files.
    #[command(after_help = "Example:\n  sandboxer start main")]
    Start(One),
    /// Hold up its execution, in memory.
    #[command(after_help = "Example:\n  sandboxer pause main")]
    Pause(One),
    /// Let it go on after a pause.
    #[command(after_help = "Example:\n  sandboxer resume main")]
    Resume(One),
    /// Give it a fresh filesystem, as at first. Its snapshots are kept.
    #[command(after_help = "Example:\n  sandboxer recreate main")]
    Recreate(One),
    /// Remove sandboxes. Their histories stay. Removing one twice is no error.
    #[command(after_help = "Example:\n  sandboxer destroy main sbx_0198…")]
    Destroy {
        /// Ids or names.
        #[arg(required = true, value_name = "ID")]
        ids: Vec<String>,
    },
    /// Borrow a container that runs already: commands and files are those of that container.
    ///
    /// It is never stopped, snapshotted, rewound or destroyed; `detach` leaves it as it was.
    #[command(after_help = "Example:\n  sandboxer attach --container my-database")]
    Attach(Attach),
    /// Leave a container that was borrowed. It goes on as it was.
    #[command(after_help = "Example:\n  sandboxer detach sbx_0198…")]
    Detach(One),
    /// Let it end later. Never later than its profile's maximum.
    #[command(after_help = "Example:\n  sandboxer extend-ttl main --duration 2h")]
    ExtendTtl {
        /// Id or name.
        id: String,
        /// By how much: a number and s, m, h or d.
        #[arg(long)]
        duration: Period,
    },
}

#[derive(Debug, Args)]
pub(crate) struct One {
    /// Id or name.
    id: String,
}

#[derive(Debug, Args)]
pub(crate) struct Attach {
    /// The container's name or id.
    #[arg(long)]
    container: String,
    /// The backend whose container it is.
    #[arg(long, default_value = "ext.docker")]
    backend: String,
    /// Who asks: an administrator, an agent, or automation.
    #[arg(long, value_enum, default_value = "adm")]
    actor: ActorName,
    /// For which project.
    #[arg(long)]
    project: Option<String>,
}

#[derive(Debug, Args)]
pub(crate) struct Create {
    /// The profile to begin with.
    #[arg(long)]
    profile: Option<String>,
    /// What it is called.
    #[arg(long)]
    name: Option<String>,
    /// On this backend, whatever the profile's route says.
    #[arg(long)]
    backend: Option<String>,
    /// This container image. Backends without images are then out.
    #[arg(long)]
    image: Option<String>,
    /// Let its processes connect to this host, although they have no network: a name, `*.NAME` for all below
    /// it, or an address. Only while an `exec` goes on, or another call that uses the sandbox: that decides
    /// and connects.
    #[arg(long, value_name = "HOST[:PORT]")]
    egress: Vec<String>,
    /// An input. `repo` is the directory that the workspace shows; setup commands find the others in
    /// SANDBOX_INPUT_….
    #[arg(long, value_name = "KEY=VALUE")]
    input: Vec<String>,
    /// Who asks: an administrator, an agent, or automation.
    #[arg(long, value_enum, default_value = "adm")]
    actor: ActorName,
    /// For which project.
    #[arg(long)]
    project: Option<String>,
    /// In which run of it.
    #[arg(long)]
    run_id: Option<String>,
    #[command(flatten)]
    on: OnHost,
    /// How long it lives: a number and s, m, h or d; never longer than the profile's maximum.
    #[arg(long)]
    ttl: Option<Period>,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
pub(crate) enum ActorName {
    Adm,
    Agt,
    Atm,
}

impl From<ActorName> for Actor {
    fn from(name: ActorName) -> Self {
        match name {
            ActorName::Adm => Self::Admin,
            ActorName::Agt => Self::Agent,
            ActorName::Atm => Self::Automation,
        }
    }
}

pub(crate) async fn run(app: &App, command: Command) -> Result<u8, Fail> {
    match command {
        Command::Create(create) => make(app, create).await,
        Command::Destroy { ids } => destroy(app, &ids).await,
        Command::Attach(Attach { container, backend, actor, project }) => {
            let consumer = Consumer { actor: actor.into(), project, run_id: None };
            let (manager, backend) = (app.manager().await?, BackendId::new(backend));
            let sandbox = manager.attach(&backend, &container, consumer, &app.sink()).await?;
            show(&sandbox).await
        }
        Command::Detach(One { id }) => {
            let sandbox = app.open(&id).await?;
            sandbox.detach(&app.sink()).await?;
            show(&sandbox).await
        }
        Command::ExtendTtl { id, duration } => {
            let sandbox = app.open(&id).await?;
            sandbox.extend_ttl(duration.duration(), &app.sink()).await?;
            show(&sandbox).await
        }
        Command::Stop(One { id }) => {
            let sandbox = app.open(&id).await?;
            sandbox.stop(&app.sink()).await?;
            show(&sandbox).await
        }
        Command::Start(One { id }) => {
            let sandbox = app.open(&id).await?;
            sandbox.start(&app.sink()).await?;
            show(&sandbox).await
        }
        Command::Pause(One { id }) => {
            let sandbox = app.open(&id).await?;
            sandbox.pause(&app.sink()).await?;
            show(&sandbox).await
        }
        Command::Resume(One { id }) => {
            let sandbox = app.open(&id).await?;
            sandbox.resume(&app.sink()).await?;
            show(&sandbox).await
        }
        Command::Recreate(One { id }) => {
            let sandbox = app.open(&id).await?;
            sandbox.recreate(&app.sink()).await?;
            show(&sandbox).await
        }
    }
}

/// Prints a sandbox's status.
pub(crate) async fn show(sandbox: &Sandbox) -> Result<u8, Fail> {
    output::document(&sandbox.status().await?)
}

/// The hosts that it may come to be on: the one that is named, else those of its profile.
pub(crate) fn hosts_of(app: &App, create: &Create) -> Result<Hosts, Fail> {
    let mut others = Vec::new();
    if let Some(id) = &create.profile
        // One that is unknown is told of when the sandbox is asked for.
        && let Ok(profile) = app.profiles()?.get(id)
    {
        others.extend(profile.placement.prefer.iter().chain(&profile.placement.fallback).cloned());
    }
    Ok(create.on.clone().or(others))
}

/// What is asked for.
pub(crate) fn request_of(create: Create) -> Result<(Option<String>, CreateSandbox), Fail> {
    let mut request = CreateSandbox { profile: create.profile, ..CreateSandbox::default() };
    for input in create.input {
        let Some((key, value)) = input.split_once('=') else {
            return Err(usage(format!("--input {input:?} is not of the form KEY=VALUE")));
        };
        request = request.input(key, value);
    }
    if let Some(backend) = create.backend {
        request = request.backend(BackendId::new(backend));
    }
    if let Some(image) = create.image {
        request = request.root(Root::Image(image));
    }
    for pattern in create.egress {
        request = request.egress(pattern);
    }
    if let Some(host) = create.on.host {
        request = request.host(host);
    }
    if let Some(ttl) = create.ttl {
        request = request.ttl(ttl.duration());
    }
    let (actor, project, run_id) = (create.actor.into(), create.project, create.run_id);
    Ok((create.name, request.consumer(Consumer { actor, project, run_id })))
}

async fn make(app: &App, create: Create) -> Result<u8, Fail> {
    let hosts = hosts_of(app, &create)?;
    let (name, request) = request_of(create)?;
    let manager = app.manager_on(&hosts).await?;
    let sink = app.sink();
    let sandbox = match &name {
        Some(name) => manager.acquire(name, request, &sink).await?,
        None => manager.create(request, &sink).await?,
    };
    drop(sink);
    show(&sandbox).await
}

/// Removes each of them, whatever happens to the others.
async fn destroy(app: &App, ids: &[String]) -> Result<u8, Fail> {
    let manager = app.manager().await?;
    let sink = app.sink();
    let (mut removed, mut failed) = (Vec::<SandboxStatus>::new(), Vec::new());
    for id in ids {
        let gone = async {
            let sandbox = manager.open(id).await?;
            sandbox.destroy(&sink).await?;
            sandbox.status().await
        };
        match gone.await {
            Ok(status) => removed.push(status),
            Err(error) => failed.push(format!("{id}: {error}")),
        }
    }
    drop(sink);
    output::document(&removed)?;
    match failed.is_empty() {
        true => Ok(0),
        false => Err(Fail::new(1, failed.join("; "))),
    }
}
