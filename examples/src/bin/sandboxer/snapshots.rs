//! Filesystem states.

use std::path::{Path, PathBuf};

use clap::Subcommand;
use sandbox_core::{Sandbox, SandboxManager, Snapshot, SnapshotId};
use serde_json::{Value, json};

use crate::{
    app::{App, Fail, is_missing},
    life::{self, Create},
    output,
};

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Take a snapshot of a sandbox's files. Its processes go on.
    #[command(after_help = "Example:\n  sandboxer snapshot main --label 'before the refactor'")]
    Snapshot {
        /// Id or name.
        id: String,
        /// Why.
        #[arg(long, default_value = "")]
        label: String,
    },
    /// Look at snapshots, or remove one.
    #[command(subcommand)]
    Snapshots(Snapshots),
    /// Give a sandbox the files of one of its snapshots. Its processes end; its history stays.
    #[command(after_help = "Example:\n  sandboxer rewind main snp_0198…")]
    Rewind {
        /// Id or name.
        id: String,
        /// The snapshot.
        snapshot: SnapshotId,
    },
    /// Make another sandbox from a snapshot.
    #[command(after_help = "Example:\n  sandboxer fork snp_0198… --name variant")]
    Fork {
        /// The snapshot.
        snapshot: SnapshotId,
        /// What the new one is called.
        #[arg(long)]
        name: Option<String>,
    },
    /// Write the workspace of a snapshot as an archive, for `import` on whatever backend or host.
    #[command(after_help = "Example:\n  sandboxer export snp_0198… --output main.sandbox")]
    Export {
        /// The snapshot.
        snapshot: SnapshotId,
        /// The archive. A file of that name is replaced when the archive is complete.
        #[arg(long, value_name = "FILE")]
        output: PathBuf,
    },
    /// Make a sandbox whose workspace is that of an archive.
    #[command(
        after_help = "Example:\n  sandboxer import main.sandbox --name copy --backend docker"
    )]
    Import {
        /// The archive.
        file: PathBuf,
        #[command(flatten)]
        create: Box<Create>,
    },
    /// Rewind the sandbox that a snapshot is of to it, whatever state it is in, also if it was lost.
    #[command(after_help = "Example:\n  sandboxer restore snp_0198…")]
    Restore {
        /// The snapshot.
        snapshot: SnapshotId,
    },
}

#[derive(Debug, Subcommand)]
pub(crate) enum Snapshots {
    /// List a sandbox's snapshots, or everyone's, oldest first.
    #[command(after_help = "Example:\n  sandboxer snapshots list main")]
    List {
        /// Id or name.
        id: Option<String>,
    },
    /// Show a snapshot, with its size.
    #[command(after_help = "Example:\n  sandboxer snapshots get snp_0198…")]
    Get {
        /// The snapshot.
        snapshot: SnapshotId,
    },
    /// Remove a snapshot. What others build on stays usable.
    #[command(after_help = "Example:\n  sandboxer snapshots delete snp_0198…")]
    Delete {
        /// The snapshot.
        snapshot: SnapshotId,
    },
}

pub(crate) async fn run(app: &App, command: Command) -> Result<u8, Fail> {
    match command {
        Command::Snapshot { id, label } => {
            let sandbox = app.open(&id).await?;
            let snapshot = sandbox.snapshot(label, &app.sink()).await?;
            output::document(&describe(&snapshot, Some(&snapshot.id)))
        }
        Command::Snapshots(Snapshots::List { id }) => list(app, id.as_deref()).await,
        Command::Snapshots(Snapshots::Get { snapshot }) => {
            let (_, sandbox, found) = find(app, &snapshot).await?;
            let current = sandbox.based_on().await?;
            let mut told = describe(&found, current.as_ref());
            told["size"] = json!(sandbox.snapshot_size(&found).await?);
            output::document(&told)
        }
        Command::Snapshots(Snapshots::Delete { snapshot }) => {
            let (_, sandbox, _) = find(app, &snapshot).await?;
            sandbox.delete_snapshot(&snapshot, &app.sink()).await?;
            output::document(&json!({"snapshot_id": snapshot, "deleted": true}))
        }
        Command::Rewind { id, snapshot } => {
            let sandbox = app.open(&id).await?;
            sandbox.rewind(&snapshot, &app.sink()).await?;
            life::show(&sandbox).await
        }
        Command::Fork { snapshot, name } => {
            let manager = app.manager().await?;
            let fork = manager.fork(&snapshot, name.as_deref(), &app.sink()).await?;
            life::show(&fork).await
        }
        Command::Export { snapshot, output } => export(app, &snapshot, &output).await,
        Command::Import { file, create } => {
            let archive = tokio::fs::File::open(&file).await;
            let archive = archive.map_err(|e| Fail::new(1, format!("{}: {e}", file.display())))?;
            let hosts = life::hosts_of(app, &create)?;
            let (name, request) = life::request_of(*create)?;
            let manager = app.manager_on(&hosts).await?;
            let made = manager.import(name.as_deref(), request, archive, &app.sink()).await?;
            life::show(&made).await
        }
        Command::Restore { snapshot } => {
            let (_, sandbox, _) = find(app, &snapshot).await?;
            sandbox.rewind(&snapshot, &app.sink()).await?;
            life::show(&sandbox).await
        }
    }
}

/// Writes an archive beside its place, and puts it there when it is complete.
async fn export(app: &App, snapshot: &SnapshotId, output: &Path) -> Result<u8, Fail> {
    let manager = app.manager().await?;
    let place = std::path::absolute(output)?;
    let dir = place.parent().unwrap_or(Path::new("/"));
    let part = tempfile::Builder::new().prefix(".sandboxer-export-").tempfile_in(dir)?;
    let mut file = tokio::fs::File::from_std(part.reopen()?);
    manager.export(snapshot, &mut file, &app.sink()).await?;
    file.sync_all().await?;
    let size = file.metadata().await?.len();
    part.persist(&place).map_err(|error| error.error)?;
    output::document(&json!({"snapshot_id": snapshot, "output": place, "bytes": size}))
}

/// A snapshot and the sandbox that it is of.
async fn find(app: &App, id: &SnapshotId) -> Result<(SandboxManager, Sandbox, Snapshot), Fail> {
    let manager = app.manager().await?;
    let snapshot = manager.snapshot(id).await?;
    let sandbox = manager.open(snapshot.sandbox.as_str()).await?;
    Ok((manager, sandbox, snapshot))
}

async fn list(app: &App, id: Option<&str>) -> Result<u8, Fail> {
    let manager = app.manager().await?;
    let ids = match id {
        Some(id) => vec![id.to_owned()],
        None => {
            let all = manager.list().await?;
            all.into_iter().map(|info| info.sandbox_id.to_string()).collect()
        }
    };
    let mut told = Vec::new();
    for id in ids {
        let sandbox = match manager.open(&id).await {
            // Removed since it was listed.
            Err(error) if is_missing(&error) && id.starts_with("sbx_") => continue,
            opened => opened?,
        };
        let current = sandbox.based_on().await?;
        let snapshots = sandbox.snapshots().await?;
        told.extend(snapshots.iter().map(|snapshot| describe(snapshot, current.as_ref())));
    }
    output::document(&told)
}

fn describe(snapshot: &Snapshot, current: Option<&SnapshotId>) -> Value {
    json!({
        "snapshot_id": snapshot.id,
        "sandbox_id": snapshot.sandbox,
        "label": snapshot.label,
        "parent": snapshot.parent,
        "taken_at": snapshot.taken_at,
        "extension_id": snapshot.data.backend.extension(),
        "current": current == Some(&snapshot.id),
    })
}
