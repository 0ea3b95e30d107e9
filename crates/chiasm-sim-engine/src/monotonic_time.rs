//! The time that the engine's messages carry.

use std::time::Instant;

/// Seconds since a little before the engine's start, as vLLM's `time.monotonic()`: never 0, which
/// vLLM takes for unset.
#[derive(Clone, Copy, Debug)]
pub(crate) struct MonotonicTime(Instant);

impl MonotonicTime {
    pub(crate) fn start() -> Self {
        Self(Instant::now())
    }

    pub(crate) fn now(self) -> f64 {
        1.0 + self.0.elapsed().as_secs_f64()
    }
}
