//! A sandbox's files.

use std::{
    io::IsTerminal,
    os::unix::ffi::OsStrExt,
    path::{Path, PathBuf},
    sync::Arc,
};

use base64::{Engine, engine::general_purpose::STANDARD as BASE64};
use clap::Subcommand;
use sandbox_core::{DownloadOptions, FileKind, SnapshotId, Transferred, UploadOptions};
use serde_json::{Value, json};
use tokio::io::AsyncReadExt;

use crate::{
    app::{App, Fail, usage},
    output,
    progress::Bar,
};

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Copy a file or a directory into a sandbox or out of it.
    ///
    /// One of the two is of the form ID:PATH, where relative paths begin at the workspace. DST is the name
    /// of the copy itself, never a directory that it is put into; a directory that is there is merged
    /// with. What comes out of a sandbox is written nowhere but there: links that lead outside are refused.
    #[command(after_help = "Examples:\n  sandboxer cp ./fixtures main:tests/fixtures
  sandboxer cp main:target/report.html ./report.html")]
    Cp {
        /// What is copied.
        src: String,
        /// What the copy is called.
        dst: String,
    },
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
        Command::Cp { src, dst } => copy(app, &src, &dst).await,
        Command::Cat { id, path } => {
            let mut reader = app.open(&id).await?.files().reader(&path, 0).await?;
            let mut buffer = vec![0; 64 * 1024];
            loop {
                match reader.read(&mut buffer).await? {
                    0 => return Ok(0),
                    count => output::bytes(&buffer[..count])?,
                };
            }
        }
        Command::Ls { id, path } => list(app, &id, &path).await,
        Command::Changes { id, snapshot } => {
            output::document(&app.open(&id).await?.changes(snapshot.as_ref()).await?)
        }
    }
}

/// A path in a sandbox, if it is one: `ID:PATH`.
fn remote(side: &str) -> Option<(&str, &str)> {
    let (id, path) = side.split_once(':')?;
    (!id.is_empty() && !id.contains('/') && !id.starts_with('.')).then_some((id, path))
}

async fn copy(app: &App, src: &str, dst: &str) -> Result<u8, Fail> {
    let bar = Arc::new(Bar::new(!app.quiet, std::io::stderr().is_terminal()));
    let told = Arc::clone(&bar);
    let done = match (remote(src), remote(dst)) {
        (None, Some((id, path))) => {
            let options = UploadOptions::new().progress(move |so_far| told.set(so_far));
            let files = app.open(id).await?.files();
            files.upload(PathBuf::from(src), place(path), options, &app.sink()).await?
        }
        (Some((id, path)), None) => {
            let options = DownloadOptions::new().progress(move |so_far| told.set(so_far));
            app.open(id).await?.files().download(place(path), PathBuf::from(dst), options).await?
        }
        _ => return Err(usage("exactly one of the two must be in a sandbox: ID:PATH")),
    };
    let Transferred { bytes, files, .. } = done;
    bar.end(&format!("{files} files, {bytes} bytes"));
    output::document(&json!({"files": files, "bytes": bytes}))
}

/// `ID:` alone is the workspace.
fn place(path: &str) -> &Path {
    Path::new(if path.is_empty() { "." } else { path })
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
