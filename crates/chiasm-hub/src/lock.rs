//! One process downloads a file, the others wait.

use std::fs::{self, File, TryLockError};
use std::io;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use tokio::time::Instant;

use crate::HubError;

/// How often a lock is tried that another process holds.
const TRY_AGAIN: Duration = Duration::from_millis(200);
/// How often it is told.
const TELL_AGAIN: Duration = Duration::from_secs(10);
/// How long the other process may hold it without downloading anything. Hashing what it has does
/// not take that long.
const STUCK: Duration = Duration::from_secs(15 * 60);

/// Locks a file as `filelock` in Python does, by `flock`; waits while another process holds it and
/// makes progress with the blob. The lock ends with the file that is returned.
pub(crate) async fn lock(path: &Path, blob: &Path) -> Result<File, HubError> {
    let wrong = |error| HubError::file(path, error);
    let mut file = open(path).map_err(wrong)?;
    let (mut state, mut changed, mut told) = (downloaded(blob), Instant::now(), Instant::now());
    loop {
        match file.try_lock() {
            Ok(()) if file.metadata().map_err(wrong)?.nlink() > 0 => return Ok(file),
            // Somebody deleted it meanwhile: the next process would lock another file at this path.
            Ok(()) => {
                file = open(path).map_err(wrong)?;
                continue;
            }
            Err(TryLockError::WouldBlock) => {}
            Err(TryLockError::Error(error)) => return Err(wrong(error)),
        }
        if told.elapsed() >= TELL_AGAIN {
            tracing::info!(lock = %path.display(), "another process downloads the same file: waiting for it");
            let now = downloaded(blob);
            if now != state {
                (state, changed) = (now, Instant::now());
            }
            if changed.elapsed() >= STUCK {
                return Err(HubError::Locked {
                    path: path.to_owned(),
                    minutes: STUCK.as_secs() / 60,
                });
            }
            told = Instant::now();
        }
        tokio::time::sleep(TRY_AGAIN).await;
    }
}

fn open(path: &Path) -> io::Result<File> {
    // Others of the group may share the cache.
    File::options().create(true).truncate(false).write(true).mode(0o664).open(path)
}

/// What there is of a blob: each process may have a file of its own for it, named after the blob.
fn downloaded(blob: &Path) -> Vec<(PathBuf, u64, Option<SystemTime>)> {
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
    async fn a_lock_whose_file_was_deleted_is_taken_on_the_new_file() {
        let folder = TempDir::new().unwrap();
        let (path, blob) = (folder.path().join("a.lock"), folder.path().join("a"));
        let held = lock(&path, &blob).await.unwrap();
        let waiting = tokio::spawn({
            let (path, blob) = (path.clone(), blob.clone());
            async move { lock(&path, &blob).await.unwrap() }
        });
        // It has the file open by then, or opens the new one: right in both cases.
        tokio::time::sleep(TRY_AGAIN).await;
        fs::remove_file(&path).unwrap();
        drop(held);
        let locked = waiting.await.unwrap();
        assert!(matches!(open(&path).unwrap().try_lock(), Err(TryLockError::WouldBlock)));
        drop(locked);
    }
}
