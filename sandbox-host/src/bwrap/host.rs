//! What of this host a sandbox shows, and the read-only skeleton that it is hung into.

use std::{
    fs, io,
    os::unix::fs::{PermissionsExt, chown, symlink},
    path::{Path, PathBuf},
};

use serde::Serialize;
use sha2::{Digest, Sha256};

use super::{run_as::RunAs, settings, tree};

/// The user and group that a sandbox's processes have inside.
pub(crate) const INSIDE_ID: u32 = 1000;
/// That user's home directory, inside.
pub(crate) const HOME: &str = "/home/sandbox";

/// Directories that programs and libraries are in.
const DIRECTORIES: [&str; 9] = [
    "/usr",
    "/bin",
    "/sbin",
    "/lib",
    "/lib32",
    "/lib64",
    "/libx32",
    "/nix/store",
    "/var/lib/ca-certificates",
];

/// What programs read in `/etc` to work as they do on the host. Nothing that names the host's users or
/// may hold a secret.
const ETC: [&str; 36] = [
    "alternatives",
    "bash.bashrc",
    "ca-certificates",
    "ca-certificates.conf",
    "crypto-policies",
    "debian_version",
    "fonts",
    "gai.conf",
    "host.conf",
    "inputrc",
    "java",
    "java-11-openjdk",
    "java-17-openjdk",
    "java-21-openjdk",
    "java-25-openjdk",
    "ld.so.cache",
    "ld.so.conf",
    "ld.so.conf.d",
    "localtime",
    "locale.alias",
    "locale.conf",
    "magic",
    "magic.mime",
    "maven",
    "mime.types",
    "os-release",
    "perl",
    "pki/ca-trust",
    "pki/java",
    "pki/tls/certs",
    "protocols",
    "python3",
    "services",
    "shells",
    "ssl",
    "terminfo",
];

/// Directories that the skeleton has besides, with their modes.
const SKELETON: [(&str, u32); 19] = [
    ("dev", 0o755),
    ("etc", 0o755),
    ("home", 0o755),
    ("home/sandbox", 0o755),
    ("mnt", 0o755),
    ("opt", 0o755),
    ("proc", 0o555),
    ("run", 0o755),
    ("srv", 0o755),
    ("sys", 0o555),
    ("tmp", 0o1777),
    ("usr", 0o755),
    ("var", 0o755),
    ("var/cache", 0o755),
    ("var/lib", 0o755),
    ("var/log", 0o755),
    ("var/spool", 0o755),
    ("var/tmp", 0o1777),
    ("workspace", 0o755),
];

/// Files over which each sandbox gets its own.
pub(crate) const IDENTITY_FILES: [&str; 4] = ["hostname", "hosts", "machine-id", "resolv.conf"];

/// What of this host a sandbox with the standard root shows.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(crate) struct HostView {
    /// Directories of this host, shown at the same place.
    pub(crate) directories: Vec<PathBuf>,
    /// Files and directories of `/etc` that the skeleton has a copy of: the name there, and where it
    /// really is. A copy costs nothing per sandbox, where a mount would.
    pub(crate) etc: Vec<(String, PathBuf)>,
    /// Symbolic links: the path, relative to the root, and what it says.
    pub(crate) links: Vec<(PathBuf, PathBuf)>,
    /// The sandbox user's shell.
    pub(crate) shell: String,
}

impl HostView {
    /// Looks at a host's root directory, which is `/` but in tests.
    pub(crate) fn look(root: &Path) -> io::Result<Self> {
        let mut view = Self {
            directories: Vec::new(),
            etc: Vec::new(),
            links: Vec::new(),
            shell: "/bin/sh".to_owned(),
        };
        for name in DIRECTORIES {
            let relative = Path::new(name).strip_prefix("/").unwrap_or(Path::new(name));
            let path = root.join(relative);
            match fs::symlink_metadata(&path) {
                Ok(found) if found.is_symlink() => {
                    view.links.push((relative.to_owned(), fs::read_link(&path)?));
                }
                Ok(found) if found.is_dir() => view.directories.push(name.into()),
                _ => {}
            }
        }
        for name in ETC {
            let path = root.join("etc").join(name);
            let Ok(found) = fs::symlink_metadata(&path) else { continue };
            let Ok(real) = path.canonicalize() else { continue };
            let inside = Path::new("/").join(real.strip_prefix(root).unwrap_or(&real));
            let shown = view.directories.iter().any(|directory| inside.starts_with(directory));
            if found.is_symlink() && shown {
                view.links.push((Path::new("etc").join(name), fs::read_link(&path)?));
            } else {
                view.etc.push((name.to_owned(), real));
            }
        }
        if root.join("usr/bin/bash").exists() || root.join("bin/bash").exists() {
            "/bin/bash".clone_into(&mut view.shell);
        }
        Ok(view)
    }

    /// A name for the skeleton that belongs to this view: another view has another one.
    fn hash(&self) -> io::Result<String> {
        let mut changed = Vec::new();
        for (_, real) in &self.etc {
            settings::stamps(real, &mut changed)?;
        }
        let parts = (self, changed, SKELETON, self.passwd(), GROUP, NSSWITCH);
        let bytes = serde_json::to_vec(&parts)?;
        Ok(Sha256::digest(bytes).iter().take(16).map(|byte| format!("{byte:02x}")).collect())
    }

    fn passwd(&self) -> String {
        let shell = &self.shell;
        format!(
            "root:x:0:0:root:/root:/bin/sh\n\
             sandbox:x:{INSIDE_ID}:{INSIDE_ID}:sandbox:{HOME}:{shell}\n\
             nobody:x:65534:65534:nobody:/nonexistent:/bin/false\n"
        )
    }

    /// The skeleton of the root filesystem in this directory, made if it is not there yet.
    pub(crate) fn skeleton(&self, skeletons: &Path, run_as: Option<RunAs>) -> io::Result<PathBuf> {
        let path = skeletons.join(self.hash()?);
        if path.is_dir() {
            return Ok(path);
        }
        // Elsewhere first: what has the final name is whole, whoever else makes it at the same time.
        let unique = sandbox_core::InstanceId::new();
        let making = skeletons.join(format!(".new-{unique}"));
        self.build(&making, run_as)?;
        match fs::rename(&making, &path) {
            Ok(()) => Ok(path),
            Err(error) => {
                tree::remove(&making)?;
                if path.is_dir() { Ok(path) } else { Err(error) }
            }
        }
    }

    fn build(&self, at: &Path, run_as: Option<RunAs>) -> io::Result<()> {
        let own = |path: &Path| match run_as {
            Some(RunAs { uid, gid }) => std::os::unix::fs::lchown(path, Some(uid), Some(gid)),
            None => Ok(()),
        };
        let dir = |path: &Path, mode: u32| {
            fs::create_dir_all(path)?;
            fs::set_permissions(path, fs::Permissions::from_mode(mode))?;
            match run_as {
                Some(RunAs { uid, gid }) => chown(path, Some(uid), Some(gid)),
                None => Ok(()),
            }
        };
        let file = |path: &Path, contents: &str| {
            fs::write(path, contents)?;
            fs::set_permissions(path, fs::Permissions::from_mode(0o644))?;
            own(path)
        };
        dir(at, 0o755)?;
        for (name, mode) in SKELETON {
            dir(&at.join(name), mode)?;
        }
        for path in &self.directories {
            let relative = path.strip_prefix("/").unwrap_or(path);
            if let Some(parent) = relative.parent() {
                dir(&at.join(parent), 0o755)?;
            }
            dir(&at.join(relative), 0o755)?;
        }
        let parent_of_etc = |name: &Path| match name.parent().filter(|p| *p != Path::new("etc")) {
            Some(parent) if parent.starts_with("etc") => {
                for dir_above in [parent.parent(), Some(parent)].into_iter().flatten() {
                    dir(&at.join(dir_above), 0o755)?;
                }
                Ok(())
            }
            _ => Ok::<(), io::Error>(()),
        };
        for (name, real) in &self.etc {
            let name = Path::new("etc").join(name);
            parent_of_etc(&name)?;
            settings::copy(real, &at.join(name), run_as)?;
        }
        for (path, target) in &self.links {
            parent_of_etc(path)?;
            symlink(target, at.join(path))?;
            own(&at.join(path))?;
        }
        for name in IDENTITY_FILES {
            file(&at.join("etc").join(name), "")?;
        }
        file(&at.join("etc/passwd"), &self.passwd())?;
        file(&at.join("etc/group"), GROUP)?;
        file(&at.join("etc/nsswitch.conf"), NSSWITCH)?;
        Ok(())
    }
}

const GROUP: &str = "root:x:0:\nsandbox:x:1000:\nnogroup:x:65534:\n";
const NSSWITCH: &str = "passwd: files\ngroup: files\nhosts: files dns\nservices: files\n\
                        protocols: files\n";

#[cfg(test)]
mod tests {
    use super::*;

    fn host() -> tempfile::TempDir {
        let host = tempfile::tempdir().unwrap();
        let root = host.path();
        for dir in
            ["usr/bin", "usr/lib", "usr/share/zoneinfo", "etc/ssl", "etc/pki/tls/certs", "opt/x"]
        {
            fs::create_dir_all(root.join(dir)).unwrap();
        }
        fs::write(root.join("usr/share/zoneinfo/UTC"), "").unwrap();
        fs::create_dir(root.join("etc/ssl/private")).unwrap();
        for file in
            ["etc/shadow", "etc/passwd", "etc/services", "etc/ssl/private/key", "opt/x/fonts"]
        {
            fs::write(root.join(file), "the host's").unwrap();
        }
        let private = fs::Permissions::from_mode(0o710);
        fs::set_permissions(root.join("etc/ssl/private"), private).unwrap();
        symlink("usr/bin", root.join("bin")).unwrap();
        fs::create_dir(root.join("lib64")).unwrap();
        symlink("../usr/share/zoneinfo/UTC", root.join("etc/localtime")).unwrap();
        symlink("../opt/x/fonts", root.join("etc/fonts")).unwrap();
        symlink("nowhere", root.join("etc/magic")).unwrap();
        host
    }

    #[test]
    fn programs_and_chosen_settings_are_shown() {
        let host = host();
        let view = HostView::look(&host.path().canonicalize().unwrap()).unwrap();
        insta::assert_json_snapshot!(view, { ".etc[][1]" => "[where it really is]" });
    }

    #[test]
    fn a_skeleton_is_made_once_and_holds_nothing_private_of_the_hosts() {
        let host = host();
        let view = HostView::look(&host.path().canonicalize().unwrap()).unwrap();
        let skeletons = tempfile::tempdir().unwrap();
        let first = view.skeleton(skeletons.path(), None).unwrap();
        assert_eq!(view.skeleton(skeletons.path(), None).unwrap(), first);
        assert_eq!(fs::read_dir(skeletons.path()).unwrap().count(), 1);
        assert_eq!(fs::read_link(first.join("bin")).unwrap(), Path::new("usr/bin"));
        assert_eq!(fs::metadata(first.join("tmp")).unwrap().permissions().mode() & 0o7777, 0o1777);
        assert!(first.join("etc/pki/tls/certs").is_dir());
        assert!(first.join("lib64").is_dir());
        assert!(!first.join("etc/shadow").exists());
        assert!(first.join("etc/ssl").is_dir() && !first.join("etc/ssl/private").exists());
        assert_eq!(fs::read_to_string(first.join("etc/services")).unwrap(), "the host's");
        let passwd = fs::read_to_string(first.join("etc/passwd")).unwrap();
        assert!(passwd.contains("sandbox:x:1000:1000:") && !passwd.contains("the host's"));
        fs::write(host.path().join("etc/services"), "changed meanwhile").unwrap();
        assert_ne!(view.skeleton(skeletons.path(), None).unwrap(), first);
        let other = HostView { shell: "/bin/zsh".into(), ..view };
        assert_ne!(other.skeleton(skeletons.path(), None).unwrap(), first);
    }
}
