//! What a story takes place in: a state directory of its own, a small repository, a manager.

use std::{fs, path::PathBuf};

use sandbox_bwrap::BwrapBackend;
use sandbox_core::{
    ChannelSink, Consumer, CreateSandbox, SandboxEvent, SandboxManager, Suppressed, TurnId,
};
use tokio::task::JoinHandle;

use crate::Outcome;

/// What a story takes place in. [`Scene::end`] removes all of it.
#[derive(Debug)]
pub struct Scene {
    dir: tempfile::TempDir,
    /// A manager on the state directory.
    pub manager: SandboxManager,
}

impl Scene {
    /// A fresh one.
    ///
    /// # Errors
    ///
    /// If this host can make no sandboxes; the message says what is missing.
    pub async fn begin() -> Outcome<Self> {
        let dir = tempfile::Builder::new().prefix("quickstart-").tempdir()?;
        let manager = manager(dir.path()).await?;
        let repository = dir.path().join("repository");
        fs::create_dir(&repository)?;
        for (name, text) in [
            ("add.sh", "#!/bin/sh\necho $(($1 + $2))\n"),
            ("test.sh", "#!/bin/sh\ntest \"$(sh add.sh 2 3)\" = 5 && echo all tests passed\n"),
            ("README", "Adds two numbers.\n"),
        ] {
            fs::write(repository.join(name), text)?;
        }
        Ok(Self { dir, manager })
    }

    /// Tells a story in a fresh one, and removes all of it however that ends.
    ///
    /// # Errors
    ///
    /// The story's own; otherwise as [`begin`](Self::begin) and [`end`](Self::end).
    pub async fn tell(story: impl AsyncFnOnce(&Self) -> Outcome) -> Outcome {
        let scene = Self::begin().await?;
        let told = story(&scene).await;
        scene.end().await?;
        told
    }

    /// Where the state is.
    #[must_use]
    pub fn state_dir(&self) -> PathBuf {
        self.dir.path().to_owned()
    }

    /// A request for a sandbox of the repository.
    #[must_use]
    pub fn request(&self, project: &str) -> CreateSandbox {
        CreateSandbox::profile("profile.agent-dev")
            .input("repo", self.dir.path().join("repository").to_string_lossy())
            .consumer(Consumer::agent(project))
    }

    /// Removes every sandbox and the rest.
    ///
    /// # Errors
    ///
    /// If something could not be removed.
    pub async fn end(self) -> Outcome {
        for sandbox in self.manager.list().await? {
            self.manager.open(sandbox.sandbox_id.as_str()).await?.destroy(&Suppressed).await?;
        }
        Ok(self.dir.close()?)
    }
}

/// A manager on a state directory, as each process makes its own.
///
/// # Errors
///
/// If this host can make no sandboxes.
pub async fn manager(state_dir: &std::path::Path) -> Outcome<SandboxManager> {
    let backend = BwrapBackend::builder().state_dir(state_dir.join("bwrap")).build()?;
    Ok(SandboxManager::builder().state_dir(state_dir).backend(backend).build().await?)
}

/// A turn whose events are printed as they happen. The task ends when the sink is dropped; it returns
/// the events' kinds.
#[must_use]
pub fn printed_turn(name: &str) -> (ChannelSink, JoinHandle<Vec<String>>) {
    let (sink, mut events) = ChannelSink::new(TurnId::new(name), 64);
    let printer = tokio::spawn(async move {
        let mut kinds = Vec::new();
        while let Some(event) = events.recv().await {
            println!("      {}", line(&event));
            kinds.push(event.name());
        }
        kinds
    });
    (sink, printer)
}

/// An event on one line.
#[must_use]
pub fn line(event: &SandboxEvent) -> String {
    let all = serde_json::to_value(event).unwrap_or_default();
    let told = ["argv", "outcome", "label", "path", "generation", "error", "reason", "backend"];
    let told = told.iter().filter(|key| !all[**key].is_null());
    let detail: Vec<String> = told.map(|key| format!("{key}={}", all[*key])).collect();
    let turn = event.turn.as_ref().map_or("-", TurnId::as_str);
    let line = format!("[{turn}] {:>3} {:<18} {}", event.seq, event.name(), detail.join(" "));
    line.chars().take(110).collect()
}
