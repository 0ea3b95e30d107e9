//! The state folder: records of engines that outlive a frontend, for the next one.
//!
//! An engine reports its properties only once. They are stored in one file per engine, for the next
//! frontend of the same user. The process that holds a file's lock is the engine's frontend until
//! it ends.

mod process_id;
mod record;

use std::fs::{self, DirBuilder, File, TryLockError};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

pub use self::process_id::ProcessId;
pub use self::record::{Launched, Record};

use crate::error::EngineError;

/// The interval between attempts to take a lock that another frontend holds.
const LOCK_RETRY_INTERVAL: Duration = Duration::from_millis(100);

/// The locks that this process holds, by their paths. They are held until the process ends, because
/// its tasks close sockets and remove paths that the next frontend would already have bound.
static HELD_LOCKS: Mutex<Vec<(PathBuf, File)>> = Mutex::new(Vec::new());

/// The folder with the records of running engines, for the next frontend of this user.
#[derive(Clone, Debug)]
pub struct StateDir {
    path: PathBuf,
}

impl StateDir {
    /// Opens the folder, or creates it with mode 0700.
    ///
    /// # Errors
    /// [`EngineError::State`]: the folder can't be created, belongs to another user, or other users
    /// can write to it.
    pub fn open(path: impl Into<PathBuf>) -> Result<Self, EngineError> {
        let path = path.into();
        let open = || {
            DirBuilder::new().recursive(true).mode(0o700).create(&path)?;
            check_permissions(&fs::metadata(&path)?, 0o022)
        };
        open().map_err(|source| EngineError::State { path: path.clone(), source })?;
        Ok(Self { path })
    }

    /// Returns the file of the engine with this name.
    pub fn file(&self, name: &str) -> RecordFile {
        let plain =
            |c: char| if c.is_ascii_alphanumeric() || matches!(c, '.' | '-') { c } else { '_' };
        let name: String = name.strip_prefix("tcp://").unwrap_or(name).chars().map(plain).collect();
        RecordFile {
            path: self.path.join(format!("{name}.json")),
            lock: self.path.join(format!("{name}.lock")),
        }
    }

    /// Removes the records of engines that have ended and have no frontend. Returns their number.
    pub fn sweep(&self) -> usize {
        let ended = self.records().into_iter().filter(|(_, record)| record.has_ended());
        let files: Vec<_> = ended.map(|(name, _)| self.file(&name)).collect();
        files
            .into_iter()
            .filter(|file| matches!(file.try_lock(), Ok(true)))
            .map(|file| file.forget_and_unlock())
            .count()
    }

    /// Returns all records with their names, sorted by name.
    pub fn records(&self) -> Vec<(String, Record)> {
        let Ok(entries) = fs::read_dir(&self.path) else { return Vec::new() };
        let names = entries.flatten().filter_map(|entry| entry.file_name().into_string().ok());
        let mut records: Vec<_> = names
            .filter_map(|name| {
                let name = name.strip_suffix(".json")?.to_owned();
                let record = self.file(&name).read()?;
                Some((name, record))
            })
            .collect();
        records.sort_by(|(left, _), (right, _)| left.cmp(right));
        records
    }
}

/// Checks that a folder belongs to this user and gives other users no permissions.
pub(crate) fn check_private(metadata: &fs::Metadata) -> io::Result<()> {
    check_permissions(metadata, 0o077)
}

/// Checks that a folder belongs to this user and has none of the `forbidden` permissions.
fn check_permissions(metadata: &fs::Metadata, forbidden: u32) -> io::Result<()> {
    let is_own = metadata.uid() == rustix::process::geteuid().as_raw();
    if metadata.is_dir() && is_own && metadata.mode() & forbidden == 0 {
        return Ok(());
    }
    let allowed = 0o777 & !forbidden;
    let message =
        format!("it must be a folder of this user with no more permissions than {allowed:o}");
    Err(io::Error::new(io::ErrorKind::PermissionDenied, message))
}

/// The file of one engine's record, and its lock.
#[derive(Clone, Debug)]
pub struct RecordFile {
    path: PathBuf,
    lock: PathBuf,
}

impl RecordFile {
    /// Waits for the lock and holds it until this process ends.
    ///
    /// # Errors
    /// [`EngineError::State`]: the lock file can't be created.
    pub async fn lock(&self) -> Result<(), EngineError> {
        let mut is_waiting = false;
        while !self.try_lock()? {
            if !is_waiting {
                tracing::info!(
                    lock = %self.lock.display(),
                    "another frontend has this engine, waiting for its end"
                );
                is_waiting = true;
            }
            tokio::time::sleep(LOCK_RETRY_INTERVAL).await;
        }
        Ok(())
    }

    /// Takes the lock. Returns `false` if another process holds it.
    ///
    /// # Errors
    /// [`EngineError::State`]: the lock file can't be created.
    pub fn try_lock(&self) -> Result<bool, EngineError> {
        let failed = |source| EngineError::State { path: self.lock.clone(), source };
        let file = File::options().create(true).append(true).open(&self.lock).map_err(failed)?;
        match file.try_lock() {
            Ok(()) => {
                held_locks().push((self.lock.clone(), file));
                Ok(true)
            }
            Err(TryLockError::WouldBlock) => Ok(false),
            Err(TryLockError::Error(source)) => Err(failed(source)),
        }
    }

    /// Releases the lock. None of the engine's sockets may have been bound.
    pub(crate) fn unlock(&self) {
        held_locks().retain(|(lock, _)| *lock != self.lock);
    }

    /// Reads the record. Returns `None` if there is no file, or if it can't be read, which is
    /// logged.
    pub fn read(&self) -> Option<Record> {
        let text = match fs::read(&self.path) {
            Ok(text) => text,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return None,
            Err(error) => {
                tracing::warn!(
                    path = %self.path.display(),
                    %error,
                    "can't read the record of an engine"
                );
                return None;
            }
        };
        Record::decode(&text)
            .inspect_err(|error| {
                let why = error.to_string();
                tracing::warn!(
                    path = %self.path.display(),
                    why,
                    "ignoring the record of an engine that can't be decoded"
                );
            })
            .ok()
    }

    /// Replaces the record atomically.
    ///
    /// # Errors
    /// [`EngineError::State`]: the file can't be written.
    pub fn write(&self, record: &Record) -> Result<(), EngineError> {
        let new = self.path.with_extension("new");
        let written = fs::write(&new, record.encode()).and_then(|()| fs::rename(&new, &self.path));
        written.map_err(|source| EngineError::State { path: self.path.clone(), source })
    }

    fn forget_and_unlock(&self) {
        self.forget();
        self.unlock();
    }

    /// Removes the record and the folder of the engine's sockets.
    pub fn forget(&self) {
        if let Some(record) = self.read() {
            remove_sockets(&record.sockets);
        }
        if let Err(error) = fs::remove_file(&self.path) {
            tracing::debug!(path = %self.path.display(), %error, "can't remove an engine's record");
        }
    }
}

fn held_locks() -> MutexGuard<'static, Vec<(PathBuf, File)>> {
    HELD_LOCKS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Removes a recorded folder of sockets that is no longer needed.
pub(crate) fn remove_sockets(path: &Path) {
    // A cleaner of temporary files may have removed the folder, and another user may have created a
    // new one.
    if fs::symlink_metadata(path).and_then(|metadata| check_private(&metadata)).is_ok()
        && let Err(error) = fs::remove_dir_all(path)
    {
        tracing::debug!(path = %path.display(), %error, "can't remove a socket directory");
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
    fn record_round_trips() {
        let dir = tempfile::tempdir().unwrap();
        let state = StateDir::open(dir.path().join("made/here")).unwrap();
        assert_eq!(fs::metadata(dir.path().join("made/here")).unwrap().mode() & 0o777, 0o700);
        let file = state.file("tcp://127.0.0.1:29550");
        assert_eq!(file.read(), None);
        let first = record(Path::new("/a"));
        let second = record(Path::new("/b"));
        file.write(&first).unwrap();
        file.write(&second).unwrap();
        assert_eq!(file.read(), Some(second.clone()));
        assert_eq!(state.records(), [("127.0.0.1_29550".to_owned(), second)]);
        file.forget();
        assert!(state.records().is_empty());
    }

    #[test]
    fn undecodable_record_is_ignored() {
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
    fn folder_writable_by_others_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let set_mode =
            |mode| fs::set_permissions(dir.path(), fs::Permissions::from_mode(mode)).unwrap();
        set_mode(0o775);
        assert!(matches!(StateDir::open(dir.path()), Err(EngineError::State { .. })));
        set_mode(0o755);
        assert!(StateDir::open(dir.path()).is_ok());
    }

    #[test]
    fn sweep_removes_ended_engines_without_frontend() {
        let dir = tempfile::tempdir().unwrap();
        let state = StateDir::open(dir.path()).unwrap();
        let current = ProcessId::current();
        let dead = ProcessId { start: current.start + 1, ..current };
        for (name, process) in [
            ("attached", None),
            ("running", Some(current)),
            ("locked", Some(dead)),
            ("ended", Some(dead)),
        ] {
            let launched = process.map(|process| Launched { process, watchdog: None });
            state.file(name).write(&Record { launched, ..record(Path::new("/nowhere")) }).unwrap();
        }
        assert!(state.file("locked").try_lock().unwrap());
        assert_eq!(state.sweep(), 1);
        let left: Vec<_> = state.records().into_iter().map(|(name, _)| name).collect();
        assert_eq!(left, ["attached", "locked", "running"]);
        assert!(state.file("ended").try_lock().unwrap(), "its name can be used again");
    }

    #[test]
    fn lock_is_exclusive() {
        let dir = tempfile::tempdir().unwrap();
        let file = StateDir::open(dir.path()).unwrap().file("a");
        assert!(file.try_lock().unwrap());
        // A lock belongs to an open file, so opening it again stands in for another process.
        assert!(!file.try_lock().unwrap());
    }

    #[test]
    fn forget_removes_only_private_sockets() {
        let dir = tempfile::tempdir().unwrap();
        let file = StateDir::open(dir.path()).unwrap().file("a");
        let own = dir.path().join("own");
        let open = dir.path().join("open");
        for (path, mode) in [(&own, 0o700), (&open, 0o777)] {
            fs::create_dir(path).unwrap();
            fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
            file.write(&record(path)).unwrap();
            file.forget();
        }
        assert!(!own.exists() && open.exists());
    }
}
