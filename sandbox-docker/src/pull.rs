//! Finding images, and getting those that are missing.

use bollard::{
    auth::DockerCredentials, models::ImageInspect, query_parameters::CreateImageOptionsBuilder,
};
use futures::TryStreamExt;
use sandbox_core::{Error, ErrorKind, Result};

use crate::{
    auth,
    error::{asking, engine, is_missing},
    pull_options::{PullPolicy, PullProgress},
    shared::Shared,
};

const OPERATION: &str = "provision";

/// An image of this name or id, fetched if the policy says so.
pub(crate) async fn find(shared: &Shared, name: &str) -> Result<ImageInspect> {
    let docker = shared.docker(OPERATION).await?;
    // What is named by its content cannot be newer elsewhere.
    let fixed = name.starts_with("sha256:");
    let fetched = shared.pull == PullPolicy::Always && !fixed;
    if fetched {
        fetch(shared, name).await?;
    }
    match docker.inspect_image(name).await {
        Err(error) if is_missing(&error) => {
            if fetched || fixed || shared.pull == PullPolicy::Never {
                let message = format!(
                    "the container engine has no image {name}{}",
                    if shared.pull == PullPolicy::Never {
                        ", and the backend was told never to pull one: `docker pull` it first"
                    } else {
                        ""
                    }
                );
                return Err(Error::new(ErrorKind::NotFound, OPERATION, message));
            }
            fetch(shared, name).await?;
            docker.inspect_image(name).await.map_err(asking(OPERATION, format!("the image {name}")))
        }
        found => found.map_err(asking(OPERATION, format!("the image {name}"))),
    }
}

async fn fetch(shared: &Shared, name: &str) -> Result<()> {
    let docker = shared.docker(OPERATION).await?;
    let credentials = auth::for_image(&shared.docker_config, name).await?;
    let (repository, tag) = split(name);
    let options = CreateImageOptionsBuilder::default().from_image(repository).tag(tag).build();
    let mut stream = Box::pin(docker.create_image(Some(options), None, credentials.clone()));
    loop {
        let step = match stream.try_next().await {
            Ok(Some(step)) => step,
            Ok(None) => return Ok(()),
            Err(error) => return Err(refused(shared, name, credentials, error).await),
        };
        let detail = step.progress_detail.unwrap_or_default();
        let number = |value: Option<i64>| value.and_then(|value| u64::try_from(value).ok());
        let progress = PullProgress {
            image: name.to_owned(),
            layer: step.id,
            status: step.status.unwrap_or_default(),
            done: number(detail.current),
            total: number(detail.total),
        };
        tracing::debug!(?progress, "pulling");
        if let Some(watcher) = &shared.watcher {
            (watcher.0)(&progress);
        }
    }
}

/// How the engine says that a registry wants to know who asks and nobody has said so: it has a status for
/// credentials that are refused, and none for those that are missing.
const NO_CREDENTIALS: &str = "no basic auth credentials";

/// Why an image could not be pulled, as far as that can be found out.
async fn refused(
    shared: &Shared,
    name: &str,
    credentials: Option<DockerCredentials>,
    error: bollard::errors::Error,
) -> Error {
    let registry = match auth::registry(name) {
        auth::HUB => "docker.io",
        other => other,
    };
    let place = shared.docker_config.join("config.json");
    let with = match &credentials {
        None => format!("without credentials, as {} has none for it", place.display()),
        Some(DockerCredentials { username: Some(user), .. }) => {
            format!("with the credentials of {user} that {} has or leads to", place.display())
        }
        Some(_) => format!("with the token that {} has or leads to", place.display()),
    };
    let none = credentials.is_none();
    let what = format!("the image {name} cannot be pulled from {registry} {with}");
    let error = engine(OPERATION, what, error);
    let kind = match error.kind() {
        ErrorKind::Backend if none && error.to_string().contains(NO_CREDENTIALS) => {
            ErrorKind::PermissionDenied
        }
        // A pull says that it failed. Looking at what the registry has says why.
        ErrorKind::Backend => {
            let looked = match shared.docker(OPERATION).await {
                Ok(docker) => docker.inspect_registry_image(name, credentials).await,
                Err(error) => return error,
            };
            match looked.map_err(asking(OPERATION, "")) {
                Err(why) if why.kind() == ErrorKind::PermissionDenied => why.kind(),
                Err(why) if why.kind() == ErrorKind::NotFound => why.kind(),
                Err(_) => ErrorKind::Unavailable,
                // The registry has it: it is the engine that cannot.
                Ok(_) => ErrorKind::Backend,
            }
        }
        kind => kind,
    };
    let advice = match kind {
        ErrorKind::NotFound => "; is its name right?",
        ErrorKind::PermissionDenied => "; may you pull it? `docker login` to that registry",
        _ => "",
    };
    Error::new(kind, OPERATION, format!("{}{advice}", error.message())).with_source(error)
}

/// A name's repository, and its tag or digest; without one, the newest is meant, and not all there are.
fn split(name: &str) -> (&str, &str) {
    if let Some((repository, digest)) = name.split_once('@') {
        return (repository, digest);
    }
    match name.rsplit_once(':') {
        // A colon before a slash is a registry's port.
        Some((repository, tag)) if !tag.contains('/') => (repository, tag),
        _ => (name, "latest"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_split() {
        for (name, expected) in [
            ("alpine", ("alpine", "latest")),
            ("alpine:3", ("alpine", "3")),
            ("host:5000/a/b", ("host:5000/a/b", "latest")),
            ("host:5000/a/b:1", ("host:5000/a/b", "1")),
            ("a@sha256:00", ("a", "sha256:00")),
        ] {
            assert_eq!(split(name), expected, "{name}");
        }
    }
}
