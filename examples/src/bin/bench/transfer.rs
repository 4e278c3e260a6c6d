//! Bytes out of a sandbox and into it.

use std::{path::Path, time::Duration};

use sandbox_core::{Command, DownloadOptions, SandboxManager, UploadOptions};
use sandbox_examples::{
    Outcome,
    figures::{percentile, succeed, timed},
};

use crate::{
    SINK, create,
    memory::Watch,
    report::{Figure, rate, report_bounded},
    settle,
};

const MIB: u64 = 1024 * 1024;

/// So much more than at its start may the harness have in memory.
const ASKED: f64 = 64.0;

/// A command that says much, beside the same through a pipe on the host.
pub(crate) async fn stdout(manager: &SandboxManager, workspace: &Path, repeats: usize) -> Outcome {
    let bytes = 256 * MIB;
    eprintln!("256 MiB of standard output: {repeats} times");
    let sandbox = create(manager, workspace).await?;
    let count = bytes.to_string();
    let (mut ours, mut host) = (Vec::new(), Vec::new());
    let watch = Watch::begin();
    for _ in 0..repeats {
        let command = Command::new("head").args(["-c", &count, "/dev/zero"]);
        let start = std::time::Instant::now();
        let run = sandbox.exec(command, &SINK).await?;
        ours.push(start.elapsed());
        if run.stdout.total != bytes {
            return Err(format!("{} bytes came, not {bytes}", run.stdout.total).into());
        }
    }
    let growth = watch.growth();
    for _ in 0..repeats {
        host.push(timed(read_all(&count)).await?);
    }
    sandbox.destroy(&SINK).await?;
    let peer = "the same through a pipe on the host";
    let [ours, host] = [ours, host].map(|times| rate(bytes, middle(&times)));
    Figure { metric: "stdout_256mib", value: ours, unit: "MB/s", peer, peer_value: host }.print();
    report_bounded("stdout_256mib_harness_peak_growth", growth, "MB", ASKED);
    Ok(())
}

/// A large file up and down, beside `cp`.
pub(crate) async fn file(manager: &SandboxManager, workspace: &Path, mib: u64) -> Outcome {
    let bytes = mib * MIB;
    eprintln!("a file of {mib} MiB up and down");
    let scratch = tempfile::tempdir()?;
    let (source, back) = (scratch.path().join("source"), scratch.path().join("back"));
    write_noise(&source, mib).await?;
    let sandbox = create(manager, workspace).await?;
    settle().await?;
    let copy = timed(succeed(cp(&source, &scratch.path().join("copy")))).await?;
    std::fs::remove_file(scratch.path().join("copy"))?;
    settle().await?;

    let watch = Watch::begin();
    let files = sandbox.files();
    let up = timed(files.upload(&source, "up", UploadOptions::new(), &SINK)).await?;
    let growth = watch.growth();
    settle().await?;
    let watch = Watch::begin();
    let down = timed(files.download("up", &back, DownloadOptions::new())).await?;
    let growth = growth.max(watch.growth());
    if std::fs::metadata(&back)?.len() != bytes {
        return Err("the file that came back is another one".into());
    }
    succeed(command("cmp", &[&source, &back])).await?;
    sandbox.destroy(&SINK).await?;
    let peer = "cp on the host";
    let peer_value = rate(bytes, copy);
    for (metric, time) in [("upload", up), ("download", down)] {
        let metric = format!("{metric}_{mib}mib");
        let value = rate(bytes, time);
        Figure { metric: &metric, value, unit: "MB/s", peer, peer_value }.print();
    }
    report_bounded("transfer_harness_peak_growth", growth, "MB", ASKED);
    Ok(())
}

/// A tree of small files up and down, beside `cp -a`.
pub(crate) async fn tree(manager: &SandboxManager, workspace: &Path, files: usize) -> Outcome {
    eprintln!("a tree of {files} small files up and down");
    let scratch = tempfile::tempdir()?;
    let (source, back) = (scratch.path().join("source"), scratch.path().join("back"));
    for n in 0..files {
        let directory = source.join(format!("{}", n / 100));
        std::fs::create_dir_all(&directory)?;
        std::fs::write(directory.join(format!("{n}")), format!("{n} ").repeat(50))?;
    }
    let sandbox = create(manager, workspace).await?;
    settle().await?;
    let copied = scratch.path().join("copied");
    let copy = timed(succeed(command("cp", &[Path::new("-a"), &source, &copied]))).await?;
    settle().await?;
    let watch = Watch::begin();
    let access = sandbox.files();
    let up = timed(access.upload(&source, "tree", UploadOptions::new(), &SINK)).await?;
    let down = timed(access.download("tree", &back, DownloadOptions::new())).await?;
    let growth = watch.growth();
    succeed(command("diff", &[Path::new("-r"), &source, &back])).await?;
    sandbox.destroy(&SINK).await?;
    let peer_value = percentile(&[copy], 50);
    for (metric, time) in [("upload", up), ("download", down)] {
        let metric = format!("{metric}_tree_{files}_files");
        let value = percentile(&[time], 50);
        Figure { metric: &metric, value, unit: "ms", peer: "cp -a on the host", peer_value }
            .print();
    }
    report_bounded("tree_harness_peak_growth", growth, "MB", ASKED);
    Ok(())
}

fn middle(times: &[Duration]) -> Duration {
    let mut sorted = times.to_vec();
    sorted.sort();
    sorted.get(sorted.len() / 2).copied().unwrap_or_default()
}

/// Reads what `head` says as any program would.
async fn read_all(count: &str) -> Outcome {
    use tokio::io::AsyncReadExt;
    let mut command = command("head", &[Path::new("-c"), Path::new(count), Path::new("/dev/zero")]);
    let mut child = command.stdout(std::process::Stdio::piped()).spawn()?;
    let mut stdout = child.stdout.take().ok_or("a pipe was asked for")?;
    let mut buffer = vec![0; 64 * 1024];
    while stdout.read(&mut buffer).await? > 0 {}
    child.wait().await?;
    Ok(())
}

/// Bytes that no filesystem makes less of.
async fn write_noise(path: &Path, mib: u64) -> Outcome {
    let count = format!("count={mib}");
    let to = format!("of={}", path.display());
    let arguments = ["if=/dev/urandom", &to, "bs=1M", &count, "status=none"].map(Path::new);
    succeed(command("dd", &arguments)).await
}

fn cp(from: &Path, to: &Path) -> tokio::process::Command {
    command("cp", &[from, to])
}

fn command(program: &str, arguments: &[&Path]) -> tokio::process::Command {
    let mut command = tokio::process::Command::new(program);
    command.args(arguments);
    command
}
