//! Where the control groups are that the harness is in, from what the kernel lists.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

/// Of the interface.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Version {
    V1,
    V2,
}

/// A tree of control groups.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Hierarchy {
    pub(crate) version: Version,
    /// Of version 1, which are attached to it.
    controllers: Vec<String>,
    pub(crate) mount: PathBuf,
    /// The harness's own group.
    pub(crate) own: PathBuf,
}

impl Hierarchy {
    /// Whether the controller of this name can be in it.
    pub(crate) fn may_have(&self, controller: &str) -> bool {
        self.version == Version::V2 || self.controllers.iter().any(|name| name == controller)
    }
}

/// The mounted hierarchies, version 2 first, from `/proc/self/mountinfo` and `/proc/self/cgroup`.
pub(crate) fn hierarchies(mounts: &str, own: &str) -> Vec<Hierarchy> {
    let mut found = Vec::new();
    for line in mounts.lines() {
        let Some((left, right)) = line.split_once(" - ") else { continue };
        let left: Vec<&str> = left.split(' ').collect();
        let right: Vec<&str> = right.split(' ').collect();
        let (&[_, _, _, root, mount, ..], &[kind, _, options, ..]) = (&left[..], &right[..]) else {
            continue;
        };
        let version = match kind {
            "cgroup" => Version::V1,
            "cgroup2" => Version::V2,
            _ => continue,
        };
        let controllers: Vec<String> = match version {
            Version::V1 => options.split(',').map(str::to_owned).collect(),
            Version::V2 => Vec::new(),
        };
        let in_it = |names: &str| match version {
            Version::V1 => names.split(',').any(|name| controllers.iter().any(|c| c == name)),
            Version::V2 => names.is_empty(),
        };
        let path = own.lines().find_map(|line| {
            let mut fields = line.splitn(3, ':').skip(1);
            let (names, path) = (fields.next()?, fields.next()?);
            in_it(names).then_some(path)
        });
        let Some(path) = path else { continue };
        let mount = PathBuf::from(mount.replace("\\040", " "));
        // A group outside of what is mounted cannot be seen: what is mounted is all there is then.
        let own = match Path::new(path).strip_prefix(root) {
            Ok(below) if !path.contains("..") && below != Path::new("") => mount.join(below),
            _ => mount.clone(),
        };
        found.push(Hierarchy { version, controllers, mount, own });
    }
    found.sort_by_key(|hierarchy| std::cmp::Reverse(hierarchy.version));
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn version_2_of_a_login_session() {
        let mounts = "25 1 0:22 / /proc rw - proc proc rw\n\
                      30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n";
        let own = "0::/user.slice/user-1000.slice/user@1000.service/app.slice/x.scope\n";
        let found = hierarchies(mounts, own);
        assert_eq!(found.len(), 1);
        assert_eq!(found[0].version, Version::V2);
        assert!(found[0].own.ends_with("user@1000.service/app.slice/x.scope"));
        assert!(found[0].may_have("memory"));
    }

    #[test]
    fn both_versions_side_by_side() {
        let mounts = "40 39 0:30 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n\
                      41 39 0:31 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n\
                      42 39 0:32 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n";
        let own = "4:memory:/jobs/a\n1:cpu,cpuacct:/\n9:name=systemd:/x\n0::/\n";
        let found = hierarchies(mounts, own);
        let own: Vec<&Path> = found.iter().map(|h| h.own.as_path()).collect();
        assert_eq!(
            own,
            [
                Path::new("/sys/fs/cgroup/unified"),
                Path::new("/sys/fs/cgroup/cpu,cpuacct"),
                Path::new("/sys/fs/cgroup/memory/jobs/a"),
            ]
        );
        assert!(found[2].may_have("memory") && !found[2].may_have("pids"));
    }

    #[test]
    fn inside_a_container_only_what_is_mounted_counts() {
        let mounts = "40 39 0:30 /docker/abc /sys/fs/cgroup/pids ro - cgroup cgroup rw,pids\n";
        for own in ["4:pids:/docker/abc\n", "4:pids:/elsewhere\n", "4:pids:/../x\n"] {
            assert_eq!(hierarchies(mounts, own)[0].own, Path::new("/sys/fs/cgroup/pids"));
        }
    }
}
