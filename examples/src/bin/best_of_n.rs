//! One snapshot, several forks at once, the best one kept.
//!
//! Each fork is a sandbox of its own with the same files. Each tries another edit; all run the same test;
//! the one with the best score stays, the others are removed. Every attempt is a turn with a sink of its
//! own, so that no event can get into the wrong one.
#![allow(clippy::print_stdout, clippy::print_stderr, reason = "programs talk to people")]

use std::{process::ExitCode, time::Instant};

use sandbox_core::{CollectSink, Command, Sandbox, SandboxManager, SnapshotId, Suppressed, TurnId};
use sandbox_examples::{Outcome, check, conclude, scene::Scene};
use tokio::task::JoinSet;

/// What is tried, and how well it does: the number of right sums out of three.
const ATTEMPTS: [(&str, usize); 4] =
    [("echo $(($1 * $2))", 1), ("echo $1$2", 0), ("expr $1 + $2", 3), ("echo $(($1 - $2))", 1)];

#[tokio::main]
async fn main() -> ExitCode {
    conclude(Scene::tell(story).await)
}

async fn story(scene: &Scene) -> Outcome {
    let sandbox = scene.manager.acquire("main", scene.request("best-of-n"), &Suppressed).await?;
    let snapshot = sandbox.snapshot("where all attempts begin", &Suppressed).await?;

    println!("▸ {} attempts at once", ATTEMPTS.len());
    let begun = Instant::now();
    let mut attempts = JoinSet::new();
    for number in 0..ATTEMPTS.len() {
        let (manager, snapshot) = (scene.manager.clone(), snapshot.id.clone());
        attempts.spawn(async move { attempt(&manager, &snapshot, number).await });
    }
    let mut tried = Vec::new();
    while let Some(done) = attempts.join_next().await {
        let (number, fork, score) = done??;
        println!("  attempt {number}: {score} of 3   {}", ATTEMPTS[number].0);
        check(score == ATTEMPTS[number].1, "it does as well as it can")?;
        tried.push((score, number, fork));
    }
    println!("  in {:.0} ms", begun.elapsed().as_secs_f64() * 1000.0);

    println!("\n▸ the best is kept");
    tried.sort_by_key(|(score, number, _)| (std::cmp::Reverse(*score), *number));
    let mut tried = tried.into_iter();
    let (_, number, best) = tried.next().ok_or("nothing was tried")?;
    for (_, _, fork) in tried {
        fork.destroy(&Suppressed).await?;
    }
    check(number == 2, "the addition has won")?;
    let left = scene.manager.list().await?;
    check(left.len() == 2, "the original and the best are left")?;
    let original = sandbox.files().read("add.sh").await?;
    let kept = best.files().read("add.sh").await?;
    check(kept != original, "the original is as it was")?;
    check(best.info().await?.latest_snapshot.is_none(), "a fork has a history of its own")?;
    Ok(())
}

/// A fork that tries one edit, and its score.
async fn attempt(
    manager: &SandboxManager,
    snapshot: &SnapshotId,
    number: usize,
) -> Outcome<(usize, Sandbox, usize)> {
    let sink = CollectSink::new(TurnId::new(format!("attempt-{number}")));
    let fork = manager.fork(snapshot, Some(&format!("attempt-{number}")), &sink).await?;
    let text = format!("#!/bin/sh\n{}\n", ATTEMPTS[number].0);
    fork.files().write("add.sh", text, &sink).await?;
    let mut score = 0;
    for (a, b) in [("2", "2"), ("2", "3"), ("7", "0")] {
        let run = fork.exec(Command::new("sh").args(["add.sh", a, b]), &sink).await?;
        let expected = a.parse::<u32>()? + b.parse::<u32>()?;
        score += usize::from(run.stdout.text().trim() == expected.to_string());
    }
    let turns = sink
        .events()
        .iter()
        .all(|event| event.turn == Some(TurnId::new(format!("attempt-{number}"))));
    check(turns, "its events are its own turn's")?;
    Ok((number, fork, score))
}
