//! A file lock that lets one process download a blob while others wait.

use std::fs::{self, File, TryLockError};
use std::io;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use tokio::time::Instant;

use crate::HubError;

/// The interval between attempts to take a lock that another process holds.
const RETRY_INTERVAL: Duration = Duration::from_millis(200);
/// The interval between log lines while waiting for a lock.
const LOG_INTERVAL: Duration = Duration::from_secs(10);
/// The maximum time that another process may hold a lock without downloading anything. Hashing an
/// earlier download takes less.
const STUCK_TIMEOUT: Duration = Duration::from_secs(15 * 60);

/// Locks a file with `flock`, as Python's `filelock` does. The lock is released when the returned
/// file is dropped.
///
/// Waits while another process holds the lock and makes progress with the blob.
pub(crate) async fn lock(path: &Path, blob: &Path) -> Result<File, HubError> {
    let file_error = |error| HubError::file(path, error);
    let mut file = open(path).map_err(file_error)?;
    let mut known_parts = parts(blob);
    let mut changed_at = Instant::now();
    let mut logged_at = Instant::now();
    loop {
        match file.try_lock() {
            Ok(()) if is_at(&file, path) => return Ok(file),
            // The file was deleted: another process would lock a new file at this path.
            Ok(()) => file = open(path).map_err(file_error)?,
            Err(TryLockError::WouldBlock) => {}
            Err(TryLockError::Error(error)) => return Err(file_error(error)),
        }
        if logged_at.elapsed() >= LOG_INTERVAL {
            tracing::info!(
                lock = %path.display(),
                "another process downloads the same file: waiting for it"
            );
            let parts = parts(blob);
            if parts != known_parts {
                known_parts = parts;
                changed_at = Instant::now();
            }
            if changed_at.elapsed() >= STUCK_TIMEOUT {
                return Err(HubError::Locked {
                    path: path.to_owned(),
                    minutes: STUCK_TIMEOUT.as_secs() / 60,
                });
            }
            logged_at = Instant::now();
        }
        tokio::time::sleep(RETRY_INTERVAL).await;
    }
}

/// Returns `true` if `file` is the one that is at `path` now.
fn is_at(file: &File, path: &Path) -> bool {
    match (file.metadata(), fs::metadata(path)) {
        (Ok(held), Ok(current)) => held.dev() == current.dev() && held.ino() == current.ino(),
        _ => false,
    }
}

fn open(path: &Path) -> io::Result<File> {
    // Users of the same group may share the cache.
    File::options().create(true).truncate(false).write(true).mode(0o664).open(path)
}

/// Returns path, size and modification time of all files whose names begin with the blob's. Each
/// process may have a temporary file of its own.
fn parts(blob: &Path) -> Vec<(PathBuf, u64, Option<SystemTime>)> {
    let name = blob.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let entries =
        blob.parent().and_then(|folder| fs::read_dir(folder).ok()).into_iter().flatten().flatten();
    let parts = entries.filter(|entry| entry.file_name().to_string_lossy().starts_with(&name));
    let mut parts: Vec<_> = parts
        .filter_map(|entry| {
            let file = entry.metadata().ok()?;
            Some((entry.path(), file.len(), file.modified().ok()))
        })
        .collect();
    parts.sort();
    parts
}

#[cfg(test)]
mod tests {
    use tempfile::TempDir;

    use super::*;

    #[tokio::test]
    async fn deleted_lock_file_is_locked_anew() {
        let folder = TempDir::new().unwrap();
        let path = folder.path().join("a.lock");
        let blob = folder.path().join("a");
        let held = lock(&path, &blob).await.unwrap();
        let waiting = tokio::spawn({
            let path = path.clone();
            async move { lock(&path, &blob).await.unwrap() }
        });
        // The task has the old file open by then, or opens the new one. Both must work.
        tokio::time::sleep(RETRY_INTERVAL).await;
        fs::remove_file(&path).unwrap();
        drop(held);
        let locked = waiting.await.unwrap();
        assert!(matches!(open(&path).unwrap().try_lock(), Err(TryLockError::WouldBlock)));
        drop(locked);
    }
}
