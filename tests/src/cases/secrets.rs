//! Secrets reach who they are for, and nobody else.

use std::{collections::BTreeMap, path::Path};

use async_trait::async_trait;
use sandbox_core::{Command, ErrorKind, ProfileCatalog, Result, SandboxManager, Secret, Secrets};

use super::cases;
use crate::{Check, Context, context::error_of, holds, same};

cases!("secrets";
    [] a_secret_reaches_the_process_that_asks_for_it_and_no_other,
    [] a_secret_is_in_no_record_event_argument_or_file,
    [] a_setup_command_gets_its_secrets_and_cannot_tell_them,
    [] a_missing_secret_is_named_and_nothing_is_made,
);

/// A value that no file holds by chance, and no other case at work at the same time.
fn value(cx: &Context) -> String {
    format!("zq-s3cr3t-{}", cx.marker())
}

#[derive(Debug)]
struct Known(BTreeMap<&'static str, Secret>);

#[async_trait]
impl Secrets for Known {
    async fn find(&self, reference: &str) -> Result<Option<Secret>> {
        Ok(self.0.get(reference).cloned())
    }

    fn places(&self, _: &str) -> String {
        "it is not among the case's".into()
    }
}

async fn manager(cx: &Context, value: &str) -> Check<SandboxManager> {
    let secrets = Known([("TOKEN", Secret::new(value))].into());
    Ok(cx.manager_with_profiles(ProfileCatalog::none(), secrets).await?)
}

async fn a_secret_reaches_the_process_that_asks_for_it_and_no_other(cx: &Context) -> Check {
    let value = value(cx);
    let manager = manager(cx, &value).await?;
    let sandbox = manager.create(cx.request(), &cx.sink).await?;
    let tell = Command::shell("printf %s \"$API_TOKEN\"");
    let run = cx.run(&sandbox, tell.clone().env_secret("API_TOKEN", "TOKEN")).await?;
    same!(run.stdout.text(), value);
    same!(cx.run(&sandbox, tell).await?.stdout.text(), "");
    // A process that has it does not give it to others.
    let marker = cx.marker();
    let holder = Command::new("sleep").arg(&marker).env_secret("API_TOKEN", "TOKEN");
    let process = sandbox.spawn(holder, &cx.sink).await?;
    let look = format!("grep -als {value} /proc/[0-9]*/environ | wc -l");
    // The one that holds it, if one may look into it at all; this one is told of the value by its
    // arguments, not its environment.
    let others: usize = cx.sh(&sandbox, &look).await?.trim().parse()?;
    holds!(others <= 1, "{others} processes have it in their environment");
    let env = cx.sh(&sandbox, "env").await?;
    holds!(!env.contains(&value), "another process's environment has it not");
    drop(process);
    Ok(())
}

async fn a_secret_is_in_no_record_event_argument_or_file(cx: &Context) -> Check {
    let value = value(cx);
    let manager = manager(cx, &value).await?;
    let request = cx.request().setup("test -n \"$TOKEN\"").setup_secret("TOKEN");
    let sandbox = manager.create(request, &cx.sink).await?;
    let marker = cx.marker();
    let holder = Command::shell(format!("sleep {marker} & wait")).env_secret("X", "TOKEN");
    let process = sandbox.spawn(holder, &cx.sink).await?;
    cx.until_count(&sandbox, &marker, |count| count > 0).await?;
    for entry in std::fs::read_dir("/proc")?.flatten() {
        let arguments = std::fs::read(entry.path().join("cmdline")).unwrap_or_default();
        holds!(!has(&arguments, &value), "the arguments of {:?} have it", entry.path());
    }
    let events = serde_json::to_string(&cx.sink.events())?;
    holds!(events.contains("process_started"), "there are events");
    holds!(!events.contains(&value), "an event has it");
    drop(process);
    // A positive control: what is written down is found.
    std::fs::write(cx.scratch().join("state").join("control"), &value)?;
    same!(holding(cx.scratch(), &value)?, 1);
    std::fs::remove_file(cx.scratch().join("state").join("control"))?;
    same!(holding(cx.scratch(), &value)?, 0);
    Ok(())
}

async fn a_setup_command_gets_its_secrets_and_cannot_tell_them(cx: &Context) -> Check {
    let value = value(cx);
    let manager = manager(cx, &value).await?;
    let length = format!("test \"${{#TOKEN}}\" = {}", value.len());
    let request = cx.request().setup(length).setup_secret("TOKEN");
    let sandbox = manager.create(request, &cx.sink).await?;
    same!(cx.sh(&sandbox, "printf %s \"$TOKEN\"").await?, "");
    let telling = cx.request().setup("echo it is $TOKEN; exit 1").setup_secret("TOKEN");
    let error = error_of(manager.create(telling, &cx.sink).await)?;
    same!(error.kind(), ErrorKind::Setup);
    holds!(error.message().contains("it is [secret TOKEN]"), "{error} tells that there was one");
    same!(holding(cx.scratch(), &value)?, 0);
    Ok(())
}

async fn a_missing_secret_is_named_and_nothing_is_made(cx: &Context) -> Check {
    let value = value(cx);
    let manager = manager(cx, &value).await?;
    let request = cx.request().setup("true").setup_secret("TOKEN").setup_secret("OTHER");
    let error = error_of(manager.create(request, &cx.sink).await)?;
    same!(error.kind(), ErrorKind::NotFound);
    holds!(error.message().contains("OTHER"), "{error} names it");
    holds!(!error.to_string().contains(&value), "{error} tells no value");
    holds!(cx.sink.events().is_empty(), "nothing was begun");
    holds!(cx.backend.inventory().await?.is_empty(), "nothing was made");
    let sandbox = manager.create(cx.request(), &cx.sink).await?;
    let error = error_of(cx.run(&sandbox, Command::new("true").env_secret("X", "OTHER")).await)?;
    same!(error.kind(), ErrorKind::NotFound);
    let kinds = cx.kinds(&sandbox).await?;
    holds!(!kinds.contains(&"process_started".to_owned()), "nothing was started");
    Ok(())
}

fn has(bytes: &[u8], text: &str) -> bool {
    bytes.windows(text.len()).any(|window| window == text.as_bytes())
}

/// How many files below a directory hold this text; what may not be looked into is left out.
fn holding(path: &Path, text: &str) -> std::io::Result<usize> {
    use std::io::ErrorKind::{NotFound, PermissionDenied};
    let counted = match std::fs::symlink_metadata(path) {
        Ok(found) if found.is_dir() => std::fs::read_dir(path).and_then(|entries| {
            entries.map(|entry| holding(&entry?.path(), text)).sum::<std::io::Result<usize>>()
        }),
        Ok(found) if found.is_file() => std::fs::read(path).map(|all| usize::from(has(&all, text))),
        found => found.map(|_| 0),
    };
    match counted {
        Err(error) if matches!(error.kind(), NotFound | PermissionDenied) => Ok(0),
        counted => counted,
    }
}
