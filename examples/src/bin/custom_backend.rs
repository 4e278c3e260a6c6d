//! A backend that somebody else wrote is used as ours are.
//!
//! `src/custom_backend.rs` has the backend, in one file. Here a manager gets it, makes a sandbox by it, runs
//! something, takes a snapshot, breaks what is there and rewinds; and hears what that backend cannot do.
#![allow(clippy::print_stdout, clippy::print_stderr, reason = "programs talk to people")]

use std::process::ExitCode;

use sandbox_core::{
    Command, CreateSandbox, ErrorKind, Feature, Level, Network, SandboxManager, Suppressed,
};
use sandbox_examples::{
    Outcome, Story, check, conclude, custom_backend::CustomBackend, scene::printed_turn,
};

#[tokio::main]
async fn main() -> ExitCode {
    conclude(tell().await)
}

async fn tell() -> Outcome {
    let dir = tempfile::Builder::new().prefix("custom-backend-").tempdir()?;
    let manager = SandboxManager::builder()
        .state_dir(dir.path().join("state"))
        .backend(CustomBackend::new(&dir.path().join("custom"))?)
        .build()
        .await?;
    let repository = dir.path().join("repository");
    std::fs::create_dir(&repository)?;
    std::fs::write(repository.join("README"), "v1\n")?;

    let mut story = Story::default();
    let request = CreateSandbox::new().workspace(&repository).network(Network::Host);
    let told = turn(&manager, request, &mut story).await;
    // Whatever went wrong, nothing is left behind.
    for sandbox in manager.list().await? {
        manager.open(sandbox.sandbox_id.as_str()).await?.destroy(&Suppressed).await?;
    }
    told?;
    check(
        std::fs::read_to_string(repository.join("README"))? == "v1\n",
        "the source is as it was",
    )?;
    story.summary();
    Ok(dir.close()?)
}

async fn turn(manager: &SandboxManager, request: CreateSandbox, story: &mut Story) -> Outcome {
    for (backend, found) in manager.backends().await {
        let found = found?;
        println!("▸ {backend}: {}, isolation {}", found.version, found.isolation());
        check(found.level(Feature::NetworkDeny) == Level::None, "it says what it cannot do")?;
    }
    let (sink, printer) = printed_turn("turn-1");
    let denied = request.clone().network(Network::Deny);
    let error = manager.create(denied, &sink).await.err().ok_or("it was made")?;
    check(error.kind() == ErrorKind::Unsupported, "and refuses it, rather than doing less")?;

    let sandbox = story.step("create", manager.create(request, &sink)).await?;
    let first = Command::new("cat").arg("/proc/1/comm");
    let run = story.step("run a command", sandbox.exec(first, &sink)).await?;
    let name = run.stdout.text();
    check(name.starts_with("sandbox-guest"), "the guest is the first of its processes")?;

    let before = story.step("snapshot", sandbox.snapshot("before", &sink)).await?;
    sandbox.exec(Command::shell("rm README; echo x > new"), &sink).await?;
    check(sandbox.changes(Some(&before.id)).await?.len() == 2, "two changes are listed")?;
    story.step("rewind", sandbox.rewind(&before.id, &sink)).await?;
    let run = sandbox.exec(Command::shell("cat *"), &sink).await?;
    check(run.stdout.text() == "v1\n", "the files are back")?;
    story.step("destroy", sandbox.destroy(&sink)).await?;

    drop(sink);
    let kinds = printer.await?;
    check(kinds.last().is_some_and(|kind| kind == "destroyed"), "all of it is in the history")
}
