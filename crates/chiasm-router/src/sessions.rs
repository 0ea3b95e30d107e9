//! The worker that each session's last request went to.

use std::num::NonZeroUsize;

use lru::LruCache;

use crate::worker_handle::WorkerHandle;

/// A bounded map from sessions to workers; the least recently used sessions are evicted.
pub(crate) struct Sessions(Option<LruCache<u64, WorkerHandle>>);

impl Sessions {
    /// Creates a map for at most `capacity` sessions; with 0 it stays empty.
    pub(crate) fn new(capacity: usize) -> Self {
        // Not LruCache::new, which allocates the whole capacity at once.
        Self(NonZeroUsize::new(capacity).map(|capacity| {
            let mut sessions = LruCache::unbounded();
            sessions.resize(capacity);
            sessions
        }))
    }

    /// Returns the worker of a session and marks the session as used.
    pub(crate) fn worker(&mut self, session: u64) -> Option<WorkerHandle> {
        self.0.as_mut()?.get(&session).copied()
    }

    /// Records that a request of a session went to a worker.
    pub(crate) fn set_worker(&mut self, session: u64, worker: WorkerHandle) {
        if let Some(sessions) = &mut self.0 {
            sessions.put(session, worker);
        }
    }
}
