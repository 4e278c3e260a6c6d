//! Running the suite.

use std::{
    os::unix::process::CommandExt,
    process::{Command, ExitCode},
    time::Duration,
};

use libtest_mimic::{Arguments, Completion, Failed, Trial};
use sandbox_core::Level;

use crate::{Case, Context, Subject, all};

/// No case takes longer than this, unless it hangs.
const LIMIT: Duration = Duration::from_secs(300);

/// Set for a case that runs in a process of its own.
const CHILD: &str = "SANDBOX_CONFORMANCE_CHILD";

/// Set to the subjects that must not skip cases, each with the features that it may lack:
/// `bwrap:users,bwrap_user:users+pause`.
const REQUIRED: &str = "SANDBOX_CONFORMANCE_REQUIRED";

/// Runs every case on every subject, with the arguments of a Rust test binary.
#[must_use]
pub fn main(subjects: Vec<Subject>) -> ExitCode {
    let arguments = Arguments::from_args();
    let mut trials = Vec::new();
    for subject in subjects {
        for case in all().into_iter().filter(|case| subject.wants(case.name)) {
            let name = format!("{}::{}", subject.name(), case.name);
            let subject = subject.clone();
            let full = name.clone();
            trials.push(Trial::ignorable_test(name, move || run(&subject, case, &full)));
        }
    }
    libtest_mimic::run(&arguments, trials).exit_code()
}

/// Says that a subject is left out, and why.
///
/// # Panics
///
/// If it is one that must not be.
pub fn left_out(subject: &str, why: &str) {
    let listed = std::env::var(REQUIRED).unwrap_or_default();
    let required = listed.split(',').any(|entry| entry.split(':').next() == Some(subject));
    assert!(!required, "{subject} is left out though required: {why}");
    #[allow(clippy::print_stderr, reason = "what is left out is never left out silently")]
    {
        eprintln!("left out: {subject}: {why}");
    }
}

fn run(subject: &Subject, case: Case, name: &str) -> Result<Completion, Failed> {
    match subject.user() {
        Some(uid) if std::env::var_os(CHILD).is_none() => run_as(uid, name),
        _ => complete(subject, run_here(subject, case)?),
    }
}

/// How a case went.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Verdict {
    /// As it must.
    Passed,
    /// The backend lacks what it is about: this.
    Skipped(String),
    /// Otherwise, for this reason.
    Failed(String),
}

/// Runs one case in this process; for tests of the suite itself.
///
/// # Panics
///
/// If there is no case of this name, or the operating system gives no threads.
#[must_use]
pub fn run_case(subject: &Subject, name: &str) -> Verdict {
    let Some(case) = all().into_iter().find(|case| case.name == name) else {
        panic!("there is no case {name}");
    };
    run_here(subject, case).unwrap_or_else(|error| panic!("{error}"))
}

fn run_here(subject: &Subject, case: Case) -> std::io::Result<Verdict> {
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    let done = runtime.block_on(async {
        let context = Context::new(subject).await?;
        for feature in case.needs {
            if context.capabilities.level(*feature) == Level::None {
                let reason = format!("{feature}: {}", context.capabilities.evidence(*feature));
                return Ok(Verdict::Skipped(reason));
            }
        }
        let result = match tokio::time::timeout(LIMIT, (case.run)(&context)).await {
            Ok(result) => result,
            Err(_) => Err(format!("it hung: no end after {} s", LIMIT.as_secs()).into()),
        };
        let cleaned = context.finish().await;
        result.and(cleaned).map(|()| Verdict::Passed)
    });
    Ok(done.unwrap_or_else(|failure: crate::Failure| Verdict::Failed(failure.message().into())))
}

fn complete(subject: &Subject, verdict: Verdict) -> Result<Completion, Failed> {
    match verdict {
        Verdict::Passed => Ok(Completion::Completed),
        Verdict::Failed(why) => Err(why.into()),
        Verdict::Skipped(why) if !may_skip(subject.name(), &why) => {
            Err(format!("skipped though required: {why}").into())
        }
        Verdict::Skipped(why) => Ok(Completion::ignored_with(why)),
    }
}

/// Whether a subject may skip a case for this reason, which begins with the missing feature.
fn may_skip(subject: &str, why: &str) -> bool {
    let listed = std::env::var(REQUIRED).unwrap_or_default();
    let entries = listed.split(',').map(|entry| entry.split_once(':').unwrap_or((entry, "")));
    let Some((_, allowed)) = entries.into_iter().find(|(name, _)| *name == subject) else {
        return true;
    };
    let missing = why.split(':').next().unwrap_or_default();
    allowed.split('+').any(|feature| feature == missing)
}

/// The same case in a process of its own that runs as another user.
fn run_as(uid: u32, name: &str) -> Result<Completion, Failed> {
    let home = tempfile::Builder::new().prefix("conformance-user-").tempdir()?;
    std::os::unix::fs::chown(home.path(), Some(uid), Some(uid))?;
    // This link is followed without the directories that lead to the program, which may be this user's alone.
    let output = Command::new("/proc/self/exe")
        .args(["--exact", name, "--nocapture", "--test-threads=1"])
        .env_clear()
        .envs(std::env::vars_os().filter(|(key, _)| key == "PATH" || key == REQUIRED))
        .env(CHILD, "1")
        .env("HOME", home.path())
        .env("TMPDIR", home.path())
        .current_dir(home.path())
        .uid(uid)
        .gid(uid)
        .output()?;
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    if !output.status.success() {
        return Err(format!("{said}{}", String::from_utf8_lossy(&output.stderr)).into());
    }
    // libtest's own words for a test that was skipped.
    match said.lines().find_map(|line| line.split_once("... ignored").map(|(_, why)| why)) {
        Some(why) => {
            Ok(Completion::ignored_with(why.trim_matches([' ', ',', '(', ')']).to_owned()))
        }
        None if said.contains(" 1 passed") => Ok(Completion::Completed),
        None => Err(format!("it ran no case: {said}").into()),
    }
}
