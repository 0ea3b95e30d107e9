//! The state folder: what a frontend has to know of engines that were ready for one before it.
//!
//! An engine says where it publishes and what it became only once. So it is written down, one file
//! per engine, for the next frontend of the same user. Whoever holds a file's lock is the engine's
//! frontend, until its process ends.

mod process_id;
mod record;

use std::fs::{self, DirBuilder, File, TryLockError};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

pub use self::process_id::ProcessId;
pub use self::record::{Launched, Record};

use crate::error::EngineError;

/// How often a lock is tried that another frontend holds.
const TRY_AGAIN: Duration = Duration::from_millis(100);

/// The locks that this process holds. They end with it and not before: its sockets are closed by
/// tasks of their own, which remove paths that the next frontend would have bound by then.
static HELD: Mutex<Vec<(PathBuf, File)>> = Mutex::new(Vec::new());

/// A folder of this user's with one file per engine.
#[derive(Clone, Debug)]
pub struct StateDir {
    path: PathBuf,
}

impl StateDir {
    /// Opens the folder, or makes it with mode 0700.
    ///
    /// # Errors
    /// [`EngineError::State`]: it can't be made, is another user's, or others can write to it.
    pub fn open(path: impl Into<PathBuf>) -> Result<Self, EngineError> {
        let path = path.into();
        let opened = || {
            DirBuilder::new().recursive(true).mode(0o700).create(&path)?;
            check_own(&fs::metadata(&path)?, 0o022)
        };
        opened().map_err(|source| EngineError::State { path: path.clone(), source })?;
        Ok(Self { path })
    }

    /// The file of the engine with this name.
    pub fn file(&self, name: &str) -> RecordFile {
        let plain =
            |c: char| if c.is_ascii_alphanumeric() || matches!(c, '.' | '-') { c } else { '_' };
        let name: String = name.strip_prefix("tcp://").unwrap_or(name).chars().map(plain).collect();
        RecordFile {
            path: self.path.join(format!("{name}.json")),
            lock: self.path.join(format!("{name}.lock")),
        }
    }

    /// Forgets engines that have ended without a frontend; how many.
    pub fn sweep(&self) -> usize {
        let over = self.records().into_iter().filter(|(_, record)| record.is_over());
        let files: Vec<_> = over.map(|(name, _)| self.file(&name)).collect();
        files
            .into_iter()
            .filter(|file| matches!(file.try_lock(), Ok(true)))
            .map(|file| file.forget_and_unlock())
            .count()
    }

    /// All engines that are known, with the names of their files, by these names.
    pub fn records(&self) -> Vec<(String, Record)> {
        let Ok(entries) = fs::read_dir(&self.path) else { return Vec::new() };
        let names = entries.flatten().filter_map(|entry| entry.file_name().into_string().ok());
        let mut records: Vec<_> = names
            .filter_map(|name| {
                let name = name.strip_suffix(".json")?.to_owned();
                Some((self.file(&name).read()?, name))
            })
            .map(|(record, name)| (name, record))
            .collect();
        records.sort_by(|(left, _), (right, _)| left.cmp(right));
        records
    }
}

/// Refuses a folder that another user owns or can enter.
pub(crate) fn check_private(about: &fs::Metadata) -> io::Result<()> {
    check_own(about, 0o077)
}

/// Refuses a folder that is not this user's or has one of these permissions.
fn check_own(about: &fs::Metadata, forbidden: u32) -> io::Result<()> {
    let own = about.uid() == rustix::process::geteuid().as_raw();
    if about.is_dir() && own && about.mode() & forbidden == 0 {
        return Ok(());
    }
    let allowed = 0o777 & !forbidden;
    let wanted =
        format!("it must be a folder of this user with no more permissions than {allowed:o}");
    Err(io::Error::new(io::ErrorKind::PermissionDenied, wanted))
}

/// Where one engine is written down.
#[derive(Clone, Debug)]
pub struct RecordFile {
    path: PathBuf,
    lock: PathBuf,
}

impl RecordFile {
    /// Waits until no other frontend has the engine. From then on it is this process's until that
    /// ends.
    ///
    /// # Errors
    /// [`EngineError::State`]: the lock can't be made.
    pub async fn lock(&self) -> Result<(), EngineError> {
        let mut waits = false;
        while !self.try_lock()? {
            if !waits {
                tracing::info!(lock = %self.lock.display(), "another frontend has this engine, waiting for its end");
                waits = true;
            }
            tokio::time::sleep(TRY_AGAIN).await;
        }
        Ok(())
    }

    /// Takes the lock; false if another process has it.
    ///
    /// # Errors
    /// [`EngineError::State`]: the lock can't be made.
    pub fn try_lock(&self) -> Result<bool, EngineError> {
        let failed = |source| EngineError::State { path: self.lock.clone(), source };
        let file = File::options().create(true).append(true).open(&self.lock).map_err(failed)?;
        match file.try_lock() {
            Ok(()) => {
                HELD.lock().unwrap_or_else(PoisonError::into_inner).push((self.lock.clone(), file));
                Ok(true)
            }
            Err(TryLockError::WouldBlock) => Ok(false),
            Err(TryLockError::Error(source)) => Err(failed(source)),
        }
    }

    /// Lets other processes have the lock. No socket of the engine's may have been bound.
    pub(crate) fn unlock(&self) {
        HELD.lock().unwrap_or_else(PoisonError::into_inner).retain(|(lock, _)| *lock != self.lock);
    }

    /// What is written there; `None` without a file, or with one that can't be understood, which is
    /// logged.
    pub fn read(&self) -> Option<Record> {
        let text = match fs::read(&self.path) {
            Ok(text) => text,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return None,
            Err(error) => {
                tracing::warn!(path = %self.path.display(), %error, "what is known of an engine can't be read");
                return None;
            }
        };
        Record::decode(&text)
            .inspect_err(|error| {
                let why = error.to_string();
                tracing::warn!(path = %self.path.display(), why, "what is known of an engine is ignored");
            })
            .ok()
    }

    /// Replaces what is written there, at once.
    ///
    /// # Errors
    /// [`EngineError::State`]: it can't be written.
    pub fn write(&self, record: &Record) -> Result<(), EngineError> {
        let new = self.path.with_extension("new");
        let written = fs::write(&new, record.encode()).and_then(|()| fs::rename(&new, &self.path));
        written.map_err(|source| EngineError::State { path: self.path.clone(), source })
    }

    fn forget_and_unlock(&self) {
        self.forget();
        self.unlock();
    }

    /// Forgets the engine, and removes the folder of its sockets.
    pub fn forget(&self) {
        if let Some(record) = self.read() {
            remove_sockets(&record.sockets);
        }
        if let Err(error) = fs::remove_file(&self.path) {
            tracing::debug!(path = %self.path.display(), %error, "an engine was not known any more");
        }
    }
}

/// Removes a folder of sockets that is written down and not needed any more.
pub(crate) fn remove_sockets(path: &Path) {
    // Whoever removes folders for temporary files may have been first, and somebody else may have
    // made another one.
    if fs::symlink_metadata(path).and_then(|about| check_private(&about)).is_ok()
        && let Err(error) = fs::remove_dir_all(path)
    {
        tracing::debug!(path = %path.display(), %error, "a folder of sockets was not removed");
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    fn record(sockets: &Path) -> Record {
        let report = Some(vec![0x80, 0xff]);
        Record {
            report,
            ..Record::new("m", "tcp://127.0.0.1:1", "ipc:///in", "ipc:///out", sockets)
        }
    }

    #[test]
    fn a_record_is_read_as_it_was_written() {
        let dir = tempfile::tempdir().unwrap();
        let state = StateDir::open(dir.path().join("made/here")).unwrap();
        assert_eq!(fs::metadata(dir.path().join("made/here")).unwrap().mode() & 0o777, 0o700);
        let file = state.file("tcp://127.0.0.1:29550");
        assert_eq!(file.read(), None);
        let (first, second) = (record(Path::new("/a")), record(Path::new("/b")));
        file.write(&first).unwrap();
        file.write(&second).unwrap();
        assert_eq!(file.read(), Some(second.clone()));
        assert_eq!(state.records(), [("127.0.0.1_29550".to_owned(), second)]);
        file.forget();
        assert!(state.records().is_empty());
    }

    #[test]
    fn what_can_not_be_understood_is_no_record() {
        let dir = tempfile::tempdir().unwrap();
        let file = StateDir::open(dir.path()).unwrap().file("a");
        let later = String::from_utf8(record(Path::new("/a")).encode())
            .unwrap()
            .replace("\"version\":1", "\"version\":2");
        for text in ["", "{}", "[1]", &later] {
            fs::write(&file.path, text).unwrap();
            assert_eq!(file.read(), None, "{text}");
        }
    }

    #[test]
    fn a_folder_that_others_can_write_to_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let mode =
            |mode| fs::set_permissions(dir.path(), fs::Permissions::from_mode(mode)).unwrap();
        mode(0o775);
        assert!(matches!(StateDir::open(dir.path()), Err(EngineError::State { .. })));
        mode(0o755);
        assert!(StateDir::open(dir.path()).is_ok());
    }

    #[test]
    fn engines_that_have_ended_are_forgotten_unless_somebody_has_them() {
        let dir = tempfile::tempdir().unwrap();
        let state = StateDir::open(dir.path()).unwrap();
        let this = ProcessId::this();
        let dead = ProcessId { start: this.start + 1, ..this };
        for (name, process) in
            [("attached", None), ("runs", Some(this)), ("had", Some(dead)), ("ended", Some(dead))]
        {
            let launched = process.map(|process| Launched { process, watchdog: None });
            state.file(name).write(&Record { launched, ..record(Path::new("/nowhere")) }).unwrap();
        }
        assert!(state.file("had").try_lock().unwrap());
        assert_eq!(state.sweep(), 1);
        let left: Vec<_> = state.records().into_iter().map(|(name, _)| name).collect();
        assert_eq!(left, ["attached", "had", "runs"]);
        assert!(state.file("ended").try_lock().unwrap(), "its name can be used again");
    }

    #[test]
    fn only_one_has_the_lock() {
        let dir = tempfile::tempdir().unwrap();
        let file = StateDir::open(dir.path()).unwrap().file("a");
        assert!(file.try_lock().unwrap());
        // A lock belongs to whoever opened the file, so another opening is as good as another
        // process.
        assert!(!file.try_lock().unwrap());
    }

    #[test]
    fn forgetting_an_engine_removes_its_sockets_and_nothing_that_others_can_enter() {
        let dir = tempfile::tempdir().unwrap();
        let file = StateDir::open(dir.path()).unwrap().file("a");
        let (own, open) = (dir.path().join("own"), dir.path().join("open"));
        for (path, mode) in [(&own, 0o700), (&open, 0o777)] {
            fs::create_dir(path).unwrap();
            fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
            file.write(&record(path)).unwrap();
            file.forget();
        }
        assert!(!own.exists() && open.exists());
    }
}
