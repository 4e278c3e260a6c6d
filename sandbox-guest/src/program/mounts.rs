//! The set-up's steps towards the filesystem that the sandbox sees.

use std::{
    collections::VecDeque,
    ffi::OsString,
    fs, io,
    os::unix::fs::{DirBuilderExt, PermissionsExt},
    path::{Component, Path, PathBuf},
};

use rustix::{
    fs::{StatVfsMountFlags, statvfs},
    mount::{
        FsMountFlags, FsOpenFlags, MountAttrFlags, MountFlags, MoveMountFlags, UnmountFlags,
        fsconfig_create, fsconfig_set_flag, fsconfig_set_string, fsmount, fsopen, mount,
        mount_bind_recursive, mount_move, mount_remount, move_mount, unmount,
    },
    process::{chdir, pivot_root},
};
use sandbox_guest::MountStep;

use super::{base::errno_text, tree_remove};

/// What `mount(2)` takes of options.
const PAGE: usize = 4095;

/// As many links as the kernel follows.
const LINKS: usize = 40;

/// Does all steps; the error says which failed on what.
pub(crate) fn run(steps: &[MountStep]) -> Result<(), String> {
    let mut places = Places::new(steps);
    steps.iter().try_for_each(|next| {
        let mut next = next.clone();
        places.settle(&mut next)?;
        step(&next)
    })
}

/// Where mounts really come to lie below the root-to-be. Its files are somebody else's: the links in it
/// mean what they will mean once it is the root, and never something outside.
struct Places {
    root: Option<String>,
    /// The directories that the set-up itself writes to: no link may lead there.
    private: Vec<PathBuf>,
    taken: Vec<Taken>,
}

/// Where something is mounted already.
struct Taken {
    name: String,
    real: PathBuf,
    linked: bool,
}

impl Places {
    fn new(steps: &[MountStep]) -> Self {
        let root = steps.iter().find_map(|step| match step {
            MountStep::Pivot { root } => Some(root.clone()),
            _ => None,
        });
        let private = steps.iter().filter_map(|step| match step {
            MountStep::File { path, .. } => Path::new(path).parent().map(Path::to_owned),
            _ => None,
        });
        Self { root, private: private.collect(), taken: Vec::new() }
    }

    /// Puts the real paths into a step.
    fn settle(&mut self, step: &mut MountStep) -> Result<(), String> {
        match step {
            // What a sandbox relies on, and what tools name, is a directory of that name: a link could
            // be replaced from inside.
            MountStep::Overlay { target, .. }
            | MountStep::Tmpfs { target, .. }
            | MountStep::Devpts { target } => self.mount(target, false),
            MountStep::Move { from, to } => {
                let at_its_place = self.inside(to) == Some(from.as_str());
                self.mount(to, !at_its_place)
            }
            MountStep::Bind { from, to, .. } => {
                self.follow(from)?;
                self.mount(to, true)
            }
            MountStep::Dir { path, .. } | MountStep::File { path, .. } => {
                self.follow(path).map(drop)
            }
            MountStep::ReadOnly { target } => self.follow(target).map(drop),
            _ => Ok(()),
        }
    }

    /// The path as it will be once the root is the root; `None` for what is not below it.
    fn inside<'a>(&self, path: &'a str) -> Option<&'a str> {
        path.strip_prefix(self.root.as_deref()?).filter(|rest| rest.starts_with('/'))
    }

    fn mount(&mut self, target: &mut String, links: bool) -> Result<(), String> {
        if self.inside(target).is_none() {
            return Ok(());
        }
        let literal = target.clone();
        let linked = self.follow(target)?;
        let name = self.inside(&literal).unwrap_or(&literal);
        if linked && !links {
            return Err(format!(
                "the root has a symbolic link at {name} or on the way there, where a sandbox needs a \
                 directory; give it a root with a directory of that name"
            ));
        }
        let real = PathBuf::from(&*target);
        let hidden = self
            .taken
            .iter()
            .find(|other| (linked || other.linked) && other.real.starts_with(&real))
            .map(|other| other.name.as_str())
            .or_else(|| {
                self.private.iter().any(|p| linked && real.starts_with(p)).then_some("/run")
            });
        if let Some(hidden) = hidden {
            return Err(format!(
                "a symbolic link in the root has {name} and {hidden} lie on each other; give it a root \
                 without that link"
            ));
        }
        let name = name.to_owned();
        self.taken.push(Taken { name, real, linked });
        Ok(())
    }

    /// Follows the links in a path below the root, and says whether there were any.
    fn follow(&self, path: &mut String) -> Result<bool, String> {
        let (Some(root), Some(inside)) = (self.root.as_deref(), self.inside(path)) else {
            return Ok(false);
        };
        let failed = |why: &str| format!("find {inside} in the root: {why}");
        let real = below(Path::new(root), Path::new(inside))
            .map_err(|error| failed(&errno_text(&error)))?
            .into_os_string()
            .into_string()
            .map_err(|_| failed("a link there is not UTF-8"))?;
        let linked = real != *path;
        *path = real;
        Ok(linked)
    }
}

/// Where a path leads to whose root is this one: `..` and absolute links end there. What does not exist
/// is taken as it is named. For trees that nobody changes meanwhile.
pub(crate) fn below(root: &Path, path: &Path) -> io::Result<PathBuf> {
    let mut real = PathBuf::new();
    let mut left: VecDeque<OsString> = names_in(path).collect();
    let mut links = 0;
    while let Some(name) = left.pop_front() {
        if name == ".." {
            real.pop();
            continue;
        }
        let next = root.join(&real).join(&name);
        match fs::read_link(&next) {
            Ok(says) => {
                links += 1;
                if links > LINKS {
                    return Err(io::Error::from_raw_os_error(libc::ELOOP));
                }
                if says.is_absolute() {
                    real.clear();
                }
                for name in names_in(&says).rev() {
                    left.push_front(name);
                }
            }
            // No link, or nothing at all.
            Err(error) if matches!(error.raw_os_error(), Some(libc::EINVAL | libc::ENOENT)) => {
                real.push(name);
            }
            Err(error) => return Err(error),
        }
    }
    Ok(root.join(real))
}

fn names_in(path: &Path) -> impl DoubleEndedIterator<Item = OsString> + '_ {
    path.components().filter_map(|component| match component {
        Component::Normal(name) => Some(name.to_owned()),
        Component::ParentDir => Some("..".into()),
        _ => None,
    })
}

fn step(step: &MountStep) -> Result<(), String> {
    let (what, result) = match step {
        MountStep::Overlay { base, lower, upper, work, target } => {
            return overlay(base, lower, upper, work, target);
        }
        MountStep::Move { from, to } => {
            let done = make_mount_point(from, to).and_then(|()| Ok(mount_move(from, to)?));
            (format!("move the mount {from} to {to}"), done)
        }
        MountStep::Bind { from, to, read_only } => {
            let done = make_mount_point(from, to)
                .and_then(|()| Ok(mount_bind_recursive(from, to)?))
                .and_then(|()| if *read_only { make_read_only(to) } else { Ok(()) });
            (format!("bind {from} to {to}"), done)
        }
        MountStep::Tmpfs { target, mode, size } => {
            (format!("mount a tmpfs on {target}"), tmpfs(target, *mode, *size))
        }
        MountStep::Devpts { target } => (format!("mount a devpts on {target}"), devpts(target)),
        MountStep::Symlink { target, path } => {
            (format!("make the symbolic link {path}"), symlink(target, path))
        }
        MountStep::File { path, contents } => {
            (format!("write {path}"), fs::write(path, contents.as_slice()))
        }
        MountStep::Dir { path, mode } => (format!("make the directory {path}"), dir(path, *mode)),
        MountStep::ReadOnly { target } => {
            (format!("make {target} read-only"), make_read_only(target))
        }
        MountStep::Pivot { root } => (format!("make {root} the root"), pivot(root)),
        _ => return Err("a step of the set-up is unknown to this release".to_owned()),
    };
    result.map_err(|error| format!("{what}: {}", errno_text(&error)))
}

fn overlay(
    base: &str,
    lower: &[String],
    upper: &str,
    work: &str,
    target: &str,
) -> Result<(), String> {
    let failed = |what: &str, error: &io::Error| {
        format!("mount an overlay on {target}: {what}: {}", errno_text(error))
    };
    chdir(base).map_err(|error| failed(base, &error.into()))?;
    fs::create_dir_all(target).map_err(|error| failed(target, &error))?;
    // A volatile overlay leaves this mark, which keeps the layer from being mounted again after a
    // crash of the machine; an ordinary end of the sandbox leaves it too.
    let mark = Path::new(work).join("work/incompat");
    if mark.exists() {
        tree_remove::remove(&mark)?;
    }
    let done = match mount_overlay(lower, upper, work, target, true) {
        Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {
            mount_overlay(lower, upper, work, target, false)
        }
        done => done,
    };
    done.map_err(|error| failed(&format!("{} layers and {upper}", lower.len()), &error))?;
    chdir("/").map_err(|error| failed("/", &error.into()))?;
    let flags = statvfs(target).map_err(|error| failed(target, &error.into()))?.f_flag;
    if flags.contains(StatVfsMountFlags::RDONLY) {
        return Err(format!(
            "mount an overlay on {target}: it came up read-only, which the kernel does when it cannot \
             use the work directory {work}: it and {upper} must be on one filesystem, which is no \
             overlay itself and has user.* attributes"
        ));
    }
    Ok(())
}

fn mount_overlay(
    lower: &[String],
    upper: &str,
    work: &str,
    target: &str,
    volatile: bool,
) -> io::Result<()> {
    let options = overlay_options(lower, upper, work, volatile);
    if options.len() <= PAGE {
        let options = std::ffi::CString::new(options)?;
        return Ok(mount("overlay", target, "overlay", MountFlags::empty(), options.as_c_str())?);
    }
    // More than a page: one option at a time, for kernels that can (6.5 and later).
    let context = fsopen("overlay", FsOpenFlags::FSOPEN_CLOEXEC)?;
    for layer in lower {
        fsconfig_set_string(&context, "lowerdir+", layer.as_str()).map_err(|_| {
            let layers = lower.len();
            io::Error::other(format!("{layers} layers, which this kernel cannot mount at once"))
        })?;
    }
    fsconfig_set_string(&context, "upperdir", upper)?;
    fsconfig_set_string(&context, "workdir", work)?;
    fsconfig_set_flag(&context, "userxattr")?;
    if volatile {
        fsconfig_set_flag(&context, "volatile")?;
    }
    fsconfig_create(&context)?;
    let made = fsmount(&context, FsMountFlags::FSMOUNT_CLOEXEC, MountAttrFlags::empty())?;
    let flags = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH;
    Ok(move_mount(&made, "", rustix::fs::CWD, target, flags)?)
}

fn overlay_options(lower: &[String], upper: &str, work: &str, volatile: bool) -> String {
    let escape = |path: &str| path.replace('\\', "\\\\").replace(',', "\\,");
    let lower: Vec<String> = lower.iter().map(|path| escape(path).replace(':', "\\:")).collect();
    let end = if volatile { ",volatile" } else { "" };
    format!(
        "lowerdir={},upperdir={},workdir={},userxattr{end}",
        lower.join(":"),
        escape(upper),
        escape(work),
    )
}

/// Makes a directory or an empty file, as what will be mounted there is.
fn make_mount_point(from: &str, to: &str) -> io::Result<()> {
    if fs::symlink_metadata(to).is_ok() {
        return Ok(());
    }
    if fs::metadata(from)?.is_dir() {
        return fs::create_dir_all(to);
    }
    if let Some(parent) = Path::new(to).parent() {
        fs::create_dir_all(parent)?;
    }
    fs::File::create(to).map(drop)
}

/// Mount again with the flags that are there, which a user namespace may not clear, and read-only.
fn make_read_only(target: &str) -> io::Result<()> {
    let now = statvfs(target)?.f_flag;
    let mut flags = MountFlags::BIND | MountFlags::RDONLY;
    for (there, flag) in [
        (StatVfsMountFlags::NOSUID, MountFlags::NOSUID),
        (StatVfsMountFlags::NODEV, MountFlags::NODEV),
        (StatVfsMountFlags::NOEXEC, MountFlags::NOEXEC),
        (StatVfsMountFlags::NOATIME, MountFlags::NOATIME),
        (StatVfsMountFlags::NODIRATIME, MountFlags::NODIRATIME),
        (StatVfsMountFlags::RELATIME, MountFlags::RELATIME),
    ] {
        if now.contains(there) {
            flags |= flag;
        }
    }
    Ok(mount_remount(target, flags, c"")?)
}

fn tmpfs(target: &str, mode: u32, size: Option<u64>) -> io::Result<()> {
    fs::create_dir_all(target)?;
    let mut options = format!("mode={mode:o}");
    if let Some(size) = size {
        options += &format!(",size={size}");
    }
    let flags = MountFlags::NOSUID | MountFlags::NODEV;
    let options = std::ffi::CString::new(options)?;
    Ok(mount("tmpfs", target, "tmpfs", flags, options.as_c_str())?)
}

fn devpts(target: &str) -> io::Result<()> {
    fs::create_dir_all(target)?;
    let flags = MountFlags::NOSUID | MountFlags::NOEXEC;
    let options = c"newinstance,ptmxmode=0666,mode=620";
    Ok(mount("devpts", target, "devpts", flags, options)?)
}

fn symlink(target: &str, path: &str) -> io::Result<()> {
    match std::os::unix::fs::symlink(target, path) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
        done => done,
    }
}

fn dir(path: &str, mode: u32) -> io::Result<()> {
    fs::DirBuilder::new().recursive(true).mode(mode).create(path)?;
    // The umask does not count here.
    fs::set_permissions(path, fs::Permissions::from_mode(mode))
}

fn pivot(root: &str) -> io::Result<()> {
    chdir(root)?;
    // The old root comes to lie on the new one, where it is let go of.
    pivot_root(".", ".")?;
    unmount(".", UnmountFlags::DETACH)?;
    Ok(chdir("/")?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn links_end_below_the_root() {
        use std::os::unix::fs::symlink;
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().join("root");
        fs::create_dir_all(root.join("real/etc")).unwrap();
        symlink("/real/etc", root.join("etc")).unwrap();
        symlink("../../../..", root.join("up")).unwrap();
        symlink("../run/x/stub", root.join("real/etc/resolv.conf")).unwrap();
        symlink("loop", root.join("loop")).unwrap();
        for (path, leads_to) in [
            ("/etc/hosts", "real/etc/hosts"),
            ("/etc/resolv.conf", "real/run/x/stub"),
            ("/up/up/new", "new"),
            ("/not/there", "not/there"),
        ] {
            assert_eq!(below(&root, Path::new(path)).unwrap(), root.join(leads_to), "{path}");
        }
        assert!(below(&root, Path::new("/loop")).is_err());
    }

    #[test]
    fn what_a_sandbox_relies_on_is_no_link_and_nothing_is_hidden() {
        use std::os::unix::fs::symlink;
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().to_str().unwrap().to_owned();
        symlink("/workspace", dir.path().join("run")).unwrap();
        symlink("/opt/a", dir.path().join("b")).unwrap();
        let inside = |path: &str| format!("{root}{path}");
        let pivot = MountStep::Pivot { root: root.clone() };
        let mut places = Places::new(&[pivot]);
        let mut run = MountStep::Tmpfs { target: inside("/run"), mode: 0o755, size: None };
        assert!(places.settle(&mut run).unwrap_err().contains("link at /run"));
        let mount = |to: &str| MountStep::Move { from: "/.sbx/m/0".into(), to: inside(to) };
        places.settle(&mut mount("/opt/a/deep")).unwrap();
        let mut free = mount("/b/else");
        places.settle(&mut free).unwrap();
        assert_eq!(free, mount("/opt/a/else"));
        assert!(
            places
                .settle(&mut mount("/b"))
                .unwrap_err()
                .contains("has /b and /opt/a/deep lie on each other")
        );
    }

    #[test]
    fn option_characters_in_names_are_escaped() {
        let lower = ["a:b".to_owned(), "c,d".to_owned()];
        assert_eq!(
            overlay_options(&lower, "up", "w\\k", true),
            "lowerdir=a\\:b:c\\,d,upperdir=up,workdir=w\\\\k,userxattr,volatile"
        );
    }
}
