//! Images that are fetched from a registry: the one that `scripts/containers` provides.

use std::{
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::{Command as Program, Stdio},
    sync::{Arc, Mutex},
};

use sandbox_core::{Command, CreateSandbox, Error, ErrorKind, SandboxId, Suppressed};
use sandbox_docker::{DockerBackendBuilder, PullPolicy, PullProgress};

use crate::engine::{Given, Scene, docker, given};

/// Set for a test that runs in a process of its own: the directory with a credential helper.
const HELPED: &str = "SANDBOX_TEST_HELPED";

/// A registry, an image in it that nobody else has, and a directory for Docker's configuration.
struct Registry {
    given: Given,
    address: String,
    user: String,
    password: String,
    image: String,
    config: tempfile::TempDir,
}

impl Registry {
    fn new() -> Option<Self> {
        let given = given()?;
        let variable = |name| std::env::var(name).ok();
        let found = (variable("SANDBOX_REGISTRY"), variable("SANDBOX_REGISTRY_LOGIN"));
        let (Some(address), Some(login)) = found else {
            sandbox_conformance::left_out("docker", "there is no registry: see scripts/containers");
            return None;
        };
        let (user, password) = login.split_once(':').unwrap();
        let config = tempfile::Builder::new().prefix("sandbox-test-").tempdir().unwrap();
        // As long as any other, and not used twice.
        let image = format!("{address}/sandboxer-test/own:{}", SandboxId::new());
        let registry = Self {
            given,
            user: user.to_owned(),
            password: password.to_owned(),
            image,
            config,
            address,
        };
        registry.push();
        Some(registry)
    }

    /// Puts an image with a layer of its own there, and keeps nothing of it here.
    fn push(&self) {
        let file = self.config.path().join("unique");
        std::fs::write(&file, &self.image).unwrap();
        let container = format!("sandboxer-test-{}", SandboxId::new());
        self.docker(&["create", "--name", &container, &self.given.busybox, "true"]);
        self.docker(&["cp", file.to_str().unwrap(), &format!("{container}:/unique")]);
        self.docker(&["commit", &container, &self.image]);
        self.docker(&["rm", &container]);
        self.log_in(&self.password);
        let pushed = Program::new("docker")
            .args(["--host", &self.given.host, "--config"])
            .arg(self.config.path())
            .args(["push", "--quiet", &self.image])
            .stdout(Stdio::null())
            .status();
        assert!(pushed.unwrap().success());
        self.docker(&["rmi", &self.image]);
    }

    /// Writes the configuration that `docker login` would.
    fn log_in(&self, password: &str) {
        use base64::{Engine, engine::general_purpose::STANDARD};
        let auth = STANDARD.encode(format!("{}:{password}", self.user));
        self.configure(&format!(r#"{{"auths": {{"{}": {{"auth": "{auth}"}}}}}}"#, self.address));
    }

    fn configure(&self, text: &str) {
        std::fs::write(self.config.path().join("config.json"), text).unwrap();
    }

    fn docker(&self, arguments: &[&str]) -> String {
        docker(&self.given.host, arguments).unwrap()
    }

    async fn scene(
        &self,
        more: impl FnOnce(DockerBackendBuilder) -> DockerBackendBuilder,
    ) -> Scene {
        let config = self.config.path();
        Scene::with(&self.given.host, &self.image, |builder| more(builder.config_dir(config))).await
    }

    /// What making a sandbox says that cannot be made; no secret is in it.
    async fn refused(&self) -> Error {
        let scene = self.scene(|builder| builder.pull(PullPolicy::IfMissing)).await;
        let error = scene.manager.create(CreateSandbox::new(), &scene.sink).await.unwrap_err();
        let config = std::fs::read_to_string(self.config.path().join("config.json"));
        let config = config.unwrap_or_default();
        // What the configuration has in quotes is all that there is to be given away.
        let mut secrets: Vec<&str> = config.split('"').filter(|word| word.len() > 30).collect();
        secrets.push(&self.password);
        let said = format!("{error} {error:?}");
        let history = std::fs::read_dir(scene.dir.path().join("state/journal/history")).unwrap();
        let history: String =
            history.map(|file| std::fs::read_to_string(file.unwrap().path()).unwrap()).collect();
        for secret in secrets {
            assert!(!said.contains(secret) && !history.contains(secret), "{said}");
        }
        assert_eq!(scene.leftovers(), "");
        error
    }
}

impl Drop for Registry {
    fn drop(&mut self) {
        let _ = docker(&self.given.host, &["rmi", "--force", &self.image]);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_image_is_fetched_when_the_policy_says_so() {
    let Some(registry) = Registry::new() else { return };
    let scene = registry.scene(|builder| builder.pull(PullPolicy::Never)).await;
    let request = || CreateSandbox::new();
    let error = scene.manager.create(request(), &scene.sink).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotFound);
    assert!(error.to_string().contains(&registry.image), "{error}");

    for (policy, pulls) in [(PullPolicy::IfMissing, false), (PullPolicy::Always, true)] {
        let seen: Arc<Mutex<Vec<PullProgress>>> = Arc::default();
        let tell = Arc::clone(&seen);
        let tell = move |progress: &PullProgress| tell.lock().unwrap().push(progress.clone());
        let scene = registry.scene(|builder| builder.pull(policy).on_pull(tell)).await;
        let sandbox = scene.manager.create(request(), &scene.sink).await.unwrap();
        let run = sandbox.exec(Command::shell("cat /unique"), &Suppressed).await.unwrap();
        assert_eq!(run.stdout.text(), registry.image, "it is that image");
        let first = std::mem::take(&mut *seen.lock().unwrap());
        assert!(first.iter().all(|progress| progress.image == registry.image), "{first:?}");
        if policy == PullPolicy::IfMissing {
            let layers = first.iter().filter(|progress| progress.total.is_some_and(|all| all > 0));
            assert!(layers.count() > 0, "a layer is on its way: {first:?}");
        }
        sandbox.destroy(&scene.sink).await.unwrap();
        let again = scene.manager.create(request(), &scene.sink).await.unwrap();
        again.destroy(&scene.sink).await.unwrap();
        let second = seen.lock().unwrap().len();
        assert_eq!((first.is_empty(), second > 0), (false, pulls), "{policy:?}");
        assert_eq!(scene.leftovers(), "");
    }
    scene.backend.remove_prepared_images().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_registry_that_lets_nobody_in_is_named_and_no_secret_is() {
    let Some(mut registry) = Registry::new() else { return };
    registry.log_in("a-password-that-is-not-the-right-one");
    let error = registry.refused().await;
    assert_eq!(error.kind(), ErrorKind::PermissionDenied, "{error}");
    assert!(error.to_string().contains(&registry.address), "{error}");
    assert!(error.to_string().contains(&registry.image), "{error}");
    assert!(error.to_string().contains(&registry.user), "{error}");

    registry.configure("{}");
    let error = registry.refused().await;
    assert_eq!(error.kind(), ErrorKind::PermissionDenied, "{error}");
    assert!(error.to_string().contains(&registry.address), "{error}");
    assert!(error.to_string().contains("without credentials"), "{error}");

    // Who is let in is told what is not there.
    registry.log_in(&registry.password.clone());
    registry.image = format!("{}/sandboxer-test/own:missing", registry.address);
    let error = registry.refused().await;
    assert_eq!(error.kind(), ErrorKind::NotFound, "{error}");
    assert!(error.to_string().contains("sandboxer-test/own:missing"), "{error}");

    // Nobody is there.
    registry.image = "127.0.0.1:1/sandboxer-test/own:1".to_owned();
    let error = registry.refused().await;
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
    assert!(error.to_string().contains("127.0.0.1:1"), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_credential_helper_is_asked() {
    let Some(registry) = Registry::new() else { return };
    let Some(helpers) = std::env::var_os(HELPED).map(PathBuf::from) else {
        in_a_process_that_finds_it("registry::a_credential_helper_is_asked");
        return;
    };
    let helped = |name: &str| {
        registry.configure(&format!(r#"{{"credHelpers": {{"{}": "{name}"}}}}"#, registry.address));
    };
    helped("sandboxer-missing");
    let error = registry.refused().await;
    assert!(error.to_string().contains("docker-credential-sandboxer-missing"), "{error}");

    let answer = |password: &str| {
        // It answers whoever asks it as Docker does, and nobody else.
        let text = format!(
            "#!/bin/sh\n[ \"$1\" = get ] && [ \"$(cat)\" = {} ] || exit 1\n\
             echo '{{\"ServerURL\":\"x\",\"Username\":\"{}\",\"Secret\":\"{password}\"}}'\n",
            registry.address, registry.user
        );
        write_program(&helpers.join("docker-credential-sandboxer-test"), &text);
    };
    helped("sandboxer-test");
    answer("a-password-that-is-not-the-right-one");
    let error = registry.refused().await;
    assert_eq!(error.kind(), ErrorKind::PermissionDenied, "{error}");
    assert!(!format!("{error:?}").contains("a-password"), "{error:?}");

    answer(&registry.password);
    let scene = registry.scene(|builder| builder.pull(PullPolicy::Always)).await;
    let sandbox = scene.manager.create(CreateSandbox::new(), &scene.sink).await.unwrap();
    let run = sandbox.exec(Command::shell("cat /unique"), &Suppressed).await.unwrap();
    assert_eq!(run.stdout.text(), registry.image);
    sandbox.destroy(&scene.sink).await.unwrap();
    assert_eq!(scene.leftovers(), "");
}

fn write_program(path: &Path, text: &str) {
    std::fs::write(path, text).unwrap();
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o755)).unwrap();
}

/// Helpers are found in the path, which is a process's own.
fn in_a_process_that_finds_it(test: &str) {
    let helpers = tempfile::Builder::new().prefix("sandbox-test-").tempdir().unwrap();
    let path = std::env::var("PATH").unwrap_or_default();
    let output = Program::new(std::env::current_exe().unwrap())
        .args(["--exact", test, "--nocapture"])
        .env("PATH", format!("{}:{path}", helpers.path().display()))
        .env(HELPED, helpers.path())
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    let failed = format!("{said}{}", String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success() && said.contains(" 1 passed"), "{failed}");
}
