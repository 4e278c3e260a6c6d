//! The system calls for which there is no safe wrapper, and what runs between fork and exec.
#![allow(unsafe_code)]

use std::{
    ffi::{CStr, CString},
    fs::File,
    io::{self, Read, Write},
    os::{
        fd::{AsRawFd, BorrowedFd, OwnedFd, RawFd},
        unix::process::CommandExt,
    },
    process::Command,
};

/// What a child does between fork and exec. Everything it needs is made beforehand, as the child may
/// only make system calls: another thread of the harness may have held any lock at the fork.
#[derive(Debug, Default)]
pub(crate) struct ChildSetup {
    /// Descriptors that the program inherits; it inherits no others but the standard ones.
    pub(crate) keep: Vec<OwnedFd>,
    /// `cgroup.procs` files (or `tasks`) of the control groups to join.
    pub(crate) groups: Vec<OwnedFd>,
    /// Whether it is a failure not to be let into a control group.
    pub(crate) groups_are_required: bool,
    /// Give up root, and see prepared mounts.
    pub(crate) stage: Option<Stage>,
    /// Be killed when the thread that started it ends.
    pub(crate) die_with_thread: bool,
}

/// See [`ChildSetup::stage`].
#[derive(Debug)]
pub(crate) struct Stage {
    /// The directory over which, in a mount namespace of the child's own, the stage is mounted.
    pub(crate) at: CString,
    /// Detached mounts, where to attach each of them below [`at`](Self::at), and whether it is a directory.
    pub(crate) mounts: Vec<(OwnedFd, CString, bool)>,
    /// The user and group to become.
    pub(crate) uid: u32,
    /// See [`uid`](Self::uid).
    pub(crate) gid: u32,
}

impl ChildSetup {
    /// Has the command's child do this.
    pub(crate) fn apply(self, command: &mut Command) {
        // SAFETY: `run` only makes system calls on data that exists already; it neither allocates nor
        // locks.
        unsafe {
            command.pre_exec(move || self.run());
        }
    }

    fn run(&self) -> io::Result<()> {
        // A session of its own: signals of the harness's terminal do not reach the sandbox.
        // SAFETY: takes no pointers.
        check(unsafe { libc::setsid() }.into(), c"could not make a session\n")?;
        for group in &self.groups {
            // SAFETY: the buffer is one byte long and static.
            let written = unsafe { libc::write(group.as_raw_fd(), c"0".as_ptr().cast(), 1) };
            if self.groups_are_required {
                check(written as libc::c_long, c"could not join a control group\n")?;
            }
        }
        if let Some(stage) = &self.stage {
            stage.enter()?;
        }
        if self.die_with_thread {
            // SAFETY: takes no pointers.
            let done = unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) };
            check(done.into(), c"could not be bound to the harness's life\n")?;
        }
        // SAFETY: takes no pointers; it only marks descriptors.
        let marked = unsafe {
            libc::syscall(libc::SYS_close_range, 3, libc::c_uint::MAX, libc::CLOSE_RANGE_CLOEXEC)
        };
        check(marked, c"could not close the harness's descriptors\n")?;
        for fd in &self.keep {
            // SAFETY: takes no pointers; the descriptor is open, as `self` owns it.
            let done = unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_SETFD, 0) };
            check(done.into(), c"could not pass a descriptor on\n")?;
        }
        Ok(())
    }
}

impl Stage {
    fn enter(&self) -> io::Result<()> {
        // SAFETY: takes no pointers.
        check(unsafe { libc::unshare(libc::CLONE_NEWNS) }.into(), c"could not unshare mounts\n")?;
        let none = std::ptr::null();
        // SAFETY: the strings end in NUL, and null is allowed for what a change of propagation ignores.
        let done = unsafe {
            let flags = libc::MS_REC | libc::MS_SLAVE;
            libc::mount(none, c"/".as_ptr(), none, flags, none.cast())
        };
        check(done.into(), c"could not separate the mounts from the host's\n")?;
        // SAFETY: the strings end in NUL.
        let done = unsafe {
            let flags = libc::MS_NOSUID | libc::MS_NODEV;
            let data = c"mode=0755,size=1m".as_ptr().cast();
            let name = c"tmpfs".as_ptr();
            libc::mount(name, self.at.as_ptr(), name, flags, data)
        };
        check(done.into(), c"could not mount the stage\n")?;
        for (mount, path, is_dir) in &self.mounts {
            attach(mount.as_raw_fd(), path, *is_dir)?;
        }
        // The raw calls: the C library's would change every thread of a process, and this is none.
        // SAFETY: a null list of length 0 is allowed.
        let done = unsafe { libc::syscall(libc::SYS_setgroups, 0, none) };
        check(done, c"could not give up the groups\n")?;
        // SAFETY: takes no pointers.
        let done = unsafe { libc::syscall(libc::SYS_setresgid, self.gid, self.gid, self.gid) };
        check(done, c"could not change the group\n")?;
        // SAFETY: takes no pointers.
        let done = unsafe { libc::syscall(libc::SYS_setresuid, self.uid, self.uid, self.uid) };
        check(done, c"could not change the user\n")
    }
}

fn attach(mount: RawFd, path: &CStr, is_dir: bool) -> io::Result<()> {
    // SAFETY: the path ends in NUL.
    let made = unsafe {
        if is_dir {
            libc::mkdir(path.as_ptr(), 0o755)
        } else {
            libc::mknod(path.as_ptr(), libc::S_IFREG | 0o644, 0)
        }
    };
    check(made.into(), c"could not make a place on the stage\n")?;
    // SAFETY: both paths end in NUL; the first is empty, as the flag says.
    let moved = unsafe {
        libc::syscall(
            libc::SYS_move_mount,
            mount,
            c"".as_ptr(),
            libc::AT_FDCWD,
            path.as_ptr(),
            libc::MOVE_MOUNT_F_EMPTY_PATH,
        )
    };
    check(moved, c"could not attach a mount to the stage\n")
}

/// The error of a system call that returned a negative number. As only its number reaches the parent,
/// the step goes to standard error, which is the instance's log.
fn check(result: libc::c_long, step: &'static CStr) -> io::Result<()> {
    if result >= 0 {
        return Ok(());
    }
    let error = io::Error::last_os_error();
    // SAFETY: the buffer is as long as is said.
    unsafe {
        libc::write(2, step.as_ptr().cast(), step.count_bytes());
    }
    Err(error)
}

/// A user namespace with these maps, in the form of `/proc/<pid>/uid_map`.
pub(crate) fn user_namespace(uid_map: &str, gid_map: &str) -> io::Result<OwnedFd> {
    let (mut ready, is_ready) = pipe()?;
    let (waits, mut go_on) = pipe()?;
    // SAFETY: the child only makes system calls until it ends.
    let pid = unsafe { libc::fork() };
    if pid < 0 {
        return Err(io::Error::last_os_error());
    }
    if pid == 0 {
        // SAFETY: takes pointers to one byte of its own stack only, and never returns.
        unsafe {
            let mut byte = 0_u8;
            let made = libc::unshare(libc::CLONE_NEWUSER) == 0;
            byte += u8::from(made);
            libc::write(is_ready.as_raw_fd(), (&raw const byte).cast(), 1);
            libc::read(waits.as_raw_fd(), (&raw mut byte).cast(), 1);
            libc::_exit(0);
        }
    }
    drop((is_ready, waits));
    let namespace = (|| {
        let mut made = [0];
        ready.read_exact(&mut made)?;
        if made[0] == 0 {
            return Err(io::Error::from(io::ErrorKind::PermissionDenied));
        }
        std::fs::write(format!("/proc/{pid}/uid_map"), uid_map)?;
        std::fs::write(format!("/proc/{pid}/gid_map"), gid_map)?;
        File::open(format!("/proc/{pid}/ns/user")).map(OwnedFd::from)
    })();
    let _ = go_on.write_all(&[0]);
    // SAFETY: the status pointer may be null; the child is ours and is not waited for elsewhere.
    while unsafe { libc::waitpid(pid, std::ptr::null_mut(), 0) } < 0 {
        if io::Error::last_os_error().kind() != io::ErrorKind::Interrupted {
            break;
        }
    }
    namespace
}

fn pipe() -> io::Result<(File, File)> {
    let (read, write) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC)?;
    Ok((read.into(), write.into()))
}

/// Shows the owners of a detached mount (and of those below it) through a user namespace's maps.
pub(crate) fn map_owners(mount: BorrowedFd<'_>, namespace: BorrowedFd<'_>) -> io::Result<()> {
    let attributes = libc::mount_attr {
        attr_set: libc::MOUNT_ATTR_IDMAP,
        attr_clr: 0,
        propagation: 0,
        userns_fd: u64::try_from(namespace.as_raw_fd()).unwrap_or(u64::MAX),
    };
    // SAFETY: the path is empty and ends in NUL, as the flag says; the structure is as long as is said.
    let done = unsafe {
        libc::syscall(
            libc::SYS_mount_setattr,
            mount.as_raw_fd(),
            c"".as_ptr(),
            libc::AT_EMPTY_PATH | libc::AT_RECURSIVE,
            &raw const attributes,
            size_of::<libc::mount_attr>(),
        )
    };
    if done < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Takes a lease for reading on a file and gives it back: `WouldBlock` if somebody has it open for
/// writing.
pub(crate) fn try_lease(file: &File) -> io::Result<()> {
    for lease in [libc::F_RDLCK, libc::F_UNLCK] {
        // SAFETY: takes no pointers.
        if unsafe { libc::fcntl(file.as_raw_fd(), libc::F_SETLEASE, lease) } < 0 {
            return Err(io::Error::last_os_error());
        }
    }
    Ok(())
}
