//! A limit on concurrent greetings of agents that have no worker here. Silent agents don't delay
//! the greetings of others.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// The maximum number of concurrent greetings. It leaves connections for everything else, however
/// many agents a source names.
const MAX_GREETINGS: usize = 256;
/// The part of [`MAX_GREETINGS`] that is reserved for agents that were not silent last time.
const RESERVED_GREETINGS: usize = 64;

/// The response time from which an agent counts as silent. An agent on the other side of the world
/// is faster.
pub(super) const SILENT_AFTER: Duration = Duration::from_secs(1);

/// The permits for greetings.
pub(super) struct GreetingLimiter {
    shared: Arc<Semaphore>,
    reserved: Arc<Semaphore>,
}

impl GreetingLimiter {
    pub(super) fn new() -> Self {
        Self {
            shared: Arc::new(Semaphore::new(MAX_GREETINGS - RESERVED_GREETINGS)),
            reserved: Arc::new(Semaphore::new(RESERVED_GREETINGS)),
        }
    }

    /// Waits for a permit, which is returned by dropping it.
    ///
    /// Silent agents hold a permit for long and wait for each other. The reserved permits are for
    /// agents that were not silent last time, which includes new ones. Their greetings end within
    /// [`SILENT_AFTER`].
    pub(super) async fn acquire(&self, was_silent: bool) -> Option<OwnedSemaphorePermit> {
        let permit = tokio::select! {
            biased;
            permit = self.reserved.clone().acquire_owned(), if !was_silent => permit,
            permit = self.shared.clone().acquire_owned() => permit,
        };
        // The semaphores are never closed.
        permit.ok()
    }
}

#[cfg(test)]
mod tests {
    use tokio::time::{Instant, sleep};

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn silent_agents_do_not_delay_other_greetings() {
        let limiter = Arc::new(GreetingLimiter::new());
        for _ in 0..10_000 {
            let limiter = limiter.clone();
            tokio::spawn(async move {
                let permit = limiter.acquire(false).await;
                sleep(SILENT_AFTER).await;
                drop(permit);
                loop {
                    let _permit = limiter.acquire(true).await;
                    sleep(Duration::from_secs(5)).await;
                }
            });
        }
        let waited = async || {
            let began = Instant::now();
            drop(limiter.acquire(false).await);
            began.elapsed()
        };
        // While all agents are new, a greeting waits until each was greeted once.
        sleep(Duration::from_millis(1)).await;
        let last = waited().await;
        assert!(last < Duration::from_secs(40), "{last:?}");
        sleep(Duration::from_secs(60)).await;
        assert_eq!((waited().await, limiter.shared.available_permits()), (Duration::ZERO, 0));
    }
}
