//! Control groups, version 1 and 2: limits of a sandbox as a whole, and its pausing.
//!
//! What is possible is found out by trying, in the harness's own group and those above it.

use std::{
    collections::BTreeMap,
    fs, io,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use rustix::fd::OwnedFd;
use sandbox_core::{InstanceId, Limits};
use serde::{Deserialize, Serialize};

use super::hierarchy::{Hierarchy, Version, hierarchies};

/// bwrap itself stays in the group, but is not the sandbox's.
const OWN_PROCESSES: u64 = 1;
/// The length in which the CPU limit counts, in microseconds.
const CPU_PERIOD: u64 = 100_000;
/// How long to wait for a group to freeze, or for its last process to be gone.
const PATIENCE: Duration = Duration::from_secs(5);

/// Something that control groups can do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Controller {
    Memory,
    Pids,
    Cpu,
    Freezer,
}

impl Controller {
    const ALL: [Self; 4] = [Self::Memory, Self::Pids, Self::Cpu, Self::Freezer];

    fn name(self) -> &'static str {
        match self {
            Self::Memory => "memory",
            Self::Pids => "pids",
            Self::Cpu => "cpu",
            Self::Freezer => "freezer",
        }
    }

    /// A file that a group has if the controller works in it.
    fn file(self, version: Version) -> &'static str {
        match (self, version) {
            (Self::Memory, Version::V1) => "memory.limit_in_bytes",
            (Self::Memory, Version::V2) => "memory.max",
            (Self::Pids, _) => "pids.max",
            (Self::Cpu, Version::V1) => "cpu.cfs_quota_us",
            (Self::Cpu, Version::V2) => "cpu.max",
            (Self::Freezer, Version::V1) => "freezer.state",
            (Self::Freezer, Version::V2) => "cgroup.freeze",
        }
    }
}

/// What this host lets the harness do.
#[derive(Debug, Default)]
pub(crate) struct Available {
    places: BTreeMap<Controller, (Version, PathBuf)>,
    /// What was tried where nothing was found.
    tried: Vec<String>,
}

/// The groups of an instance.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Groups {
    directories: Vec<Directory>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Directory {
    version: Version,
    controllers: Vec<Controller>,
    path: PathBuf,
}

/// What a launch needs of the groups it made.
#[derive(Debug, Default)]
pub(crate) struct Joined {
    /// Files by which a process joins.
    pub(crate) procs: Vec<OwnedFd>,
    /// Where kills for want of memory are counted.
    pub(crate) oom: Option<OwnedFd>,
}

impl Available {
    /// Tries this host.
    pub(crate) fn find() -> Self {
        let own = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
        let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
        let mut available = Self::default();
        for hierarchy in hierarchies(&mounts, &own) {
            available.try_hierarchy(&hierarchy);
        }
        available
    }

    fn try_hierarchy(&mut self, hierarchy: &Hierarchy) {
        let mut wanted = Controller::ALL.to_vec();
        wanted.retain(|c| !self.places.contains_key(c) && hierarchy.may_have(c.name()));
        // The nearest first: the limits above the harness hold for its sandboxes too. All controllers
        // of a hierarchy come from one place, as a process is in one group of it.
        let mut best: (&Path, Vec<Controller>) = (&hierarchy.own, Vec::new());
        for parent in hierarchy.own.ancestors().take_while(|p| p.starts_with(&hierarchy.mount)) {
            if best.1.len() == wanted.len() {
                break;
            }
            match try_parent(parent, hierarchy.version, &wanted) {
                Ok(found) if found.len() > best.1.len() => best = (parent, found),
                Ok(_) => {}
                Err(error) => self.tried.push(format!("{}: {error}", parent.display())),
            }
        }
        for controller in best.1 {
            self.places.insert(controller, (hierarchy.version, best.0.to_owned()));
        }
    }

    /// Where a controller works, as evidence.
    pub(crate) fn evidence(&self, controller: Controller) -> Result<String, String> {
        match self.places.get(&controller) {
            Some((version, parent)) => Ok(format!(
                "the {} controller of control groups {} works below {}",
                controller.name(),
                if *version == Version::V1 { "version 1" } else { "version 2" },
                parent.display()
            )),
            None if self.tried.is_empty() => {
                Err(format!("no group with the {} controller could be made", controller.name()))
            }
            None => Err(format!(
                "no group with the {} controller could be made ({})",
                controller.name(),
                self.tried.join("; ")
            )),
        }
    }

    /// The groups that an instance gets: those that its limits need, and one to pause it by.
    pub(crate) fn plan(&self, instance: &InstanceId, limits: &Limits) -> Option<Groups> {
        let wanted = [
            (Controller::Memory, limits.memory.is_some()),
            (Controller::Pids, limits.pids.is_some()),
            (Controller::Cpu, limits.cpu_millis.is_some()),
            (Controller::Freezer, true),
        ];
        let mut directories: Vec<Directory> = Vec::new();
        for (controller, _) in wanted.into_iter().filter(|(_, wanted)| *wanted) {
            let Some((version, parent)) = self.places.get(&controller) else { continue };
            let path = parent.join(format!("sandboxer-{instance}"));
            match directories.iter_mut().find(|directory| directory.path == path) {
                Some(directory) => directory.controllers.push(controller),
                None => {
                    let controllers = vec![controller];
                    directories.push(Directory { version: *version, controllers, path });
                }
            }
        }
        (!directories.is_empty()).then_some(Groups { directories })
    }
}

/// Which of these controllers work in a group below this one.
fn try_parent(
    parent: &Path,
    version: Version,
    wanted: &[Controller],
) -> io::Result<Vec<Controller>> {
    let trial = Trial::new(parent)?;
    if version == Version::V2 {
        // A process moves only where its mover may write to the common ancestor's list, too.
        fs::OpenOptions::new().write(true).open(parent.join("cgroup.procs"))?;
        let has = |c: &Controller| trial.0.join(c.file(version)).exists();
        let real_root = !parent.join("cgroup.type").exists();
        if real_root && !wanted.iter().all(has) {
            // Only there may a group with processes pass controllers on. One that the kernel does not
            // have is refused, and then simply is not found below.
            for controller in wanted.iter().filter(|c| **c != Controller::Freezer) {
                let line = format!("+{}", controller.name());
                let _ = fs::write(parent.join("cgroup.subtree_control"), line);
            }
        }
    }
    fs::OpenOptions::new().write(true).open(trial.0.join("cgroup.procs"))?;
    let works = |c: &Controller| {
        fs::OpenOptions::new().write(true).open(trial.0.join(c.file(version))).is_ok()
    };
    Ok(wanted.iter().copied().filter(works).collect())
}

/// A group that is gone again after the trial.
struct Trial(PathBuf);

impl Trial {
    fn new(parent: &Path) -> io::Result<Self> {
        let path = parent.join(format!("sandboxer-trial-{}", InstanceId::new()));
        fs::create_dir(&path)?;
        Ok(Self(path))
    }
}

impl Drop for Trial {
    fn drop(&mut self) {
        let _ = fs::remove_dir(&self.0);
    }
}

impl Groups {
    /// Makes the groups and sets their limits.
    pub(crate) fn make(&self, limits: &Limits) -> io::Result<Joined> {
        let mut joined = Joined::default();
        for directory in self.directories.iter().filter(|d| !d.is_for_pausing_only()) {
            match fs::create_dir(&directory.path) {
                Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
                _ => {}
            }
            for (file, value) in directory.settings(limits) {
                write(&directory.path.join(file), &value)?;
            }
            if limits.memory.is_some() && directory.controllers.contains(&Controller::Memory) {
                directory.limit_swap(limits)?;
                let file = match directory.version {
                    Version::V1 => "memory.oom_control",
                    Version::V2 => "memory.events",
                };
                joined.oom = Some(fs::File::open(directory.path.join(file))?.into());
            }
            let procs = directory.path.join("cgroup.procs");
            joined.procs.push(fs::OpenOptions::new().write(true).open(procs)?.into());
        }
        Ok(joined)
    }

    /// Freezes or thaws all processes, which `processes` lists, and waits until that is so.
    ///
    /// The group may not be there before: to move a process costs the kernel some ten milliseconds,
    /// which a creation need not spend for a pause that may never come.
    pub(crate) fn freeze(
        &self,
        frozen: bool,
        processes: impl Fn() -> io::Result<Vec<u32>>,
    ) -> io::Result<()> {
        let directory = self.freezer().ok_or(io::ErrorKind::Unsupported)?;
        if frozen {
            match fs::create_dir(&directory.path) {
                Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
                _ => {}
            }
        }
        let value = match (directory.version, frozen) {
            (Version::V1, true) => "FROZEN",
            (Version::V1, false) => "THAWED",
            (Version::V2, true) => "1",
            (Version::V2, false) => "0",
        };
        write(&directory.path.join(Controller::Freezer.file(directory.version)), value)?;
        let done = wait_until(|| {
            // What joins a frozen group freezes; what was started meanwhile is found the next time.
            let all_in = !frozen || directory.take_in(&processes()?)?;
            Ok(all_in && directory.is_frozen()? == frozen)
        })?;
        if done { Ok(()) } else { Err(io::ErrorKind::TimedOut.into()) }
    }

    /// Thaws without waiting for it. Groups that are gone are no error.
    pub(crate) fn thaw(&self) -> io::Result<()> {
        let Some(directory) = self.freezer() else { return Ok(()) };
        let value = if directory.version == Version::V1 { "THAWED" } else { "0" };
        let file = directory.path.join(Controller::Freezer.file(directory.version));
        match write(&file, value) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            result => result,
        }
    }

    /// Whether all processes are frozen.
    pub(crate) fn is_frozen(&self) -> io::Result<bool> {
        self.freezer().map_or(Ok(false), Directory::is_frozen)
    }

    /// Whether the groups can freeze.
    pub(crate) fn can_freeze(&self) -> bool {
        self.freezer().is_some()
    }

    /// Removes the groups, once the processes that end are gone from them.
    pub(crate) fn remove(&self) -> io::Result<()> {
        for directory in &self.directories {
            let removed = wait_until(|| match fs::remove_dir(&directory.path) {
                Ok(()) => Ok(true),
                Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(true),
                Err(error) if error.kind() == io::ErrorKind::ResourceBusy => Ok(false),
                Err(error) => Err(error),
            })?;
            if !removed {
                let message = format!("{} still has processes", directory.path.display());
                return Err(io::Error::new(io::ErrorKind::ResourceBusy, message));
            }
        }
        Ok(())
    }

    /// Whether a limit of this kind holds for the group as a whole.
    pub(crate) fn limits(&self, controller: Controller) -> bool {
        self.with(controller).is_some()
    }

    /// The most memory that was ever in use, where the kernel keeps it.
    pub(crate) fn memory_peak(&self) -> Option<u64> {
        let directory = self.with(Controller::Memory)?;
        let file = match directory.version {
            Version::V1 => "memory.max_usage_in_bytes",
            Version::V2 => "memory.peak",
        };
        fs::read_to_string(directory.path.join(file)).ok()?.trim().parse().ok()
    }

    fn freezer(&self) -> Option<&Directory> {
        self.with(Controller::Freezer)
    }

    fn with(&self, controller: Controller) -> Option<&Directory> {
        self.directories.iter().find(|d| d.controllers.contains(&controller))
    }
}

impl Directory {
    fn is_for_pausing_only(&self) -> bool {
        self.controllers == [Controller::Freezer]
    }

    /// Moves processes in that are not there yet; whether all were.
    fn take_in(&self, processes: &[u32]) -> io::Result<bool> {
        let procs = self.path.join("cgroup.procs");
        let there = fs::read_to_string(&procs)?;
        let there: Vec<u32> = there.lines().filter_map(|line| line.trim().parse().ok()).collect();
        let mut all = true;
        for pid in processes.iter().filter(|pid| !there.contains(*pid)) {
            all = false;
            match write(&procs, &pid.to_string()) {
                // It has ended.
                Err(error) if error.raw_os_error() == Some(libc::ESRCH) => {}
                result => result?,
            }
        }
        Ok(all)
    }

    fn settings(&self, limits: &Limits) -> Vec<(&'static str, String)> {
        let mut settings = Vec::new();
        for controller in &self.controllers {
            let file = controller.file(self.version);
            match (controller, self.version) {
                (Controller::Memory, _) => {
                    settings.extend(limits.memory.map(|bytes| (file, bytes.to_string())));
                }
                (Controller::Pids, _) => {
                    let all = |pids: u64| pids.saturating_add(OWN_PROCESSES).to_string();
                    settings.extend(limits.pids.map(|pids| (file, all(pids))));
                }
                (Controller::Cpu, version) => {
                    let Some(millis) = limits.cpu_millis else { continue };
                    // The kernel takes no less than a millisecond.
                    let quota = (millis.saturating_mul(CPU_PERIOD) / 1000).max(1000);
                    if version == Version::V1 {
                        settings.push(("cpu.cfs_period_us", CPU_PERIOD.to_string()));
                        settings.push((file, quota.to_string()));
                    } else {
                        settings.push((file, format!("{quota} {CPU_PERIOD}")));
                    }
                }
                (Controller::Freezer, _) => {}
            }
        }
        settings
    }

    /// Gives no swap on top of the memory, where swap is counted at all: without that count there is
    /// either no swap, or no way to limit it.
    fn limit_swap(&self, limits: &Limits) -> io::Result<()> {
        let (file, value) = match self.version {
            Version::V1 => ("memory.memsw.limit_in_bytes", limits.memory.unwrap_or(u64::MAX)),
            Version::V2 => ("memory.swap.max", 0),
        };
        let path = self.path.join(file);
        if path.exists() { write(&path, &value.to_string()) } else { Ok(()) }
    }

    fn is_frozen(&self) -> io::Result<bool> {
        let (file, sign) = match self.version {
            Version::V1 => ("freezer.state", "FROZEN"),
            Version::V2 => ("cgroup.events", "frozen 1"),
        };
        match fs::read_to_string(self.path.join(file)) {
            Ok(text) => Ok(text.lines().any(|line| line.trim() == sign)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
            Err(error) => Err(error),
        }
    }
}

fn write(path: &Path, value: &str) -> io::Result<()> {
    fs::write(path, value).map_err(|error| {
        io::Error::new(error.kind(), format!("{value:?} to {}: {error}", path.display()))
    })
}

/// Polls, as neither version tells of all that is waited for here. It is over within a few steps.
fn wait_until(mut done: impl FnMut() -> io::Result<bool>) -> io::Result<bool> {
    let begin = Instant::now();
    let mut step = Duration::from_micros(50);
    loop {
        if done()? {
            return Ok(true);
        }
        if begin.elapsed() > PATIENCE {
            return Ok(false);
        }
        std::thread::sleep(step);
        step = (step * 2).min(Duration::from_millis(20));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_become_settings() {
        let mut limits = Limits::default();
        limits.memory = Some(1 << 20);
        limits.pids = Some(9);
        limits.cpu_millis = Some(1500);
        let controllers = Controller::ALL.to_vec();
        let both = [Version::V1, Version::V2].map(|version| {
            Directory { version, controllers: controllers.clone(), path: "/x".into() }
                .settings(&limits)
        });
        insta::assert_debug_snapshot!(both);
    }
}
