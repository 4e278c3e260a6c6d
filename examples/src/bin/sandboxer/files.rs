//! A sandbox's files.

use std::os::unix::ffi::OsStrExt;

use base64::{Engine, engine::general_purpose::STANDARD as BASE64};
use clap::Subcommand;
use sandbox_core::{FileKind, SnapshotId};
use serde_json::{Value, json};

use crate::{
    app::{App, Fail},
    output,
};

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Print a file.
    #[command(after_help = "Example:\n  sandboxer cat main src/main.rs")]
    Cat {
        /// Id or name.
        id: String,
        /// The file; relative paths begin at the workspace.
        path: String,
    },
    /// List a directory.
    #[command(after_help = "Example:\n  sandboxer ls main src")]
    Ls {
        /// Id or name.
        id: String,
        /// The directory; relative paths begin at the workspace.
        #[arg(default_value = ".")]
        path: String,
    },
    /// List the files that were added, changed or deleted, since the beginning or a snapshot.
    #[command(
        after_help = "Examples:\n  sandboxer changes main\n  sandboxer changes main snp_0198…"
    )]
    Changes {
        /// Id or name.
        id: String,
        /// Since this snapshot.
        snapshot: Option<SnapshotId>,
    },
}

pub(crate) async fn run(app: &App, command: Command) -> Result<u8, Fail> {
    match command {
        Command::Cat { id, path } => {
            let contents = app.open(&id).await?.files().read(&path).await?;
            output::bytes(&contents)
        }
        Command::Ls { id, path } => list(app, &id, &path).await,
        Command::Changes { id, snapshot } => {
            output::document(&app.open(&id).await?.changes(snapshot.as_ref()).await?)
        }
    }
}

async fn list(app: &App, id: &str, path: &str) -> Result<u8, Fail> {
    let entries = app.open(id).await?.files().list(path).await?;
    let told = entries.iter().map(|entry| {
        let metadata = &entry.metadata;
        let kind = match metadata.kind {
            FileKind::File => "file",
            FileKind::Directory => "directory",
            FileKind::Symlink => "symlink",
            _ => "other",
        };
        let mut told = named("name", entry.name.as_bytes());
        told["kind"] = json!(kind);
        told["size"] = json!(metadata.size);
        told["mode"] = json!(format!("{:04o}", metadata.mode & 0o7777));
        told["uid"] = json!(metadata.uid);
        told["gid"] = json!(metadata.gid);
        told["modified"] = json!(metadata.modified);
        if let Some(target) = &metadata.target {
            let target = named("target", target.as_os_str().as_bytes());
            told["target"] = target["target"].clone();
            told["target_encoding"] = target["target_encoding"].clone();
        }
        told
    });
    output::document(&told.collect::<Vec<_>>())
}

/// A name as text where it is UTF-8, else as base64.
fn named(key: &str, name: &[u8]) -> Value {
    let (text, encoding) = match std::str::from_utf8(name) {
        Ok(text) => (text.to_owned(), "utf8"),
        Err(_) => (BASE64.encode(name), "base64"),
    };
    json!({key: text, format!("{key}_encoding"): encoding})
}
