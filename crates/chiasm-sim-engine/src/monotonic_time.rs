//! The timestamps in the engine's messages.

use std::time::Instant;

/// Seconds since shortly before the engine's start, like vLLM's `time.monotonic()`. Never 0, which
/// vLLM treats as unset.
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
