//! Sandboxes beside compose projects, over SSH: on the hosts of `scripts/hosts`, with docker-compose and the
//! engine of `scripts/containers`.
#![allow(
    clippy::unwrap_used,
    reason = "these are tests, in functions that clippy cannot tell as such"
)]

mod ssh_scene;

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command as HostCommand, Stdio},
    time::Duration,
};

use sandbox_core::{
    CreateSandbox, ErrorKind, Feature, InstanceState, Isolation, Network, ReapPolicy,
    SandboxBackend, Suppressed,
};
use sandbox_ssh::{Compose, SshBackend};
use ssh_scene::{Scene, sh, soon, until};

/// Where the engine listens; `scripts/containers` says it.
const ENGINE: &str = "SANDBOX_DOCKER_HOST";
const IMAGE: &str = "SANDBOX_BUSYBOX_IMAGE";
/// Set for a harness that is to be killed.
const VICTIM: &str = "SANDBOX_COMPOSE_VICTIM";

/// Answers through the workspace, and keeps something in a volume.
const ANSWERS: &str =
    "while :; do [ -e /shared/ping ] && mv /shared/ping /shared/pong; sleep 0.1; done";

struct Engine {
    scene: Scene,
    docker_host: String,
    image: String,
}

impl Engine {
    fn new() -> Option<Self> {
        let (Ok(docker_host), Ok(image)) = (std::env::var(ENGINE), std::env::var(IMAGE)) else {
            let why = format!("{ENGINE} and {IMAGE} are not set");
            sandbox_conformance::left_out("docker", &why);
            return None;
        };
        Some(Self { scene: Scene::new()?, docker_host, image })
    }

    fn compose(&self) -> Compose {
        Compose::new().command(["docker-compose"]).env("DOCKER_HOST", &self.docker_host)
    }

    fn backend(&self, host: &str, compose: Compose) -> SshBackend {
        let builder = self.scene.builder(host);
        builder.compose_with_the_account_as_the_only_isolation(compose).build().unwrap()
    }

    /// A workspace with a project of these services: their names, commands, and whatever else.
    fn project(&self, name: &str, services: &[(&str, &str, &str)]) -> PathBuf {
        let path = self.scene.repository(name);
        fs::create_dir(path.join("shared")).unwrap();
        let mut text = "version: \"2.4\"\nservices:\n".to_owned();
        for (name, command, more) in services {
            let command = serde_json::json!(["sh", "-c", command.replace('$', "$$")]);
            text.push_str(&format!(
                "  {name}:\n    image: {}\n    network_mode: none\n    stop_signal: SIGKILL\n    \
                 command: {command}\n    volumes: [\"./shared:/shared\", \"data:/data\"]\n{more}",
                self.image
            ));
        }
        text.push_str("volumes:\n  data: {}\n");
        fs::write(path.join("docker-compose.yml"), text).unwrap();
        path
    }

    fn docker(&self, words: &[&str]) -> String {
        let mut docker = HostCommand::new("docker");
        let output = docker.args(["--host", &self.docker_host]).args(words).output().unwrap();
        assert!(output.status.success(), "{words:?}: {}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    }

    /// What there is of a project: containers and volumes.
    fn left(&self, project: &str) -> (usize, usize) {
        let label = format!("label=com.docker.compose.project={project}");
        let count = |words: &[&str]| {
            self.docker(&[words, &["--quiet", "--filter", &label]].concat()).lines().count()
        };
        (count(&["ps", "--all"]), count(&["volume", "ls"]))
    }

    /// How many containers there are of projects of this scene.
    fn here(&self) -> usize {
        let here = self.scene.path("");
        let directory = "{{.Label \"com.docker.compose.project.working_dir\"}}";
        let label = "label=com.docker.compose.project";
        let said = self.docker(&["ps", "--all", "--filter", label, "--format", directory]);
        said.lines().filter(|line| Path::new(line).starts_with(&here)).count()
    }

    /// The directories of instances on the host.
    fn instances(&self) -> Vec<PathBuf> {
        let entries = fs::read_dir(self.scene.path("host/compose/instances"));
        entries.into_iter().flatten().flatten().map(|entry| entry.path()).collect()
    }

    /// The project of the one instance that compose was asked for.
    async fn begun(&self) -> String {
        until("a project that is being brought up", || {
            self.instances().iter().any(|path| path.join("compose.json").exists())
        })
        .await;
        project_of(&self.instances()[0])
    }
}

/// The project of the instance of this directory.
fn project_of(instance: &Path) -> String {
    let name = instance.file_name().unwrap().to_str().unwrap();
    name.replace("ins_", "sandboxer-")
}

fn request(workspace: &Path) -> CreateSandbox {
    CreateSandbox::new().workspace(workspace).network(Network::Host)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_project_is_up_as_long_as_its_sandbox() {
    let Some(engine) = Engine::new() else { return };
    let workspace = engine.project("app", &[("web", ANSWERS, "")]);
    let backend = engine.backend("near", engine.compose());
    let manager = engine.scene.manager(backend.clone()).await;
    let sandbox = manager.create(request(&workspace), &Suppressed).await.unwrap();
    let project = sh(&sandbox, "echo $COMPOSE_PROJECT_NAME").await;
    assert_eq!((engine.left(&project), engine.here()), ((1, 1), 1));
    let ask = "touch shared/ping; until [ -e shared/pong ]; do sleep 0.05; done; rm shared/pong; cat README";
    assert_eq!(soon("an answer", sh(&sandbox, ask)).await, "v1");
    // Commands reach the services, by compose and by the engine.
    let inside = "docker-compose exec -T web sh -c 'echo kept > /data/file; echo inside'";
    assert_eq!(sh(&sandbox, inside).await, "inside");

    sandbox.stop(&Suppressed).await.unwrap();
    assert_eq!(engine.left(&project), (0, 1), "what is in volumes stays");
    sandbox.start(&Suppressed).await.unwrap();
    assert_eq!(engine.left(&project), (1, 1));
    assert_eq!(sh(&sandbox, "docker-compose exec -T web cat /data/file").await, "kept");
    assert_eq!(soon("an answer", sh(&sandbox, ask)).await, "v1");

    // A rewind is a project of its own, on the files of the snapshot.
    let snapshot = sandbox.snapshot("one", &Suppressed).await.unwrap();
    sh(&sandbox, "echo v2 > README").await;
    sandbox.rewind(&snapshot.id, &Suppressed).await.unwrap();
    assert_eq!(engine.left(&project), (0, 0));
    let second = sh(&sandbox, "echo $COMPOSE_PROJECT_NAME").await;
    assert_eq!(engine.left(&second), (1, 1));
    assert_eq!(soon("an answer", sh(&sandbox, ask)).await, "v1");
    assert_eq!(
        sh(&sandbox, "docker-compose exec -T web ls /data").await,
        "",
        "volumes are in no snapshot"
    );

    // Whatever became of the project's files, and though there is more of it than they say.
    let more =
        format!("docker volume create --label com.docker.compose.project={second} {second}_more");
    sh(&sandbox, &format!("{more}; rm docker-compose.yml")).await;
    sandbox.destroy(&Suppressed).await.unwrap();
    assert_eq!(engine.left(&second), (0, 0));
    assert!(engine.instances().is_empty());
    assert!(backend.inventory().await.unwrap().is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_told_of_it_is_true() {
    let Some(engine) = Engine::new() else { return };
    let backend = engine.backend("near", engine.compose());
    assert_eq!(backend.id().as_str(), "compose-ssh");
    let found = backend.probe().await.unwrap();
    assert_eq!(found.isolation(), Isolation::Process);
    assert!(found.version.contains("docker-compose"), "{}", found.version);
    assert!(found.evidence(Feature::Snapshot).contains("in no snapshot"));
    let missing = engine.backend("near", engine.compose().command(["no-such-compose"]));
    let error = missing.probe().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable);
    assert!(error.to_string().contains("no-such-compose"), "{error}");
    let silent = Compose::new().command(["docker-compose"]).env("DOCKER_HOST", "unix:///no/such");
    let error = engine.backend("near", silent).probe().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable);
    assert!(error.to_string().contains("/no/such"), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_health_check_is_waited_for() {
    let Some(engine) = Engine::new() else { return };
    let health =
        "    healthcheck: {test: [CMD, test, -e, /tmp/well], interval: 200ms, retries: 500}\n";
    let services =
        [("db", "sleep 3; touch /tmp/well; exec sleep 9999", health), ("init", "true", "")];
    let workspace = engine.project("app", &services);
    let manager = engine.scene.manager(engine.backend("near", engine.compose())).await;
    let sandbox = manager.create(request(&workspace), &Suppressed).await.unwrap();
    let container = sh(&sandbox, "docker-compose ps -q db").await;
    let state = engine.docker(&["inspect", "--format", "{{.State.Health.Status}}", &container]);
    assert_eq!(state.trim(), "healthy");
    sandbox.destroy(&Suppressed).await.unwrap();
}

/// A service: its name, what it runs, and what else is said of it.
type Service<'a> = (&'a str, &'a str, &'a str);

#[tokio::test(flavor = "multi_thread")]
async fn a_service_that_fails_is_named_and_leaves_nothing() {
    let Some(engine) = Engine::new() else { return };
    let never = "    healthcheck: {test: [CMD, 'false'], interval: 200ms, retries: 2}\n";
    let starting = "    healthcheck: {test: [CMD, 'false'], interval: 200ms, retries: 5000}\n";
    let web = ("web", "exec sleep 9999", "");
    let cases: [(&str, Service, ErrorKind, &[&str]); 4] = [
        (
            "ends",
            ("db", "echo no disk; sleep 0.3; exit 3", ""),
            ErrorKind::Setup,
            &["db", "code 3", "no disk"],
        ),
        (
            "ill",
            ("db", "echo begun; exec sleep 9999", never),
            ErrorKind::Setup,
            &["db", "health check fails"],
        ),
        (
            "slow",
            ("db", "exec sleep 9999", starting),
            ErrorKind::Timeout,
            &["db", "its health is starting"],
        ),
        (
            "wrong",
            ("db", "true", "    entrypoint: [/no/such]\n"),
            ErrorKind::Setup,
            &["docker-compose", "db", "/no/such"],
        ),
    ];
    for (name, service, kind, says) in cases {
        let workspace = engine.project(name, &[web, service]);
        let patience = if name == "slow" { 45 } else { 100 };
        let compose = engine.compose().ready_within(Duration::from_secs(patience));
        let backend = engine.backend("near", compose);
        let manager = engine.scene.manager(backend.clone()).await;
        let error = soon(name, manager.create(request(&workspace), &Suppressed)).await.unwrap_err();
        assert_eq!(error.kind(), kind, "{error}");
        for word in says {
            assert!(error.to_string().contains(word), "{name}: {error}");
        }
        assert_eq!(engine.here(), 0, "{name}");
        assert!(engine.instances().is_empty(), "{name}");
        assert!(backend.inventory().await.unwrap().is_empty());
    }
}

/// Not a test: the harness of the next one, which is killed.
#[tokio::test(flavor = "multi_thread")]
async fn a_victim() {
    let Some(dir) = std::env::var_os(VICTIM).map(PathBuf::from) else { return };
    let hosts = PathBuf::from(std::env::var_os("SANDBOX_SSH_HOSTS").unwrap());
    let compose = Compose::new()
        .command(["docker-compose"])
        .env("DOCKER_HOST", std::env::var(ENGINE).unwrap());
    let backend = SshBackend::builder()
        .host("near")
        .config_file(dir.join("config"))
        .state_dir(dir.join("host"))
        .program_dir(hosts.join("cache"))
        .compose_with_the_account_as_the_only_isolation(compose)
        .build()
        .unwrap();
    let manager = sandbox_core::SandboxManager::builder().state_dir(dir.join("state"));
    let manager = manager.backend(backend).build().await.unwrap();
    let _ = manager.acquire("killed", request(&dir.join("app")), &Suppressed).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_harness_that_is_killed_in_the_middle_leaves_nothing() {
    let Some(engine) = Engine::new() else { return };
    let starting = "    healthcheck: {test: [CMD, 'false'], interval: 200ms, retries: 5000}\n";
    engine.project("app", &[("db", "exec sleep 9999", starting)]);
    let mut victim = HostCommand::new(std::env::current_exe().unwrap())
        .args(["--exact", "a_victim"])
        .env(VICTIM, engine.scene.path(""))
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    let project = engine.begun().await;
    until("a container", || engine.left(&project).0 == 1).await;
    victim.kill().unwrap();
    victim.wait().unwrap();
    // Nobody comes back for it.
    until("nothing", || engine.instances().is_empty() && engine.left(&project) == (0, 0)).await;
    let manager = engine.scene.manager(engine.backend("near", engine.compose())).await;
    let found = manager.open("killed").await;
    assert!(found.is_err(), "what was never made is not there: {found:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_project_whose_sandbox_ends_by_itself_goes_down() {
    let Some(engine) = Engine::new() else { return };
    let workspace = engine.project("app", &[("web", ANSWERS, "")]);
    let backend = engine.backend("near", engine.compose());
    let manager = engine.scene.manager(backend.clone()).await;
    let request = request(&workspace).ttl(Duration::from_secs(20));
    let sandbox = manager.create(request, &Suppressed).await.unwrap();
    let project = project_of(&engine.instances()[0]);
    assert_eq!(engine.left(&project), (1, 1));
    drop((sandbox, manager));
    until("no service", || engine.left(&project).0 == 0).await;
    // What is on disk is left to whoever clears it.
    let found = backend.inventory().await.unwrap();
    assert_eq!(found.iter().map(|one| one.state).collect::<Vec<_>>(), [InstanceState::Stopped]);
    let manager = engine.scene.manager(backend.clone()).await;
    manager.reap(ReapPolicy::apply(), &Suppressed).await.unwrap();
    assert_eq!(engine.left(&project), (0, 0));
    assert!(backend.inventory().await.unwrap().is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_project_that_was_lost_is_taken_down_by_its_id_alone() {
    let Some(engine) = Engine::new() else { return };
    let workspace = engine.project("app", &[("web", ANSWERS, "")]);
    let backend = engine.backend("near", engine.compose());
    let manager = engine.scene.manager(backend.clone()).await;
    let sandbox = manager.create(request(&workspace), &Suppressed).await.unwrap();
    let project = sh(&sandbox, "echo $COMPOSE_PROJECT_NAME").await;
    let mut half = backend.inventory().await.unwrap().remove(0).instance;
    half.data = serde_json::Value::Null;
    for _ in 0..2 {
        backend.teardown(&half).await.unwrap();
        assert_eq!(engine.left(&project), (0, 0));
    }
    assert!(engine.instances().is_empty());
    sandbox.destroy(&Suppressed).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_link_that_is_cut_while_a_project_goes_down_is_no_obstacle() {
    let Some(engine) = Engine::new() else { return };
    if !engine.scene.has("far") {
        return;
    }
    // It takes its time to end.
    let slow = "    stop_signal: SIGTERM\n    stop_grace_period: 6s\n";
    let workspace = engine.project("app", &[("web", "exec sleep 9999", "")]);
    let file = workspace.join("docker-compose.yml");
    let text = fs::read_to_string(&file).unwrap().replace("    stop_signal: SIGKILL\n", slow);
    fs::write(&file, text).unwrap();
    let manager = engine.scene.manager(engine.backend("far", engine.compose())).await;
    let sandbox = manager.create(request(&workspace), &Suppressed).await.unwrap();
    let project = sh(&sandbox, "echo $COMPOSE_PROJECT_NAME").await;
    let destroying = {
        let sandbox = sandbox.clone();
        tokio::spawn(async move { sandbox.destroy(&Suppressed).await })
    };
    engine.scene.cut().await;
    soon("the end", destroying).await.unwrap().unwrap();
    assert_eq!(engine.left(&project), (0, 0));
    assert!(engine.instances().is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_project_of_a_directory_on_the_host_leaves_that_directory() {
    let Some(engine) = Engine::new() else { return };
    let workspace = engine.project("truth", &[("web", ANSWERS, "")]);
    let manager = engine.scene.manager(engine.backend("near", engine.compose())).await;
    let request = CreateSandbox::new().remote_workspace(&workspace).network(Network::Host);
    let sandbox = manager.create(request, &Suppressed).await.unwrap();
    let project = sh(&sandbox, "echo $COMPOSE_PROJECT_NAME").await;
    fs::write(workspace.join("shared/ping"), "").unwrap();
    until("an answer", || workspace.join("shared/pong").exists()).await;
    assert_eq!(sh(&sandbox, "pwd").await, workspace.canonicalize().unwrap().to_str().unwrap());
    sandbox.destroy(&Suppressed).await.unwrap();
    assert_eq!(engine.left(&project), (0, 0));
    assert_eq!(fs::read_to_string(workspace.join("README")).unwrap(), "v1\n");
}
