//! Progress of a download.

use std::sync::atomic::{AtomicU64, Ordering};

/// The byte counts of a download. They may be read at any time.
#[derive(Debug, Default)]
pub struct Progress {
    total: AtomicU64,
    done: AtomicU64,
}

impl Progress {
    /// Returns the total size of the files to download, including bytes of an earlier download. It
    /// is 0 until the sizes are known.
    pub fn total(&self) -> u64 {
        self.total.load(Ordering::Relaxed)
    }

    /// Returns the number of these bytes that are on the disk.
    pub fn done(&self) -> u64 {
        self.done.load(Ordering::Relaxed)
    }

    /// Adds bytes to the total.
    pub(crate) fn add_total(&self, bytes: u64) {
        self.total.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Counts bytes that were downloaded.
    pub(crate) fn add(&self, bytes: u64) {
        self.done.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Takes back bytes that were counted and have to be downloaded again.
    pub(crate) fn subtract(&self, bytes: u64) {
        self.done.fetch_sub(bytes, Ordering::Relaxed);
    }
}
