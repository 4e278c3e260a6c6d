//! The system calls that no safe crate offers in the form needed here: the only unsafe code.
#![allow(unsafe_code)]

use std::{
    ffi::{CStr, CString, c_char, c_int, c_void},
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
    let (argv, envp) = (argv.pointers.as_ptr() as usize, envp.pointers.as_ptr() as usize);
    // SAFETY: the path and all strings are NUL-terminated, and both arrays end with a null pointer.
    let failed = unsafe { raw(libc::SYS_execve, [path.as_ptr() as usize, argv, envp, 0, 0]) };
    failed.err().unwrap_or(libc::EIO)
}

/// The last error's number.
#[cfg(not(target_arch = "x86_64"))]
fn errno() -> c_int {
    io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO)
}

/// A bare system call, without the C library: it touches no memory but its arguments', and so not the
/// last error's number, which what shares this process's memory shares too.
///
/// # Safety
///
/// As the system call says.
#[cfg(target_arch = "x86_64")]
unsafe fn raw(number: libc::c_long, arguments: [usize; 5]) -> Result<usize, c_int> {
    let [one, two, three, four, five] = arguments;
    let result: isize;
    // SAFETY: the convention of x86-64 Linux; the caller answers for the rest.
    unsafe {
        std::arch::asm!(
            "syscall",
            inlateout("rax") number as isize => result,
            in("rdi") one, in("rsi") two, in("rdx") three, in("r10") four, in("r8") five,
            lateout("rcx") _, lateout("r11") _,
            options(nostack),
        );
    }
    if result < 0 { Err(-result as c_int) } else { Ok(result as usize) }
}

/// A system call; see the other one. Here nothing shares this process's memory.
///
/// # Safety
///
/// As the system call says.
#[cfg(not(target_arch = "x86_64"))]
unsafe fn raw(number: libc::c_long, arguments: [usize; 5]) -> Result<usize, c_int> {
    let [one, two, three, four, five] = arguments;
    // SAFETY: the caller answers for it.
    let result = unsafe { libc::syscall(number, one, two, three, four, five) };
    if result == -1 { Err(errno()) } else { Ok(result as usize) }
}

/// What a companion runs. It keeps to system calls: it neither allocates nor locks nor panics.
pub(crate) trait Companion: Send {
    /// Its exit code.
    fn run(&mut self) -> c_int;
}

/// A process that runs beside this one, and what it needs as long as it runs: not to be dropped before
/// it is reaped.
pub(crate) struct Running<C> {
    _what: Box<C>,
    _stack: Stack,
}

/// Starts a companion: a process with descriptors of its own, and this one's memory.
///
/// A fork would copy this process's page tables and take a fault for each page that either changes
/// later: for a short command that is more than all the rest that is done here.
#[cfg(target_arch = "x86_64")]
pub(crate) fn companion<C: Companion>(what: C) -> io::Result<(Pid, Running<C>)> {
    let mut what = Box::new(what);
    let mut stack = Stack::new();
    let flags = libc::CLONE_VM | libc::SIGCHLD;
    // SAFETY: what it runs and its stack stay where they are until it is reaped, and nobody else looks
    // at either; it keeps to system calls that touch nothing else.
    let pid = unsafe { clone(flags, &mut stack, enter::<C>, ptr::from_mut(&mut *what).cast()) };
    let pid = pid.map_err(io::Error::from_raw_os_error)?;
    Ok((pid, Running { _what: what, _stack: stack }))
}

/// Starts a companion; see the other one. Here it has a copy of this process's memory.
#[cfg(not(target_arch = "x86_64"))]
pub(crate) fn companion<C: Companion>(what: C) -> io::Result<(Pid, Running<C>)> {
    let mut what = Box::new(what);
    let pid = fork(|| what.run())?;
    Ok((pid, Running { _what: what, _stack: Stack::new() }))
}

extern "C" fn enter<C: Companion>(what: *mut c_void) -> c_int {
    // SAFETY: the pointer is to the companion that was given to `clone`, which only this process uses.
    let what = unsafe { &mut *what.cast::<C>() };
    what.run()
}

/// The stack of a process that shares this one's memory.
pub(crate) struct Stack(Vec<std::mem::MaybeUninit<u128>>);

impl Stack {
    const SIZE: usize = 32 * 1024;

    pub(crate) fn new() -> Self {
        let mut stack = Vec::new();
        stack.reserve_exact(Self::SIZE / size_of::<u128>());
        Self(stack)
    }

    fn top(&mut self) -> *mut u128 {
        self.0.spare_capacity_mut().as_mut_ptr_range().end.cast()
    }
}

/// Starts a process at a function, on a stack.
///
/// # Safety
///
/// With `CLONE_VM`: function, argument and stack must be left alone until the process has ended or
/// executed another program.
#[cfg(target_arch = "x86_64")]
unsafe fn clone(
    flags: c_int,
    stack: &mut Stack,
    function: extern "C" fn(*mut c_void) -> c_int,
    argument: *mut c_void,
) -> Result<Pid, c_int> {
    let result: isize;
    // SAFETY: the two words are written below the top of a stack that is larger. The child takes them
    // off, so that it calls the function with the alignment that the convention asks for, and never
    // returns from here; the parent sees an ordinary system call.
    unsafe {
        let top = stack.top().cast::<usize>().sub(2);
        top.write(argument as usize);
        top.add(1).write(function as usize);
        std::arch::asm!(
            "syscall",
            "test rax, rax",
            "jnz 2f",
            "xor ebp, ebp",
            "pop rdi",
            "pop rax",
            "call rax",
            "mov edi, eax",
            "mov eax, {exit}",
            "syscall",
            "ud2",
            "2:",
            exit = const libc::SYS_exit_group,
            inlateout("rax") libc::SYS_clone as isize => result,
            in("rdi") flags as usize, in("rsi") top, in("rdx") 0, in("r10") 0, in("r8") 0,
            lateout("rcx") _, lateout("r11") _,
        );
    }
    if result < 0 { Err(-result as c_int) } else { Ok(result as Pid) }
}

/// Starts a process; see the other one.
///
/// # Safety
///
/// As the other one's.
#[cfg(not(target_arch = "x86_64"))]
unsafe fn clone(
    flags: c_int,
    stack: &mut Stack,
    function: extern "C" fn(*mut c_void) -> c_int,
    argument: *mut c_void,
) -> Result<Pid, c_int> {
    // SAFETY: the caller answers for it.
    let pid = unsafe { libc::clone(function, stack.top().cast(), flags, argument) };
    if pid == -1 { Err(errno()) } else { Ok(pid) }
}

/// A descriptor by its number, which the caller knows to be open.
pub(crate) fn borrow<'a>(fd: RawFd) -> BorrowedFd<'a> {
    // SAFETY: the numbers come from a plan whose descriptors this process got with its start.
    unsafe { BorrowedFd::borrow_raw(fd) }
}

/// Forks; the child runs `child` and nothing else.
///
/// Other threads may exist, so `child` must neither allocate nor lock: system calls only.
#[cfg(not(target_arch = "x86_64"))]
fn fork(child: impl FnOnce() -> c_int) -> io::Result<Pid> {
    // The bare call, without the C library's fork handlers: they take locks and time, and the child
    // needs nothing that they restore.
    // SAFETY: with no stack and no flags but the exit signal this is fork(2); the child keeps to
    // system calls on its own copy of the memory, and never returns from here.
    let pid = unsafe { libc::syscall(libc::SYS_clone, libc::SIGCHLD, 0, 0, 0, 0) };
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
    loop {
        // SAFETY: always safe; it does not return.
        let _ = unsafe { raw(libc::SYS_exit_group, [code as usize, 0, 0, 0, 0]) };
    }
}

/// Starts a child that shares this process's memory, which waits until the child has executed a
/// program or exited.
pub(crate) fn vfork<C: Companion>(stack: &mut Stack, child: &mut C) -> io::Result<Pid> {
    let flags = libc::CLONE_VM | libc::CLONE_VFORK | libc::SIGCHLD;
    // SAFETY: the child and its stack outlive it, since CLONE_VFORK suspends this (single-threaded)
    // process until the child no longer uses the shared memory.
    let pid = unsafe { clone(flags, stack, enter::<C>, ptr::from_mut(child).cast()) };
    pid.map_err(io::Error::from_raw_os_error)
}

/// Closes all descriptors from `first` on.
pub(crate) fn close_from(first: RawFd) {
    // SAFETY: the callers own no descriptor there that is used afterwards.
    let range = [first as usize, c_int::MAX as usize, 0, 0, 0];
    // SAFETY: as above.
    if unsafe { raw(libc::SYS_close_range, range) }.is_err() {
        // A kernel before 5.9.
        for fd in first as usize..4096 {
            // SAFETY: as above.
            let _ = unsafe { raw(libc::SYS_close, [fd, 0, 0, 0, 0]) };
        }
    }
}

/// Has all descriptors from `first` on closed by the next exec.
pub(crate) fn close_on_exec_from(first: RawFd) {
    const CLOSE_RANGE_CLOEXEC: usize = 4;
    let range = [first as usize, c_int::MAX as usize, CLOSE_RANGE_CLOEXEC, 0, 0];
    // SAFETY: only sets flags on descriptors.
    let _ = unsafe { raw(libc::SYS_close_range, range) };
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
    let none = 0_u64;
    let mask = [libc::SIG_SETMASK as usize, ptr::from_ref(&none) as usize, 0, 8, 0];
    // SAFETY: reads the kernel's kind of set, which has 64 bits.
    let _ = unsafe { raw(libc::SYS_rt_sigprocmask, mask) };
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

/// Reads one signal, and who sent it: 0 for somebody outside the process id namespace. `WouldBlock` when
/// there is none.
pub(crate) fn read_signal(fd: BorrowedFd<'_>) -> io::Result<(c_int, u32)> {
    let mut info = [0_u8; size_of::<libc::signalfd_siginfo>()];
    let size = rustix::io::read(fd, &mut info[..])?;
    if size < 16 {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    let word = |at: usize| [info[at], info[at + 1], info[at + 2], info[at + 3]];
    // `ssi_signo` and `ssi_pid`.
    Ok((c_int::from_ne_bytes(word(0)), u32::from_ne_bytes(word(12))))
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
    let mut status: c_int = 0;
    // SAFETY: plain data, for which zeroes are valid.
    let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
    let options = if block { libc::__WALL } else { libc::WNOHANG | libc::__WALL };
    let (to, used) = (ptr::from_mut(&mut status), ptr::from_mut(&mut usage));
    let wait = [-1_isize as usize, to as usize, options as usize, used as usize, 0];
    loop {
        // SAFETY: both pointers are to locals of the right type.
        match unsafe { raw(libc::SYS_wait4, wait) } {
            Err(libc::EINTR) => {}
            Err(error) => return Err(io::Error::from_raw_os_error(error)),
            Ok(0) => return Ok(None),
            Ok(pid) => {
                let us = |time: libc::timeval| time.tv_sec as u64 * 1_000_000 + time.tv_usec as u64;
                return Ok(Some(Waited {
                    pid: pid as Pid,
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
    let new = ptr::from_ref(&limit) as usize;
    // SAFETY: reads a local, which is what the kernel calls rlimit64 on 64-bit machines.
    unsafe { raw(libc::SYS_prlimit64, [0, resource as usize, new, 0, 0]) }.map(drop)
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
    let (uid, gid) = (uid as usize, gid as usize);
    let list = [groups.len(), groups.as_ptr() as usize, 0, 0, 0];
    // SAFETY: the group list is valid for its length; the others are plain numbers.
    unsafe {
        raw(libc::SYS_setgroups, list)?;
        raw(libc::SYS_setresgid, [gid, gid, gid, 0, 0])?;
        raw(libc::SYS_setresuid, [uid, uid, uid, 0, 0]).map(drop)
    }
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
