//! One process downloads a file, the others wait.

use std::fs::{self, File, TryLockError};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use tokio::time::Instant;

use crate::HubError;

/// How often a lock is tried that another process holds.
const TRY_AGAIN: Duration = Duration::from_millis(200);
/// How often it is told.
const TELL_AGAIN: Duration = Duration::from_secs(10);
/// How long the other process may hold it without downloading anything. Hashing what it has does not take that long.
const STUCK: Duration = Duration::from_secs(15 * 60);

/// Locks a file as `filelock` in Python does, by `flock`; waits while another process holds it and makes progress with the blob.
/// The lock ends with the file that is returned.
pub(crate) async fn lock(path: &Path, blob: &Path) -> Result<File, HubError> {
    // Others of the group may share the cache.
    let file = File::options().create(true).truncate(false).write(true).mode(0o664).open(path);
    let file = file.map_err(|error| HubError::file(path, error))?;
    let (mut state, mut changed, mut told) = (downloaded(blob), Instant::now(), Instant::now());
    loop {
        match file.try_lock() {
            Ok(()) => return Ok(file),
            Err(TryLockError::WouldBlock) => {}
            Err(TryLockError::Error(error)) => return Err(HubError::file(path, error)),
        }
        if told.elapsed() >= TELL_AGAIN {
            tracing::info!(lock = %path.display(), "another process downloads the same file: waiting for it");
            let now = downloaded(blob);
            if now != state {
                (state, changed) = (now, Instant::now());
            }
            if changed.elapsed() >= STUCK {
                return Err(HubError::Locked { path: path.to_owned(), minutes: STUCK.as_secs() / 60 });
            }
            told = Instant::now();
        }
        tokio::time::sleep(TRY_AGAIN).await;
    }
}

/// What there is of a blob: each process may have a file of its own for it, named after the blob.
fn downloaded(blob: &Path) -> Vec<(PathBuf, u64, Option<SystemTime>)> {
    let name = blob.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let entries = blob.parent().and_then(|folder| fs::read_dir(folder).ok()).into_iter().flatten().flatten();
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
