//! What there is to make sandboxes with: backends and profiles.

use std::path::PathBuf;

use clap::Subcommand;
use sandbox_core::ProfileCatalog;
use serde_json::{Value, json};

use crate::{
    app::{App, Fail},
    backends::{Backends, Hosts, OnHost},
    output,
};

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Show what each backend can do on this host, with the evidence that was seen.
    #[command(after_help = "Examples:
  sandboxer backends | jq '.[].features.network_deny'
  sandboxer backends --host me@build1")]
    Backends(OnHost),
    /// Look at profiles.
    #[command(subcommand)]
    Profiles(Profiles),
}

#[derive(Debug, Subcommand)]
pub(crate) enum Profiles {
    /// List the profiles that `create --profile` knows.
    #[command(after_help = "Example:\n  sandboxer profiles list")]
    List,
    /// Check profile files: every mistake with file and line.
    #[command(after_help = "Example:\n  sandboxer profiles check profiles/*.yaml")]
    Check {
        /// The files.
        #[arg(required = true, value_name = "FILE")]
        files: Vec<PathBuf>,
    },
}

pub(crate) async fn run(app: &App, command: Command) -> Result<u8, Fail> {
    match command {
        Command::Backends(on) => output::document(&probes(app, &on.or([])).await?),
        Command::Profiles(Profiles::List) => {
            let profiles = app.profiles()?;
            let told = profiles.iter().map(|(profile, origin)| {
                json!({
                    "id": profile.id,
                    "version": profile.version,
                    "extension": profile.extension.extension(),
                    "origin": origin,
                    "profile": profile,
                })
            });
            output::document(&told.collect::<Vec<_>>())
        }
        Command::Profiles(Profiles::Check { files }) => check(&files),
    }
}

/// What each backend can do, or why it can do nothing.
pub(crate) async fn probes(app: &App, hosts: &Hosts) -> Result<Vec<Value>, Fail> {
    let Backends { there, missing } = app.backends(hosts).await?;
    let mut told = Vec::new();
    for backend in there {
        let id = backend.id().extension();
        told.push(match backend.probe().await {
            Ok(found) => json!({
                "extension_id": id,
                "available": true,
                "version": found.version,
                "isolation": found.isolation(),
                "features": found.features,
                "hosting": found.hosting,
                "error": null,
            }),
            Err(error) => unavailable(&id, &error),
        });
    }
    told.extend(missing.iter().map(|(id, error)| unavailable(id, error)));
    Ok(told)
}

fn unavailable(id: &str, error: &sandbox_core::Error) -> Value {
    json!({"extension_id": id, "available": false, "error": error.to_string()})
}

fn check(files: &[PathBuf]) -> Result<u8, Fail> {
    let mut bad = 0;
    let told = files.iter().map(|file| match ProfileCatalog::read(file) {
        Ok(profile) => json!({"file": file, "valid": true, "id": profile.id, "error": null}),
        Err(error) => {
            bad += 1;
            json!({"file": file, "valid": false, "id": null, "error": error.message()})
        }
    });
    output::document(&told.collect::<Vec<_>>())?;
    match bad {
        0 => Ok(0),
        bad => Err(Fail::new(1, format!("{bad} of {} files are no profiles", files.len()))),
    }
}
