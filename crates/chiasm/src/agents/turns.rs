//! Turns of agents that have no worker here: not all of those that are named are asked at once, and
//! silent ones keep no others waiting.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// Most agents without a worker that are asked at once. Whatever a source names, this process has
/// connections left for others.
const MOST_ASKED: usize = 256;
/// Those of them that were not silent when they were asked last.
const KEPT: usize = 64;

/// An agent that takes longer to say what it is counts as silent: one on the other side of the
/// world takes less.
pub(super) const SILENT_AFTER: Duration = Duration::from_secs(1);

/// Turns to be asked.
pub(super) struct Turns {
    of_all: Arc<Semaphore>,
    kept: Arc<Semaphore>,
}

impl Turns {
    pub(super) fn new() -> Self {
        Self {
            of_all: Arc::new(Semaphore::new(MOST_ASKED - KEPT)),
            kept: Arc::new(Semaphore::new(KEPT)),
        }
    }

    /// Waits for a turn, which ends when what is returned is dropped. Silent ones take long and
    /// wait for each other: some turns are for those alone that were not silent when they were
    /// asked last, as new ones, and end within [`SILENT_AFTER`].
    pub(super) async fn take(&self, was_silent: bool) -> Option<OwnedSemaphorePermit> {
        let turn = tokio::select! {
            biased;
            turn = self.kept.clone().acquire_owned(), if !was_silent => turn,
            turn = self.of_all.clone().acquire_owned() => turn,
        };
        // Neither is ever closed.
        turn.ok()
    }
}

#[cfg(test)]
mod tests {
    use tokio::time::{Instant, sleep};

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn ten_thousand_silent_ones_keep_no_other_waiting() {
        let turns = Arc::new(Turns::new());
        for _ in 0..10_000 {
            let turns = turns.clone();
            tokio::spawn(async move {
                let turn = turns.take(false).await;
                sleep(SILENT_AFTER).await;
                drop(turn);
                loop {
                    let _turn = turns.take(true).await;
                    sleep(Duration::from_secs(5)).await;
                }
            });
        }
        let waited = async || {
            let began = Instant::now();
            drop(turns.take(false).await);
            began.elapsed()
        };
        // When all of them are new it waits until each was asked once.
        sleep(Duration::from_millis(1)).await;
        let last = waited().await;
        assert!(last < Duration::from_secs(40), "{last:?}");
        sleep(Duration::from_secs(60)).await;
        assert_eq!((waited().await, turns.of_all.available_permits()), (Duration::ZERO, 0));
    }
}
