//! The system-call filter: what ordinary programs, compilers, servers and debuggers need, and no more.
//!
//! The policy is that of Docker's default profile for a container without capabilities. A call that is
//! not listed fails with `ENOSYS`, as on a kernel that lacks it: programs then fall back to older calls
//! (`clone3` to `clone`, whose flags can be checked). What is known to be dangerous fails with `EPERM`.
//! Calls of another architecture kill the caller; x32 calls are not listed. Tracing is allowed: a
//! debugger is of use, and the guest cannot be traced.

use std::collections::BTreeMap;

use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen as Len, SeccompCmpOp as Op, SeccompCondition,
    SeccompFilter, SeccompRule, TargetArch,
};

type Rules = BTreeMap<i64, Vec<SeccompRule>>;
type Result<T> = std::result::Result<T, String>;

/// Loads both filters into this thread and all that it starts. Needs `no_new_privs`.
pub(crate) fn load() -> Result<()> {
    // Of two filters that both refuse, the later one names the error.
    for program in [allowed()?, denied()?] {
        seccompiler::apply_filter(&program).map_err(|error| explain(&error))?;
    }
    Ok(())
}

fn allowed() -> Result<BpfProgram> {
    let rules = ALLOWED.iter().chain(ALLOWED_HERE).map(|call| (*call, Vec::new())).collect();
    let enosys = SeccompAction::Errno(libc::ENOSYS as u32);
    compile(rules, enosys, SeccompAction::Allow)
}

fn denied() -> Result<BpfProgram> {
    let mut rules: Rules = DENIED.iter().map(|call| (*call, Vec::new())).collect();
    rules.insert(libc::SYS_clone, any_flag(0, NAMESPACES)?);
    let with_time = [NAMESPACES, &[libc::CLONE_NEWTIME as u64]].concat();
    rules.insert(libc::SYS_unshare, any_flag(0, &with_time)?);
    rules.insert(
        libc::SYS_ioctl,
        vec![
            // Types into a terminal on behalf of whoever reads from it.
            rule(&[(1, Op::Eq, libc::TIOCSTI)])?,
            rule(&[(1, Op::Eq, libc::TIOCLINUX)])?,
        ],
    );
    let families = [libc::AF_UNIX, libc::AF_INET, libc::AF_INET6, libc::AF_NETLINK];
    let other_family: Vec<_> = families.iter().map(|f| (0, Op::Ne, *f as u64)).collect();
    let raw = |family: i32| {
        let kind = Op::MaskedEq(0xf);
        rule(&[(0, Op::Eq, family as u64), (1, kind, libc::SOCK_RAW as u64)])
    };
    rules.insert(
        libc::SYS_socket,
        vec![rule(&other_family)?, raw(libc::AF_INET)?, raw(libc::AF_INET6)?],
    );
    let other_personality: Vec<_> = PERSONALITIES.iter().map(|p| (0, Op::Ne, *p)).collect();
    rules.insert(libc::SYS_personality, vec![rule(&other_personality)?]);
    compile(rules, SeccompAction::Allow, SeccompAction::Errno(libc::EPERM as u32))
}

fn compile(rules: Rules, otherwise: SeccompAction, matched: SeccompAction) -> Result<BpfProgram> {
    let arch = TargetArch::try_from(std::env::consts::ARCH).map_err(|error| explain(&error))?;
    SeccompFilter::new(rules, otherwise, matched, arch)
        .and_then(BpfProgram::try_from)
        .map_err(|error| explain(&error))
}

/// One rule for each flag: any of them matches.
fn any_flag(argument: u8, flags: &[u64]) -> Result<Vec<SeccompRule>> {
    flags.iter().map(|flag| rule(&[(argument, Op::MaskedEq(*flag), *flag)])).collect()
}

/// A rule all of whose conditions must hold; each looks at an argument's lower half, as the kernel
/// does for these calls.
fn rule(conditions: &[(u8, Op, u64)]) -> Result<SeccompRule> {
    let conditions = conditions
        .iter()
        .map(|(argument, op, value)| {
            SeccompCondition::new(*argument, Len::Dword, op.clone(), *value)
        })
        .collect::<std::result::Result<_, _>>()
        .map_err(|error| explain(&error))?;
    SeccompRule::new(conditions).map_err(|error| explain(&error))
}

fn explain(error: &dyn std::fmt::Display) -> String {
    format!("cannot load the system-call filter: {error}")
}

const NAMESPACES: &[u64] = &[
    libc::CLONE_NEWNS as u64,
    libc::CLONE_NEWCGROUP as u64,
    libc::CLONE_NEWUTS as u64,
    libc::CLONE_NEWIPC as u64,
    libc::CLONE_NEWUSER as u64,
    libc::CLONE_NEWPID as u64,
    libc::CLONE_NEWNET as u64,
];

/// Linux, 32-bit Linux, both with the uname of 2.6, and the question which it is.
const PERSONALITIES: &[u64] = &[0, 8, 0x20000, 0x20008, 0xffff_ffff];

/// Refused as forbidden.
const DENIED: &[i64] = &[
    // Mounts and roots.
    libc::SYS_mount,
    libc::SYS_umount2,
    libc::SYS_pivot_root,
    libc::SYS_chroot,
    libc::SYS_move_mount,
    libc::SYS_open_tree,
    libc::SYS_fsopen,
    libc::SYS_fsconfig,
    libc::SYS_fsmount,
    libc::SYS_fspick,
    libc::SYS_mount_setattr,
    libc::SYS_quotactl,
    libc::SYS_quotactl_fd,
    libc::SYS_open_by_handle_at,
    libc::SYS_name_to_handle_at,
    // Namespaces of others.
    libc::SYS_setns,
    // The keyring is not divided by namespaces.
    libc::SYS_add_key,
    libc::SYS_request_key,
    libc::SYS_keyctl,
    // The kernel itself.
    libc::SYS_init_module,
    libc::SYS_finit_module,
    libc::SYS_delete_module,
    libc::SYS_kexec_load,
    libc::SYS_kexec_file_load,
    libc::SYS_reboot,
    libc::SYS_swapon,
    libc::SYS_swapoff,
    libc::SYS_syslog,
    libc::SYS_acct,
    libc::SYS_vhangup,
    libc::SYS_lookup_dcookie,
    libc::SYS_fanotify_init,
    // Much code in the kernel, and many holes.
    libc::SYS_bpf,
    libc::SYS_perf_event_open,
    libc::SYS_userfaultfd,
    libc::SYS_io_uring_setup,
    libc::SYS_io_uring_enter,
    libc::SYS_io_uring_register,
    // Other nodes' memory, the clock, the machine's names.
    libc::SYS_move_pages,
    libc::SYS_migrate_pages,
    libc::SYS_mbind,
    libc::SYS_set_mempolicy,
    libc::SYS_clock_settime,
    libc::SYS_settimeofday,
    libc::SYS_sethostname,
    libc::SYS_setdomainname,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_iopl,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_ioperm,
];

macro_rules! calls {
    ($($name:ident)*) => { &[$(libc::$name),*] };
}

/// Let through on every architecture, unless [`DENIED`] or a rule above refuses it.
#[rustfmt::skip]
const ALLOWED: &[i64] = calls! {
    // Refused by the other filter, which names a better error.
    SYS_mount SYS_umount2 SYS_pivot_root SYS_chroot SYS_move_mount SYS_open_tree SYS_fsopen
    SYS_fsconfig SYS_fsmount SYS_fspick SYS_mount_setattr SYS_quotactl SYS_quotactl_fd
    SYS_open_by_handle_at SYS_name_to_handle_at SYS_setns SYS_add_key SYS_request_key SYS_keyctl
    SYS_init_module SYS_finit_module SYS_delete_module SYS_kexec_load SYS_kexec_file_load SYS_reboot
    SYS_swapon SYS_swapoff SYS_syslog SYS_acct SYS_vhangup SYS_lookup_dcookie SYS_fanotify_init
    SYS_bpf SYS_perf_event_open SYS_userfaultfd SYS_io_uring_setup SYS_io_uring_enter
    SYS_io_uring_register SYS_move_pages SYS_migrate_pages SYS_mbind SYS_set_mempolicy
    SYS_clock_settime SYS_settimeofday SYS_sethostname SYS_setdomainname
    // Files.
    SYS_openat SYS_openat2 SYS_close SYS_close_range SYS_read SYS_write SYS_readv SYS_writev
    SYS_pread64 SYS_pwrite64 SYS_preadv SYS_pwritev SYS_preadv2 SYS_pwritev2 SYS_lseek SYS_sendfile
    SYS_copy_file_range SYS_splice SYS_tee SYS_vmsplice SYS_dup SYS_dup3 SYS_fcntl SYS_flock
    SYS_ioctl SYS_fsync SYS_fdatasync SYS_sync SYS_syncfs SYS_sync_file_range SYS_ftruncate
    SYS_truncate SYS_fallocate SYS_fadvise64 SYS_readahead SYS_fstat SYS_newfstatat SYS_statx
    SYS_statfs SYS_fstatfs SYS_getdents64 SYS_getcwd SYS_chdir SYS_fchdir SYS_mkdirat SYS_mknodat
    SYS_unlinkat SYS_renameat SYS_renameat2 SYS_linkat SYS_symlinkat SYS_readlinkat SYS_fchmod
    SYS_fchmodat SYS_fchown SYS_fchownat SYS_faccessat SYS_faccessat2 SYS_utimensat SYS_umask
    SYS_setxattr SYS_lsetxattr SYS_fsetxattr SYS_getxattr SYS_lgetxattr SYS_fgetxattr SYS_listxattr
    SYS_llistxattr SYS_flistxattr SYS_removexattr SYS_lremovexattr SYS_fremovexattr SYS_memfd_create
    SYS_memfd_secret SYS_inotify_init1 SYS_inotify_add_watch SYS_inotify_rm_watch SYS_fanotify_mark
    SYS_io_setup SYS_io_destroy SYS_io_submit SYS_io_cancel SYS_io_getevents SYS_pipe2
    // Waiting.
    SYS_ppoll SYS_pselect6 SYS_epoll_create1 SYS_epoll_ctl SYS_epoll_pwait SYS_epoll_pwait2
    SYS_eventfd2 SYS_signalfd4 SYS_timerfd_create SYS_timerfd_settime SYS_timerfd_gettime
    SYS_nanosleep SYS_clock_nanosleep SYS_futex SYS_futex_waitv SYS_get_robust_list
    SYS_set_robust_list
    // Memory.
    SYS_brk SYS_mmap SYS_munmap SYS_mprotect SYS_mremap SYS_madvise SYS_process_madvise
    SYS_process_mrelease SYS_msync SYS_mincore SYS_mlock SYS_mlock2 SYS_munlock SYS_mlockall
    SYS_munlockall SYS_pkey_alloc SYS_pkey_free SYS_pkey_mprotect SYS_get_mempolicy SYS_membarrier
    SYS_remap_file_pages
    // Processes.
    SYS_clone SYS_unshare SYS_execve SYS_execveat SYS_exit SYS_exit_group SYS_wait4 SYS_waitid
    SYS_getpid SYS_getppid SYS_gettid SYS_getpgid SYS_setpgid SYS_getsid SYS_setsid
    SYS_set_tid_address SYS_rseq SYS_prctl SYS_personality SYS_kill SYS_tkill SYS_tgkill
    SYS_pidfd_open SYS_pidfd_send_signal SYS_pidfd_getfd SYS_ptrace SYS_process_vm_readv
    SYS_process_vm_writev SYS_kcmp SYS_getrlimit SYS_setrlimit SYS_prlimit64 SYS_getrusage SYS_times
    SYS_getpriority SYS_setpriority SYS_ioprio_get SYS_ioprio_set SYS_sched_yield
    SYS_sched_getaffinity SYS_sched_setaffinity SYS_sched_getparam SYS_sched_setparam
    SYS_sched_getscheduler SYS_sched_setscheduler SYS_sched_get_priority_max
    SYS_sched_get_priority_min SYS_sched_rr_get_interval SYS_sched_getattr SYS_sched_setattr
    SYS_getcpu SYS_restart_syscall SYS_seccomp SYS_landlock_create_ruleset SYS_landlock_add_rule
    SYS_landlock_restrict_self
    // Signals.
    SYS_rt_sigaction SYS_rt_sigprocmask SYS_rt_sigpending SYS_rt_sigqueueinfo SYS_rt_tgsigqueueinfo
    SYS_rt_sigreturn SYS_rt_sigsuspend SYS_rt_sigtimedwait SYS_sigaltstack
    // Who one is; without capabilities the setters change nothing that matters.
    SYS_getuid SYS_geteuid SYS_getgid SYS_getegid SYS_getresuid SYS_getresgid SYS_getgroups
    SYS_setuid SYS_setgid SYS_setreuid SYS_setregid SYS_setresuid SYS_setresgid SYS_setfsuid
    SYS_setfsgid SYS_setgroups SYS_capget SYS_capset
    // Time and the machine.
    SYS_clock_gettime SYS_clock_getres SYS_gettimeofday SYS_adjtimex SYS_clock_adjtime
    SYS_getitimer SYS_setitimer SYS_timer_create SYS_timer_settime SYS_timer_gettime
    SYS_timer_getoverrun SYS_timer_delete SYS_getrandom SYS_uname SYS_sysinfo
    // Sockets and System V IPC, which has a namespace of its own.
    SYS_socket SYS_socketpair SYS_bind SYS_listen SYS_accept SYS_accept4 SYS_connect SYS_getsockname
    SYS_getpeername SYS_sendto SYS_recvfrom SYS_sendmsg SYS_recvmsg SYS_sendmmsg SYS_recvmmsg
    SYS_shutdown SYS_setsockopt SYS_getsockopt SYS_shmget SYS_shmat SYS_shmdt SYS_shmctl SYS_semget
    SYS_semop SYS_semtimedop SYS_semctl SYS_msgget SYS_msgsnd SYS_msgrcv SYS_msgctl SYS_mq_open
    SYS_mq_unlink SYS_mq_timedsend SYS_mq_timedreceive SYS_mq_notify SYS_mq_getsetattr
};

/// The calls that x86-64 has kept from older times.
#[cfg(target_arch = "x86_64")]
#[rustfmt::skip]
const ALLOWED_HERE: &[i64] = calls! {
    SYS_iopl SYS_ioperm
    SYS_open SYS_creat SYS_stat SYS_lstat SYS_access SYS_mkdir SYS_rmdir SYS_mknod SYS_unlink
    SYS_rename SYS_link SYS_symlink SYS_readlink SYS_chmod SYS_chown SYS_lchown SYS_utime SYS_utimes
    SYS_futimesat SYS_getdents SYS_dup2 SYS_pipe SYS_poll SYS_select SYS_epoll_create SYS_epoll_wait
    SYS_epoll_ctl_old SYS_epoll_wait_old SYS_eventfd SYS_signalfd SYS_inotify_init SYS_fork
    SYS_vfork SYS_getpgrp SYS_pause SYS_alarm SYS_time SYS_arch_prctl
};

#[cfg(not(target_arch = "x86_64"))]
const ALLOWED_HERE: &[i64] = &[];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_filters_compile_and_fit_the_kernel() {
        // The kernel takes 4096 instructions for a program.
        assert!((300..4096).contains(&allowed().unwrap().len()));
        assert!((50..4096).contains(&denied().unwrap().len()));
    }

    #[test]
    fn what_is_denied_is_listed_so_that_the_error_is_eperm() {
        for call in DENIED {
            assert!(ALLOWED.contains(call) || ALLOWED_HERE.contains(call), "{call}");
        }
    }
}
