//! The clock by which cached answers age and cached failures expire.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant, SystemTime};

/// The machine's clocks, plus an offset that tests can advance. Clones share the offset.
///
/// Only caches use this clock. Timeouts of connections and bodies run in the time of the async
/// runtime.
#[derive(Clone, Debug, Default)]
pub struct Clock {
    /// The offset of both clocks from the machine's, in nanoseconds.
    offset: Arc<AtomicU64>,
}

impl Clock {
    /// Moves both clocks forward by `by`.
    pub fn advance(&self, by: Duration) {
        self.offset.fetch_add(by.as_nanos() as u64, Ordering::SeqCst);
    }

    /// Returns the monotonic time.
    pub(crate) fn now(&self) -> Instant {
        Instant::now() + self.offset()
    }

    /// Returns the wall-clock time.
    pub(crate) fn date(&self) -> SystemTime {
        SystemTime::now() + self.offset()
    }

    fn offset(&self) -> Duration {
        Duration::from_nanos(self.offset.load(Ordering::SeqCst))
    }
}
