//! The circuit breaker of a worker, which requests on all threads share.

use std::sync::Mutex;
use std::sync::atomic::AtomicBool;

use tokio::sync::watch;
use tokio::time::Instant;

use crate::breaker::{Breaker, BreakerState};

/// A worker's breaker, which requests on all threads share.
#[derive(Debug)]
pub(crate) struct WorkerBreaker {
    pub(crate) breaker: Mutex<Breaker>,
    /// `true` if the breaker is closed and counts no failures, so that requests need not lock it.
    pub(crate) is_clean: AtomicBool,
    pub(crate) state: watch::Sender<(BreakerState, Option<Instant>)>,
}

impl WorkerBreaker {
    pub(crate) fn new() -> Self {
        Self {
            breaker: Mutex::new(Breaker::new(Instant::now())),
            is_clean: AtomicBool::new(true),
            state: watch::Sender::default(),
        }
    }
}
