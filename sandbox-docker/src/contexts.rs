//! Which engine is meant, and how it is reached: what the `docker` program would find.

use std::{
    path::{Path, PathBuf},
    time::Duration,
};

use bollard::{API_DEFAULT_VERSION, Docker};
use sandbox_core::{Error, ErrorKind, Result};
use serde::Deserialize;
use sha2::{Digest, Sha256};

use crate::error::asking;

const OPERATION: &str = "find the container engine";

const STANDARD: &str = "unix:///var/run/docker.sock";

/// How an engine is reached.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Endpoint {
    /// Through a socket of this host.
    Unix(PathBuf),
    /// Over TCP; with these files, by TLS.
    Tcp(String, Option<TlsFiles>),
    /// Over SSH, with the user's own configuration.
    Ssh(String),
}

/// A certificate authority, and our own certificate and key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct TlsFiles {
    pub(crate) ca: PathBuf,
    pub(crate) cert: PathBuf,
    pub(crate) key: PathBuf,
}

impl TlsFiles {
    fn below(directory: &Path) -> Self {
        Self {
            ca: directory.join("ca.pem"),
            cert: directory.join("cert.pem"),
            key: directory.join("key.pem"),
        }
    }
}

impl Endpoint {
    /// As `docker --host` takes it; `None` for the standard place.
    pub(crate) fn host(&self) -> Option<String> {
        let host = match self {
            Self::Unix(path) => format!("unix://{}", path.display()),
            Self::Tcp(address, _) => format!("tcp://{address}"),
            Self::Ssh(address) => format!("ssh://{address}"),
        };
        (host != STANDARD).then_some(host)
    }

    /// Whether the engine sees this host's files.
    pub(crate) fn is_local(&self) -> bool {
        matches!(self, Self::Unix(_))
    }

    /// A client of this engine. Connects when it is first used.
    pub(crate) fn client(&self, timeout: Duration) -> Result<Docker> {
        let seconds = timeout.as_secs().max(1);
        let made = match self {
            Self::Unix(path) => {
                Docker::connect_with_unix(&path.to_string_lossy(), seconds, API_DEFAULT_VERSION)
            }
            Self::Tcp(address, None) => {
                Docker::connect_with_http(&format!("tcp://{address}"), seconds, API_DEFAULT_VERSION)
            }
            Self::Tcp(address, Some(files)) => Docker::connect_with_ssl(
                &format!("tcp://{address}"),
                &files.key,
                &files.cert,
                &files.ca,
                seconds,
                API_DEFAULT_VERSION,
            ),
            Self::Ssh(address) => Docker::connect_with_ssh(
                &format!("ssh://{address}"),
                seconds,
                API_DEFAULT_VERSION,
                None,
            ),
        };
        made.map_err(asking("connect", format!("{self:?}")))
    }
}

/// What is asked for, and what surrounds us.
#[derive(Debug, Default)]
pub(crate) struct Asked<'a> {
    /// A host that the caller named.
    pub(crate) host: Option<&'a str>,
    /// A context that the caller named.
    pub(crate) context: Option<&'a str>,
    /// `DOCKER_HOST`.
    pub(crate) env_host: Option<String>,
    /// `DOCKER_CONTEXT`.
    pub(crate) env_context: Option<String>,
    /// `DOCKER_CERT_PATH`.
    pub(crate) env_cert_path: Option<PathBuf>,
    /// `DOCKER_TLS_VERIFY` is set, to something.
    pub(crate) env_tls: bool,
}

#[derive(Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct Config {
    current_context: Option<String>,
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Meta {
    endpoints: std::collections::BTreeMap<String, MetaEndpoint>,
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct MetaEndpoint {
    host: Option<String>,
}

/// The engine, in the order in which the `docker` program looks: what the caller says, `DOCKER_HOST`,
/// `DOCKER_CONTEXT`, the configuration's current context, the standard socket. `directory` is the
/// configuration's.
///
/// # Errors
///
/// `NotFound` if a context is not there, `InvalidSpec` if something cannot be understood.
pub(crate) fn find(asked: &Asked<'_>, directory: &Path) -> Result<Endpoint> {
    let tls =
        asked.env_tls.then(|| TlsFiles::below(asked.env_cert_path.as_deref().unwrap_or(directory)));
    if let Some(host) = asked.host {
        return parse(host, tls);
    }
    if let Some(context) = asked.context {
        return of_context(context, directory);
    }
    if let Some(host) = asked.env_host.as_deref().filter(|host| !host.is_empty()) {
        return parse(host, tls);
    }
    let current = match asked.env_context.clone().filter(|context| !context.is_empty()) {
        Some(context) => Some(context),
        None => current_context(directory)?,
    };
    match current {
        Some(context) => of_context(&context, directory),
        None => parse(STANDARD, None),
    }
}

fn current_context(directory: &Path) -> Result<Option<String>> {
    let path = directory.join("config.json");
    let text = match std::fs::read_to_string(&path) {
        Ok(text) => text,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(Error::io(OPERATION, path.display().to_string(), error)),
    };
    let config: Config = serde_json::from_str(&text)
        .map_err(|error| invalid(format!("{}: {error}", path.display())))?;
    Ok(config.current_context.filter(|context| !context.is_empty()))
}

fn of_context(name: &str, directory: &Path) -> Result<Endpoint> {
    if name == "default" {
        return parse(STANDARD, None);
    }
    let id: String = Sha256::digest(name).iter().map(|byte| format!("{byte:02x}")).collect();
    let path = directory.join("contexts/meta").join(&id).join("meta.json");
    let text = std::fs::read_to_string(&path).map_err(|error| {
        Error::io(OPERATION, format!("there is no Docker context {name:?}"), error)
    })?;
    let meta: Meta = serde_json::from_str(&text)
        .map_err(|error| invalid(format!("the Docker context {name:?}: {error}")))?;
    let host = meta.endpoints.get("docker").and_then(|endpoint| endpoint.host.as_deref());
    let Some(host) = host else {
        return Err(invalid(format!("the Docker context {name:?} names no Docker endpoint")));
    };
    let files = directory.join("contexts/tls").join(&id).join("docker");
    parse(host, files.is_dir().then(|| TlsFiles::below(&files)))
}

fn parse(host: &str, tls: Option<TlsFiles>) -> Result<Endpoint> {
    let unknown = || {
        invalid(format!(
            "the container engine's address {host:?} is of no kind that is known: unix:///PATH, \
             tcp://HOST:PORT and ssh://[USER@]HOST are"
        ))
    };
    let (scheme, rest) = host.split_once("://").ok_or_else(unknown)?;
    if rest.is_empty() {
        return Err(unknown());
    }
    match scheme {
        "unix" => Ok(Endpoint::Unix(rest.into())),
        "tcp" | "http" => Ok(Endpoint::Tcp(rest.to_owned(), tls)),
        "https" => match tls {
            Some(files) => Ok(Endpoint::Tcp(rest.to_owned(), Some(files))),
            None => Err(invalid(format!(
                "{host} needs certificates: set DOCKER_TLS_VERIFY and DOCKER_CERT_PATH"
            ))),
        },
        // The name becomes an argument of ssh: it must not be an option.
        "ssh" if !rest.starts_with('-') && !rest.contains("@-") => {
            Ok(Endpoint::Ssh(rest.to_owned()))
        }
        _ => Err(unknown()),
    }
}

fn invalid(message: String) -> Error {
    Error::new(ErrorKind::InvalidSpec, OPERATION, message)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with_context(name: &str, host: &str, current: bool) -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        let id: String = Sha256::digest(name).iter().map(|byte| format!("{byte:02x}")).collect();
        let meta = dir.path().join("contexts/meta").join(&id);
        std::fs::create_dir_all(&meta).unwrap();
        let text = serde_json::json!({"Name": name, "Endpoints": {"docker": {"Host": host}}});
        std::fs::write(meta.join("meta.json"), text.to_string()).unwrap();
        std::fs::create_dir_all(dir.path().join("contexts/tls").join(&id).join("docker")).unwrap();
        if current {
            let text = serde_json::json!({"currentContext": name});
            std::fs::write(dir.path().join("config.json"), text.to_string()).unwrap();
        }
        dir
    }

    #[test]
    fn whatever_is_said_counts_in_dockers_order() {
        let dir = with_context("far", "tcp://far:2376", true);
        let mut asked = Asked::default();
        let Endpoint::Tcp(address, Some(files)) = find(&asked, dir.path()).unwrap() else {
            panic!("the current context")
        };
        assert_eq!(address, "far:2376");
        assert!(files.ca.starts_with(dir.path()));
        asked.env_context = Some("default".into());
        assert_eq!(find(&asked, dir.path()).unwrap().host(), None);
        asked.env_host = Some("unix:///run/user/1000/docker.sock".into());
        let local = find(&asked, dir.path()).unwrap();
        assert!(local.is_local());
        assert_eq!(local.host().as_deref(), Some("unix:///run/user/1000/docker.sock"));
        asked.host = Some("ssh://ann@far");
        assert_eq!(find(&asked, dir.path()).unwrap(), Endpoint::Ssh("ann@far".into()));
    }

    #[test]
    fn tls_is_as_the_environment_says() {
        let dir = tempfile::tempdir().unwrap();
        let mut asked = Asked { env_host: Some("tcp://far:2375".into()), ..Asked::default() };
        assert_eq!(find(&asked, dir.path()).unwrap(), Endpoint::Tcp("far:2375".into(), None));
        asked.env_tls = true;
        asked.env_cert_path = Some("/certs".into());
        let found = find(&asked, dir.path()).unwrap();
        let files = Some(TlsFiles::below(Path::new("/certs")));
        assert_eq!(found, Endpoint::Tcp("far:2375".into(), files));
    }

    #[test]
    fn what_is_not_known_is_said() {
        let dir = with_context("odd", "npipe:////./pipe/docker", false);
        let error = |host, context| {
            let asked = Asked { host, context, ..Asked::default() };
            find(&asked, dir.path()).unwrap_err().to_string()
        };
        assert!(error(None, Some("nope")).contains("no Docker context \"nope\""));
        assert!(error(None, Some("odd")).contains("of no kind that is known"));
        assert!(error(Some("/var/run/docker.sock"), None).contains("of no kind"));
        assert!(error(Some("ssh://-oProxyCommand=x"), None).contains("of no kind"));
        assert!(error(Some("https://far"), None).contains("needs certificates"));
    }
}
