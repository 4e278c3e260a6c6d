//! Directories that were taken in: what sandboxes' workspaces are laid over, or copied from.
//!
//! One is named after its list (paths, kinds, modes, sizes, times), so that what has not changed is there
//! already. It never changes; files that it has in common with an older one from the same place are the same
//! files. It stays as long as an instance or a snapshot stands on it, and the last ones a while longer.

use std::{
    fs, io,
    os::unix::fs::DirBuilderExt,
    path::{Path, PathBuf},
    time::{Duration, SystemTime},
};

use sandbox_core::{Error, ErrorKind, Result};
use sha2::{Digest, Sha256};

use crate::{error::at, message::Entry, process::Worker, tree};

const OPERATION: &str = "keep the workspace";
/// How long one stays that nothing stands on: somebody may just be about to use it.
const GRACE: Duration = Duration::from_secs(3600);
/// In one that is being made: by whom.
const MAKER: &str = "maker";
/// Where what stands on them is.
const STANDING: [&str; 8] = [
    "bwrap/instances",
    "bwrap/layers",
    "account/instances",
    "account/snapshots",
    "machine/instances",
    "machine/snapshots",
    "compose/instances",
    "compose/snapshots",
];
/// How many stay that nothing stands on.
const UNUSED: usize = 8;

/// Where they are.
#[derive(Debug, Clone)]
pub(super) struct Sources {
    state: PathBuf,
}

/// One of them.
#[derive(Debug, Clone)]
pub(super) struct Source {
    path: PathBuf,
}

impl Source {
    pub(super) fn tree(&self) -> PathBuf {
        self.path.join("tree")
    }

    pub(super) fn list(&self) -> PathBuf {
        self.path.join("list.json")
    }

    pub(super) fn origin(&self) -> PathBuf {
        self.path.join("origin")
    }

    fn users(&self) -> PathBuf {
        self.path.join("users")
    }

    /// Notes that it was of use now.
    fn touch(&self) -> io::Result<()> {
        fs::write(self.path.join("used"), [])
    }

    fn used(&self) -> SystemTime {
        let used = fs::metadata(self.path.join("used")).and_then(|used| used.modified());
        used.unwrap_or(SystemTime::UNIX_EPOCH)
    }
}

/// A list's name.
pub(super) fn name(list: &[Entry]) -> Result<String> {
    let bytes = serde_json::to_vec(list).map_err(|error| {
        Error::new(ErrorKind::Backend, OPERATION, "the list").with_source(error)
    })?;
    Ok(Sha256::digest(bytes).iter().take(16).map(|byte| format!("{byte:02x}")).collect())
}

impl Sources {
    pub(super) fn of(state: &Path) -> Self {
        Self { state: state.to_owned() }
    }

    fn root(&self) -> PathBuf {
        self.state.join("sources")
    }

    /// The one of this name, if it is there.
    pub(super) fn find(&self, name: &str) -> Option<Source> {
        let source = Source { path: self.root().join(name) };
        source.tree().is_dir().then_some(())?;
        source.touch().ok().map(|()| source)
    }

    /// The one that came last from a place.
    pub(super) fn latest(&self, origin: &str) -> Option<Source> {
        let from =
            |source: &Source| fs::read(source.origin()).is_ok_and(|o| o == origin.as_bytes());
        self.all().ok()?.into_iter().filter(from).max_by_key(Source::used)
    }

    /// A directory for one that is being made.
    pub(super) fn begin(&self, name: &str) -> Result<Source> {
        private(&self.root())?;
        let unique = sandbox_core::InstanceId::new();
        let path = self.root().join(format!(".new-{name}-{unique}"));
        private(&path)?;
        private(&path.join("users"))?;
        let maker = path.join(MAKER);
        let note = || fs::write(&maker, serde_json::to_vec(&Worker::this()?)?);
        note().map_err(at(OPERATION, &maker))?;
        Ok(Source { path })
    }

    /// Gives it its name.
    pub(super) fn finish(&self, made: &Source, name: &str) -> Result<Source> {
        let source = Source { path: self.root().join(name) };
        made.touch().map_err(at(OPERATION, &made.path))?;
        match fs::rename(&made.path, &source.path) {
            // Somebody else made the same meanwhile.
            Err(_) if source.tree().is_dir() => self.discard(made),
            renamed => renamed.map_err(at(OPERATION, &source.path)),
        }?;
        Ok(source)
    }

    pub(super) fn discard(&self, made: &Source) -> Result<()> {
        tree::remove(&made.path).map_err(at(OPERATION, &made.path))
    }

    /// Notes that an instance or a snapshot stands on this workspace.
    ///
    /// # Errors
    ///
    /// `NotFound` if it was one of these and is not there any more.
    pub(super) fn keep(&self, workspace: &Path, user: &str) -> Result<()> {
        let Ok(below) = workspace.strip_prefix(self.root()) else { return Ok(()) };
        let name = below.components().next().map(|name| self.root().join(name));
        let Some(source) = name.map(|path| Source { path }) else { return Ok(()) };
        if !source.tree().is_dir() {
            let message = format!("the workspace {} is not there any more", workspace.display());
            return Err(Error::new(ErrorKind::NotFound, OPERATION, message));
        }
        let note = source.users().join(user);
        fs::write(&note, []).and_then(|()| source.touch()).map_err(at(OPERATION, &note))
    }

    /// Notes that somebody does not stand on any of them any more.
    pub(super) fn release(&self, user: &str) -> Result<()> {
        for source in self.all()? {
            let note = source.users().join(user);
            match fs::remove_file(&note) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => {
                    return Err(at(OPERATION, &note)(error));
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// Removes those that nothing stands on, but for the last ones.
    pub(super) fn collect(&self) -> Result<()> {
        let mut unused = Vec::new();
        for source in self.all()? {
            if !self.is_used(&source).map_err(at(OPERATION, &source.path))? {
                unused.push((source.used(), source));
            }
        }
        unused.sort_by_key(|(used, _)| std::cmp::Reverse(*used));
        for (_, source) in unused.into_iter().skip(UNUSED).filter(|(used, _)| is_old(*used)) {
            self.discard(&source)?;
        }
        for entry in entries(&self.root())? {
            let making = is_new(&entry);
            if making && !is_being_made(&entry) {
                tree::remove(&entry).map_err(at(OPERATION, &entry))?;
            }
        }
        Ok(())
    }

    fn is_used(&self, source: &Source) -> io::Result<bool> {
        for entry in fs::read_dir(source.users())? {
            let entry = entry?;
            let place = |dir: &str| self.state.join(dir).join(entry.file_name()).exists();
            let there = STANDING.into_iter().any(place);
            // One that is just being made is not there yet.
            if there || !entry.metadata()?.modified().is_ok_and(is_old) {
                return Ok(true);
            }
        }
        Ok(false)
    }

    fn all(&self) -> Result<Vec<Source>> {
        let all = entries(&self.root())?.into_iter().map(|path| Source { path });
        Ok(all.filter(|source| source.origin().exists() && !is_new(&source.path)).collect())
    }
}

fn is_new(path: &Path) -> bool {
    path.file_name().is_some_and(|name| name.as_encoded_bytes().starts_with(b"."))
}

/// Whether whoever makes it still runs.
fn is_being_made(path: &Path) -> bool {
    let maker: Option<Worker> =
        fs::read(path.join(MAKER)).ok().and_then(|maker| serde_json::from_slice(&maker).ok());
    match maker {
        Some(maker) => maker.runs(),
        // It is only just being begun; or somebody was ended right then.
        None => {
            fs::metadata(path).and_then(|made| made.modified()).is_ok_and(|begun| !is_old(begun))
        }
    }
}

fn is_old(time: SystemTime) -> bool {
    time.elapsed().is_ok_and(|age| age > GRACE)
}

fn entries(dir: &Path) -> Result<Vec<PathBuf>> {
    let entries = match fs::read_dir(dir) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries.map_err(at(OPERATION, dir))?,
    };
    entries.map(|entry| Ok(entry.map_err(at(OPERATION, dir))?.path())).collect()
}

/// Makes a directory that only its owner may look into.
pub(super) fn private(dir: &Path) -> Result<()> {
    let made = fs::DirBuilder::new().recursive(true).mode(0o700).create(dir);
    made.map_err(at("prepare the state directory", dir))
}
