//! One agent turn on a real repository.
//!
//! Acquires a named sandbox of the repository (the one in the current directory, or the path given),
//! builds it inside, takes a snapshot, breaks things badly, rewinds, shows that the files are back and
//! that the host's repository was never touched, forks, and destroys everything. The turn's events are
//! printed as they happen. Exits with 1 if anything is not as it should be.
#![allow(clippy::print_stdout, clippy::print_stderr, reason = "programs talk to people")]

use std::{path::PathBuf, process::ExitCode, time::Duration};

use sandbox_bwrap::BwrapBackend;
use sandbox_core::{
    ChannelSink, Command, Consumer, ErrorKind, Sandbox, SandboxEvent, SandboxManager,
    TurnEventSink, TurnId,
};
use sandbox_examples::{Outcome, Story, check, conclude, fingerprint, project};

#[tokio::main]
async fn main() -> ExitCode {
    let path = std::env::args_os().nth(1).map_or_else(|| PathBuf::from("."), PathBuf::from);
    conclude(tell(path).await)
}

async fn tell(path: PathBuf) -> Outcome {
    let repository = path.canonicalize().map_err(|error| format!("{}: {error}", path.display()))?;
    let before = fingerprint::of(&repository)?;
    println!("repository  {}", repository.display());

    let state = tempfile::Builder::new().prefix("quickstart-").tempdir()?;
    let backend = BwrapBackend::builder().state_dir(state.path().join("bwrap")).build()?;
    let manager =
        SandboxManager::builder().state_dir(state.path()).backend(backend).build().await?;

    // The harness passes this turn's sink to each call it makes; here the events go to the screen.
    let (sink, mut events) = ChannelSink::new(TurnId::new("turn-1"), 64);
    let printer = tokio::spawn(async move {
        let mut count = 0;
        while let Some(event) = events.recv().await {
            print_event(&event);
            count += 1;
        }
        count
    });

    let mut story = Story::default();
    let told = turn(&manager, &sink, &repository, &mut story).await;
    // Whatever went wrong, nothing is left behind.
    for sandbox in manager.list().await? {
        if sandbox.state.is_live() {
            manager.open(sandbox.sandbox_id.as_str()).await?.destroy(&sink).await?;
        }
    }
    drop(sink);
    let events = printer.await?;
    told?;

    println!();
    let untouched = before == fingerprint::of(&repository)?;
    check(untouched, "the repository on this host was never touched")?;
    story.summary();
    println!("\n{events} events in this turn's history; everything was cleaned up");
    Ok(())
}

async fn turn(
    manager: &SandboxManager,
    sink: &dyn TurnEventSink,
    repository: &std::path::Path,
    story: &mut Story,
) -> Outcome {
    let request = project::request(repository).consumer(Consumer::agent("quickstart"));
    let sandbox = story
        .step("acquire the sandbox `main`", manager.acquire("main", request.clone(), sink))
        .await?;
    let again = manager.acquire("main", request, sink).await?;
    check(again.id() == sandbox.id(), "acquiring it again gives the same sandbox")?;

    let build = project::build_command(repository).timeout(Duration::from_secs(600));
    let run = story.step("build and test inside", sandbox.exec(build.clone(), sink)).await?;
    for line in run.stdout.text().lines().filter(|line| !line.is_empty()) {
        println!("  │ {line}");
    }
    if !run.outcome.is_success() {
        println!("{}", run.stderr.text());
    }
    check(run.outcome.is_success(), "it builds, and its tests pass, inside the sandbox")?;

    let true_ = || Command::new("/bin/true");
    sandbox.exec(true_(), sink).await?;
    story.step("run /bin/true in the warm sandbox", sandbox.exec(true_(), sink)).await?;

    let files = list(&sandbox, sink).await?;
    let good = story.step("snapshot", sandbox.snapshot("before the refactor", sink)).await?;

    story
        .step("break it badly: rm -rf", sandbox.exec(Command::shell("rm -rf ./* ./.git"), sink))
        .await?;
    check(list(&sandbox, sink).await?.len() < files.len(), "the sources are gone")?;
    let run = sandbox.exec(build.timeout(Duration::from_secs(60)), sink).await;
    let broken = match run {
        Ok(run) => !run.outcome.is_success(),
        Err(error) => error.kind() == ErrorKind::NotFound,
    };
    check(broken || files.is_empty(), "it does not build any more")?;

    story.step("rewind", sandbox.rewind(&good.id, sink)).await?;
    check(list(&sandbox, sink).await? == files, "every file is back")?;
    check(sandbox.info().await?.generation == 2, "same sandbox, second generation")?;

    let fork = story.step("fork", manager.fork(&good.id, Some("variant"), sink)).await?;
    check(list(&fork, sink).await? == files, "the fork has the same files")?;
    fork.files().write("only-in-the-fork", "x", sink).await?;
    let seen = sandbox.files().metadata("only-in-the-fork").await;
    check(seen.is_err(), "what the fork writes stays in the fork")?;

    println!("\n▸ how someone else gets in");
    let report = sandbox.reachability().await?.report();
    println!("{}", serde_json::to_string_pretty(&report)?);

    story
        .step("destroy both", async {
            fork.destroy(sink).await?;
            sandbox.destroy(sink).await
        })
        .await
}

/// The files of the workspace that the repository is made of.
async fn list(sandbox: &Sandbox, sink: &dyn TurnEventSink) -> Outcome<Vec<String>> {
    let find = Command::shell("find . -path ./target -prune -o -type f -print | sort")
        .output_limit(16 * 1024 * 1024);
    let run = sandbox.exec(find, sink).await?;
    Ok(run.stdout.text().lines().map(str::to_owned).collect())
}

fn print_event(event: &SandboxEvent) {
    let detail = serde_json::to_value(event).unwrap_or_default();
    let detail = ["name", "argv", "outcome", "label", "path", "generation", "error", "reason"]
        .iter()
        .filter(|key| !detail[**key].is_null())
        .map(|key| format!("{key}={}", detail[*key]))
        .collect::<Vec<_>>()
        .join(" ");
    let id = event.sandbox_id.as_str();
    let line = format!("…{} {:>3} {:<18} {detail}", &id[id.len() - 6..], event.seq, event.name());
    println!("    {}", line.chars().take(110).collect::<String>());
}
