//! From a spec to bwrap's arguments and the guest's instructions. Touches nothing.
//!
//! bwrap's own root is a filesystem in memory in which everything is laid out: the host's directories at
//! their places, the rest below [`LAID_OUT`]. The guest mounts the overlays in there, moves the host's
//! directories into the root overlay and makes that the root. What is laid out, the raw layers among it,
//! is out of reach then. All sources have short names of our making, so that no path of the host ever
//! gets into the options of a mount.

use std::{
    ffi::OsString,
    os::fd::RawFd,
    path::{Path, PathBuf},
};

use sandbox_core::{
    Access, Error, ErrorKind, Mount, Network, Provision, Result, Root, SandboxSpec, SnapshotId,
    WorkspaceMode,
};
use sandbox_guest::{Bytes, MountStep, Setup};

use super::host::{HOME, HostView, IDENTITY_FILES, INSIDE_ID};

/// The workspace, inside.
pub(crate) const WORKSPACE: &str = "/workspace";
/// The program inside that others enter through. Its directory is a mount of its own, below another, so
/// that nothing inside can put something else in its place.
pub(crate) const ENTER_PROGRAM: &str = "/run/sandbox/guest";
/// The most layers that a sandbox may stand on: what the kernel takes in a page of mount options.
pub(crate) const MAX_LAYERS: usize = 300;

const LAID_OUT: &str = "/.sbx";
const NEW_ROOT: &str = "/.sbx/root";
const RUN_SIZE: u64 = 64 * 1024 * 1024;
const PRIVATE_SIZE: u64 = 1024 * 1024;
const DEVICES: [&str; 6] = ["full", "null", "random", "tty", "urandom", "zero"];

/// What a plan is made from.
#[derive(Debug)]
pub(crate) struct Input<'a> {
    pub(crate) request: &'a Provision,
    /// The snapshots that the instance stands on, lowest first.
    pub(crate) layers: &'a [SnapshotId],
    /// With [`Root::Standard`]: what of the host is shown.
    pub(crate) view: &'a HostView,
    pub(crate) sources: &'a Sources,
    pub(crate) fds: Fds,
    /// Limits that the guest has to set, as no control group does.
    pub(crate) guest_limits: GuestLimits,
    pub(crate) identity: &'a Identity,
}

/// Where bwrap finds what it mounts.
#[derive(Debug, Clone, Default)]
pub(crate) struct Sources {
    /// The instance's `fs`, with the upper and the work directories.
    pub(crate) fs: PathBuf,
    pub(crate) layers: PathBuf,
    /// The directory with the guest program.
    pub(crate) guest: PathBuf,
    /// The skeleton, or the spec's root directory.
    pub(crate) root: PathBuf,
    pub(crate) workspace: Option<PathBuf>,
    /// Those of the spec's mounts, in its order.
    pub(crate) mounts: Vec<PathBuf>,
}

/// Inherited descriptors.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Fds {
    pub(crate) info: RawFd,
    pub(crate) setup: RawFd,
    pub(crate) listen: RawFd,
    pub(crate) oom: Option<RawFd>,
}

/// See [`Input::guest_limits`].
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct GuestLimits {
    pub(crate) processes: Option<u64>,
    pub(crate) address_space: Option<u64>,
}

/// What makes a sandbox a machine of its own: files of `/etc`, first [`IDENTITY_FILES`] in their order.
#[derive(Debug, Clone)]
pub(crate) struct Identity(Vec<(&'static str, String)>);

impl Identity {
    /// `host` holds the host's `hosts` and `resolv.conf`, for a sandbox that shares its network.
    pub(crate) fn new(request: &Provision, host: Option<(&str, &str)>) -> Self {
        let name = &request.hostname;
        let own = "127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\n";
        let (hosts, resolv_conf) = host.unwrap_or((own, "# This sandbox has no network.\n"));
        let newline = if hosts.ends_with('\n') { "" } else { "\n" };
        let contents = [
            format!("{name}\n"),
            format!("{hosts}{newline}127.0.1.1\t{name}\n"),
            format!("{}\n", request.machine_id),
            resolv_conf.to_owned(),
        ];
        Self(IDENTITY_FILES.into_iter().zip(contents).collect())
    }

    /// With these in place of what the root has: see [`super::accounts`].
    pub(crate) fn with(mut self, accounts: Vec<(&'static str, String)>) -> Self {
        self.0.extend(accounts);
        self
    }
}

/// What this backend has nothing for.
///
/// # Errors
///
/// `Unsupported`, with what to do instead.
pub(crate) fn refuse(spec: &SandboxSpec) -> Result<()> {
    let reason = match &spec.root {
        Root::Standard | Root::Directory(_) => match spec.workspace_mode {
            WorkspaceMode::Private | WorkspaceMode::Bind => return Ok(()),
            WorkspaceMode::RemoteCanonical => {
                "there is no other host here that a workspace could stay on; bind a directory of this one, or \
                 use a backend whose sandboxes are on other hosts"
            }
            _ => "this kind of workspace is not known here",
        },
        Root::Image(_) => {
            "images are for container backends; unpack it and name the directory as the root"
        }
        _ => "this kind of root is not known here",
    };
    Err(Error::unsupported("provision", reason))
}

/// bwrap's arguments, without the program's own name.
pub(crate) fn arguments(input: &Input<'_>) -> Vec<OsString> {
    let spec = &input.request.spec;
    let mut line = Line::default();
    line.words(["--unshare-user", "--unshare-ipc", "--unshare-pid", "--unshare-uts"]);
    line.words(["--unshare-cgroup-try"]);
    if spec.network != Network::Host {
        line.words(["--unshare-net"]);
    }
    let id = INSIDE_ID.to_string();
    line.words(["--uid", &id, "--gid", &id, "--hostname", &input.request.hostname]);
    // As PID 1 the guest reaps what others leave behind, and its end is the end of everything.
    line.words(["--as-pid-1"]);
    // For its mounts; it drops them before it serves. They count in the new user namespace only.
    line.words(["--cap-add", "CAP_SYS_ADMIN", "--cap-add", "CAP_DAC_OVERRIDE"]);
    line.words(["--clearenv", "--info-fd", &input.fds.info.to_string()]);

    if spec.root == Root::Standard {
        for directory in &input.view.directories {
            line.mount("--ro-bind", directory, directory);
        }
    }
    line.words(["--proc", "/proc", "--tmpfs", "/dev"]);
    for device in DEVICES {
        let path = format!("/dev/{device}");
        line.mount("--dev-bind", &path, &path);
    }
    for (target, link) in [
        ("/proc/self/fd", "/dev/fd"),
        ("/proc/self/fd/0", "/dev/stdin"),
        ("/proc/self/fd/1", "/dev/stdout"),
        ("/proc/self/fd/2", "/dev/stderr"),
        ("pts/ptmx", "/dev/ptmx"),
    ] {
        line.words(["--symlink", target, link]);
    }
    line.words(["--dir", "/dev/pts", "--perms", "1777", "--tmpfs", "/dev/shm"]);

    let sources = input.sources;
    // Both the upper and the work directories: the kernel wants them on one mount.
    line.mount("--bind", &sources.fs, format!("{LAID_OUT}/fs"));
    line.mount("--ro-bind", &sources.guest, format!("{LAID_OUT}/guest"));
    line.mount("--ro-bind", &sources.root, format!("{LAID_OUT}/base"));
    let workspace = format!("{LAID_OUT}/workspace");
    match &sources.workspace {
        Some(bound) if spec.workspace_mode == WorkspaceMode::Bind => {
            line.words(["--dir", &workspace]);
            line.mount("--bind", bound, format!("{LAID_OUT}/bound"));
        }
        Some(below) => line.mount("--ro-bind", below, workspace),
        None => line.words(["--dir", &workspace]),
    }
    if !input.layers.is_empty() {
        line.mount("--ro-bind", &sources.layers, format!("{LAID_OUT}/layers"));
    }
    for (index, layer) in input.layers.iter().enumerate() {
        for (part, short) in [("root", 'r'), ("workspace", 'w')] {
            let target = format!("../layers/{layer}/{part}");
            line.words(["--symlink", &target, &format!("{LAID_OUT}/{short}/{index}")]);
        }
    }
    for (index, (mount, source)) in spec.mounts.iter().zip(&sources.mounts).enumerate() {
        let option = match mount.access {
            Access::ReadOnly => "--ro-bind",
            Access::ReadWrite => "--bind",
        };
        line.mount(option, source, format!("{LAID_OUT}/m/{index}"));
    }
    line.words(["--dir", NEW_ROOT, "--"]);
    line.words([&format!("{LAID_OUT}/guest/guest"), "init"]);
    line.words(["--setup-fd", &input.fds.setup.to_string()]);
    line.0
}

/// An argument list in the making.
#[derive(Default)]
pub(crate) struct Line(pub(crate) Vec<OsString>);

impl Line {
    pub(crate) fn words<const N: usize>(&mut self, words: [&str; N]) {
        self.0.extend(words.map(OsString::from));
    }

    pub(crate) fn mount(
        &mut self,
        option: &str,
        source: impl AsRef<Path>,
        target: impl AsRef<Path>,
    ) {
        self.0.extend([option.into(), source.as_ref().into(), target.as_ref().into()]);
    }
}

/// What the guest is told.
///
/// # Errors
///
/// `InvalidSpec` if a mount's target is not UTF-8 or hides what a sandbox needs.
pub(crate) fn setup(input: &Input<'_>) -> Result<Setup> {
    let request = input.request;
    let env = environment(&request.spec, input.view);
    Ok(Setup {
        listen_fd: Some(input.fds.listen),
        mounts: mounts(input, &env)?,
        workspace: WORKSPACE.to_owned(),
        env,
        drop_capabilities: true,
        filter_syscalls: true,
        max_processes: input.guest_limits.processes,
        max_address_space: input.guest_limits.address_space,
        oom_fd: input.fds.oom,
        ..request.guest_setup()
    })
}

fn environment(spec: &SandboxSpec, view: &HostView) -> Vec<(String, String)> {
    let shell = if spec.root == Root::Standard { view.shell.as_str() } else { "/bin/sh" };
    let base = [
        ("HOME", HOME),
        ("LANG", "C.UTF-8"),
        ("LOGNAME", "sandbox"),
        ("PATH", "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"),
        ("SHELL", shell),
        ("USER", "sandbox"),
    ];
    let own = |(key, value): &(&str, &str)| ((*key).to_owned(), (*value).to_owned());
    let mut env: std::collections::BTreeMap<_, _> = base.iter().map(own).collect();
    env.extend(spec.env.clone());
    env.into_iter().collect()
}

fn mounts(input: &Input<'_>, env: &[(String, String)]) -> Result<Vec<MountStep>> {
    let spec = &input.request.spec;
    let inside = |path: &str| format!("{NEW_ROOT}{path}");
    let laid_out = |name: &str| format!("{LAID_OUT}/{name}");
    let mut steps = vec![overlay(input.layers, 'r', "root", "base", NEW_ROOT.to_owned())];
    if spec.root == Root::Standard {
        for directory in &input.view.directories {
            let path = utf8(directory)?;
            steps.push(MountStep::Move { from: path.to_owned(), to: inside(path) });
        }
    } else {
        steps.push(MountStep::Dir { path: inside(HOME), mode: 0o755 });
    }
    for path in ["/proc", "/dev"] {
        steps.push(MountStep::Move { from: path.to_owned(), to: inside(path) });
    }
    steps.push(MountStep::Devpts { target: inside("/dev/pts") });
    steps.push(MountStep::ReadOnly { target: inside("/dev") });

    steps.push(MountStep::Tmpfs { target: inside("/run"), mode: 0o755, size: Some(RUN_SIZE) });
    let private = inside("/run/sandbox");
    let size = Some(PRIVATE_SIZE);
    steps.push(MountStep::Tmpfs { target: private.clone(), mode: 0o755, size });
    let mut entering = serde_json::json!({ "workspace": WORKSPACE, "env": env });
    let GuestLimits { processes, address_space } = input.guest_limits;
    // Whoever enters is in no control group of the sandbox's.
    let processes = processes.or(spec.limits.pids);
    for (key, limit) in [("max_processes", processes), ("max_address_space", address_space)] {
        if let Some(limit) = limit {
            entering[key] = limit.into();
        }
    }
    let mut file = |name: &str, contents: &str| {
        let contents = Bytes::from(contents.as_bytes());
        steps.push(MountStep::File { path: format!("{private}/{name}"), contents });
    };
    file("env.json", &entering.to_string());
    for (name, contents) in &input.identity.0 {
        file(name, contents);
    }
    steps.push(MountStep::Bind {
        from: laid_out("guest/guest"),
        to: inside(ENTER_PROGRAM),
        read_only: true,
    });
    for (name, _) in &input.identity.0 {
        steps.push(MountStep::Bind {
            from: format!("{private}/{name}"),
            to: inside(&format!("/etc/{name}")),
            read_only: true,
        });
    }
    steps.push(MountStep::ReadOnly { target: private });

    steps.push(overlay(input.layers, 'w', "workspace", "workspace", inside(WORKSPACE)));
    if spec.workspace_mode == WorkspaceMode::Bind {
        // Over the overlay, of which it is known by now that no link leads there.
        steps.push(MountStep::Move { from: laid_out("bound"), to: inside(WORKSPACE) });
    }
    let mut extra: Vec<(usize, &Mount)> = spec.mounts.iter().enumerate().collect();
    // A mount below another one comes after it.
    extra.sort_by_key(|(_, mount)| mount.target.components().count());
    for (index, mount) in extra {
        let target = utf8(&mount.target)?;
        check_target(target)?;
        let from = laid_out(&format!("m/{index}"));
        steps.push(MountStep::Move { from, to: inside(target) });
    }
    steps.push(MountStep::Pivot { root: NEW_ROOT.to_owned() });
    Ok(steps)
}

fn overlay(
    layers: &[SnapshotId],
    short: char,
    part: &str,
    lowest: &str,
    target: String,
) -> MountStep {
    let mut lower: Vec<String> =
        (0..layers.len()).rev().map(|index| format!("{short}/{index}")).collect();
    lower.push(lowest.to_owned());
    MountStep::Overlay {
        base: LAID_OUT.to_owned(),
        lower,
        upper: format!("fs/upper/{part}"),
        work: format!("fs/work/{part}"),
        target,
    }
}

fn check_target(target: &str) -> Result<()> {
    let hides = ["/run", "/etc"].into_iter().find(|needed| *needed == target);
    match hides {
        Some(needed) => Err(invalid(format!(
            "nothing can be mounted at {needed}: it would hide what a sandbox needs"
        ))),
        None => Ok(()),
    }
}

fn utf8(path: &Path) -> Result<&str> {
    path.to_str().ok_or_else(|| invalid(format!("the path {path:?} is not UTF-8")))
}

fn invalid(message: String) -> Error {
    Error::new(ErrorKind::InvalidSpec, "provision", message)
}

/// Where something is mounted over the root's or the workspace's own files, so that what is there is not
/// the sandbox's doing; and a directory that the set-up makes.
pub(crate) fn not_its_doing(
    spec: &SandboxSpec,
    view: &HostView,
    accounts: &[(&'static str, String)],
) -> (Vec<PathBuf>, Option<PathBuf>) {
    let mut mounts: Vec<PathBuf> = ["/proc", "/dev", "/run", WORKSPACE].map(Into::into).into();
    let names = IDENTITY_FILES.iter().chain(accounts.iter().map(|(name, _)| name));
    mounts.extend(names.map(|name| Path::new("/etc").join(name)));
    mounts.extend(spec.mounts.iter().map(|mount| mount.target.clone()));
    if spec.root == Root::Standard {
        mounts.extend(view.directories.iter().cloned());
        return (mounts, None);
    }
    (mounts, Some(HOME.into()))
}

#[cfg(test)]
mod tests {
    use sandbox_core::{CreateSandbox, OwnerId, SandboxId};

    use super::*;

    fn view() -> HostView {
        HostView {
            directories: vec!["/usr".into()],
            etc: vec![
                ("ssl".into(), "/etc/ssl".into()),
                ("ld.so.cache".into(), "/etc/ld.so.cache".into()),
            ],
            links: vec![("bin".into(), "usr/bin".into())],
            shell: "/bin/bash".into(),
        }
    }

    fn request(spec: CreateSandbox) -> Provision {
        let sandbox: SandboxId = "sbx_0123456789abcdef0123456789abcdef".parse().unwrap();
        let owner: OwnerId = "own_0123456789abcdef0123456789abcdef".parse().unwrap();
        let mut request = Provision::new(sandbox, owner, spec.spec);
        request.instance = "ins_0123456789abcdef0123456789abcdef".parse().unwrap();
        request
    }

    #[test]
    fn what_is_for_other_backends_is_refused_by_name() {
        for (request, says) in [
            (CreateSandbox::new().root(Root::Image("alpine".into())), "images are for container"),
            (CreateSandbox::new().remote_workspace("/src"), "no other host here"),
        ] {
            let error = refuse(&request.spec).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Unsupported);
            assert!(error.to_string().contains(says), "{error}");
        }
        refuse(&CreateSandbox::new().workspace("/src").spec).unwrap();
    }

    fn planned(
        spec: CreateSandbox,
        layers: &[SnapshotId],
        guest_limits: GuestLimits,
    ) -> Result<serde_json::Value> {
        let mounts = spec.spec.mounts.iter().map(|mount| mount.source.clone()).collect();
        let workspace = spec.spec.workspace.clone();
        let root = match &spec.spec.root {
            Root::Directory(directory) => directory.clone(),
            _ => "/state/skeleton/abc".into(),
        };
        let request = request(spec);
        let input = Input {
            request: &request,
            layers,
            view: &view(),
            sources: &Sources {
                fs: "/state/instances/ins_…/fs".into(),
                layers: "/state/layers".into(),
                guest: "/state/guest/def".into(),
                root,
                workspace,
                mounts,
            },
            fds: Fds { info: 10, setup: 11, listen: 12, oom: Some(13) },
            guest_limits,
            identity: &Identity::new(&request, Some(("1.2.3.4 intranet", "nameserver 1.2.3.4\n"))),
        };
        let line: Vec<String> =
            arguments(&input).iter().map(|word| word.to_string_lossy().into_owned()).collect();
        // One option with what belongs to it on a line.
        let options = line.join(" ").replace(" --", "\n--");
        let setup = setup(&input)?;
        let mut readable = serde_json::to_value(&setup).unwrap();
        for step in readable["mounts"].as_array_mut().unwrap() {
            if let Some(contents) = step.pointer_mut("/file/contents") {
                let bytes: Vec<u8> = serde_json::from_value(contents.clone()).unwrap();
                *contents = String::from_utf8(bytes).unwrap().into();
            }
            *step = step.to_string().into();
        }
        Ok(serde_json::json!({
            "arguments": options.lines().collect::<Vec<_>>(),
            "setup": readable,
        }))
    }

    #[test]
    fn the_safe_defaults() {
        let plan = planned(CreateSandbox::new(), &[], GuestLimits::default()).unwrap();
        insta::assert_json_snapshot!(plan);
    }

    #[test]
    fn everything_at_once() {
        let layers = ["1", "2"].map(|n| format!("snp_{n:0>32}").parse().unwrap());
        let spec = CreateSandbox::new()
            .workspace("/src/a dir, with: marks")
            .network(Network::Host)
            .mount_read_write("/srv/cache", "/data/deep/cache")
            .mount_read_only("/opt/tool", "/data")
            .env("LANG", "de_DE.UTF-8")
            .env("A", "b c");
        let limits = GuestLimits { processes: Some(64), address_space: Some(1 << 30) };
        insta::assert_json_snapshot!(planned(spec, &layers, limits).unwrap());
    }

    #[test]
    fn a_bound_workspace_is_mounted_over_the_overlay() {
        let spec = CreateSandbox::new().bind_workspace("/src/app");
        let plan = planned(spec, &[], GuestLimits::default()).unwrap();
        let line = plan["arguments"].to_string();
        assert!(line.contains("--bind /src/app /.sbx/bound"), "{line}");
        assert!(line.contains("--dir /.sbx/workspace"), "{line}");
        let mounts = plan["setup"]["mounts"].as_array().unwrap();
        let at = |text: &str| mounts.iter().position(|step| step.to_string().contains(text));
        let (overlay, bound) = (at("fs/upper/workspace").unwrap(), at("/.sbx/bound").unwrap());
        assert_eq!(bound, overlay + 1);
    }

    #[test]
    fn a_root_of_its_own() {
        let spec = CreateSandbox::new().root(Root::Directory("/images/alpine".into()));
        insta::assert_json_snapshot!(planned(spec, &[], GuestLimits::default()).unwrap());
    }

    #[test]
    fn what_would_break_a_sandbox_is_refused() {
        use std::os::unix::ffi::OsStrExt;
        let odd = PathBuf::from(std::ffi::OsStr::from_bytes(b"/a\xff"));
        for (target, says) in
            [("/run".into(), "nothing can be mounted at /run"), (odd, "is not UTF-8")]
        {
            let spec = CreateSandbox::new().mount_read_only("/x", target);
            let error = planned(spec, &[], GuestLimits::default()).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidSpec);
            assert!(error.to_string().contains(says), "{error}");
        }
    }

    #[test]
    fn as_many_layers_as_promised_fit_into_a_page() {
        let layers: Vec<_> = (0..MAX_LAYERS).map(|_| SnapshotId::new()).collect();
        let step = overlay(&layers, 'w', "workspace", "workspace", String::new());
        let MountStep::Overlay { lower, upper, work, .. } = step else { unreachable!() };
        let options = format!(
            "lowerdir={},upperdir={upper},workdir={work},userxattr,volatile",
            lower.join(":")
        );
        assert!(options.len() < 4096, "{}", options.len());
    }
}
