//! What a case works with.

use std::{
    fmt,
    path::{Path, PathBuf},
    sync::Arc,
};

use sandbox_core::{
    CollectSink, Command, Consumer, CreateSandbox, Result, Run, Sandbox, SandboxBackend,
    SandboxManager, TurnId,
};
use tempfile::TempDir;

/// What a case returns.
pub type Check<T = ()> = std::result::Result<T, Failure>;

/// Why a case failed.
pub struct Failure(String);

impl<E: fmt::Display> From<E> for Failure {
    fn from(error: E) -> Self {
        Self(error.to_string())
    }
}

impl fmt::Debug for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl Failure {
    /// What is to be told.
    #[must_use]
    pub fn message(&self) -> &str {
        &self.0
    }
}

type Make = dyn Fn(&Path) -> Result<Arc<dyn SandboxBackend>> + Send + Sync;

/// A backend under test.
#[derive(Clone)]
pub struct Subject {
    name: String,
    make: Arc<Make>,
    run_as: Option<u32>,
}

impl Subject {
    /// A backend, made with a state directory of its own for each case.
    pub fn new(
        name: impl Into<String>,
        make: impl Fn(&Path) -> Result<Arc<dyn SandboxBackend>> + Send + Sync + 'static,
    ) -> Self {
        Self { name: name.into(), make: Arc::new(make), run_as: None }
    }

    /// The same, each case in a process of its own that runs as this user. For suites that run as root.
    #[must_use]
    pub fn run_as(mut self, uid: u32) -> Self {
        self.run_as = Some(uid);
        self
    }

    /// What it is called in the output.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    pub(crate) fn user(&self) -> Option<u32> {
        self.run_as
    }

    /// The backend, with its state in this directory.
    ///
    /// # Errors
    ///
    /// What making it says.
    pub fn backend(&self, state: &Path) -> Result<Arc<dyn SandboxBackend>> {
        (self.make)(state)
    }
}

impl fmt::Debug for Subject {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Subject({})", self.name)
    }
}

/// A state directory, a repository, a manager and a sink, for one case.
#[derive(Debug)]
pub struct Context {
    dir: TempDir,
    subject: Subject,
    /// The backend under test.
    pub backend: Arc<dyn SandboxBackend>,
    /// A manager with that backend.
    pub manager: SandboxManager,
    /// The sink of the case's turn.
    pub sink: CollectSink,
}

impl Context {
    pub(crate) async fn new(subject: &Subject) -> Result<Self> {
        let failed = |error| sandbox_core::Error::io("prepare", "a temporary directory", error);
        let dir = tempfile::Builder::new().prefix("conformance-").tempdir().map_err(failed)?;
        let backend = subject.backend(&dir.path().join("backend"))?;
        let manager = SandboxManager::builder()
            .state_dir(dir.path().join("state"))
            .shared_backend(Arc::clone(&backend))
            .build()
            .await?;
        let repository = dir.path().join("repository");
        write_repository(&repository).map_err(failed)?;
        let (subject, sink) = (subject.clone(), CollectSink::new(TurnId::new("turn")));
        Ok(Self { dir, subject, backend, manager, sink })
    }

    /// A directory with a few files: `README`, `src/main.c`, an executable `run.sh`, a link.
    #[must_use]
    pub fn repository(&self) -> PathBuf {
        self.dir.path().join("repository")
    }

    /// Where the case may write on this host.
    #[must_use]
    pub fn scratch(&self) -> &Path {
        self.dir.path()
    }

    /// Another manager on the same state, as another process would have.
    ///
    /// # Errors
    ///
    /// What building it says.
    pub async fn another_manager(&self) -> Result<SandboxManager> {
        SandboxManager::builder()
            .state_dir(self.dir.path().join("state"))
            .shared_backend(self.subject.backend(&self.dir.path().join("backend"))?)
            .build()
            .await
    }

    /// A request for a sandbox of the repository.
    #[must_use]
    pub fn request(&self) -> CreateSandbox {
        CreateSandbox::new()
            .workspace(self.repository())
            .consumer(Consumer::agent("conformance").run("1"))
    }

    /// A sandbox of the repository.
    ///
    /// # Errors
    ///
    /// What making it says.
    pub async fn sandbox(&self) -> Result<Sandbox> {
        self.manager.create(self.request(), &self.sink).await
    }

    /// Runs shell text and expects success; returns standard output without its last newline.
    ///
    /// # Errors
    ///
    /// If it does not run, or not with success.
    pub async fn sh(&self, sandbox: &Sandbox, text: &str) -> Check<String> {
        let run = self.run(sandbox, Command::shell(text)).await?;
        if !run.outcome.is_success() {
            let said = run.stderr.text();
            return Err(format!("{text:?} ended as {:?}: {said}", run.outcome).into());
        }
        Ok(run.stdout.text().trim_end_matches('\n').to_owned())
    }

    /// Runs a command.
    ///
    /// # Errors
    ///
    /// If it does not run.
    pub async fn run(&self, sandbox: &Sandbox, command: Command) -> Result<Run> {
        sandbox.exec(command, &self.sink).await
    }

    /// Removes every sandbox, and then everything else of the case.
    pub(crate) async fn finish(self) -> Check {
        for info in self.manager.list().await? {
            if info.state.is_live() {
                let sandbox = self.manager.open(info.sandbox_id.as_str()).await?;
                sandbox.destroy(&sandbox_core::Suppressed).await?;
            }
        }
        let left = self.backend.inventory().await?;
        if !left.is_empty() {
            return Err(format!("instances are left over: {left:?}").into());
        }
        self.dir.close()?;
        Ok(())
    }
}

fn write_repository(at: &Path) -> std::io::Result<()> {
    use std::os::unix::fs::{PermissionsExt, symlink};
    std::fs::create_dir_all(at.join("src"))?;
    std::fs::write(at.join("README"), "v1\n")?;
    std::fs::write(at.join("src/main.c"), "int main(void) { return 0; }\n")?;
    std::fs::write(at.join("run.sh"), "#!/bin/sh\necho ran\n")?;
    std::fs::set_permissions(at.join("run.sh"), std::fs::Permissions::from_mode(0o755))?;
    symlink("README", at.join("link"))
}

/// Fails a case unless the two are equal.
#[macro_export]
macro_rules! same {
    ($left:expr, $right:expr $(,)?) => {{
        let (left, right) = (&$left, &$right);
        if left != right {
            return Err(format!(
                "{} is {left:?}, not {right:?} ({}:{})",
                stringify!($left),
                file!(),
                line!()
            )
            .into());
        }
    }};
}

/// Fails a case unless this holds.
#[macro_export]
macro_rules! holds {
    ($condition:expr, $($what:tt)+) => {
        if !$condition {
            let what = format!($($what)+);
            return Err(format!("not so: {what} ({}:{})", file!(), line!()).into());
        }
    };
}
