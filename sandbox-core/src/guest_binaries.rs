//! Where guest programs come from.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    sync::Arc,
};

use sha2::{Digest, Sha256};

use crate::{Error, ErrorKind, Result};

/// The environment variable that names a folder of guest programs, one for each architecture:
/// `sandbox-guest-x86_64`, `sandbox-guest-aarch64` …
pub const GUEST_DIR_VARIABLE: &str = "SANDBOX_GUEST_DIR";

/// The guest programs that backends may bring into places.
#[derive(Debug, Clone)]
pub struct GuestBinaries {
    by_arch: BTreeMap<String, Arc<GuestBinary>>,
}

/// A guest program for one architecture.
#[derive(Clone)]
pub struct GuestBinary {
    arch: String,
    bytes: std::borrow::Cow<'static, [u8]>,
    checksum: String,
}

impl GuestBinaries {
    /// The program that this library brings, and those of the folder that `SANDBOX_GUEST_DIR` names,
    /// which win.
    ///
    /// # Errors
    ///
    /// If the folder cannot be read, or a program in it is not one for its architecture.
    pub fn standard() -> Result<Self> {
        let mut found = Self::none();
        if let Some(bytes) = sandbox_guest::bundled() {
            found.add(std::env::consts::ARCH, bytes.into())?;
        }
        match std::env::var_os(GUEST_DIR_VARIABLE) {
            Some(dir) => found.with_dir(PathBuf::from(dir)),
            None => Ok(found),
        }
    }

    /// None at all.
    #[must_use]
    pub fn none() -> Self {
        Self { by_arch: BTreeMap::new() }
    }

    /// The same, and those of a folder, which win.
    ///
    /// # Errors
    ///
    /// As [`standard`](Self::standard).
    pub fn with_dir(mut self, dir: impl AsRef<Path>) -> Result<Self> {
        let dir = dir.as_ref();
        let failed = |error| Error::io("find guest programs", dir.display().to_string(), error);
        for entry in std::fs::read_dir(dir).map_err(failed)? {
            let entry = entry.map_err(failed)?;
            let name = entry.file_name();
            if let Some(arch) = name.to_str().and_then(|name| name.strip_prefix("sandbox-guest-")) {
                let bytes = std::fs::read(entry.path()).map_err(failed)?;
                self.add(arch, bytes.into())?;
            }
        }
        Ok(self)
    }

    /// The program for an architecture, as `uname -m` says it.
    ///
    /// # Errors
    ///
    /// `Unsupported` if there is none; the message says how to add one.
    pub fn get(&self, arch: &str) -> Result<Arc<GuestBinary>> {
        self.by_arch.get(arch).cloned().ok_or_else(|| {
            let known: Vec<&str> = self.by_arch.keys().map(String::as_str).collect();
            let message = format!(
                "no guest program for the architecture {arch} (there are: {}); build \
                 sandbox-guest for it and put it as sandbox-guest-{arch} into a folder that {} names",
                if known.is_empty() { "none".to_owned() } else { known.join(", ") },
                GUEST_DIR_VARIABLE,
            );
            Error::unsupported("find the guest program", message)
        })
    }

    fn add(&mut self, arch: &str, bytes: std::borrow::Cow<'static, [u8]>) -> Result<()> {
        let actual = elf_arch(&bytes);
        if actual.is_some_and(|actual| actual != arch) || actual.is_none() {
            let message = format!(
                "the guest program for {arch} is {}; build sandbox-guest for {arch}",
                actual.map_or("no ELF program that is known".into(), |a| format!("one for {a}")),
            );
            return Err(Error::new(ErrorKind::Unsupported, "find guest programs", message));
        }
        let checksum = Sha256::digest(&bytes).iter().map(|byte| format!("{byte:02x}")).collect();
        let binary = GuestBinary { arch: arch.to_owned(), bytes, checksum };
        self.by_arch.insert(arch.to_owned(), Arc::new(binary));
        Ok(())
    }
}

impl GuestBinary {
    /// The program.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// Its SHA-256, in hexadecimal digits: the same program has the same place everywhere.
    #[must_use]
    pub fn checksum(&self) -> &str {
        &self.checksum
    }

    /// Writes it into a directory of this host, unless it is there, and returns its path. Whoever comes
    /// first writes it, whole or not at all; when this returns it can be run.
    ///
    /// # Errors
    ///
    /// If it cannot be written, or does not run there.
    pub fn install(&self, dir: &Path) -> Result<PathBuf> {
        let path = dir.join(format!("sandbox-guest-{}", self.checksum));
        if path.exists() {
            return Ok(path);
        }
        let making = dir.join(format!(".new-{}", crate::InstanceId::new()));
        let made = self.write(&making).and_then(|()| std::fs::rename(&making, &path));
        if made.is_err() {
            let _ = std::fs::remove_file(&making);
        }
        let what = || format!("the guest program {}", path.display());
        made.map_err(|error| Error::io("install the guest program", what(), error))?;
        Ok(path)
    }

    fn write(&self, path: &Path) -> std::io::Result<()> {
        use std::os::unix::fs::PermissionsExt;
        std::fs::write(path, &self.bytes)?;
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o755))?;
        if self.arch == std::env::consts::ARCH { until_it_runs(path) } else { Ok(()) }
    }
}

/// What another thread forks while the program is written has it open for writing until it starts a program
/// of its own, and what is open for writing cannot be run.
fn until_it_runs(program: &Path) -> std::io::Result<()> {
    use std::{io::ErrorKind::ExecutableFileBusy, process::Command, time::Duration};
    let run = || Command::new(program).arg("--version").output();
    let ran = (0..1000).find_map(|_| match run() {
        Err(error) if error.kind() == ExecutableFileBusy => {
            std::thread::sleep(Duration::from_millis(1));
            None
        }
        ran => Some(ran),
    });
    match ran {
        Some(Ok(output)) if !output.status.success() => {
            Err(std::io::Error::other(format!("it does not run here ({})", output.status)))
        }
        Some(Ok(_)) => Ok(()),
        Some(Err(error)) => Err(error),
        None => Err(ExecutableFileBusy.into()),
    }
}

impl std::fmt::Debug for GuestBinary {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "GuestBinary({}, {} bytes, {})", self.arch, self.bytes.len(), self.checksum)
    }
}

/// The architecture of an ELF program, by its header's machine field.
fn elf_arch(bytes: &[u8]) -> Option<&'static str> {
    if bytes.len() < 20 || bytes[..4] != *b"\x7fELF" {
        return None;
    }
    match u16::from_le_bytes([bytes[18], bytes[19]]) {
        3 => Some("x86"),
        40 => Some("arm"),
        62 => Some("x86_64"),
        183 => Some("aarch64"),
        243 => Some("riscv64"),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn elf(machine: u16) -> Vec<u8> {
        let mut bytes = vec![0; 20];
        bytes[..4].copy_from_slice(b"\x7fELF");
        bytes[18..].copy_from_slice(&machine.to_le_bytes());
        bytes
    }

    #[test]
    fn the_program_is_installed_once_and_runs() {
        let dir = tempfile::tempdir().unwrap();
        let bytes = sandbox_guest::bundled().unwrap();
        let mut binaries = GuestBinaries::none();
        binaries.add(std::env::consts::ARCH, bytes.into()).unwrap();
        let guest = binaries.get(std::env::consts::ARCH).unwrap();
        let paths: Vec<PathBuf> = std::thread::scope(|scope| {
            let all: Vec<_> =
                (0..8).map(|_| scope.spawn(|| guest.install(dir.path()).unwrap())).collect();
            all.into_iter().map(|one| one.join().unwrap()).collect()
        });
        assert!(paths.iter().all(|path| *path == paths[0]));
        assert_eq!(std::fs::read(&paths[0]).unwrap(), bytes);
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1);
        let error = guest.install(&dir.path().join("nowhere")).unwrap_err();
        assert!(error.to_string().contains("the guest program"), "{error}");
    }

    #[test]
    fn a_program_of_another_architecture_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("sandbox-guest-aarch64"), elf(62)).unwrap();
        let error = GuestBinaries::none().with_dir(dir.path()).unwrap_err();
        assert!(error.to_string().contains("the guest program for aarch64 is one for x86_64"));
    }

    #[test]
    fn a_missing_architecture_says_how_to_add_it() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("sandbox-guest-aarch64"), elf(183)).unwrap();
        let binaries = GuestBinaries::none().with_dir(dir.path()).unwrap();
        assert_eq!(binaries.get("aarch64").unwrap().checksum().len(), 64);
        let error = binaries.get("riscv64").unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unsupported);
        assert!(error.to_string().contains("sandbox-guest-riscv64"), "{error}");
    }
}
