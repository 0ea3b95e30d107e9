//! Counters of the media loader.

use std::sync::atomic::{AtomicU64, Ordering};

/// A monotonic counter.
#[derive(Default)]
pub(crate) struct Counter(AtomicU64);

impl Counter {
    pub(crate) fn inc(&self) {
        self.add(1);
    }

    pub(crate) fn add(&self, amount: u64) {
        self.0.fetch_add(amount, Ordering::Relaxed);
    }

    fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// The live counters behind [`MediaCounts`].
#[derive(Default)]
pub(crate) struct Counters {
    pub(crate) data: Counter,
    pub(crate) files: Counter,
    pub(crate) fresh: Counter,
    pub(crate) revalidated: Counter,
    pub(crate) fetched: Counter,
    pub(crate) fetched_bytes: Counter,
    pub(crate) shared: Counter,
    pub(crate) failed_again: Counter,
    pub(crate) named: Counter,
    pub(crate) unknown_names: Counter,
}

impl Counters {
    /// Returns the current values, with `cached_bytes` 0.
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

/// A snapshot of the loader's counters.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MediaCounts {
    /// The number of `data:` URLs opened.
    pub data: u64,
    /// The number of `file:` URLs opened.
    pub files: u64,
    /// The number of URLs whose content was cached and fresh, so that no request was sent.
    pub fresh: u64,
    /// The number of URLs whose cached content the origin confirmed as not modified.
    pub revalidated: u64,
    /// The number of bodies fetched from origins.
    pub fetched: u64,
    /// The total size of these bodies in bytes.
    pub fetched_bytes: u64,
    /// The number of URLs that shared a fetch already in flight.
    pub shared: u64,
    /// The number of URLs that were not fetched because an earlier fetch had just failed.
    pub failed_again: u64,
    /// The number of clients' names that were resolved.
    pub named: u64,
    /// The number of clients' names that were unknown, or whose content was no longer cached.
    pub unknown_names: u64,
    /// The current size of the content cache in bytes.
    pub cached_bytes: u64,
}
