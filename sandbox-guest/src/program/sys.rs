//! The system calls that no safe crate offers in the form needed here: the only unsafe code.
#![allow(unsafe_code)]

use std::{
    ffi::{CStr, CString, c_char, c_int, c_ulong, c_void},
    io,
    os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd},
    ptr,
};

use tokio::io::{Interest, unix::AsyncFd};

/// A process id as the kernel counts them.
pub(crate) type Pid = i32;

/// Strings as `execve` takes them, made before the fork so that nothing is allocated after it.
pub(crate) struct StringArray {
    // The pointers point into these.
    _strings: Vec<CString>,
    pointers: Vec<*const c_char>,
}

impl StringArray {
    pub(crate) fn new(strings: Vec<CString>) -> Self {
        let pointers = strings.iter().map(|s| s.as_ptr()).chain([ptr::null()]).collect();
        Self { _strings: strings, pointers }
    }
}

// SAFETY: the pointers point to heap memory that the same value owns and nobody changes.
unsafe impl Send for StringArray {}
// SAFETY: as above; shared access only reads.
unsafe impl Sync for StringArray {}

/// Replaces the program; returns only with the error.
pub(crate) fn execve(path: &CStr, argv: &StringArray, envp: &StringArray) -> c_int {
    // SAFETY: the path and all strings are NUL-terminated, and both arrays end with a null pointer.
    unsafe { libc::execve(path.as_ptr(), argv.pointers.as_ptr(), envp.pointers.as_ptr()) };
    errno()
}

/// The last error's number.
pub(crate) fn errno() -> c_int {
    io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO)
}

/// Forks; the child runs `child` and nothing else.
///
/// Other threads may exist, so `child` must neither allocate nor lock: system calls only.
pub(crate) fn fork(child: impl FnOnce() -> c_int) -> io::Result<Pid> {
    // The bare call, without the C library's fork handlers: they take locks and time, and the child
    // needs nothing that they restore.
    // SAFETY: with no stack and no flags but the exit signal this is fork(2); the child keeps to
    // system calls on its own copy of the memory, and never returns from here.
    let pid = unsafe { libc::syscall(libc::SYS_clone, libc::SIGCHLD as c_ulong, 0, 0, 0, 0) };
    match pid {
        -1 => Err(io::Error::last_os_error()),
        0 => {
            let code = child();
            exit_now(code)
        }
        pid => Ok(pid as Pid),
    }
}

/// Ends this process without running anything more of it.
pub(crate) fn exit_now(code: c_int) -> ! {
    // SAFETY: always safe; it does not return.
    unsafe { libc::_exit(code) }
}

/// How much stack the child of [`vfork`] gets.
pub(crate) const VFORK_STACK: usize = 64 * 1024;

/// Starts a child that shares this process's memory, which waits until the child has executed a
/// program or exited. The child runs `child`, and exits with what it returns.
pub(crate) fn vfork<F: FnMut() -> c_int>(stack: &mut [u8], child: &mut F) -> io::Result<Pid> {
    extern "C" fn run<F: FnMut() -> c_int>(child: *mut c_void) -> c_int {
        // SAFETY: the pointer is the `child` below; its owner is suspended while this runs.
        let child = unsafe { &mut *child.cast::<F>() };
        child()
    }
    let top = stack.as_mut_ptr_range().end;
    let top = top.wrapping_sub(top as usize % 16);
    let flags = libc::CLONE_VM | libc::CLONE_VFORK | libc::SIGCHLD;
    // SAFETY: the child has a stack of its own that outlives it, since CLONE_VFORK suspends this
    // (single-threaded) process until the child no longer uses the shared memory.
    let pid = unsafe { libc::clone(run::<F>, top.cast(), flags, ptr::from_mut(child).cast()) };
    if pid == -1 { Err(io::Error::last_os_error()) } else { Ok(pid) }
}

/// Closes all descriptors from `first` on.
pub(crate) fn close_from(first: RawFd) {
    // SAFETY: the callers own no descriptor there that is used afterwards.
    let done = unsafe { libc::syscall(libc::SYS_close_range, first, c_int::MAX, 0) };
    if done == -1 {
        // A kernel before 5.9.
        for fd in first..4096 {
            // SAFETY: as above.
            unsafe { libc::close(fd) };
        }
    }
}

/// Has all descriptors from `first` on closed by the next exec.
pub(crate) fn close_on_exec_from(first: RawFd) {
    const CLOSE_RANGE_CLOEXEC: c_int = 4;
    // SAFETY: only sets flags on descriptors.
    unsafe { libc::syscall(libc::SYS_close_range, first, c_int::MAX, CLOSE_RANGE_CLOEXEC) };
}

/// Takes over an inherited descriptor, if it is open.
pub(crate) fn take_fd(fd: RawFd) -> io::Result<OwnedFd> {
    // SAFETY: a bare flag query.
    if fd < 0 || unsafe { libc::fcntl(fd, libc::F_GETFD) } == -1 {
        return Err(io::Error::from_raw_os_error(libc::EBADF));
    }
    // SAFETY: it is open, and the caller says that nobody else in this process owns it.
    let fd = unsafe { OwnedFd::from_raw_fd(fd) };
    // SAFETY: sets a flag of an open descriptor.
    unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_SETFD, libc::FD_CLOEXEC) };
    Ok(fd)
}

/// Gives every signal its default disposition and blocks them all, for this thread and those it
/// starts: nothing interrupts, and children have only the mask to undo.
pub(crate) fn block_signals() {
    default_dispositions();
    set_mask(libc::SIG_BLOCK, true);
}

/// Gives every signal its default disposition and lets it through, as a new program expects it.
pub(crate) fn default_signals() {
    default_dispositions();
    unblock_signals();
}

fn default_dispositions() {
    for signal in 1..=64 {
        // SAFETY: sets a default disposition; refused for those that cannot have another.
        unsafe { libc::signal(signal, libc::SIG_DFL) };
    }
}

/// Lets every signal through again. Safe after a fork.
pub(crate) fn unblock_signals() {
    set_mask(libc::SIG_SETMASK, false);
}

fn set_mask(how: c_int, all: bool) {
    // SAFETY: the set is initialized by the call right after.
    let mut set = unsafe { std::mem::zeroed() };
    // SAFETY: plain writes to a local set, which is then read.
    unsafe {
        if all {
            libc::sigfillset(&mut set);
        } else {
            libc::sigemptyset(&mut set);
        }
        libc::sigprocmask(how, &set, ptr::null_mut());
    }
}

/// A descriptor that becomes readable when one of these (blocked) signals arrives.
pub(crate) fn signal_fd(signals: &[c_int]) -> io::Result<OwnedFd> {
    // SAFETY: the set is initialized by sigemptyset before its use.
    let mut set = unsafe { std::mem::zeroed() };
    // SAFETY: writes to a local set.
    unsafe {
        libc::sigemptyset(&mut set);
        for signal in signals {
            libc::sigaddset(&mut set, *signal);
        }
    }
    // SAFETY: reads the set, makes a descriptor.
    let fd = unsafe { libc::signalfd(-1, &set, libc::SFD_CLOEXEC | libc::SFD_NONBLOCK) };
    if fd == -1 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: just made, and owned by nobody else.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Has the runtime watch a descriptor.
pub(crate) fn watch(fd: OwnedFd, interest: Interest) -> io::Result<AsyncFd<OwnedFd>> {
    // SAFETY: the descriptor is owned and given away whole, so that it stays open and the same for as
    // long as it is watched.
    let watched = unsafe { AsyncFd::register_with_interest(fd, interest) };
    watched.map_err(io::Error::from)
}

/// Reads one signal's number; `WouldBlock` when there is none.
pub(crate) fn read_signal(fd: BorrowedFd<'_>) -> io::Result<c_int> {
    let mut info = [0_u8; size_of::<libc::signalfd_siginfo>()];
    let size = rustix::io::read(fd, &mut info[..])?;
    if size < 4 {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    Ok(c_int::from_ne_bytes([info[0], info[1], info[2], info[3]]))
}

/// A child that has ended.
pub(crate) struct Waited {
    pub(crate) pid: Pid,
    pub(crate) status: c_int,
    pub(crate) cpu_us: u64,
    pub(crate) max_memory: u64,
}

/// Waits for any child; `None` if `block` is false and none has ended. Safe after a fork.
pub(crate) fn wait_any(block: bool) -> io::Result<Option<Waited>> {
    let mut status = 0;
    // SAFETY: plain data, for which zeroes are valid.
    let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
    let options = if block { libc::__WALL } else { libc::WNOHANG | libc::__WALL };
    loop {
        // SAFETY: both pointers are to locals of the right type.
        let pid = unsafe { libc::wait4(-1, &mut status, options, &mut usage) };
        match pid {
            -1 if errno() == libc::EINTR => {}
            -1 => return Err(io::Error::last_os_error()),
            0 => return Ok(None),
            pid => {
                let us = |time: libc::timeval| time.tv_sec as u64 * 1_000_000 + time.tv_usec as u64;
                return Ok(Some(Waited {
                    pid,
                    status,
                    cpu_us: us(usage.ru_utime) + us(usage.ru_stime),
                    max_memory: usage.ru_maxrss as u64 * 1024,
                }));
            }
        }
    }
}

/// `kill(2)`; a negative pid is a process group.
pub(crate) fn kill(pid: Pid, signal: c_int) -> io::Result<()> {
    // SAFETY: always safe for memory.
    if unsafe { libc::kill(pid, signal) } == -1 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

/// The guest's own process group; 0 if that is of a namespace outside.
pub(crate) fn own_group() -> Pid {
    // SAFETY: always safe.
    unsafe { libc::getpgrp() }
}

/// `pidfd_send_signal(2)` with any signal, real-time ones and 0 included.
pub(crate) fn pidfd_signal(pidfd: BorrowedFd<'_>, signal: c_int) -> io::Result<()> {
    // SAFETY: a null siginfo is allowed.
    let done = unsafe {
        let fd = pidfd.as_raw_fd();
        libc::syscall(libc::SYS_pidfd_send_signal, fd, signal, ptr::null::<c_void>(), 0)
    };
    if done == -1 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// What `RLIMIT_…` names are in this C library.
#[cfg(target_env = "gnu")]
pub(crate) type Resource = libc::__rlimit_resource_t;
#[cfg(not(target_env = "gnu"))]
pub(crate) type Resource = c_int;

/// `setrlimit(2)`. Safe after a fork.
pub(crate) fn set_limit(resource: Resource, soft: u64, hard: u64) -> Result<(), c_int> {
    let limit = libc::rlimit { rlim_cur: soft, rlim_max: hard };
    // SAFETY: reads a local of the right type.
    let done = unsafe { libc::setrlimit(resource, &limit) };
    if done == -1 { Err(errno()) } else { Ok(()) }
}

/// The soft and the hard limit.
pub(crate) fn limit(resource: Resource) -> (u64, u64) {
    let mut limit = libc::rlimit { rlim_cur: libc::RLIM_INFINITY, rlim_max: libc::RLIM_INFINITY };
    // SAFETY: writes a local of the right type.
    unsafe { libc::getrlimit(resource, &mut limit) };
    (limit.rlim_cur, limit.rlim_max)
}

/// Becomes another user, for good. Safe after a fork.
pub(crate) fn become_user(uid: u32, gid: u32, groups: &[u32]) -> Result<(), c_int> {
    // The bare calls: the C library's would reach for other threads.
    // SAFETY: the group list is valid for its length; the others are plain numbers.
    let done = unsafe {
        libc::syscall(libc::SYS_setgroups, groups.len(), groups.as_ptr()) == 0
            && libc::syscall(libc::SYS_setresgid, gid, gid, gid) == 0
            && libc::syscall(libc::SYS_setresuid, uid, uid, uid) == 0
    };
    if done { Ok(()) } else { Err(errno()) }
}

/// Empties the bounding set as far as that is allowed, the ambient set, and the other three.
pub(crate) fn drop_capabilities() -> io::Result<()> {
    #[repr(C)]
    struct Header {
        version: u32,
        pid: c_int,
    }
    const VERSION_3: u32 = 0x2008_0522;
    for capability in 0..64 {
        // SAFETY: plain numbers. Refused without CAP_SETPCAP, which `no_new_privs` makes up for, and
        // for numbers that do not exist.
        unsafe { libc::prctl(libc::PR_CAPBSET_DROP, capability, 0, 0, 0) };
    }
    // SAFETY: plain numbers. A kernel without ambient capabilities refuses, and has none.
    unsafe { libc::prctl(libc::PR_CAP_AMBIENT, libc::PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0) };
    let header = Header { version: VERSION_3, pid: 0 };
    let none = [0_u32; 6];
    // SAFETY: the header names version 3, whose data are six numbers.
    let done = unsafe { libc::syscall(libc::SYS_capset, &header, none.as_ptr()) };
    if done == -1 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Keeps the allocator to one arena and gives freed memory back: the guest is small, and many run.
pub(crate) fn tame_allocator() {
    #[cfg(target_env = "gnu")]
    {
        const M_TRIM_THRESHOLD: c_int = -1;
        const M_MMAP_THRESHOLD: c_int = -3;
        const M_ARENA_MAX: c_int = -8;
        // SAFETY: sets parameters before there is a second thread.
        unsafe {
            libc::mallopt(M_ARENA_MAX, 1);
            libc::mallopt(M_TRIM_THRESHOLD, 256 * 1024);
            libc::mallopt(M_MMAP_THRESHOLD, 256 * 1024);
        }
    }
}
