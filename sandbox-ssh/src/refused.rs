//! Why a host does not let us in, found out by trying once more.
//!
//! `ssh` says all of it with one exit code, and in words that change. So it is asked to connect again, to
//! show which key the host has, and to go no further: without any key that it would trust and without any
//! way to log in. That key is then looked for in the files that `ssh` would look in.

use std::{collections::BTreeMap, process::Stdio, time::Duration};

use sandbox_core::{Error, ErrorKind};
use tokio::process::Command;

use crate::{address::Address, error::last_words, settings::Settings};

/// How long to look for a reason.
const PATIENCE: Duration = Duration::from_secs(15);
const OPERATION: &str = "connect to the host";

/// The error for a connection that was not made; `said` is what `ssh` said.
pub(crate) async fn explain(settings: &Settings, host: &Address, said: &[u8]) -> Error {
    let said = last_words(said);
    let found = tokio::time::timeout(PATIENCE, look(settings, host)).await;
    let (kind, message) = match found.ok().flatten() {
        Some(Found::Unknown(key)) => (
            ErrorKind::PermissionDenied,
            format!(
                "the host key of {host} is not known ({key}); compare it with the host's own, and add it \
                 to the known hosts (`ssh {host}` asks for it)"
            ),
        ),
        Some(Found::Changed(key)) => (
            ErrorKind::PermissionDenied,
            format!(
                "the host key of {host} has changed: it is now {key}, which is not the known one. Either \
                 the host was set up anew, or this is not the host; nothing was sent to it"
            ),
        ),
        Some(Found::Known) => (
            ErrorKind::PermissionDenied,
            format!("{host} was reached, and does not let us in or does not run commands ({said})"),
        ),
        None => (ErrorKind::Unavailable, format!("{host} cannot be reached ({said})")),
    };
    let retryable = kind == ErrorKind::Unavailable;
    Error::new(kind, OPERATION, message).retryable(retryable)
}

/// What there is to know of a host's key.
#[derive(Debug, PartialEq, Eq)]
enum Found {
    Unknown(String),
    Changed(String),
    Known,
}

/// `None` if the host was not reached, or that cannot be found out.
async fn look(settings: &Settings, host: &Address) -> Option<Found> {
    let key = ask_for_key(settings, host).await?;
    let configured = configured(settings, host).await?;
    let mut lines = Vec::new();
    for name in ["userknownhostsfile", "globalknownhostsfile"] {
        for file in configured.get(name).into_iter().flat_map(|files| files.split(' ')) {
            lines.extend(known(&expanded(file), &key.name).await);
        }
    }
    Some(judge(&key, &lines))
}

/// A host's key as it showed it.
#[derive(Debug, PartialEq, Eq)]
struct Key {
    /// What it is called in the files of known hosts.
    name: String,
    kind: String,
    key: String,
}

fn judge(key: &Key, lines: &[String]) -> Found {
    let shown = format!("{} {}", key.kind, key.key);
    if lines.is_empty() {
        return Found::Unknown(shown);
    }
    // An authority's signature cannot be judged here.
    let fits = |line: &String| {
        let words: Vec<&str> = line.split_ascii_whitespace().collect();
        words.first() == Some(&"@cert-authority") || words.contains(&key.key.as_str())
    };
    if lines.iter().any(fits) { Found::Known } else { Found::Changed(shown) }
}

/// Has `ssh` connect as far as to the host's key, and tell it.
async fn ask_for_key(settings: &Settings, host: &Address) -> Option<Key> {
    let mark = format!("sandbox-key-{}", uuid::Uuid::now_v7().simple());
    let tell = format!("KnownHostsCommand=/bin/sh -c 'echo \"$@\" >&2' sh {mark} %H %t %K");
    let mut ssh = ssh(settings);
    for option in [
        "BatchMode=yes",
        "ControlMaster=no",
        "ControlPath=none",
        "StrictHostKeyChecking=yes",
        "UserKnownHostsFile=/dev/null",
        "GlobalKnownHostsFile=/dev/null",
        "PreferredAuthentications=none",
        "PubkeyAuthentication=no",
        "ConnectTimeout=10",
        "LogLevel=QUIET",
        &tell,
    ] {
        ssh.args(["-o", option]);
    }
    let output = ssh.args(["-T", "--", host.as_str(), "true"]).output().await.ok()?;
    String::from_utf8_lossy(&output.stderr).lines().find_map(|line| {
        let mut words = line.strip_prefix(&mark)?.split_ascii_whitespace().map(str::to_owned);
        let key = Key { name: words.next()?, kind: words.next()?, key: words.next()? };
        // It is asked before there is a key, too.
        (key.key != "NONE").then_some(key)
    })
}

/// What `ssh` would do with this host.
async fn configured(settings: &Settings, host: &Address) -> Option<BTreeMap<String, String>> {
    let output = ssh(settings).args(["-G", "--", host.as_str()]).output().await.ok()?;
    let text = String::from_utf8(output.stdout).ok()?;
    let pair = |line: &str| line.split_once(' ').map(|(key, value)| (key.into(), value.into()));
    Some(text.lines().filter_map(pair).collect())
}

/// The lines of a file of known hosts that are about this name, hashed ones too.
async fn known(file: &str, name: &str) -> Vec<String> {
    let mut find = Command::new("ssh-keygen");
    find.args(["-F", name, "-f", file]).stdin(Stdio::null()).kill_on_drop(true);
    let Ok(output) = find.output().await else { return Vec::new() };
    let text = String::from_utf8_lossy(&output.stdout);
    text.lines().filter(|line| !line.starts_with('#')).map(str::to_owned).collect()
}

fn expanded(file: &str) -> String {
    match (file.strip_prefix("~/"), std::env::var("HOME")) {
        (Some(below), Ok(home)) => format!("{home}/{below}"),
        _ => file.to_owned(),
    }
}

fn ssh(settings: &Settings) -> Command {
    let mut ssh = Command::new(&settings.program);
    if let Some(file) = &settings.config_file {
        ssh.arg("-F").arg(file);
    }
    ssh.stdin(Stdio::null()).kill_on_drop(true);
    ssh
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_changed_key_is_told_from_an_unknown_one() {
        let key = Key { name: "h".into(), kind: "ssh-ed25519".into(), key: "AAAA1".into() };
        assert_eq!(judge(&key, &[]), Found::Unknown("ssh-ed25519 AAAA1".into()));
        let other = "h ssh-ed25519 AAAA2".to_owned();
        assert_eq!(
            judge(&key, std::slice::from_ref(&other)),
            Found::Changed("ssh-ed25519 AAAA1".into())
        );
        assert_eq!(judge(&key, &[other, "h ssh-ed25519 AAAA1".into()]), Found::Known);
        assert_eq!(judge(&key, &["@cert-authority h ssh-rsa AAAA9".into()]), Found::Known);
    }
}
