//! The guest under bwrap, with mounts, without rights: what a backend does, by hand.
#![cfg(all(feature = "program", target_os = "linux"))]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::print_stdout)]

mod common;

use std::{
    fs,
    os::unix::fs::PermissionsExt,
    path::Path,
    process::{Child, Command, Stdio},
};

use common::{Client, command, shell, wait_until};
use sandbox_guest::{ExitStatus, FailureKind, MountStep, PtySize, Request, Response, Setup, Start};

struct Sandbox {
    bwrap: Child,
    dir: tempfile::TempDir,
}

impl Sandbox {
    /// `None`, with the reason printed, where this host cannot run bwrap.
    fn start() -> Option<Self> {
        let dir = tempfile::Builder::new().prefix("guest").tempdir_in("/var/tmp").unwrap();
        let at = |name: &str| dir.path().join(name);
        for name in ["state/up/usr", "state/up/etc", "state/up/ws", "repo", "sock"] {
            fs::create_dir_all(at(name)).unwrap();
        }
        for name in ["state/work/usr", "state/work/etc", "state/work/ws"] {
            fs::create_dir_all(at(name)).unwrap();
        }
        fs::write(at("repo/file"), "from the repository\n").unwrap();
        fs::copy(common::program(), at("guest")).unwrap();
        fs::write(at("setup.json"), serde_json::to_vec(&setup()).unwrap()).unwrap();
        fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o755)).unwrap();

        let mut bwrap = if is_root() {
            let chown = Command::new("chown").args(["-R", "65534:65534"]).arg(dir.path()).status();
            assert!(chown.unwrap().success());
            let mut setpriv = Command::new("setpriv");
            setpriv.args(["--reuid", "65534", "--regid", "65534", "--clear-groups", "bwrap"]);
            setpriv
        } else {
            Command::new("bwrap")
        };
        bwrap.args(["--unshare-all", "--uid", "1000", "--gid", "1000", "--as-pid-1"]);
        bwrap.args(["--cap-add", "CAP_SYS_ADMIN", "--cap-add", "CAP_DAC_OVERRIDE"]);
        bwrap.args(["--die-with-parent", "--ro-bind", "/usr", "/usr", "--ro-bind", "/etc", "/etc"]);
        for link in ["bin", "lib", "lib64"] {
            bwrap.args(["--symlink", &format!("usr/{link}"), &format!("/{link}")]);
        }
        bwrap.args(["--proc", "/proc", "--tmpfs", "/dev", "--symlink", "pts/ptmx", "/dev/ptmx"]);
        for device in ["/dev/null", "/dev/zero", "/dev/urandom", "/dev/tty"] {
            bwrap.args(["--dev-bind", device, device]);
        }
        for (kind, name) in [
            ("--bind", "state"),
            ("--ro-bind", "repo"),
            ("--bind", "sock"),
            ("--ro-bind", "guest"),
            ("--ro-bind", "setup.json"),
        ] {
            bwrap.arg(kind).arg(at(name)).arg(format!("/{name}"));
        }
        bwrap.args(["--dir", "/new", "/guest", "init", "--setup", "/setup.json"]);
        let mut bwrap = match bwrap.stdin(Stdio::null()).env("SECRET", "of-the-host").spawn() {
            Ok(bwrap) => bwrap,
            Err(error) => {
                println!("skipped: bwrap: {error}");
                return None;
            }
        };
        let socket = at("sock/socket");
        wait_until("the guest", || socket.exists() || matches!(bwrap.try_wait(), Ok(Some(_))));
        if !socket.exists() {
            println!("skipped: bwrap or the set-up failed here");
            return None;
        }
        Some(Self { bwrap, dir })
    }

    async fn connect(&self) -> Client {
        Client::connect(&self.dir.path().join("sock/socket")).await
    }

    /// The guest's process id on this host: bwrap's child.
    fn guest(&self) -> u32 {
        let bwrap = self.bwrap.id();
        let children = format!("/proc/{bwrap}/task/{bwrap}/children");
        fs::read_to_string(children).unwrap().trim().parse().unwrap()
    }
}

impl Drop for Sandbox {
    fn drop(&mut self) {
        let _ = self.bwrap.kill();
        let _ = self.bwrap.wait();
    }
}

fn is_root() -> bool {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    status.lines().any(|line| line.starts_with("Uid:\t0"))
}

fn setup() -> Setup {
    let overlay = |lower: &str, name: &str, target: &str| MountStep::Overlay {
        base: "/state".into(),
        lower: vec![lower.into()],
        upper: format!("up/{name}"),
        work: format!("work/{name}"),
        target: target.into(),
    };
    let dir = |path: &str| MountStep::Dir { path: path.into(), mode: 0o755 };
    let symlink =
        |target: &str, path: &str| MountStep::Symlink { target: target.into(), path: path.into() };
    let moved = |from: &str, to: &str| MountStep::Move { from: from.into(), to: to.into() };
    let settings =
        r#"{"workspace": "/workspace", "env": [["PATH", "/usr/bin:/bin"], ["MARK", "yes"]]}"#;
    Setup {
        instance: "instance".into(),
        listen_path: Some("/sock/socket".into()),
        workspace: "/workspace".into(),
        env: vec![("PATH".into(), "/usr/bin:/bin".into()), ("HOME".into(), "/workspace".into())],
        drop_capabilities: true,
        filter_syscalls: true,
        max_processes: Some(150),
        mounts: vec![
            MountStep::Tmpfs { target: "/new".into(), mode: 0o755, size: None },
            dir("/new/usr"),
            dir("/new/workspace"),
            overlay("/usr", "usr", "/new/usr"),
            overlay("/etc", "etc", "/new/etc"),
            overlay("/repo", "ws", "/new/workspace"),
            symlink("usr/bin", "/new/bin"),
            symlink("usr/lib", "/new/lib"),
            symlink("usr/lib64", "/new/lib64"),
            moved("/proc", "/new/proc"),
            moved("/dev", "/new/dev"),
            MountStep::Devpts { target: "/new/dev/pts".into() },
            MountStep::Tmpfs { target: "/new/tmp".into(), mode: 0o1777, size: Some(50_000_000) },
            dir("/new/run/sandbox"),
            MountStep::Bind {
                from: "/guest".into(),
                to: "/new/run/sandbox/guest".into(),
                read_only: true,
            },
            moved("/sock", "/new/sock"),
            MountStep::File {
                path: "/new/run/sandbox/env.json".into(),
                contents: settings.as_bytes().to_vec().into(),
            },
            MountStep::Pivot { root: "/new".into() },
        ],
        ..Setup::default()
    }
}

async fn text(client: &Client, script: &str) -> String {
    let ended = client.shell(script).await;
    let (out, err) = (ended.text(), String::from_utf8_lossy(&ended.stderr).into_owned());
    format!("{}{}", out.trim_end(), err.trim_end())
}

/// Calls that a program may make, with the error that it gets; `0` is success.
const CALLS: &str = r#"
import ctypes, os, socket, sys
libc = ctypes.CDLL(None, use_errno=True)
def call(*a):
    ctypes.set_errno(0)
    r = libc.syscall(*a)
    return ctypes.get_errno() if r == -1 else 0
P = ctypes.c_char_p
tests = {
    "getpid": (39,), "mount": (165, P(b"t"), P(b"/tmp"), P(b"tmpfs"), 0, None),
    "unshare_user": (272, 0x10000000), "unshare_files": (272, 0x400),
    "clone_user": (56, 0x10000000 | 17, 0, 0, 0, 0), "clone3": (435, 0, 0),
    "keyctl": (250, 0, -3, 0), "bpf": (321, 0, 0, 0), "io_uring": (425, 1, 0),
    "perf": (298, 0, 0, -1, -1, 0), "userfaultfd": (323, 0), "setns": (308, 0, 0),
    "pivot_root": (155, P(b"/"), P(b"/")), "unknown": (999,), "chroot": (161, P(b"/")),
    "personality": (135, 0xffffffff), "personality_other": (135, 0x0040000),
    "tiocsti": (16, 0, 0x5412, P(b"x")), "tiocsti_high": (16, 0, 0x5412 | (1 << 40), P(b"x")),
    "ptrace_guest": (101, 16, 1, 0, 0), "kill_guest": (62, 1, 9), "x32": (0x40000000 + 39,),
}
for name, args in tests.items():
    print(name, call(*[ctypes.c_long(a) if isinstance(a, int) else a for a in args]))
for name, args in {"raw": (2, 3, 1), "packet": (17, 3, 0), "vsock": (40, 1, 0), "alg": (38, 5, 0),
                   "netlink": (16, 3, 0), "tcp": (2, 1, 0)}.items():
    try:
        socket.socket(*args).close(); print(name, 0)
    except OSError as e:
        print(name, e.errno)
"#;

#[tokio::test]
async fn the_sandbox_is_what_the_setup_says() {
    let Some(sandbox) = Sandbox::start() else { return };
    let client = sandbox.connect().await;

    // Files: the repository is seen, and never written to.
    assert_eq!(
        text(&client, "cat file; echo new > file; cat file; pwd").await,
        "from the repository\nnew\n/workspace"
    );
    let repo = fs::read_to_string(sandbox.dir.path().join("repo/file")).unwrap();
    assert_eq!(repo, "from the repository\n");
    // The host's root owns /usr, and is nobody here.
    assert!(text(&client, "echo x > /usr/bin/made").await.contains("denied"));
    let root = "bin\ndev\netc\nlib\nlib64\nproc\nrun\nsock\ntmp\nusr\nworkspace";
    assert_eq!(text(&client, "ls /").await, root);
    assert!(text(&client, "echo > /run/sandbox/guest").await.contains("Read-only"));

    // Rights.
    let status = text(&client, "grep -E 'Cap|NoNew|Seccomp:' /proc/self/status").await;
    for line in status.lines() {
        let value = line.split_whitespace().last().unwrap();
        let expected = match line.split(':').next().unwrap() {
            "NoNewPrivs" => "1",
            "Seccomp" => "2",
            "CapBnd" => continue,
            _ => "0000000000000000",
        };
        assert_eq!(value, expected, "{status}");
    }
    for path in ["/proc/1/environ", "/proc/1/mem", "/proc/1/fd/0", "/proc/1/maps"] {
        let read = text(&client, &format!("cat {path}")).await;
        assert!(read.contains("denied"), "{path}: {read}");
    }
    assert!(!text(&client, "env").await.contains("SECRET"));
    assert_eq!(text(&client, "ls /proc/self/fd | wc -l").await, "4");
    assert_eq!(text(&client, "id -u").await, "1000");
}

#[tokio::test]
async fn forbidden_calls_fail_as_they_should() {
    let Some(sandbox) = Sandbox::start() else { return };
    let client = sandbox.connect().await;
    if cfg!(not(target_arch = "x86_64")) || !Path::new("/usr/bin/python3").exists() {
        println!("skipped: needs x86-64 and /usr/bin/python3");
        return;
    }
    let ended = client.run(command(&["python3", "-c", CALLS])).await.unwrap();
    let text = ended.text();
    let (eperm, enosys) = (libc_errno::EPERM, libc_errno::ENOSYS);
    for (name, errno) in [
        ("getpid", 0),
        ("mount", eperm),
        ("unshare_user", eperm),
        ("unshare_files", 0),
        ("clone_user", eperm),
        ("clone3", enosys),
        ("keyctl", eperm),
        ("bpf", eperm),
        ("io_uring", eperm),
        ("perf", eperm),
        ("userfaultfd", eperm),
        ("setns", eperm),
        ("pivot_root", eperm),
        ("unknown", enosys),
        ("chroot", eperm),
        ("personality", 0),
        ("personality_other", eperm),
        ("tiocsti", eperm),
        ("tiocsti_high", eperm),
        ("ptrace_guest", eperm),
        ("x32", enosys),
        ("raw", eperm),
        ("packet", eperm),
        ("vsock", eperm),
        ("alg", eperm),
        ("netlink", 0),
        ("tcp", 0),
    ] {
        let line = format!("{name} {errno}");
        assert!(text.lines().any(|l| l == line), "{line} is not in {text}{:?}", ended.stderr);
    }
    // It was asked to die, and is still there.
    client.ask(Request::Status).await.unwrap();
}

mod libc_errno {
    pub(crate) const EPERM: i32 = 1;
    pub(crate) const ENOSYS: i32 = 38;
}

#[tokio::test]
async fn processes_terminals_and_limits_work_inside() {
    let Some(sandbox) = Sandbox::start() else { return };
    let client = sandbox.connect().await;
    let start = Start { pty: Some(PtySize { rows: 20, cols: 50 }), ..shell("stty size; tty") };
    let ended = client.run(start).await.unwrap();
    assert_eq!(ended.text(), "20 50\r\n/dev/pts/0\r\n");

    // A bomb meets the limit; the guest goes on, and the bomb is cleared away.
    let bomb = Start { timeout_ms: Some(1000), ..shell("sh -c 'f() { f & f; }; f' & sleep 30") };
    assert_eq!(client.run(bomb).await.unwrap().status(), ExitStatus::TimedOut);
    let Response::Status(status) = client.ask(Request::Status).await.unwrap() else { panic!() };
    assert_eq!(status.processes, 0, "{status:?}");

    // Double forks leave no zombies.
    client.shell("i=0; while [ $i -lt 300 ]; do (true &); i=$((i+1)); done").await;
    let zombies = text(&client, "grep -l 'State:.Z' /proc/[0-9]*/status 2>/dev/null | wc -l").await;
    assert_eq!(zombies, "0");

    // Another user cannot be had, and says so.
    let start = Start { user: Some("root".into()), ..command(&["id"]) };
    let failure = client.run(start).await.unwrap_err();
    assert_eq!(failure.kind, FailureKind::PermissionDenied, "{failure}");
    let start = Start { user: Some("1000".into()), ..command(&["id", "-u"]) };
    assert_eq!(client.run(start).await.unwrap().text(), "1000\n");

    // A killed supervisor: nothing of its tree stays, and nothing is made up.
    let ended = client.shell("(setsid sleep 40 &); kill -9 $PPID; sleep 40").await;
    assert_eq!(ended.status(), ExitStatus::Unknown);
    let Response::Status(status) = client.ask(Request::Status).await.unwrap() else { panic!() };
    assert_eq!(status.processes, 0, "{status:?}");
}

#[tokio::test]
async fn who_enters_has_no_more_rights_than_anyone_inside() {
    let Some(sandbox) = Sandbox::start() else { return };
    if !is_root() {
        println!("skipped: entering namespaces needs root");
        return;
    }
    let script = "grep -E 'Cap[^B]|NoNew|Seccomp:' /proc/self/status; pwd; echo $MARK $SECRET $TERM; \
                  ls /proc/self/fd | wc -l";
    let target = sandbox.guest().to_string();
    let output = Command::new("nsenter")
        .args(["--target", &target, "--user", "--mount", "--pid", "--net", "--uts", "--ipc"])
        .args(["--preserve-credentials", "--", "/run/sandbox/guest", "enter", "--"])
        .args(["sh", "-c", script])
        .env("SECRET", "of-the-host")
        .env("TERM", "dumb")
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{output:?}");
    for line in text.lines().filter(|line| line.starts_with("Cap")) {
        assert!(line.ends_with("\t0000000000000000"), "{text}");
    }
    assert!(text.contains("NoNewPrivs:\t1") && text.contains("Seccomp:\t2"), "{text}");
    assert!(text.ends_with("/workspace\nyes dumb\n4\n"), "{text}");

    let status = Command::new("nsenter")
        .args(["--target", &target, "--user", "--mount", "--pid", "--preserve-credentials"])
        .args(["--", "/run/sandbox/guest", "enter", "--cwd", "/tmp", "--", "no-such-program"])
        .stderr(Stdio::null())
        .status()
        .unwrap();
    assert_eq!(status.code(), Some(127));
}
