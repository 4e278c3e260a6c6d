//! What a case works with.

use std::{
    fmt,
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
    time::{Duration, Instant},
};

use rustix::process::{Pid, Signal, kill_process};
use sandbox_core::{
    Capabilities, Chunk, CollectSink, Command, Consumer, CreateSandbox, Feature, Instance,
    InstanceState, Level, Network, Outcome, Process, ProfileCatalog, Reachability, Result, Run,
    Sandbox, SandboxBackend, SandboxManager, SandboxState, Secrets, TurnId,
};
use tempfile::TempDir;

/// How long a case waits for what must come soon. Nothing measures it; it tells a hang.
pub(crate) const SOON: Duration = Duration::from_secs(30);

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
type Guest = dyn Fn(&Instance) -> Option<u32> + Send + Sync;

/// A backend under test.
#[derive(Clone)]
pub struct Subject {
    name: String,
    make: Arc<Make>,
    run_as: Option<u32>,
    guest: Option<Arc<Guest>>,
    part: Option<fn(&str) -> bool>,
}

impl Subject {
    /// A backend, made with a state directory of its own for each case.
    pub fn new(
        name: impl Into<String>,
        make: impl Fn(&Path) -> Result<Arc<dyn SandboxBackend>> + Send + Sync + 'static,
    ) -> Self {
        Self { name: name.into(), make: Arc::new(make), run_as: None, guest: None, part: None }
    }

    /// The same, each case in a process of its own that runs as this user. For suites that run as root.
    #[must_use]
    pub fn run_as(mut self, uid: u32) -> Self {
        self.run_as = Some(uid);
        self
    }

    /// The same, and where an instance's guest is a process of this host although its reachability does
    /// not say so: which.
    #[must_use]
    pub fn guest(mut self, pid: impl Fn(&Instance) -> Option<u32> + Send + Sync + 'static) -> Self {
        self.guest = Some(Arc::new(pid));
        self
    }

    /// The same, with those cases only whose names are wanted: for a second subject of a backend whose first
    /// has them all.
    #[must_use]
    pub fn part(mut self, wanted: fn(&str) -> bool) -> Self {
        self.part = Some(wanted);
        self
    }

    pub(crate) fn wants(&self, case: &str) -> bool {
        self.part.is_none_or(|wanted| wanted(case))
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
    /// What its probe says of this host.
    pub capabilities: Capabilities,
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
        let capabilities = backend.probe().await?;
        let manager = SandboxManager::builder()
            .state_dir(dir.path().join("state"))
            .shared_backend(Arc::clone(&backend))
            .build()
            .await?;
        let repository = dir.path().join("repository");
        write_repository(&repository).map_err(failed)?;
        let (subject, sink) = (subject.clone(), CollectSink::new(TurnId::new("turn")));
        Ok(Self { dir, subject, backend, capabilities, manager, sink })
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
        self.manager_on("state", self.subject.backend(&self.dir.path().join("backend"))?).await
    }

    /// A manager on the same state with this backend, such as a decorated one.
    ///
    /// # Errors
    ///
    /// What building it says.
    pub async fn manager_with(&self, backend: Arc<dyn SandboxBackend>) -> Result<SandboxManager> {
        self.manager_on("state", backend).await
    }

    /// A manager on the same state with these profiles and secrets.
    ///
    /// # Errors
    ///
    /// What building it says.
    pub async fn manager_with_profiles(
        &self,
        profiles: ProfileCatalog,
        secrets: impl Secrets + 'static,
    ) -> Result<SandboxManager> {
        SandboxManager::builder()
            .state_dir(self.dir.path().join("state"))
            .shared_backend(Arc::clone(&self.backend))
            .profiles(profiles)
            .secrets(secrets)
            .build()
            .await
    }

    /// Another owner's manager: a state of its own, the same backend.
    ///
    /// # Errors
    ///
    /// What building it says.
    pub async fn strange_manager(&self) -> Result<SandboxManager> {
        self.manager_on("strange", Arc::clone(&self.backend)).await
    }

    async fn manager_on(
        &self,
        state: &str,
        backend: Arc<dyn SandboxBackend>,
    ) -> Result<SandboxManager> {
        SandboxManager::builder()
            .state_dir(self.dir.path().join(state))
            .shared_backend(backend)
            .build()
            .await
    }

    /// Whether the host has all of a feature.
    #[must_use]
    pub fn has(&self, feature: Feature) -> bool {
        self.capabilities.level(feature) == Level::Full
    }

    /// A request for a sandbox of the repository, without a network where the backend can deny it.
    #[must_use]
    pub fn request(&self) -> CreateSandbox {
        let network = if self.has(Feature::NetworkDeny) { Network::Deny } else { Network::Host };
        CreateSandbox::new()
            .workspace(self.repository())
            .network(network)
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

    /// A number of seconds that no other process sleeps for: `sleep` with it can be found by it.
    #[must_use]
    pub fn marker(&self) -> String {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        format!("8640{}.{:07}", count % 10, std::process::id()) + &format!("{count:04}")
    }

    /// How many processes there are, as seen from inside, with this marker among their arguments. Those of a
    /// program that has only just begun are not to be seen yet: wait for what must be there.
    ///
    /// # Errors
    ///
    /// If that cannot be found out.
    pub async fn count(&self, sandbox: &Sandbox, marker: &str) -> Check<usize> {
        // The pattern does not match itself.
        let (first, rest) = marker.split_at(1);
        let text = format!("grep -als '[{first}]{rest}' /proc/[0-9]*/cmdline | wc -l");
        Ok(self.sh(sandbox, &text).await?.trim().parse()?)
    }

    /// Waits until there are so many.
    ///
    /// # Errors
    ///
    /// If they do not come or go.
    pub async fn until_count(
        &self,
        sandbox: &Sandbox,
        marker: &str,
        wanted: impl Fn(usize) -> bool,
    ) -> Check {
        let deadline = Instant::now() + SOON;
        loop {
            let count = self.count(sandbox, marker).await?;
            if wanted(count) {
                return Ok(());
            }
            if Instant::now() > deadline {
                return Err(format!("still {count} processes of {marker}").into());
            }
            pause().await;
        }
    }

    /// The kinds of a sandbox's history.
    ///
    /// # Errors
    ///
    /// If it cannot be read.
    pub async fn kinds(&self, sandbox: &Sandbox) -> Check<Vec<String>> {
        let history = self.manager.history(sandbox.id(), 0).await?;
        Ok(history.iter().map(sandbox_core::SandboxEvent::name).collect())
    }

    /// How the sandbox's only instance is, as the backend says; `None` if it lists none.
    ///
    /// # Errors
    ///
    /// If that cannot be found out.
    pub async fn instance(&self, sandbox: &Sandbox) -> Check<Option<(Instance, InstanceState)>> {
        let all = self.backend.inventory().await?;
        let mut mine = all.into_iter().filter(|found| found.instance.sandbox == *sandbox.id());
        let first = mine.next().map(|found| (found.instance, found.state));
        if mine.next().is_some() {
            return Err("it has two instances".into());
        }
        Ok(first)
    }

    /// Waits until the sandbox's instance does not run any more, whoever ended it.
    ///
    /// # Errors
    ///
    /// If it goes on.
    pub async fn until_ended(&self, sandbox: &Sandbox) -> Check {
        let deadline = Instant::now() + SOON;
        loop {
            match self.instance(sandbox).await? {
                None | Some((_, InstanceState::Stopped | InstanceState::Gone)) => return Ok(()),
                Some((_, state)) if Instant::now() > deadline => {
                    return Err(format!("its instance is still {state:?}").into());
                }
                Some(_) => pause().await,
            }
        }
    }

    /// Sends a signal to the guest, from outside, where it is a process of this host; otherwise ends
    /// the instance behind the manager's back.
    ///
    /// # Errors
    ///
    /// If it cannot be reached.
    pub async fn signal_guest(&self, sandbox: &Sandbox, signal: Signal) -> Check {
        let known = match (sandbox.reachability().await?, &self.subject.guest) {
            (Reachability::Container(container), _) => {
                let mut command = std::process::Command::new("docker");
                command.args(container.engine.iter().flat_map(|engine| ["--host", engine]));
                command.arg("kill").arg(format!("--signal={}", signal.as_raw()));
                let output = command.arg(&container.container).output()?;
                if !output.status.success() {
                    return Err(String::from_utf8_lossy(&output.stderr).into_owned().into());
                }
                return Ok(());
            }
            (Reachability::Local(local), _) => Some(local.pid),
            (_, Some(guest)) => {
                let (instance, _) = self.instance(sandbox).await?.ok_or("it has no instance")?;
                guest(&instance)
            }
            _ => None,
        };
        match known {
            Some(pid) => {
                let pid = Pid::from_raw(i32::try_from(pid)?).ok_or("it is no process")?;
                kill_process(pid, signal)?;
                Ok(())
            }
            None if signal == Signal::KILL => {
                let (instance, _) = self.instance(sandbox).await?.ok_or("it has no instance")?;
                Ok(self.backend.stop(&instance).await?)
            }
            None => Err("its guest is no process of this host".into()),
        }
    }

    /// Waits for an outcome in the sandbox's history.
    ///
    /// # Errors
    ///
    /// If it does not come.
    pub async fn until_recorded(
        &self,
        sandbox: &Sandbox,
        wanted: impl Fn(&sandbox_core::Known) -> bool,
    ) -> Check {
        let mut watch = self.manager.watch(sandbox.id(), 0);
        let found = async {
            loop {
                if watch.next().await?.known().is_some_and(&wanted) {
                    return Check::Ok(());
                }
            }
        };
        match tokio::time::timeout(SOON, found).await {
            Ok(found) => found,
            Err(_) => {
                let kinds = self.kinds(sandbox).await?;
                Err(format!("the history does not say so: {kinds:?}").into())
            }
        }
    }

    /// Removes every sandbox, and then everything else of the case.
    pub(crate) async fn finish(self) -> Check {
        let mut result = Ok(());
        for info in self.manager.list().await?.into_iter().rev() {
            let sandbox = self.manager.open(info.sandbox_id.as_str()).await?;
            let destroyed = sandbox.destroy(&sandbox_core::Suppressed).await;
            result = result.and(destroyed.map_err(Failure::from));
        }
        // Whatever went wrong, nothing stays on this host.
        for left in self.backend.inventory().await? {
            self.backend.teardown(&left.instance).await?;
            result = result.and(Err(format!("an instance is left over: {left:?}").into()));
        }
        self.dir.close()?;
        result
    }
}

/// A little while, between two looks at something.
pub(crate) async fn pause() {
    tokio::time::sleep(Duration::from_millis(20)).await;
}

/// What must come soon; that it does not is a failure.
pub(crate) async fn soon<T>(what: &str, future: impl Future<Output = T>) -> Check<T> {
    match tokio::time::timeout(SOON, future).await {
        Ok(result) => Ok(result),
        Err(_) => Err(format!("it hangs: {what}").into()),
    }
}

/// Reads standard output, or a terminal's, until this was said: how it is cut into pieces is nobody's promise.
pub(crate) async fn until_said(process: &mut Process, said: &mut String, wanted: &str) -> Check {
    while !said.contains(wanted) {
        match process.next_output().await {
            Some(Chunk::Stdout(bytes)) => said.push_str(&String::from_utf8_lossy(&bytes)),
            Some(_) => {}
            None => return Err(format!("it ended after {said:?}").into()),
        }
    }
    Ok(())
}

/// Whether a process was ended, by whom it may.
pub(crate) fn is_lost(outcome: &Outcome) -> bool {
    matches!(outcome, Outcome::Lost(_))
}

/// The kind of the error that this must be.
pub(crate) fn error_of<T>(result: Result<T>) -> Check<sandbox_core::Error> {
    match result {
        Ok(_) => Err("it succeeded".into()),
        Err(error) => Ok(error),
    }
}

/// Whether the sandbox can be used.
pub(crate) async fn is_ready(sandbox: &Sandbox) -> Check<bool> {
    Ok(sandbox.info().await?.state == SandboxState::Ready)
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
    ($left:expr, $right:expr $(,)?) => {
        match (&$left, &$right) {
            (left, right) if left != right => {
                return Err(format!(
                    "{} is {left:?}, not {right:?} ({}:{})",
                    stringify!($left),
                    file!(),
                    line!()
                )
                .into());
            }
            _ => {}
        }
    };
}

/// Fails a case unless this holds.
#[macro_export]
macro_rules! holds {
    ($condition:expr, $($what:tt)+) => {{
        let held: bool = $condition;
        if !held {
            let what = format!($($what)+);
            return Err(format!("not so: {what} ({}:{})", file!(), line!()).into());
        }
    }};
}
