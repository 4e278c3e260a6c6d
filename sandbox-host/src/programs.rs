//! The two programs that are run: `bwrap`, which has to be there, and the guest, which is brought along.

use std::{
    fs, io,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    time::Duration,
};

use sandbox_core::{Error, ErrorKind, GuestBinaries, Result};

use crate::error::at;

/// The directory with the guest program, below the one for all of them; written once for each program.
pub(crate) fn guest_dir(programs: &GuestBinaries, guests: &Path) -> Result<PathBuf> {
    const OPERATION: &str = "provision";
    let guest = programs.get(std::env::consts::ARCH)?;
    let dir = guests.join(guest.checksum());
    if dir.is_dir() {
        return Ok(dir);
    }
    let making = guests.join(format!(".new-{}", sandbox_core::InstanceId::new()));
    let make = || {
        fs::create_dir(&making)?;
        fs::set_permissions(&making, fs::Permissions::from_mode(0o755))?;
        let program = making.join("guest");
        fs::write(&program, guest.bytes())?;
        fs::set_permissions(&program, fs::Permissions::from_mode(0o755))?;
        until_nobody_writes(&program)?;
        match fs::rename(&making, &dir) {
            Err(_) if dir.is_dir() => crate::tree::remove(&making),
            result => result,
        }
    };
    make().map_err(at(OPERATION, &dir))?;
    Ok(dir)
}

/// A process that another thread forked while the program was being written has it open for writing
/// until it starts a program of its own, and what is open for writing cannot be run. The kernel grants a
/// lease for reading only when nobody writes.
fn until_nobody_writes(program: &Path) -> io::Result<()> {
    let file = fs::File::open(program)?;
    for _ in 0..1000 {
        match crate::sys::try_lease(&file) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                std::thread::sleep(Duration::from_millis(1));
            }
            // Granted; or a filesystem without leases, where it cannot be known.
            _ => return Ok(()),
        }
    }
    Ok(())
}

/// The program as an absolute path. It is looked up here because bwrap gets no environment.
pub(crate) fn find_program(program: &Path) -> Result<PathBuf> {
    if program.components().count() > 1 {
        return Ok(program.to_owned());
    }
    let path = std::env::var_os("PATH").unwrap_or_else(|| "/usr/local/bin:/usr/bin:/bin".into());
    let is_program = |path: &PathBuf| {
        fs::metadata(path).is_ok_and(|m| m.is_file() && m.permissions().mode() & 0o111 != 0)
    };
    std::env::split_paths(&path).map(|dir| dir.join(program)).find(is_program).ok_or_else(|| {
        let message = format!(
            "the program {} is not in PATH; install bubblewrap (the package is called bubblewrap on \
             Debian, Ubuntu, Fedora, Arch and Alpine), or name the program when the backend is set up",
            program.display()
        );
        Error::new(ErrorKind::Unavailable, "find bwrap", message).retryable(false)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_program_says_what_to_install() {
        let error = find_program(Path::new("no-such-bwrap")).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unavailable);
        assert!(!error.is_retryable());
        assert!(error.to_string().contains("install bubblewrap"), "{error}");
    }
}
