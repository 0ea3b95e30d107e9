//! Which worker a session's last request went to.

use std::num::NonZeroUsize;

use lru::LruCache;

use crate::seat::Seat;

/// The least recently used are forgotten.
pub(crate) struct Sessions(Option<LruCache<u64, Seat>>);

impl Sessions {
    pub(crate) fn new(most: usize) -> Self {
        // Not LruCache::new: that takes the memory for all of them at once.
        Self(NonZeroUsize::new(most).map(|most| {
            let mut sessions = LruCache::unbounded();
            sessions.resize(most);
            sessions
        }))
    }

    pub(crate) fn worker(&mut self, session: u64) -> Option<Seat> {
        self.0.as_mut()?.get(&session).copied()
    }

    pub(crate) fn went_to(&mut self, session: u64, seat: Seat) {
        if let Some(sessions) = &mut self.0 {
            sessions.put(session, seat);
        }
    }
}
