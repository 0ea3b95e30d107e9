//! What time it is for a router.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Time since some start that stays the same.
#[derive(Clone, Debug)]
pub enum Clock {
    /// The machine's monotonic clock, since this instant.
    System(Instant),
    /// Stands still until it is set: for simulations.
    Virtual(VirtualClock),
}

/// A clock that somebody sets. Clones are the same clock.
#[derive(Clone, Debug, Default)]
pub struct VirtualClock(Arc<AtomicU64>);

impl VirtualClock {
    /// Sets the time, in nanoseconds since the start. It must not go back.
    pub fn set(&self, nanoseconds: u64) {
        self.0.store(nanoseconds, Ordering::Relaxed);
    }
}

impl Default for Clock {
    fn default() -> Self {
        Self::System(Instant::now())
    }
}

impl Clock {
    pub(crate) fn now(&self) -> Duration {
        match self {
            Self::System(start) => start.elapsed(),
            Self::Virtual(VirtualClock(nanoseconds)) => {
                Duration::from_nanos(nanoseconds.load(Ordering::Relaxed))
            }
        }
    }
}
