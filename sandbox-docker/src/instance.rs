//! How an instance is told from everything else that the engine has: a container's name and labels.

use std::collections::HashMap;

use jiff::Timestamp;
use sandbox_core::{
    BackendId, Error, ErrorKind, Found, Instance, InstanceId, InstanceState, OwnerId, Provision,
    Result, SandboxId,
};
use serde::{Deserialize, Serialize};

use crate::error::{ID, failed};

/// The label that says what one of our containers or images is for.
pub(crate) const KIND: &str = "sandboxer.kind";
/// The label with the scope that it belongs to.
pub(crate) const SCOPE: &str = "sandboxer.scope";
const SANDBOX: &str = "sandboxer.sandbox";
const INSTANCE: &str = "sandboxer.instance";
const OWNER: &str = "sandboxer.owner";
const SPEC: &str = "sandboxer.spec";
/// The image that the lineage's first container was made from, and when: snapshots inherit both.
const ORIGIN: &str = "sandboxer.origin";
const BORN: &str = "sandboxer.born";
const GENERATION: &str = "sandboxer.generation";

/// What one of our containers or images is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// A sandbox's instance.
    Sandbox,
    /// One that waits in a pool.
    Pooled,
    /// A small tool of the backend's own, short-lived.
    Helper,
    /// An image with the guest in it.
    Prepared,
    /// A snapshot.
    Snapshot,
}

impl Kind {
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::Sandbox => "sandbox",
            Self::Pooled => "pooled",
            Self::Helper => "helper",
            Self::Prepared => "prepared",
            Self::Snapshot => "snapshot",
        }
    }
}

/// What the backend needs to find an instance again.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Data {
    /// The container, by name or id.
    pub(crate) container: String,
    /// It is somebody else's: the guest was brought into it, beside its own program.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub(crate) borrowed: bool,
}

impl Data {
    pub(crate) fn of(instance: &Instance) -> Result<Self> {
        serde_json::from_value(instance.data.clone()).map_err(|error| {
            failed("find the instance", "its history does not say which container it is")
                .with_source(error)
        })
    }

    /// Only its owner may do this with a container that is borrowed.
    pub(crate) fn refuse_borrowed(&self, operation: &'static str) -> Result<()> {
        if self.borrowed {
            let message =
                "the container is borrowed: it was attached to, and only its owner may do this";
            return Err(Error::new(ErrorKind::NotOwned, operation, message));
        }
        Ok(())
    }
}

/// The instance of this container.
pub(crate) fn describe(id: &InstanceId, sandbox: &SandboxId, data: &Data) -> Instance {
    Instance {
        id: id.clone(),
        sandbox: sandbox.clone(),
        backend: BackendId::new(ID),
        data: serde_json::to_value(data).unwrap_or_default(),
    }
}

/// The name of a container that is made for an instance.
pub(crate) fn name(instance: &InstanceId) -> String {
    format!("sandboxer-{instance}")
}

/// The name of a container that was made beforehand: as its labels cannot be changed, its name says whose
/// it has become.
pub(crate) fn claimed_name(request: &Provision) -> String {
    format!("sandboxer-{}.{}.{}", request.instance, request.sandbox, request.owner)
}

/// The labels of everything that this scope's backend makes.
pub(crate) fn labels(scope: &str, kind: Kind) -> HashMap<String, String> {
    [(SCOPE, scope), (KIND, kind.as_str())].map(|(k, v)| (k.to_owned(), v.to_owned())).into()
}

/// The labels of an instance's container.
pub(crate) fn marks(scope: &str, request: &Provision) -> HashMap<String, String> {
    let mut labels = labels(scope, Kind::Sandbox);
    for (key, value) in [
        (SANDBOX, request.sandbox.to_string()),
        (INSTANCE, request.instance.to_string()),
        (OWNER, request.owner.to_string()),
        (SPEC, request.spec.fingerprint()),
        (GENERATION, request.generation.to_string()),
    ] {
        labels.insert(key.to_owned(), value);
    }
    labels
}

/// The labels of a fresh container.
pub(crate) fn origin_labels(image: &str) -> [(String, String); 2] {
    let now = Timestamp::now().as_second();
    // What was written a moment before counts as written now.
    let born = (now - 2).to_string();
    [(ORIGIN.to_owned(), image.to_owned()), (BORN.to_owned(), born)]
}

/// What those labels say: the image, and from when on a file's time alone does not tell a change.
pub(crate) fn origin(labels: &HashMap<String, String>) -> Option<(String, i64)> {
    Some((labels.get(ORIGIN)?.clone(), labels.get(BORN)?.parse().ok()?))
}

/// What a listed container is an instance of, if it is one.
pub(crate) fn found(
    container: &str,
    names: &[String],
    labels: &HashMap<String, String>,
    state: InstanceState,
    created: i64,
) -> Option<Found> {
    let (instance, sandbox, owner) =
        names.iter().find_map(|name| claimed(name)).or_else(|| marked(labels))?;
    let data = Data { container: container.to_owned(), borrowed: false };
    Some(Found {
        instance: describe(&instance, &sandbox, &data),
        owner,
        state,
        created_at: Timestamp::from_second(created).unwrap_or_default(),
    })
}

type Marks = (InstanceId, SandboxId, OwnerId);

fn claimed(name: &str) -> Option<Marks> {
    let name = name.trim_start_matches('/').strip_prefix("sandboxer-")?;
    let mut parts = name.split('.');
    let found = (parts.next()?, parts.next()?, parts.next()?);
    Some((found.0.parse().ok()?, found.1.parse().ok()?, found.2.parse().ok()?))
}

fn marked(labels: &HashMap<String, String>) -> Option<Marks> {
    if labels.get(KIND).map(String::as_str) != Some(Kind::Sandbox.as_str()) {
        return None;
    }
    Some((
        labels.get(INSTANCE)?.parse().ok()?,
        labels.get(SANDBOX)?.parse().ok()?,
        labels.get(OWNER)?.parse().ok()?,
    ))
}

/// The error of an operation on an instance, with its sandbox.
pub(crate) fn about(error: Error, instance: &Instance) -> Error {
    error.with_sandbox(&instance.sandbox).with_backend(&instance.backend)
}

#[cfg(test)]
mod tests {
    use sandbox_core::SandboxSpec;

    use super::*;

    fn request() -> Provision {
        Provision::new(SandboxId::new(), OwnerId::new(), SandboxSpec::default())
    }

    #[test]
    fn a_container_says_whose_it_is() {
        let request = request();
        let labels = marks("here", &request);
        let found = found("abc", &[], &labels, InstanceState::Running, 7).unwrap();
        assert_eq!((&found.instance.id, &found.owner), (&request.instance, &request.owner));
        assert_eq!(Data::of(&found.instance).unwrap().container, "abc");
    }

    #[test]
    fn a_claimed_one_says_so_by_its_name() {
        let request = request();
        let labels = labels("here", Kind::Pooled);
        assert_eq!(found("abc", &["/other".into()], &labels, InstanceState::Running, 7), None);
        let names = [format!("/{}", claimed_name(&request))];
        let found = found("abc", &names, &labels, InstanceState::Running, 7).unwrap();
        assert_eq!(found.instance.sandbox, request.sandbox);
    }
}
