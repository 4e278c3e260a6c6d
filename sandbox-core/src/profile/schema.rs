//! The fields of a profile.

use serde::{Deserialize, Deserializer, Serialize, de::Error as _};

use super::Period;
use crate::{BackendId, Isolation, route::Strategy};

/// A named, versioned recipe for sandboxes: defaults for what a request leaves open, and a route.
///
/// ```
/// use sandbox_core::Profile;
///
/// let profile = Profile::from_yaml(
///     "id: profile.tiny\nversion: \"1.0.0\"\nextension: ext.bwrap\nttl: {default: 1h, max: 2h}\n",
///     "tiny.yaml",
/// )?;
/// assert_eq!(profile.id, "profile.tiny");
/// # Ok::<(), sandbox_core::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[non_exhaustive]
pub struct Profile {
    /// What it is called: `profile.agent-dev`.
    #[serde(deserialize_with = "word")]
    pub id: String,
    /// Which version of it.
    #[serde(deserialize_with = "word")]
    pub version: String,
    /// The backend of the route `explicit`.
    pub extension: BackendId,
    /// Which backends may serve it.
    #[serde(default)]
    pub route: Route,
    /// How far its sandboxes must be kept apart from the host.
    #[serde(default)]
    pub isolation: IsolationRule,
    /// The image, on backends that run images.
    #[serde(default)]
    pub image: Option<String>,
    /// What can be reached.
    #[serde(default)]
    pub network: NetworkRule,
    /// How the workspace is populated.
    #[serde(default)]
    pub workspace: WorkspaceRule,
    /// What a sandbox is usually kept for, in the harness's words: `session`, `run` …
    #[serde(default)]
    pub scope_default: Option<String>,
    /// How long sandboxes live.
    #[serde(default)]
    pub ttl: TtlRule,
    /// What sandboxes may use.
    #[serde(default)]
    pub resources: Resources,
    /// What is done before a sandbox is ready.
    #[serde(default)]
    pub setup: SetupRule,
    /// On which hosts, for backends that have hosts.
    #[serde(default)]
    pub placement: Placement,
    /// How sandboxes on other hosts are reached.
    #[serde(default)]
    pub reachability: ReachabilityHints,
    /// Words for people and dashboards.
    #[serde(default)]
    pub metadata: Metadata,
}

/// Which backends may serve a profile.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
#[non_exhaustive]
pub struct Route {
    /// How they are ordered.
    pub strategy: Strategy,
    /// Which; the order is the order of preference where the strategy finds no difference. Without any,
    /// the profile's `extension`. The strategy `explicit` uses that one alone.
    pub extensions: Vec<BackendId>,
    /// None that costs more.
    pub max_cost_per_hour_usd: Option<f64>,
}

/// How far sandboxes must be kept apart from the host.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
#[non_exhaustive]
pub struct IsolationRule {
    /// The least that is acceptable.
    pub level: Isolation,
}

/// What can be reached.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
#[non_exhaustive]
pub struct NetworkRule {
    /// Where nothing else is said.
    pub default: NetworkDefault,
    /// `host[:port]` patterns that are allowed all the same, where the default is `deny`.
    pub egress: Vec<String>,
}

/// Whether there is a network.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum NetworkDefault {
    /// Nothing but a loopback of its own.
    #[default]
    Deny,
    /// What the backend's network reaches.
    Allow,
}

/// How the workspace is populated.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
#[non_exhaustive]
pub struct WorkspaceRule {
    /// How.
    pub mode: WorkspaceModeRule,
    /// What the sandbox may do with it.
    pub access: AccessRule,
}

/// How the workspace is populated.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum WorkspaceModeRule {
    /// The directory shows through; what changes is the sandbox's own.
    #[default]
    Overlay,
    /// A copy.
    Copy,
    /// The directory itself.
    Bind,
    /// The input `repo` is a directory of the host that the sandbox comes to be on, and the workspace is
    /// that directory itself, which stays the truth. For backends whose sandboxes are on other hosts.
    RemoteCanonical,
}

/// What a sandbox may do with its workspace.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum AccessRule {
    /// Look at it.
    Ro,
    /// Change it.
    #[default]
    Rw,
}

/// How long sandboxes live.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
#[non_exhaustive]
pub struct TtlRule {
    /// Where the request says nothing, from when it is ready.
    pub default: Option<Period>,
    /// The most that may be asked for, or extended to.
    pub max: Option<Period>,
    /// With no process and no request.
    pub idle_reap: Option<Period>,
}

/// What sandboxes may use.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
#[non_exhaustive]
pub struct Resources {
    /// CPUs; parts of one are allowed.
    pub cpu: Option<f64>,
    /// Memory, in MiB.
    pub memory_mb: Option<u64>,
    /// Processes and threads.
    pub pids: Option<u64>,
    /// Disk, in MiB.
    pub disk_mb: Option<u64>,
}

/// What is done before a sandbox is ready.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
#[non_exhaustive]
pub struct SetupRule {
    /// For people.
    pub instructions: Option<String>,
    /// Shell text, run one after the other in the workspace. The first that fails fails the creation.
    pub commands: Vec<String>,
    /// Secrets that these commands get as environment variables of the same name.
    pub secret_refs: Vec<String>,
}

/// On which hosts.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
#[non_exhaustive]
pub struct Placement {
    /// These first.
    pub prefer: Vec<String>,
    /// Then these.
    pub fallback: Vec<String>,
}

/// How sandboxes on other hosts are reached; told in their reachability.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
#[non_exhaustive]
pub struct ReachabilityHints {
    /// Which tunnel.
    pub tunnel: Option<String>,
    /// Whose identity.
    pub identity: Option<String>,
}

impl ReachabilityHints {
    pub(crate) fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

/// Words for people and dashboards. Nothing is decided by them.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
#[non_exhaustive]
pub struct Metadata {
    /// Such as `self-hosted`.
    pub cost_class: Option<String>,
    /// Such as `standard`.
    pub latency_class: Option<String>,
}

/// A word without spaces, not too long.
fn word<'de, D: Deserializer<'de>>(from: D) -> Result<String, D::Error> {
    let text = String::deserialize(from)?;
    let plain = |c: char| c.is_ascii_alphanumeric() || "._-+".contains(c);
    if text.is_empty() || text.len() > 100 || !text.chars().all(plain) {
        let message = format!("{text:?} must be 1 to 100 letters, digits, '.', '_', '-' or '+'");
        return Err(D::Error::custom(message));
    }
    Ok(text)
}
