//! Named blobs in shared memory, for processes on this machine that do not know arenas. They open a
//! blob by name and copy it, as Python's `SharedMemory` does.
//!
//! A blob is a file that exists until it is dropped here. Its name and its lock have the form of an
//! arena's, so that [`sweep`](crate::sweep) removes the blobs of killed processes.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use crate::owner::Owner;
use crate::segment;
use crate::shm::SHM_DIR;

/// The reason why a blob can't be written.
#[derive(Debug, thiserror::Error)]
pub enum ShmBlobError {
    /// The existing blobs leave no room.
    #[error("no room for {requested} bytes: {used} of {limit} bytes are in use")]
    Full {
        /// The size of the requested blob in bytes.
        requested: u64,
        /// The total size of the existing blobs in bytes.
        used: u64,
        /// The maximum total size of all blobs in bytes.
        limit: u64,
    },
    /// The system has no shared memory, or too little of it.
    #[error("shared memory can't be written: {0}")]
    System(#[from] io::Error),
}

impl ShmBlobError {
    /// Returns the cause as a label for counters.
    pub fn cause(&self) -> &'static str {
        match self {
            Self::Full { .. } => "parcels_full",
            Self::System(_) => "no_shared_memory",
        }
    }
}

/// A limit of the total size of all blobs. Clones share it.
#[derive(Clone, Debug)]
pub struct ShmBlobBudget {
    inner: Arc<Budget>,
}

#[derive(Debug)]
struct Budget {
    dir: PathBuf,
    limit_bytes: u64,
    used_bytes: AtomicU64,
}

impl ShmBlobBudget {
    /// Creates a budget of `limit_bytes` of shared memory, which is taken from the system when it
    /// is needed.
    pub fn new(limit_bytes: u64) -> Self {
        Self::in_dir(Path::new(SHM_DIR), limit_bytes)
    }

    fn in_dir(dir: &Path, limit_bytes: u64) -> Self {
        let budget = Budget { dir: dir.to_owned(), limit_bytes, used_bytes: AtomicU64::new(0) };
        Self { inner: Arc::new(budget) }
    }

    /// Returns the total size of the existing blobs in bytes.
    pub fn used_bytes(&self) -> u64 {
        self.inner.used_bytes.load(Relaxed)
    }

    /// Writes the concatenated parts as a blob. Takes as long as copying them.
    ///
    /// # Errors
    /// [`ShmBlobError`] if the blob can't be written and the bytes have to be sent in another way.
    pub fn write(&self, parts: &[impl AsRef<[u8]>]) -> Result<ShmBlob, ShmBlobError> {
        let bytes = parts.iter().map(|part| part.as_ref().len() as u64).sum();
        let share = Share::reserve(&self.inner, bytes)?;
        let name = segment::name(Owner::this(), rand::random());
        let file = segment::create_with(&self.inner.dir, &name, bytes, parts)?;
        Ok(ShmBlob { name, share, _locked: file })
    }
}

/// A part of the budget, released on drop.
#[derive(Debug)]
struct Share {
    budget: Arc<Budget>,
    bytes: u64,
}

impl Share {
    fn reserve(budget: &Arc<Budget>, requested: u64) -> Result<Self, ShmBlobError> {
        let limit = budget.limit_bytes;
        let add = |used: u64| used.checked_add(requested).filter(|sum| *sum <= limit);
        match budget.used_bytes.fetch_update(Relaxed, Relaxed, add) {
            Ok(_) => Ok(Self { budget: budget.clone(), bytes: requested }),
            Err(used) => Err(ShmBlobError::Full { requested, used, limit }),
        }
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        self.budget.used_bytes.fetch_sub(self.bytes, Relaxed);
    }
}

/// A named blob in shared memory. Dropping it removes the name; processes that have already opened
/// the blob keep access.
#[derive(Debug)]
pub struct ShmBlob {
    name: String,
    share: Share,
    /// Holds the lock that shows that this process is alive.
    _locked: File,
}

impl ShmBlob {
    /// Returns the name of the POSIX shared memory, without the leading slash.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the size in bytes.
    pub fn bytes(&self) -> u64 {
        self.share.bytes
    }
}

impl Drop for ShmBlob {
    fn drop(&mut self) {
        match fs::remove_file(self.share.budget.dir.join(&self.name)) {
            Ok(()) => {}
            // When a Python process ends, its resource tracker removes shared memory that it had
            // open.
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => {
                tracing::warn!(name = self.name, %error, "a shared-memory blob was not removed")
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sweep::sweep_dir;

    fn names(dir: &Path) -> Vec<String> {
        fs::read_dir(dir)
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect()
    }

    #[test]
    fn dropped_blob_is_removed_from_disk_and_budget() {
        let dir = tempfile::tempdir_in(SHM_DIR).unwrap();
        let budget = ShmBlobBudget::in_dir(dir.path(), 10);
        let first = budget.write(&[&b"abc"[..], b"", b"defg"]).unwrap();
        assert_eq!(fs::read(dir.path().join(first.name())).unwrap(), b"abcdefg");
        assert_eq!((first.bytes(), budget.used_bytes()), (7, 7));
        let refused = budget.write(&[b"hijk"]).unwrap_err();
        assert!(
            matches!(refused, ShmBlobError::Full { requested: 4, used: 7, limit: 10 }),
            "{refused}"
        );
        let second = budget.write(&[b"hij"]).unwrap();
        assert_eq!((names(dir.path()).len(), sweep_dir(dir.path())), (2, 0), "both are in use");
        drop((first, second));
        assert_eq!((names(dir.path()).len(), budget.used_bytes()), (0, 0));
    }

    #[test]
    fn failed_write_uses_no_budget() {
        let budget = ShmBlobBudget::in_dir(Path::new("/dev/shm/chiasm-is-no-folder"), 10);
        let refused = budget.write(&[b"abc"]).unwrap_err();
        assert_eq!((refused.cause(), budget.used_bytes()), ("no_shared_memory", 0));
        assert!(ShmBlobBudget::in_dir(Path::new(SHM_DIR), u64::MAX).write(&[b"x"]).is_ok());
    }

    #[test]
    fn dead_processes_blob_is_swept() {
        let dir = tempfile::tempdir_in(SHM_DIR).unwrap();
        let budget = ShmBlobBudget::in_dir(dir.path(), 10);
        let blob = budget.write(&[b"abc"]).unwrap();
        // Another process may have removed the blob already.
        fs::remove_file(dir.path().join(blob.name())).unwrap();
        drop(blob);
        let left = segment::name(Owner { pid: u32::MAX, start: 7 }, 3);
        drop(segment::create_with(dir.path(), &left, 3, &[b"abc"]).unwrap());
        assert_eq!((sweep_dir(dir.path()), names(dir.path()).len()), (1, 0));
    }
}
