//! What has happened at the door, in numbers.

use std::sync::atomic::{AtomicU64, Ordering};

/// A number that only grows.
#[derive(Default)]
pub(crate) struct Count(AtomicU64);

impl Count {
    pub(crate) fn inc(&self) {
        self.add(1);
    }

    pub(crate) fn add(&self, more: u64) {
        self.0.fetch_add(more, Ordering::Relaxed);
    }

    fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// The numbers behind [`MediaCounts`], which grow while things happen.
#[derive(Default)]
pub(crate) struct Counters {
    pub(crate) data: Count,
    pub(crate) files: Count,
    pub(crate) fresh: Count,
    pub(crate) revalidated: Count,
    pub(crate) fetched: Count,
    pub(crate) fetched_bytes: Count,
    pub(crate) shared: Count,
    pub(crate) failed_again: Count,
    pub(crate) named: Count,
    pub(crate) unknown_names: Count,
}

impl Counters {
    pub(crate) fn snapshot(&self) -> MediaCounts {
        MediaCounts {
            data: self.data.get(),
            files: self.files.get(),
            fresh: self.fresh.get(),
            revalidated: self.revalidated.get(),
            fetched: self.fetched.get(),
            fetched_bytes: self.fetched_bytes.get(),
            shared: self.shared.get(),
            failed_again: self.failed_again.get(),
            named: self.named.get(),
            unknown_names: self.unknown_names.get(),
            cached_bytes: 0,
        }
    }
}

/// What has happened so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MediaCounts {
    /// `data:` URLs.
    pub data: u64,
    /// `file:` URLs.
    pub files: u64,
    /// URLs whose content was known and fresh, so that nobody was asked.
    pub fresh: u64,
    /// URLs whose content was known, and of which the origin said that it has not changed.
    pub revalidated: u64,
    /// Bodies fetched from origins.
    pub fetched: u64,
    /// Bytes of these bodies.
    pub fetched_bytes: u64,
    /// URLs that somebody else's fetch was waited for.
    pub shared: u64,
    /// URLs that were not fetched because they failed a moment ago.
    pub failed_again: u64,
    /// Clients' names that were known.
    pub named: u64,
    /// Clients' names that were not known, or whose content was gone.
    pub unknown_names: u64,
    /// Bytes of the cache of contents, as they are now.
    pub cached_bytes: u64,
}
