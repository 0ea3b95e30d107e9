//! The clock of a router: the machine's, or a virtual one for simulations.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// A source of the time since a fixed start.
#[derive(Clone, Debug)]
pub enum Clock {
    /// The machine's monotonic clock, measured from this instant.
    System(Instant),
    /// A clock that stands still until it is set, for simulations.
    Virtual(VirtualClock),
}

/// A clock that is set by hand. Clones share the same time.
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
    /// Returns the time since the start.
    pub(crate) fn now(&self) -> Duration {
        match self {
            Self::System(start) => start.elapsed(),
            Self::Virtual(VirtualClock(nanoseconds)) => {
                Duration::from_nanos(nanoseconds.load(Ordering::Relaxed))
            }
        }
    }
}
