//! The liveness of an engine: a silent engine is probed, and any message is an answer.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use tokio::time::Instant;

/// The state of an engine's probe.
#[derive(Debug)]
pub(super) struct Liveness {
    created_at: Instant,
    /// `true` if a message arrived since the last check.
    got_message: AtomicBool,
    /// The time of the unanswered probe, in milliseconds since `created_at`; 0 for none.
    probed_at_ms: AtomicU64,
}

impl Liveness {
    pub(super) fn new() -> Self {
        Self {
            created_at: Instant::now(),
            got_message: AtomicBool::new(false),
            probed_at_ms: AtomicU64::new(0),
        }
    }

    /// Records that a message of the engine arrived.
    pub(super) fn record_message(&self) {
        // The values rarely change, so they are read first: most calls write nothing, and the cache
        // line stays shared.
        if !self.got_message.load(Relaxed) {
            self.got_message.store(true, Relaxed);
        }
        if self.probed_at_ms.load(Relaxed) != 0 {
            self.probed_at_ms.store(0, Relaxed);
        }
    }

    /// Returns the time since the unanswered probe; zero if there is none.
    pub(super) fn silent_for(&self) -> Duration {
        match self.probed_at_ms.load(Relaxed) {
            0 => Duration::ZERO,
            probed_at => self.created_at.elapsed().saturating_sub(Duration::from_millis(probed_at)),
        }
    }

    /// Starts a probe and returns `true` if the engine was silent since the last call and no probe
    /// is unanswered.
    pub(super) fn start_probe_if_due(&self) -> bool {
        if self.got_message.swap(false, Relaxed) || self.probed_at_ms.load(Relaxed) != 0 {
            return false;
        }
        let now = u64::try_from(self.created_at.elapsed().as_millis()).unwrap_or(u64::MAX);
        self.probed_at_ms.store(now.max(1), Relaxed);
        true
    }
}
