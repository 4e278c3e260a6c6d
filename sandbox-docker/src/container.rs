//! From a request to a container's settings and the guest's instructions. Touches nothing.

use std::collections::{BTreeMap, HashMap};

use bollard::models::{
    ContainerCreateBody, HostConfig, HostConfigLogConfig, Mount, MountType, ResourcesUlimits,
};
use sandbox_core::{
    Access, Error, ErrorKind, InstanceId, Limits, Network, Provision, Result, Root, SandboxSpec,
    WorkspaceMode,
};
use sandbox_guest::{Bytes, MountStep, Setup};

use crate::{archive::Owner, instance};

/// The workspace, inside.
pub(crate) const WORKSPACE: &str = "/workspace";
/// The sandbox user's home.
pub(crate) const HOME: &str = "/home/sandbox";
/// The backend's own directory.
pub(crate) const OWN: &str = "/.sandbox";
/// The guest program.
pub(crate) const GUEST: &str = "/.sandbox/guest";
/// A filesystem in memory, in no snapshot.
pub(crate) const RUN: &str = "/.sandbox/run";
/// Where the guest listens.
pub(crate) const SOCKET: &str = "/.sandbox/run/socket";
/// Where `/etc/machine-id` leads.
pub(crate) const MACHINE_ID: &str = "/.sandbox/run/machine-id";

/// The guest's own directory in a borrowed container.
pub(crate) fn borrowed_directory(instance: &InstanceId) -> String {
    format!("/.sandbox-{instance}")
}

/// Where the guest listens in a borrowed container.
pub(crate) fn borrowed_socket(instance: &InstanceId) -> String {
    format!("{}/run/socket", borrowed_directory(instance))
}

/// The guest program in a borrowed container.
pub(crate) fn borrowed_guest(instance: &InstanceId) -> String {
    format!("{}/guest", borrowed_directory(instance))
}

/// Threads of the guest's own and of what carries connections in, on top of a sandbox's limit.
pub(crate) const OWN_THREADS: u64 = 8;

/// The settings that all of a backend's containers share.
#[derive(Debug, Clone)]
pub(crate) struct Settings {
    pub(crate) scope: String,
    pub(crate) user: Owner,
    pub(crate) read_only_root: bool,
    pub(crate) runtime: Option<String>,
    /// Of each single process.
    pub(crate) ulimits: BTreeMap<String, i64>,
    /// What a spec leaves open.
    pub(crate) limits: Limits,
    /// The engine is on this host, so that paths mean the same to it.
    pub(crate) local: bool,
    /// Guests are connected to without the engine, where that can be.
    pub(crate) direct: bool,
}

/// What cannot be had here.
///
/// # Errors
///
/// `Unsupported`, with what to do instead.
pub(crate) fn refuse(spec: &SandboxSpec, settings: &Settings) -> Result<()> {
    let reason = match &spec.root {
        Root::Directory(_) => "a root directory is for other backends; import it as an image",
        Root::Standard | Root::Image(_) => {
            if spec.workspace_mode == WorkspaceMode::RemoteCanonical {
                let reason = "a workspace that stays on another host is for backends whose sandboxes are \
                              on other hosts; bind a directory of this one, or let it be copied";
                return Err(Error::unsupported("provision", reason));
            }
            let shows = !spec.mounts.is_empty() || spec.workspace_mode == WorkspaceMode::Bind;
            if shows && !settings.local {
                "the engine is on another host, which does not have this one's directories; let the \
                 workspace be copied"
            } else {
                return Ok(());
            }
        }
        _ => "this kind of root is not known here",
    };
    Err(Error::unsupported("provision", reason))
}

/// The container of an instance.
///
/// # Errors
///
/// `Unsupported` as [`refuse`] says; `InvalidSpec` if a path is not UTF-8.
pub(crate) fn body(
    request: &Provision,
    image: &str,
    settings: &Settings,
) -> Result<ContainerCreateBody> {
    let spec = &request.spec;
    refuse(spec, settings)?;
    let mut host = host_config(spec.network, &spec.limits, settings)?;
    let mut mounts = Vec::new();
    if let (WorkspaceMode::Bind, Some(directory)) = (spec.workspace_mode, &spec.workspace) {
        mounts.push(bind(directory, WORKSPACE, Access::ReadWrite)?);
    } else if settings.read_only_root {
        mounts.push(volume(WORKSPACE));
    }
    if settings.read_only_root {
        mounts.extend([HOME, "/tmp", "/var/tmp"].map(volume));
    }
    for mount in &spec.mounts {
        let target = mount.target.to_str();
        let target = target.ok_or_else(|| invalid(format!("{:?} is not UTF-8", mount.target)))?;
        if ["/", "/etc", OWN].contains(&target) || target.starts_with("/.sandbox/") {
            let message =
                format!("nothing can be mounted at {target}: a sandbox needs what is there");
            return Err(invalid(message));
        }
        mounts.push(bind(&mount.source, target, mount.access)?);
    }
    host.mounts = Some(mounts).filter(|mounts| !mounts.is_empty());
    let mut body = waiting(image, settings, host);
    body.hostname = Some(request.hostname.clone());
    body.labels = Some(instance::marks(&settings.scope, request));
    Ok(body)
}

/// A container with the guest as its program, which waits to be told what it is for.
pub(crate) fn waiting(image: &str, settings: &Settings, host: HostConfig) -> ContainerCreateBody {
    let Owner { uid, gid } = settings.user;
    ContainerCreateBody {
        image: Some(image.to_owned()),
        entrypoint: Some([GUEST, "init", "--setup-stdin"].map(str::to_owned).into()),
        cmd: Some(Vec::new()),
        user: Some(format!("{uid}:{gid}")),
        working_dir: Some("/".to_owned()),
        // An image's own check would start processes that nobody asked for.
        healthcheck: Some(bollard::models::HealthConfig {
            test: Some(vec!["NONE".to_owned()]),
            ..Default::default()
        }),
        tty: Some(false),
        open_stdin: Some(true),
        // When whoever started it has gone, so has the connection.
        stdin_once: Some(true),
        attach_stdin: Some(true),
        attach_stdout: Some(true),
        attach_stderr: Some(true),
        host_config: Some(host),
        ..Default::default()
    }
}

/// What a container may do and use.
pub(crate) fn host_config(
    network: Network,
    limits: &Limits,
    settings: &Settings,
) -> Result<HostConfig> {
    let number = |value: u64| i64::try_from(value).unwrap_or(i64::MAX);
    let limit = |asked: Option<u64>, default: Option<u64>| asked.or(default);
    let pids = limit(limits.pids, settings.limits.pids);
    let memory = limit(limits.memory, settings.limits.memory).map(number);
    let cpu = limit(limits.cpu_millis, settings.limits.cpu_millis);
    let network = match network {
        Network::Deny => "none",
        Network::Host => "host",
        other => {
            let message = format!("the network {other:?} is not known here");
            return Err(Error::unsupported("provision", message));
        }
    };
    // Not the user's alone, as not every engine takes an owner; the guest is the first to use it.
    let run = "size=1m,mode=1777".to_owned();
    Ok(HostConfig {
        network_mode: Some(network.to_owned()),
        cap_drop: Some(vec!["ALL".to_owned()]),
        security_opt: Some(vec!["no-new-privileges".to_owned()]),
        readonly_rootfs: Some(settings.read_only_root),
        pids_limit: pids.map(|pids| number(pids.saturating_add(OWN_THREADS))),
        memory,
        // No swap on top.
        memory_swap: memory,
        nano_cpus: cpu.map(|millis| number(millis.saturating_mul(1_000_000))),
        // What goes through the guest's pipes is nobody's log.
        log_config: Some(HostConfigLogConfig { typ: Some("none".to_owned()), config: None }),
        ipc_mode: Some("private".to_owned()),
        init: Some(false),
        privileged: Some(false),
        runtime: settings.runtime.clone(),
        tmpfs: Some(HashMap::from([(RUN.to_owned(), run)])),
        ulimits: Some(settings.ulimits.iter().map(ulimit).collect()),
        ..Default::default()
    })
}

fn ulimit((name, limit): (&String, &i64)) -> ResourcesUlimits {
    ResourcesUlimits { name: Some(name.clone()), soft: Some(*limit), hard: Some(*limit) }
}

fn bind(source: &std::path::Path, target: &str, access: Access) -> Result<Mount> {
    let path = source.to_str();
    let path = path.ok_or_else(|| invalid(format!("the path {source:?} is not UTF-8")))?;
    Ok(Mount {
        typ: Some(MountType::BIND),
        source: Some(path.to_owned()),
        target: Some(target.to_owned()),
        read_only: Some(access == Access::ReadOnly),
        ..Default::default()
    })
}

/// A volume without a name, which goes with the container.
fn volume(target: &str) -> Mount {
    Mount { typ: Some(MountType::VOLUME), target: Some(target.to_owned()), ..Default::default() }
}

/// What the guest is told. `env` is the image's.
pub(crate) fn setup(request: &Provision, env: &[String], settings: &Settings) -> Setup {
    let contents = Bytes::from(format!("{}\n", request.machine_id).into_bytes());
    Setup {
        listen_path: Some(SOCKET.to_owned()),
        // What the backend starts to carry a connection in is root without a right; a sandbox's own
        // processes are somebody else, unless they were asked to be root.
        listen_peer: (settings.user.uid != 0).then_some(0),
        mounts: vec![MountStep::File { path: MACHINE_ID.to_owned(), contents }],
        workspace: WORKSPACE.to_owned(),
        env: environment(&request.spec, env, settings),
        drop_capabilities: true,
        filter_syscalls: true,
        ..request.guest_setup()
    }
}

fn environment(spec: &SandboxSpec, image: &[String], settings: &Settings) -> Vec<(String, String)> {
    let root = settings.user.uid == 0;
    let (home, user) = if root { ("/root", "root") } else { (HOME, "sandbox") };
    let mut env: BTreeMap<String, String> = [
        ("HOME", home),
        ("LANG", "C.UTF-8"),
        ("LOGNAME", user),
        ("PATH", "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"),
        ("SHELL", "/bin/sh"),
        ("USER", user),
    ]
    .map(|(key, value)| (key.to_owned(), value.to_owned()))
    .into();
    let pairs = image.iter().filter_map(|pair| pair.split_once('='));
    env.extend(pairs.map(|(key, value)| (key.to_owned(), value.to_owned())));
    env.extend(spec.env.clone());
    env.into_iter().collect()
}

fn invalid(message: String) -> Error {
    Error::new(ErrorKind::InvalidSpec, "provision", message)
}

#[cfg(test)]
mod tests {
    use sandbox_core::{CreateSandbox, OwnerId, SandboxId};

    use super::*;

    fn settings() -> Settings {
        let mut limits = Limits::default();
        limits.pids = Some(4096);
        Settings {
            scope: "here".into(),
            user: Owner { uid: 1000, gid: 1000 },
            read_only_root: false,
            runtime: None,
            ulimits: BTreeMap::from([("core".to_owned(), 0)]),
            limits,
            local: true,
            direct: true,
        }
    }

    fn request(create: CreateSandbox) -> Provision {
        let sandbox: SandboxId = "sbx_0123456789abcdef0123456789abcdef".parse().unwrap();
        let owner: OwnerId = "own_0123456789abcdef0123456789abcdef".parse().unwrap();
        let mut request = Provision::new(sandbox, owner, create.spec);
        request.instance = "ins_0123456789abcdef0123456789abcdef".parse().unwrap();
        request
    }

    /// Only what is set.
    fn set(value: serde_json::Value) -> serde_json::Value {
        match value {
            serde_json::Value::Object(map) => map
                .into_iter()
                .filter(|(_, value)| !value.is_null())
                .map(|(key, value)| (key, set(value)))
                .collect(),
            other => other,
        }
    }

    #[test]
    fn the_safe_defaults() {
        let request = request(CreateSandbox::new());
        let body = body(&request, "image", &settings()).unwrap();
        insta::assert_json_snapshot!(set(serde_json::to_value(body).unwrap()));
        insta::assert_json_snapshot!(setup(&request, &["PATH=/own".into()], &settings()));
    }

    #[test]
    fn all_that_can_be_asked_for() {
        let create = CreateSandbox::new()
            .bind_workspace("/src/app")
            .mount_read_only("/shown", "/mnt/shown")
            .network(Network::Host)
            .pids(64)
            .memory(1 << 30)
            .cpu_millis(1500)
            .env("KEY", "value");
        let mut settings = settings();
        settings.read_only_root = true;
        settings.runtime = Some("runsc".into());
        let body = body(&request(create), "image", &settings).unwrap();
        insta::assert_json_snapshot!(set(serde_json::to_value(body).unwrap()));
    }

    #[test]
    fn what_cannot_be_had_is_refused_by_name() {
        let mut far = settings();
        far.local = false;
        for (create, settings, says) in [
            (CreateSandbox::new().root(Root::Directory("/r".into())), settings(), "root directory"),
            (CreateSandbox::new().bind_workspace("/src"), far.clone(), "on another host"),
            (CreateSandbox::new().mount_read_only("/a", "/b"), far, "on another host"),
            (
                CreateSandbox::new().mount_read_only("/a", "/.sandbox/run"),
                settings(),
                "at /.sandbox",
            ),
        ] {
            let error = body(&request(create), "image", &settings).unwrap_err();
            assert!(error.to_string().contains(says), "{error}");
        }
    }
}
