//! Whether an engine answers: it is asked when it has been silent for a while, and anything that it
//! says is an answer.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use tokio::time::Instant;

/// When an engine was asked for a sign of life and has not given one.
#[derive(Debug)]
pub(super) struct Pulse {
    since: Instant,
    /// Something came since it was last looked at.
    heard: AtomicBool,
    /// Milliseconds from `since` to the question that is not answered; 0 for none.
    asked: AtomicU64,
}

impl Pulse {
    pub(super) fn new() -> Self {
        Self { since: Instant::now(), heard: AtomicBool::new(false), asked: AtomicU64::new(0) }
    }

    /// The engine has said something.
    pub(super) fn beat(&self) {
        // Both are read far more often than they change.
        if !self.heard.load(Relaxed) {
            self.heard.store(true, Relaxed);
        }
        if self.asked.load(Relaxed) != 0 {
            self.asked.store(0, Relaxed);
        }
    }

    /// Time since the question that is not answered; zero if there is none.
    pub(super) fn silent_for(&self) -> Duration {
        match self.asked.load(Relaxed) {
            0 => Duration::ZERO,
            asked => self.since.elapsed().saturating_sub(Duration::from_millis(asked)),
        }
    }

    /// Whether the engine is to be asked now: it was silent since the last look and has no question
    /// to answer.
    pub(super) fn is_due(&self) -> bool {
        if self.heard.swap(false, Relaxed) || self.asked.load(Relaxed) != 0 {
            return false;
        }
        let now = u64::try_from(self.since.elapsed().as_millis()).unwrap_or(u64::MAX);
        self.asked.store(now.max(1), Relaxed);
        true
    }
}
