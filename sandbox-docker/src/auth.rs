//! Credentials for registries, from Docker's own configuration.

use std::{collections::BTreeMap, path::Path, process::Stdio, time::Duration};

use base64::{Engine, engine::general_purpose::STANDARD};
use bollard::auth::DockerCredentials;
use sandbox_core::{Error, ErrorKind, Result};
use serde::Deserialize;
use tokio::io::AsyncWriteExt;

const OPERATION: &str = "find registry credentials";

/// The registry of names that say none, as the configuration calls it.
pub(crate) const HUB: &str = "https://index.docker.io/v1/";

/// A credential helper that takes longer hangs.
const PATIENCE: Duration = Duration::from_secs(30);

/// `config.json`, as far as it is about credentials.
#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct Config {
    auths: BTreeMap<String, Entry>,
    creds_store: Option<String>,
    cred_helpers: BTreeMap<String, String>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Entry {
    auth: Option<String>,
    username: Option<String>,
    password: Option<String>,
    identitytoken: Option<String>,
}

/// What a helper answers.
#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Answer {
    username: String,
    secret: String,
}

/// Where credentials are to be had.
#[derive(Debug, PartialEq)]
enum Source {
    /// In the file itself.
    Known(DockerCredentials),
    /// From this program, asked for this server.
    Helper(String, String),
    /// Nowhere.
    None,
}

/// The credentials for an image's registry, if there are any.
///
/// # Errors
///
/// `InvalidSpec` if the configuration cannot be understood; `Unavailable` if its helper cannot be run.
pub(crate) async fn for_image(directory: &Path, image: &str) -> Result<Option<DockerCredentials>> {
    let path = directory.join("config.json");
    let text = match std::fs::read_to_string(&path) {
        Ok(text) => text,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(Error::io(OPERATION, path.display().to_string(), error)),
    };
    let unreadable = |why: String| {
        let message = format!("{}: {why}", path.display());
        Error::new(ErrorKind::InvalidSpec, OPERATION, message)
    };
    // Where, and not what: that may be a secret.
    let config: Config = serde_json::from_str(&text).map_err(|error| {
        let (line, column) = (error.line(), error.column());
        unreadable(format!("it is not as Docker writes it at line {line}, column {column}"))
    })?;
    match source(&config, registry(image)).map_err(unreadable)? {
        Source::Known(credentials) => Ok(Some(credentials)),
        Source::Helper(program, server) => ask(&program, &server).await,
        Source::None => Ok(None),
    }
}

/// The registry that an image's name means, as the configuration calls it.
pub(crate) fn registry(image: &str) -> &str {
    match image.split_once('/') {
        Some((first, _)) if first.contains(['.', ':']) || first == "localhost" => match first {
            "docker.io" | "index.docker.io" => HUB,
            other => other,
        },
        _ => HUB,
    }
}

fn source(config: &Config, registry: &str) -> Result<Source, String> {
    let host = |name: &str| {
        let name = name.trim_start_matches("https://").trim_start_matches("http://");
        name.split('/').next().unwrap_or_default().to_owned()
    };
    if let Some(helper) = config.cred_helpers.get(registry) {
        return Ok(Source::Helper(helper.clone(), registry.to_owned()));
    }
    if let Some(store) = config.creds_store.as_ref().filter(|store| !store.is_empty()) {
        return Ok(Source::Helper(store.clone(), registry.to_owned()));
    }
    let same = |name: &&String| host(name) == host(registry);
    let found = config.auths.get_key_value(registry);
    let found = found.or_else(|| config.auths.iter().find(|(name, _)| same(name)));
    let Some((server, entry)) = found else { return Ok(Source::None) };
    let mut credentials = DockerCredentials {
        username: entry.username.clone(),
        password: entry.password.clone(),
        identitytoken: entry.identitytoken.clone(),
        serveraddress: Some(server.clone()),
        ..DockerCredentials::default()
    };
    if let Some(auth) = entry.auth.as_ref().filter(|auth| !auth.is_empty()) {
        let bad = |_| format!("the entry of {server} is not what `docker login` writes");
        let text = STANDARD.decode(auth).map_err(bad)?;
        let text = String::from_utf8(text)
            .map_err(|_| format!("the entry of {server} is not what `docker login` writes"))?;
        let (user, password) = text.split_once(':').unwrap_or((&text, ""));
        credentials.username = Some(user.to_owned());
        credentials.password = Some(password.trim_end_matches('\0').to_owned());
    }
    let has = |value: &Option<String>| value.as_ref().is_some_and(|text| !text.is_empty());
    if has(&credentials.username) || has(&credentials.identitytoken) {
        Ok(Source::Known(credentials))
    } else {
        Ok(Source::None)
    }
}

/// Asks a credential helper, which is a program of Docker's making that is run on this host.
async fn ask(helper: &str, server: &str) -> Result<Option<DockerCredentials>> {
    let program = format!("docker-credential-{helper}");
    let failed = |error| Error::io(OPERATION, program.clone(), error);
    let mut child = tokio::process::Command::new(&program)
        .arg("get")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .kill_on_drop(true)
        .spawn()
        .map_err(failed)?;
    if let Some(mut stdin) = child.stdin.take() {
        // A helper that does not read is one that has ended.
        let _ = stdin.write_all(server.as_bytes()).await;
    }
    let output = tokio::time::timeout(PATIENCE, child.wait_with_output()).await;
    let output = output.map_err(|_| {
        let message = format!("{program} did not answer within {} s", PATIENCE.as_secs());
        Error::new(ErrorKind::Timeout, OPERATION, message)
    })?;
    let output = output.map_err(failed)?;
    if !output.status.success() {
        // It knows none: the registry may let anybody in.
        return Ok(None);
    }
    let answer: Answer = serde_json::from_slice(&output.stdout).map_err(|_| {
        let message = format!("{program} answered what is no credential");
        Error::new(ErrorKind::Unavailable, OPERATION, message)
    })?;
    let mut credentials = DockerCredentials {
        serveraddress: Some(server.to_owned()),
        ..DockerCredentials::default()
    };
    if answer.username == "<token>" {
        credentials.identitytoken = Some(answer.secret);
    } else {
        credentials.username = Some(answer.username);
        credentials.password = Some(answer.secret);
    }
    Ok(Some(credentials))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(text: &str) -> Config {
        serde_json::from_str(text).unwrap()
    }

    #[test]
    fn registries_are_told_from_folders() {
        for (image, expected) in [
            ("alpine", HUB),
            ("library/alpine:3", HUB),
            ("docker.io/a/b", HUB),
            ("ghcr.io/a/b:1", "ghcr.io"),
            ("localhost/a", "localhost"),
            ("host:5000/a", "host:5000"),
        ] {
            assert_eq!(registry(image), expected, "{image}");
        }
    }

    #[test]
    fn logins_are_decoded() {
        // "ann:secret:with colon"
        let config = config(
            r#"{"auths": {"https://ghcr.io/v2/": {"auth": "YW5uOnNlY3JldDp3aXRoIGNvbG9u"},
                "empty.example": {}}}"#,
        );
        let Source::Known(found) = source(&config, "ghcr.io").unwrap() else { panic!() };
        assert_eq!(found.username.as_deref(), Some("ann"));
        assert_eq!(found.password.as_deref(), Some("secret:with colon"));
        assert_eq!(source(&config, "empty.example").unwrap(), Source::None);
        assert_eq!(source(&config, HUB).unwrap(), Source::None);
    }

    #[test]
    fn helpers_are_found() {
        let config = config(r#"{"credsStore": "desktop", "credHelpers": {"gcr.io": "gcloud"}}"#);
        let helper = |name: &str, server: &str| Source::Helper(name.into(), server.into());
        assert_eq!(source(&config, "gcr.io").unwrap(), helper("gcloud", "gcr.io"));
        assert_eq!(source(&config, HUB).unwrap(), helper("desktop", HUB));
    }

    #[tokio::test]
    async fn no_configuration_is_no_credentials() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(for_image(dir.path(), "alpine").await.unwrap(), None);
        std::fs::write(dir.path().join("config.json"), r#"{"auths": "hunter2"}"#).unwrap();
        let error = for_image(dir.path(), "alpine").await.unwrap_err();
        assert!(error.to_string().contains("config.json: it is not as Docker writes it at line 1"));
        assert!(!format!("{error:?}").contains("hunter2"), "{error:?}");
    }
}
