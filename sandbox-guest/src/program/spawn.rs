//! From a request to a running process: all that can be prepared is prepared before the fork.

use std::{
    collections::HashMap,
    ffi::{CStr, CString},
    io,
    os::fd::{AsFd, AsRawFd, OwnedFd},
};

use rustix::{
    fs::{Mode, OFlags},
    pipe::{PipeFlags, pipe_with},
    pty::{OpenptFlags, ioctl_tiocgptpeer, unlockpt},
    termios::{Winsize, tcsetwinsize},
};
use sandbox_guest::{Failure, FailureKind, PtySize, Start};

use super::{
    base::{failure, lock, system},
    guest::Guest,
    supervisor::{self, Begun, Limit, Plan, Stage},
    sys::{Pid, StringArray, limit},
    users::{self, User},
};

/// Where programs are looked for if the environment does not say.
const DEFAULT_PATH: &[u8] = b"/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// This program, wherever it lies and whoever asks.
const OWN_PROGRAM: &CStr = c"/proc/self/exe";

/// What a shell's command line begins with: the keeper that it is run by.
const KEEPER: &[&[u8]] = &[b"sandbox-guest", b"shell", b"--"];

/// The guest's ends of a process's pipes.
pub(crate) struct Ends {
    pub(crate) status: OwnedFd,
    pub(crate) stdin: Option<OwnedFd>,
    pub(crate) stdout: OwnedFd,
    /// None with a terminal, which is all three.
    pub(crate) stderr: Option<OwnedFd>,
    pub(crate) terminal: bool,
}

/// Starts a supervisor that starts the process; whether that worked, its status pipe tells.
pub(crate) fn spawn(guest: &Guest, start: &Start) -> Result<(Pid, Ends), Failure> {
    check_shell(start)?;
    let user = start.user.as_deref().map(users::find).transpose()?.filter(User::is_another);
    let env = environment(guest, start)?;
    let candidates = if start.shell {
        vec![OWN_PROGRAM.to_owned()]
    } else {
        candidates(start, env.get(&b"PATH"[..]).map(Vec::as_slice))?
    };
    let (status, status_there) = pipe("the status pipe")?;
    let (ends, stdio) = match start.pty {
        Some(size) => terminal(status, size)?,
        None => pipes(status, start.stdin)?,
    };
    let arg0 = start.arg0.as_ref().unwrap_or(&start.program);
    let keeper: &[&[u8]] = if start.shell { KEEPER } else { &[] };
    let argv = keeper
        .iter()
        .copied()
        .chain(std::iter::once(arg0).chain(&start.args).map(|word| word.as_slice()))
        .map(|argument| c_string(argument, "an argument"))
        .collect::<Result<_, _>>()?;
    let envp = env
        .into_iter()
        .map(|(mut name, value)| {
            name.push(b'=');
            name.extend(value);
            c_string(&name, "an environment variable")
        })
        .collect::<Result<_, _>>()?;
    let [stdin, stdout, stderr] = stdio;
    let plan = Plan {
        candidates,
        argv: StringArray::new(argv),
        envp: StringArray::new(envp),
        cwd: c_string(&working_directory(guest, start), "the working directory")?,
        stdin: stdin.as_raw_fd(),
        stdout: stdout.as_raw_fd(),
        stderr: stderr.as_raw_fd(),
        terminal: start.pty.is_some(),
        limits: limits(guest, start),
        user,
        status: status_there.as_raw_fd(),
    };
    let mut supervisors = lock(&guest.supervisors);
    let (pid, supervising) =
        supervisor::start(plan).map_err(|error| system("cannot start a process", &error))?;
    supervisors.insert(pid, supervising);
    Ok((pid, ends))
}

/// A shell's keeper speaks to the harness through pipes.
fn check_shell(start: &Start) -> Result<(), Failure> {
    if start.shell && (start.pty.is_some() || !start.stdin || start.program.is_empty()) {
        let message = "a shell session has a program, standard input, and no terminal";
        return Err(failure(FailureKind::Invalid, message));
    }
    Ok(())
}

impl User {
    /// Whether becoming this user changes anything.
    fn is_another(&self) -> bool {
        self.uid != rustix::process::geteuid().as_raw()
            || self.gid != rustix::process::getegid().as_raw()
    }
}

/// What a start that got stuck has to say for itself.
pub(crate) fn explain(guest: &Guest, start: &Start, begun: Begun) -> Failure {
    let error = io::Error::from_raw_os_error(begun.errno);
    let program = String::from_utf8_lossy(&start.program);
    match begun.stage {
        Stage::Started | Stage::Fork => system("cannot start a process", &error),
        Stage::Stdio => system("cannot set up the process's input and output", &error),
        Stage::Limits => system("cannot set the process's resource limits", &error),
        Stage::Cwd => {
            let cwd = working_directory(guest, start);
            system(&format!("the working directory {:?}", String::from_utf8_lossy(&cwd)), &error)
        }
        Stage::User => {
            let user = start.user.as_deref().unwrap_or_default();
            let mut failure = system(&format!("cannot become the user {user:?}"), &error);
            failure.kind = FailureKind::PermissionDenied;
            failure.message += ": this sandbox runs everything as one user";
            failure
        }
        Stage::Exec => explain_exec(start, &program, begun.errno, &error),
    }
}

fn explain_exec(start: &Start, program: &str, errno: i32, error: &io::Error) -> Failure {
    let by_path = start.program.contains(&b'/');
    let (kind, message) = match errno {
        libc::ENOENT if by_path && is_there(start) => (
            FailureKind::NotFound,
            format!("the interpreter or loader that the program {program:?} asks for is missing"),
        ),
        libc::ENOENT if by_path => {
            (FailureKind::NotFound, format!("there is no program {program:?}"))
        }
        libc::ENOENT => (FailureKind::NotFound, format!("program {program:?} not found in PATH")),
        libc::EACCES => {
            (FailureKind::PermissionDenied, format!("program {program:?} is not executable"))
        }
        libc::ENOEXEC => (
            FailureKind::PermissionDenied,
            format!("program {program:?} is not executable here: exec format error"),
        ),
        libc::E2BIG => (
            FailureKind::LimitExceeded,
            format!("the arguments and environment of {program:?} are longer than Linux takes"),
        ),
        _ => return system(&format!("cannot execute {program:?}"), error),
    };
    Failure { kind, message, errno: Some(errno) }
}

/// Whether an absolute program exists, which then lacks something else.
fn is_there(start: &Start) -> bool {
    use std::os::unix::ffi::OsStrExt;
    let path = std::path::Path::new(std::ffi::OsStr::from_bytes(&start.program));
    path.is_absolute() && path.exists()
}

fn working_directory(guest: &Guest, start: &Start) -> Vec<u8> {
    absolute(guest, start.cwd.as_deref().map_or(&[][..], |cwd| cwd))
}

/// A path that begins at the workspace if it is relative.
pub(crate) fn absolute(guest: &Guest, path: &[u8]) -> Vec<u8> {
    if path.first() == Some(&b'/') {
        return path.to_vec();
    }
    let mut whole = guest.workspace.clone().into_bytes();
    if !path.is_empty() {
        whole.push(b'/');
        whole.extend_from_slice(path);
    }
    whole
}

fn environment(guest: &Guest, start: &Start) -> Result<HashMap<Vec<u8>, Vec<u8>>, Failure> {
    let mut env = HashMap::new();
    if !start.env_clear {
        for (name, value) in &guest.env {
            env.insert(name.clone().into_bytes(), value.clone().into_bytes());
        }
    }
    if let Some(spec) = &start.user {
        let user = users::find(spec)?;
        let name = user.name.unwrap_or_else(|| user.uid.to_string()).into_bytes();
        env.insert(b"HOME".to_vec(), user.home.unwrap_or_else(|| "/".to_owned()).into_bytes());
        env.insert(b"USER".to_vec(), name.clone());
        env.insert(b"LOGNAME".to_vec(), name);
    }
    if start.pty.is_some() {
        env.entry(b"TERM".to_vec()).or_insert_with(|| b"xterm-256color".to_vec());
    }
    for (name, value) in &start.env {
        if name.is_empty() || name.contains(&b'=') {
            let message = format!("{:?} is no name of a variable", String::from_utf8_lossy(name));
            return Err(failure(FailureKind::Invalid, message));
        }
        env.insert(name.to_vec(), value.to_vec());
    }
    if !start.env_clear {
        guest.egress.tell(&mut env);
    }
    Ok(env)
}

fn candidates(start: &Start, path: Option<&[u8]>) -> Result<Vec<CString>, Failure> {
    let program = &start.program;
    if program.is_empty() {
        return Err(failure(FailureKind::Invalid, "the program's name is empty"));
    }
    if program.contains(&b'/') {
        return Ok(vec![c_string(program, "the program")?]);
    }
    let directories = path.unwrap_or(DEFAULT_PATH).split(|byte| *byte == b':');
    directories
        .map(|directory| {
            let mut candidate = if directory.is_empty() { b"." } else { directory }.to_vec();
            candidate.push(b'/');
            candidate.extend_from_slice(program);
            c_string(&candidate, "the program")
        })
        .collect()
}

fn c_string(bytes: &[u8], what: &str) -> Result<CString, Failure> {
    CString::new(bytes)
        .map_err(|_| failure(FailureKind::Invalid, format!("{what} contains a NUL byte")))
}

fn pipe(what: &str) -> Result<(OwnedFd, OwnedFd), Failure> {
    pipe_with(PipeFlags::CLOEXEC)
        .map_err(|error| system(&format!("cannot make {what}"), &error.into()))
}

type Stdio = [OwnedFd; 3];

fn pipes(status: OwnedFd, with_stdin: bool) -> Result<(Ends, Stdio), Failure> {
    let (stdin, stdin_there) = if with_stdin {
        let (there, here) = pipe("a pipe")?;
        (Some(here), there)
    } else {
        let null = rustix::fs::open("/dev/null", OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty());
        (None, null.map_err(|error| system("/dev/null", &error.into()))?)
    };
    let (stdout, stdout_there) = pipe("a pipe")?;
    let (stderr, stderr_there) = pipe("a pipe")?;
    let ends = Ends { status, stdin, stdout, stderr: Some(stderr), terminal: false };
    Ok((ends, [stdin_there, stdout_there, stderr_there]))
}

fn terminal(status: OwnedFd, size: PtySize) -> Result<(Ends, Stdio), Failure> {
    check_size(size)?;
    let cannot = |error: rustix::io::Errno| system("cannot open a terminal", &error.into());
    let ptmx = OFlags::RDWR | OFlags::NOCTTY | OFlags::CLOEXEC;
    let master = rustix::fs::open("/dev/ptmx", ptmx, Mode::empty()).map_err(cannot)?;
    unlockpt(&master).map_err(cannot)?;
    resize(&master, size).map_err(cannot)?;
    let flags = OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC;
    let slave = ioctl_tiocgptpeer(&master, flags).map_err(cannot)?;
    let again =
        |fd: &OwnedFd| fd.try_clone().map_err(|error| system("cannot open a terminal", &error));
    let stdio = [again(&slave)?, again(&slave)?, slave];
    let ends =
        Ends { status, stdin: Some(again(&master)?), stdout: master, stderr: None, terminal: true };
    Ok((ends, stdio))
}

/// Refuses a terminal of no size, which programs divide by.
pub(crate) fn check_size(size: PtySize) -> Result<(), Failure> {
    if size.rows == 0 || size.cols == 0 {
        let message = format!("a terminal of {} rows and {} columns", size.rows, size.cols);
        return Err(failure(FailureKind::Invalid, message));
    }
    Ok(())
}

/// Sets a terminal's size; what runs there is told by the kernel.
pub(crate) fn resize(master: impl AsFd, size: PtySize) -> rustix::io::Result<()> {
    let size = Winsize { ws_row: size.rows, ws_col: size.cols, ws_xpixel: 0, ws_ypixel: 0 };
    tcsetwinsize(master, size)
}

/// The limits that the command must set: the lower of the sandbox's and its own.
fn limits(guest: &Guest, start: &Start) -> Vec<Limit> {
    let own = &start.limits;
    let lower = |a: Option<u64>, b: Option<u64>| a.into_iter().chain(b).min();
    let wanted = [
        (libc::RLIMIT_NPROC, guest.max_processes),
        (libc::RLIMIT_AS, lower(guest.max_address_space, own.address_space)),
        (libc::RLIMIT_CPU, own.cpu_seconds),
        (libc::RLIMIT_FSIZE, own.file_size),
        (libc::RLIMIT_CORE, own.core_size),
    ];
    let mut limits: Vec<Limit> = wanted
        .into_iter()
        .filter_map(|(resource, wanted)| {
            let (_, hard) = limit(resource);
            let value = wanted?.min(hard);
            // At the soft limit of CPU time comes SIGXCPU, which says why; at the hard one SIGKILL, a
            // second later for what ignores it.
            let grace = u64::from(resource == libc::RLIMIT_CPU);
            Some(Limit { resource, soft: value, hard: value.saturating_add(grace).min(hard) })
        })
        .collect();
    let (soft, hard) = guest.open_files;
    let (soft, hard) = own.open_files.map_or((soft, hard), |own| (own.min(hard), own.min(hard)));
    limits.push(Limit { resource: libc::RLIMIT_NOFILE, soft, hard });
    limits
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(program: &str, path: Option<&str>) -> Vec<String> {
        let start = Start { program: program.as_bytes().to_vec().into(), ..Start::default() };
        candidates(&start, path.map(str::as_bytes))
            .unwrap()
            .into_iter()
            .map(|name| name.into_string().unwrap())
            .collect()
    }

    #[test]
    fn programs_are_looked_up_as_a_shell_does() {
        assert_eq!(names("ls", Some("/a:/b")), ["/a/ls", "/b/ls"]);
        assert_eq!(names("ls", Some(":/b")), ["./ls", "/b/ls"]);
        assert_eq!(names("./ls", Some("/a")), ["./ls"]);
        assert_eq!(names("ls", None)[0], "/usr/local/sbin/ls");
    }
}
