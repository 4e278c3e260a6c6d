//! What sandboxes on Docker cost, beside what the `docker` program costs for the same; JSON lines on stdout,
//! each with what was asked for and whether it was met. On the engine of `scripts/containers`.
#![allow(clippy::print_stdout, clippy::print_stderr, reason = "programs talk to people")]

use std::time::Instant;

use sandbox_core::{Command, CreateSandbox, Root, Sandbox, SandboxManager, Suppressed};
use sandbox_docker::{DockerBackend, PoolOptions, PullPolicy};
use sandbox_examples::{
    Outcome,
    figures::{median, round, succeed, timed},
};

const SINK: Suppressed = Suppressed;

#[tokio::main]
async fn main() -> Outcome {
    let quick = std::env::args().any(|argument| argument == "--quick");
    tokio::spawn(measure(quick)).await?
}

/// The engine, its images, and how often things are done.
struct Bench {
    host: String,
    /// Nothing but BusyBox: two megabytes.
    image: String,
    /// A Debian with Git and Python, as people have it: a quarter of a gigabyte.
    debian: String,
    repeats: usize,
}

async fn measure(quick: bool) -> Outcome {
    let variable = |name: &str| {
        std::env::var(name).map_err(|_| format!("{name} is not set: see scripts/containers"))
    };
    let bench = Bench {
        host: variable("SANDBOX_DOCKER_HOST")?,
        image: variable("SANDBOX_BUSYBOX_IMAGE")?,
        debian: variable("SANDBOX_TEST_IMAGE")?,
        repeats: if quick { 10 } else { 40 },
    };
    let state = tempfile::Builder::new().prefix("bench-").tempdir()?;
    let backend = bench.backend("bench", None)?;
    let manager = SandboxManager::builder()
        .state_dir(state.path().join("plain"))
        .backend(backend)
        .build()
        .await?;
    // The image is prepared once, and that is no sandbox's cost.
    manager.create(CreateSandbox::new(), &SINK).await?.destroy(&SINK).await?;

    bench.round_trips(&manager).await?;
    bench.creations(&manager).await?;
    bench.pool(state.path()).await?;
    bench.snapshots(&manager, "busybox", &bench.image).await?;
    bench.snapshots(&manager, "debian", &bench.debian).await?;
    bench.rewinds(&manager).await?;
    bench.throughput(&manager).await
}

impl Bench {
    fn backend(&self, scope: &str, pool: Option<PoolOptions>) -> Outcome<DockerBackend> {
        let scope = format!("{scope}-{}", std::process::id());
        let mut builder = DockerBackend::builder()
            .host(&self.host)
            .image(&self.image)
            .scope(scope)
            .pull(PullPolicy::Never);
        if let Some(pool) = pool {
            builder = builder.pool(pool);
        }
        Ok(builder.build()?)
    }

    /// The `docker` program.
    fn docker(&self, arguments: &[&str]) -> tokio::process::Command {
        let mut command = tokio::process::Command::new("docker");
        command.args(["--host", &self.host]).args(arguments);
        command
    }

    async fn round_trips(&self, manager: &SandboxManager) -> Outcome {
        eprintln!("round trips of /bin/true");
        let sandbox = manager.create(CreateSandbox::new(), &SINK).await?;
        let container = container(&sandbox).await?;
        let (mut ours, mut theirs) = (Vec::new(), Vec::new());
        for round in 0..self.repeats * 20 {
            ours.push(timed(sandbox.exec(Command::new("/bin/true"), &SINK)).await?);
            if round % 20 == 0 {
                theirs.push(timed(succeed(self.docker(&["exec", &container, "true"]))).await?);
            }
        }
        sandbox.destroy(&SINK).await?;
        let (ours, theirs) = (median(&ours), median(&theirs));
        report("exec_round_trip", ours, "docker exec", theirs, Asked::Faster(30.0));
        Ok(())
    }

    async fn creations(&self, manager: &SandboxManager) -> Outcome {
        eprintln!("creations");
        let (mut ours, mut theirs) = (Vec::new(), Vec::new());
        for _ in 0..self.repeats {
            let start = Instant::now();
            let sandbox = manager.create(CreateSandbox::new(), &SINK).await?;
            sandbox.exec(Command::new("/bin/true"), &SINK).await?;
            ours.push(start.elapsed());
            sandbox.destroy(&SINK).await?;
            let run = ["run", "--rm", "--network=none", &self.image, "true"];
            theirs.push(timed(succeed(self.docker(&run))).await?);
        }
        let (ours, theirs) = (median(&ours), median(&theirs));
        report("create_to_first_command", ours, "docker run --rm", theirs, Asked::AtMost(1.1));
        Ok(())
    }

    async fn pool(&self, state: &std::path::Path) -> Outcome {
        eprintln!("creations from a pool");
        let options = PoolOptions::new(2, CreateSandbox::new());
        let backend = self.backend("bench-pool", Some(options))?;
        let manager = SandboxManager::builder()
            .state_dir(state.join("pool"))
            .backend(backend.clone())
            .build()
            .await?;
        let mut ours = Vec::new();
        for _ in 0..self.repeats {
            backend.fill_pool().await?;
            let start = Instant::now();
            let sandbox = manager.create(CreateSandbox::new(), &SINK).await?;
            sandbox.exec(Command::new("/bin/true"), &SINK).await?;
            ours.push(start.elapsed());
            sandbox.destroy(&SINK).await?;
        }
        backend.fill_pool().await?;
        backend.drain_pool().await;
        report("create_from_pool", median(&ours), "20 ms", 20.0, Asked::AtMost(1.0));
        Ok(())
    }

    /// What is saved beside a commit is the whole image, so that it depends on the image what that costs.
    async fn snapshots(&self, manager: &SandboxManager, name: &str, image: &str) -> Outcome {
        eprintln!("snapshots of 200 MB in 2000 files on {name}");
        let (mut ours, mut commits, mut saved) = (Vec::new(), Vec::new(), Vec::new());
        for _ in 0..self.repeats.min(10) / 2 {
            let request = CreateSandbox::new().root(Root::Image(image.to_owned()));
            let sandbox = manager.create(request, &SINK).await?;
            change(&sandbox).await?;
            let container = container(&sandbox).await?;
            settle().await?;
            ours.push(timed(sandbox.snapshot("", &SINK)).await?);
            settle().await?;
            let commit = ["commit", &container, "sandboxer-bench:1"];
            let start = Instant::now();
            succeed(self.docker(&commit)).await?;
            commits.push(start.elapsed());
            let file = tempfile::NamedTempFile::new()?;
            let path = file.path().to_string_lossy().into_owned();
            succeed(self.docker(&["save", "--output", &path, "sandboxer-bench:1"])).await?;
            succeed(self.docker(&["rmi", "sandboxer-bench:1"])).await?;
            saved.push(start.elapsed());
            sandbox.destroy(&SINK).await?;
        }
        let (metric, value) = (format!("snapshot_200mb_{name}"), median(&ours));
        report(&metric, value, "docker commit", median(&commits), Asked::AtMost(1.1));
        let all = "docker commit, save and rmi";
        report(&metric, value, all, median(&saved), Asked::Faster(2.5));
        Ok(())
    }

    async fn rewinds(&self, manager: &SandboxManager) -> Outcome {
        eprintln!("rewinds");
        let (mut ours, mut creations) = (Vec::new(), Vec::new());
        let sandbox = manager.create(CreateSandbox::new(), &SINK).await?;
        sandbox.exec(Command::shell("echo 1 > file"), &SINK).await?;
        let snapshot = sandbox.snapshot("", &SINK).await?;
        for _ in 0..self.repeats {
            ours.push(timed(sandbox.rewind(&snapshot.id, &SINK)).await?);
            let start = Instant::now();
            let other = manager.create(CreateSandbox::new(), &SINK).await?;
            creations.push(start.elapsed());
            other.destroy(&SINK).await?;
        }
        sandbox.destroy(&SINK).await?;
        report("rewind", median(&ours), "creation", median(&creations), Asked::AtMost(1.2));
        Ok(())
    }

    async fn throughput(&self, manager: &SandboxManager) -> Outcome {
        eprintln!("256 MiB of standard output");
        let sandbox = manager.create(CreateSandbox::new(), &SINK).await?;
        let container = container(&sandbox).await?;
        let (mut ours, mut theirs) = (Vec::new(), Vec::new());
        for _ in 0..self.repeats.min(10) / 2 {
            let command = Command::new("head").args(["-c", "268435456", "/dev/zero"]);
            let start = Instant::now();
            let run = sandbox.exec(command, &SINK).await?;
            if run.stdout.total != 268_435_456 {
                return Err(format!("{} bytes came", run.stdout.total).into());
            }
            ours.push(start.elapsed());
            let arguments = ["exec", &container, "head", "-c", "268435456", "/dev/zero"];
            theirs.push(timed(succeed(self.docker(&arguments))).await?);
        }
        sandbox.destroy(&SINK).await?;
        report("stdout_256mib", median(&ours), "docker exec", median(&theirs), Asked::AtMost(1.0));
        Ok(())
    }
}

/// The sandbox's container.
async fn container(sandbox: &Sandbox) -> Outcome<String> {
    let reach = serde_json::to_value(sandbox.reachability().await?)?;
    Ok(reach["container"].as_str().ok_or("it is in no container")?.to_owned())
}

async fn change(sandbox: &Sandbox) -> Outcome {
    let text =
        "n=0; while [ $n -lt 2000 ]; do head -c 104857 /dev/zero > changed-$n; n=$((n + 1)); done";
    let run = sandbox.exec(Command::shell(text), &SINK).await?;
    if run.outcome.is_success() { Ok(()) } else { Err(run.stderr.text().into()) }
}

/// What is still to be written of one measurement would be measured in the next.
async fn settle() -> Outcome {
    succeed(tokio::process::Command::new("sync")).await
}

/// What a figure must be, beside its peer's.
#[derive(Clone, Copy)]
enum Asked {
    /// At most so many times as much.
    AtMost(f64),
    /// At least so many times faster.
    Faster(f64),
}

fn report(metric: &str, value: f64, peer: &str, peer_value: f64, asked: Asked) {
    let ratio = value / peer_value;
    let (asked, met) = match asked {
        Asked::AtMost(most) => (format!("at most {most} times"), ratio <= most),
        Asked::Faster(times) => (format!("at least {times} times faster"), ratio * times <= 1.0),
    };
    let line = serde_json::json!({
        "metric": metric, "backend": "docker", "value": round(value), "unit": "ms",
        "peer": peer, "peer_value": round(peer_value), "ratio": round(ratio),
        "asked": asked, "met": met,
    });
    println!("{line}");
}
