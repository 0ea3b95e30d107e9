//! Whether an engine answers: it is asked when it has been silent for a while, and anything that it says is an answer.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use tokio::time::Instant;

use super::connection::{Connection, Outgoing};
use crate::wire::{Utility, request};

/// A method of every EngineCore that costs it nothing. It is answered between two steps.
const METHOD: &str = "is_scheduler_paused";

/// A number that no call has whose answer is waited for.
const NOBODYS_CALL: i64 = 0;

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

    /// Whether the engine is to be asked now: it was silent since the last look and has no question to answer.
    fn is_due(&self) -> bool {
        if self.heard.swap(false, Relaxed) || self.asked.load(Relaxed) != 0 {
            return false;
        }
        let now = u64::try_from(self.since.elapsed().as_millis()).unwrap_or(u64::MAX);
        self.asked.store(now.max(1), Relaxed);
        true
    }
}

/// Asks an engine that says nothing for so long, until it is gone.
pub(super) async fn keep_asking(connection: Arc<Connection>, every: Duration) {
    let gone = connection.gone();
    tokio::pin!(gone);
    loop {
        tokio::select! {
            () = tokio::time::sleep(every) => {}
            _ = &mut gone => return,
        }
        if connection.pulse().is_due() {
            let call = Utility { client_index: 0, call_id: NOBODYS_CALL, method: METHOD.to_owned(), args: Vec::new() };
            // One that can't be sent to is about to be gone.
            let _ = connection.send(Outgoing::Frames(request::encode_utility(&call)));
        }
    }
}
