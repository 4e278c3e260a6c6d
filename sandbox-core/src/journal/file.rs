//! Histories as files: one of JSON lines for each sandbox.
//!
//! ```text
//! <dir>/owner                  this journal's mark
//! <dir>/history/sbx_….jsonl    a record a line, only ever appended to
//! <dir>/live/sbx_…             an empty file as long as the sandbox is not known to have ended
//! <dir>/locks/sbx_…            locked by whoever changes the sandbox's life
//! <dir>/names/<name>           the id of the live sandbox that has the name
//! ```

use std::{
    collections::HashMap,
    fs::{self, File, OpenOptions, TryLockError},
    io::{self, Read, Seek, SeekFrom, Write},
    os::unix::fs::{DirBuilderExt, OpenOptionsExt},
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use async_trait::async_trait;

use super::{Draft, Journal, JournalLock};
use crate::{Error, ErrorKind, Name, OwnerId, Result, SandboxEvent, SandboxId};

/// A journal in a directory, safe between processes on one machine.
///
/// Records about a sandbox's life reach the disk before they are reported; those about processes and
/// files survive the death of every process, but not of the machine (nor do the processes).
///
/// A last line that a crash has torn is cut off with one warning. A damaged line anywhere else is an
/// error that names file and line; other sandboxes stay usable.
#[derive(Debug, Clone)]
pub struct FileJournal {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    dir: PathBuf,
    owner: OwnerId,
    histories: Mutex<HashMap<SandboxId, Arc<Mutex<History>>>>,
    /// How many of them are kept open.
    open: AtomicUsize,
    turns: Mutex<HashMap<SandboxId, Arc<tokio::sync::Mutex<()>>>>,
}

/// How many histories may be kept open between two records.
const MAX_OPEN: usize = 128;

/// What is known of a history.
#[derive(Debug, Default)]
struct History {
    tail: Tail,
    /// Kept open, as commands follow one another.
    file: Option<File>,
}

/// Where a history ended when it was last looked at.
#[derive(Debug, Default, Clone, Copy)]
struct Tail {
    seq: u64,
    length: u64,
}

impl FileJournal {
    /// Opens the journal in a directory, or begins one.
    ///
    /// # Errors
    ///
    /// `PermissionDenied` and the like if the directory cannot be made or written to.
    pub fn open(dir: impl Into<PathBuf>) -> Result<Self> {
        let dir = dir.into();
        for part in ["history", "live", "locks", "names"] {
            let path = dir.join(part);
            fs::DirBuilder::new()
                .recursive(true)
                .mode(0o700)
                .create(&path)
                .map_err(|error| failed(&path, error))?;
        }
        let owner = open_owner(&dir)?;
        let (histories, open, turns) = Default::default();
        Ok(Self { inner: Arc::new(Inner { dir, owner, histories, open, turns }) })
    }

    async fn blocking<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Inner) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let inner = Arc::clone(&self.inner);
        let done = tokio::task::spawn_blocking(move || work(&inner)).await;
        done.map_err(|error| Error::new(ErrorKind::Journal, "journal", error.to_string()))?
    }
}

#[async_trait]
impl Journal for FileJournal {
    fn owner(&self) -> OwnerId {
        self.inner.owner.clone()
    }

    async fn append(&self, record: Draft) -> Result<SandboxEvent> {
        if record.must_reach_disk() {
            return self.blocking(move |inner| inner.append(record)).await;
        }
        // Some microseconds, unless another one is at it: not worth another thread.
        match self.inner.try_append(record)? {
            Ok(event) => Ok(event),
            Err(record) => self.blocking(move |inner| inner.append(record)).await,
        }
    }

    async fn read(&self, sandbox: &SandboxId, after: u64) -> Result<Vec<SandboxEvent>> {
        if self.inner.is_up_to_date(sandbox, after)? {
            return Ok(Vec::new());
        }
        let sandbox = sandbox.clone();
        self.blocking(move |inner| inner.read(&sandbox, after)).await
    }

    async fn sandboxes(&self) -> Result<Vec<SandboxId>> {
        self.blocking(|inner| inner.ids("history", ".jsonl")).await
    }

    async fn live(&self) -> Result<Vec<SandboxId>> {
        self.blocking(|inner| inner.ids("live", "")).await
    }

    async fn retire(&self, sandbox: &SandboxId) -> Result<()> {
        let path = self.inner.live_path(sandbox);
        if locked(&self.inner.history(sandbox)).file.take().is_some() {
            self.inner.open.fetch_sub(1, Ordering::Relaxed);
        }
        match fs::remove_file(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(failed(&path, error)),
            _ => Ok(()),
        }
    }

    async fn lock(&self, sandbox: &SandboxId) -> Result<JournalLock> {
        // First in line among our own tasks, then between processes.
        let turn = Arc::clone(locked(&self.inner.turns).entry(sandbox.clone()).or_default());
        let turn = turn.lock_owned().await;
        let path = self.inner.dir.join("locks").join(sandbox.as_str());
        let file = open_lock(&path).map_err(|error| failed(&path, error))?;
        let mut pause = Duration::from_micros(500);
        loop {
            match file.try_lock() {
                Ok(()) => return Ok(JournalLock::new((file, turn))),
                Err(TryLockError::WouldBlock) => tokio::time::sleep(pause).await,
                Err(TryLockError::Error(error)) => return Err(failed(&path, error)),
            }
            pause = (pause * 2).min(Duration::from_millis(20));
        }
    }

    async fn claim(&self, name: &Name, sandbox: &SandboxId) -> Result<Option<SandboxId>> {
        let (name, sandbox) = (name.clone(), sandbox.clone());
        self.blocking(move |inner| {
            let _names = inner.lock_names()?;
            match inner.holder(&name)? {
                Some(holder) if holder == sandbox => Ok(None),
                Some(holder) => Ok(Some(holder)),
                None => {
                    let path = inner.name_path(&name);
                    write_whole(&path, sandbox.as_str().as_bytes())
                        .map_err(|error| failed(&path, error))?;
                    Ok(None)
                }
            }
        })
        .await
    }

    async fn resolve(&self, name: &Name) -> Result<Option<SandboxId>> {
        self.inner.holder(name)
    }

    async fn release(&self, name: &Name, sandbox: &SandboxId) -> Result<()> {
        let (name, sandbox) = (name.clone(), sandbox.clone());
        self.blocking(move |inner| {
            let _names = inner.lock_names()?;
            if inner.holder(&name)?.is_some_and(|holder| holder == sandbox) {
                let path = inner.name_path(&name);
                fs::remove_file(&path).map_err(|error| failed(&path, error))?;
            }
            Ok(())
        })
        .await
    }
}

impl Inner {
    fn history_path(&self, sandbox: &SandboxId) -> PathBuf {
        self.dir.join("history").join(format!("{sandbox}.jsonl"))
    }

    fn live_path(&self, sandbox: &SandboxId) -> PathBuf {
        self.dir.join("live").join(sandbox.as_str())
    }

    /// The ids that the files of a directory are named by, oldest first.
    fn ids(&self, part: &str, suffix: &str) -> Result<Vec<SandboxId>> {
        let dir = self.dir.join(part);
        let mut found = Vec::new();
        for entry in fs::read_dir(&dir).map_err(|error| failed(&dir, error))? {
            let name = entry.map_err(|error| failed(&dir, error))?.file_name();
            let id = name.to_str().and_then(|name| name.strip_suffix(suffix));
            found.extend(id.and_then(|id| id.parse::<SandboxId>().ok()));
        }
        found.sort();
        Ok(found)
    }

    fn name_path(&self, name: &Name) -> PathBuf {
        self.dir.join("names").join(name.as_str())
    }

    fn history(&self, sandbox: &SandboxId) -> Arc<Mutex<History>> {
        Arc::clone(locked(&self.histories).entry(sandbox.clone()).or_default())
    }

    /// Appends unless somebody else is appending: then the record comes back.
    fn try_append(&self, record: Draft) -> Result<Result<SandboxEvent, Draft>> {
        let path = self.history_path(&record.sandbox);
        let history = self.history(&record.sandbox);
        let Ok(mut history) = history.try_lock() else {
            return Ok(Err(record));
        };
        let history = &mut *history;
        if history.file.is_none() {
            let (file, _) = open_history(&path).map_err(|error| failed(&path, error))?;
            history.file = Some(file);
            self.open.fetch_add(1, Ordering::Relaxed);
        }
        let Some(file) = &history.file else { return Ok(Err(record)) };
        let appended = match file.try_lock() {
            Ok(()) => {
                let appended = append(file, &path, &mut history.tail, record);
                file.unlock().map_err(|error| failed(&path, error))?;
                appended.map(Ok)
            }
            Err(TryLockError::WouldBlock) => Ok(Err(record)),
            Err(TryLockError::Error(error)) => Err(failed(&path, error)),
        };
        if self.open.load(Ordering::Relaxed) > MAX_OPEN {
            history.file = None;
            self.open.fetch_sub(1, Ordering::Relaxed);
        }
        appended
    }

    /// Appends, waiting for others, and for the disk.
    fn append(&self, record: Draft) -> Result<SandboxEvent> {
        let path = self.history_path(&record.sandbox);
        let history = self.history(&record.sandbox);
        let mut history = locked(&history);
        let to_disk = record.must_reach_disk();
        if history.tail.seq == 0 && !path.exists() {
            // Before its first record: a sandbox that has a history is never overlooked.
            let live = self.live_path(&record.sandbox);
            File::create(&live).map_err(|error| failed(&live, error))?;
        }
        let (file, new) = open_history(&path).map_err(|error| failed(&path, error))?;
        file.lock().map_err(|error| failed(&path, error))?;
        let event = append(&file, &path, &mut history.tail, record)?;
        if to_disk {
            file.sync_data().map_err(|error| failed(&path, error))?;
            if new {
                sync_dir(&path).map_err(|error| failed(&path, error))?;
            }
        }
        Ok(event)
    }

    fn is_up_to_date(&self, sandbox: &SandboxId, after: u64) -> Result<bool> {
        let tail = locked(&self.history(sandbox)).tail;
        if tail.seq != after || after == 0 {
            return Ok(false);
        }
        let path = self.history_path(sandbox);
        let length = fs::metadata(&path).map_err(|error| failed(&path, error))?.len();
        Ok(length == tail.length)
    }

    fn read(&self, sandbox: &SandboxId, after: u64) -> Result<Vec<SandboxEvent>> {
        let path = self.history_path(sandbox);
        let mut file = match File::open(&path) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            Err(error) => return Err(failed(&path, error)),
        };
        let history = self.history(sandbox);
        let mut history = locked(&history);
        file.lock_shared().map_err(|error| failed(&path, error))?;
        // What was read before need not be read again.
        let tail = history.tail;
        let from = if after > 0 && after == tail.seq { tail } else { Tail::default() };
        let (events, end) = parse(&mut file, &path, from)?;
        history.tail = end;
        Ok(events.into_iter().filter(|event| event.seq > after).collect())
    }

    fn holder(&self, name: &Name) -> Result<Option<SandboxId>> {
        let path = self.name_path(name);
        match fs::read_to_string(&path) {
            Ok(text) => text.trim().parse().map(Some),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(failed(&path, error)),
        }
    }

    fn lock_names(&self) -> Result<File> {
        let path = self.dir.join("locks/names");
        let file = open_lock(&path).map_err(|error| failed(&path, error))?;
        file.lock().map_err(|error| failed(&path, error))?;
        Ok(file)
    }
}

/// Appends to a history that is locked.
fn append(file: &File, path: &Path, tail: &mut Tail, record: Draft) -> Result<SandboxEvent> {
    let length = file.metadata().map_err(|error| failed(path, error))?.len();
    if length != tail.length {
        let mut reader = file.try_clone().map_err(|error| failed(path, error))?;
        let from = if length > tail.length { *tail } else { Tail::default() };
        (_, *tail) = parse(&mut reader, path, from)?;
        if tail.length < length {
            tracing::warn!(
                path = %path.display(),
                "a crash has torn this history's last line; it is cut off"
            );
            file.set_len(tail.length).map_err(|error| failed(path, error))?;
        }
    }
    let event = record.into_event(tail.seq + 1);
    let mut line = serde_json::to_vec(&event).map_err(|error| {
        Error::new(ErrorKind::Journal, "journal", "a record cannot be written").with_source(error)
    })?;
    line.push(b'\n');
    let mut writer = file;
    if let Err(error) = writer.write_all(&line) {
        // Not even a part of it may stay.
        let _ = file.set_len(tail.length);
        return Err(failed(path, error));
    }
    *tail = Tail { seq: event.seq, length: tail.length + line.len() as u64 };
    Ok(event)
}

/// Reads records from a place on; a torn last line is left out, and the end that is returned is before
/// it.
fn parse(file: &mut File, path: &Path, from: Tail) -> Result<(Vec<SandboxEvent>, Tail)> {
    let mut text = Vec::new();
    file.seek(SeekFrom::Start(from.length)).map_err(|error| failed(path, error))?;
    file.read_to_end(&mut text).map_err(|error| failed(path, error))?;
    let mut tail = from;
    let mut events = Vec::new();
    for line in text.split_inclusive(|&byte| byte == b'\n') {
        let last = tail.length + line.len() as u64 == from.length + text.len() as u64;
        if !line.ends_with(b"\n") {
            break;
        }
        let event = serde_json::from_slice::<SandboxEvent>(line)
            .map_err(|error| error.to_string())
            .and_then(|event| {
                if event.seq == tail.seq + 1 {
                    Ok(event)
                } else {
                    Err(format!("record {} where {} belongs", event.seq, tail.seq + 1))
                }
            });
        match event {
            Ok(event) => {
                tail = Tail { seq: event.seq, length: tail.length + line.len() as u64 };
                events.push(event);
            }
            // The disk may have got a torn line's end before its beginning: then it holds NULs.
            Err(_) if last && line.contains(&0) => break,
            Err(why) => {
                let message = format!("{}, line {}: {why}", path.display(), tail.seq + 1);
                return Err(Error::new(ErrorKind::Journal, "read the history", message));
            }
        }
    }
    Ok((events, tail))
}

fn open_lock(path: &Path) -> io::Result<File> {
    OpenOptions::new().write(true).create(true).truncate(false).mode(0o600).open(path)
}

fn open_history(path: &Path) -> io::Result<(File, bool)> {
    let open = |create| {
        OpenOptions::new().read(true).append(true).create_new(create).mode(0o600).open(path)
    };
    match open(false) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => match open(true) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                open(false).map(|file| (file, false))
            }
            made => made.map(|file| (file, true)),
        },
        opened => opened.map(|file| (file, false)),
    }
}

fn open_owner(dir: &Path) -> Result<OwnerId> {
    let path = dir.join("owner");
    let mine = OwnerId::new();
    // Linking is atomic: of many processes that begin a journal at once, one names it.
    let draft = dir.join(format!("owner.{mine}"));
    let named =
        fs::write(&draft, mine.as_str()).and_then(|()| match fs::hard_link(&draft, &path) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => Err(error),
            _ => Ok(()),
        });
    let _ = fs::remove_file(&draft);
    named.map_err(|error| failed(&path, error))?;
    fs::read_to_string(&path).map_err(|error| failed(&path, error))?.trim().parse()
}

/// Writes a small file so that it is there as a whole or not at all.
fn write_whole(path: &Path, contents: &[u8]) -> io::Result<()> {
    let draft = path.with_file_name(format!(
        ".{}.{}",
        path.file_name().unwrap_or_default().to_string_lossy(),
        std::process::id()
    ));
    let mut file = File::create(&draft)?;
    file.write_all(contents)?;
    file.sync_data()?;
    fs::rename(&draft, path)?;
    sync_dir(path)
}

fn sync_dir(of: &Path) -> io::Result<()> {
    of.parent().map_or(Ok(()), |dir| File::open(dir)?.sync_all())
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn failed(path: &Path, error: io::Error) -> Error {
    let kind = match error.kind() {
        io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem => {
            ErrorKind::PermissionDenied
        }
        _ => ErrorKind::Journal,
    };
    let message =
        format!("{}: the state directory must be writable, and have room", path.display());
    Error::new(kind, "journal", message).with_source(error)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Consumer, Known};

    fn draft(sandbox: &SandboxId, kind: Known) -> Draft {
        Draft {
            sandbox: sandbox.clone(),
            turn: None,
            consumer: Consumer::default(),
            kind: kind.into(),
        }
    }

    #[tokio::test]
    async fn two_journals_on_one_directory_number_without_gaps() {
        let dir = tempfile::tempdir().unwrap();
        let a = FileJournal::open(dir.path()).unwrap();
        let b = FileJournal::open(dir.path()).unwrap();
        assert_eq!(a.owner(), b.owner());
        let id = SandboxId::new();
        let mut tasks = Vec::new();
        for n in 0..40 {
            let journal = if n % 2 == 0 { a.clone() } else { b.clone() };
            let kind = if n % 3 == 0 {
                Known::Paused
            } else {
                Known::FileOperation { operation: "write".into(), path: n.to_string() }
            };
            let draft = draft(&id, kind);
            tasks.push(tokio::spawn(async move { journal.append(draft).await.unwrap().seq }));
        }
        let mut seqs = Vec::new();
        for task in tasks {
            seqs.push(task.await.unwrap());
        }
        seqs.sort_unstable();
        assert_eq!(seqs, (1..=40).collect::<Vec<u64>>());
        let events = b.read(&id, 0).await.unwrap();
        assert_eq!(events.iter().map(|event| event.seq).collect::<Vec<_>>(), seqs);
        assert_eq!(a.read(&id, 38).await.unwrap().len(), 2);
        assert_eq!(a.read(&id, 40).await.unwrap().len(), 0);
        assert_eq!(a.sandboxes().await.unwrap(), [id]);
    }

    #[tokio::test]
    async fn a_torn_last_line_is_cut_off() {
        let dir = tempfile::tempdir().unwrap();
        let journal = FileJournal::open(dir.path()).unwrap();
        let id = SandboxId::new();
        journal.append(draft(&id, Known::Paused)).await.unwrap();
        let path = dir.path().join(format!("history/{id}.jsonl"));
        let whole = fs::read(&path).unwrap();
        fs::write(&path, [&whole[..], &whole[..20]].concat()).unwrap();

        let journal = FileJournal::open(dir.path()).unwrap();
        assert_eq!(journal.read(&id, 0).await.unwrap().len(), 1);
        assert_eq!(journal.append(draft(&id, Known::Resumed)).await.unwrap().seq, 2);
        assert_eq!(journal.read(&id, 0).await.unwrap().len(), 2);
    }

    #[tokio::test]
    async fn a_damaged_line_is_named_and_others_stay_usable() {
        let dir = tempfile::tempdir().unwrap();
        let journal = FileJournal::open(dir.path()).unwrap();
        let (bad, good) = (SandboxId::new(), SandboxId::new());
        for id in [&bad, &good] {
            journal.append(draft(id, Known::Paused)).await.unwrap();
            journal.append(draft(id, Known::Resumed)).await.unwrap();
        }
        let path = dir.path().join(format!("history/{bad}.jsonl"));
        let text = fs::read_to_string(&path).unwrap().replacen("paused", "pau\"sed", 1);
        fs::write(&path, text).unwrap();

        let journal = FileJournal::open(dir.path()).unwrap();
        let error = journal.read(&bad, 0).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Journal);
        assert!(error.to_string().contains(&format!("{bad}.jsonl, line 1")), "{error}");
        assert!(journal.append(draft(&bad, Known::Paused)).await.is_err());
        assert_eq!(journal.read(&good, 0).await.unwrap().len(), 2);
    }

    #[tokio::test]
    async fn a_name_is_claimed_once() {
        let dir = tempfile::tempdir().unwrap();
        let a = FileJournal::open(dir.path()).unwrap();
        let b = FileJournal::open(dir.path()).unwrap();
        let name: Name = "main".parse().unwrap();
        let (first, second) = (SandboxId::new(), SandboxId::new());
        assert_eq!(a.claim(&name, &first).await.unwrap(), None);
        assert_eq!(a.claim(&name, &first).await.unwrap(), None);
        assert_eq!(b.claim(&name, &second).await.unwrap(), Some(first.clone()));
        b.release(&name, &second).await.unwrap();
        assert_eq!(b.resolve(&name).await.unwrap(), Some(first.clone()));
        b.release(&name, &first).await.unwrap();
        assert_eq!(b.claim(&name, &second).await.unwrap(), None);
    }

    #[tokio::test]
    async fn a_lock_excludes_tasks_and_journals() {
        let dir = tempfile::tempdir().unwrap();
        let a = FileJournal::open(dir.path()).unwrap();
        let b = FileJournal::open(dir.path()).unwrap();
        let id = SandboxId::new();
        let held = a.lock(&id).await.unwrap();
        for journal in [&a, &b] {
            let wait = tokio::time::timeout(Duration::from_millis(50), journal.lock(&id));
            assert!(wait.await.is_err());
        }
        drop(held);
        b.lock(&id).await.unwrap();
    }

    #[test]
    fn an_unwritable_directory_is_an_error_that_names_it() {
        let error = FileJournal::open("/proc/nowhere").unwrap_err();
        assert!(error.to_string().contains("/proc/nowhere"), "{error}");
    }
}
