//! The end of an agent: no new jobs, then no more calls.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::timeout;

/// Keeps new jobs from an agent. Clones are of the same agent.
#[derive(Clone, Default)]
pub struct Drain {
    /// How many jobs run, those included that have not begun.
    running: Arc<watch::Sender<usize>>,
    /// Whether new jobs are refused, which frontends are told.
    begun: Arc<watch::Sender<bool>>,
    /// The agent goes down: nobody can take that back.
    is_last: Arc<AtomicBool>,
    /// Jobs have ended, or had their time: calls end.
    is_over: Arc<watch::Sender<bool>>,
}

impl Drain {
    /// Takes no new jobs from now on, and waits for those that run. Whether they have ended in
    /// time.
    pub async fn finished_within(&self, time: Duration) -> bool {
        self.is_last.store(true, Relaxed);
        self.begun.send_replace(true);
        let mut running = self.running.subscribe();
        timeout(time, running.wait_for(|running| *running == 0)).await.is_ok()
    }

    /// Returns when calls are to end.
    pub(super) fn over(&self) -> impl Future<Output = ()> + Send + use<> {
        let mut is_over = self.is_over.subscribe();
        async move {
            // Without its sender there is no agent any more.
            let _ = is_over.wait_for(|is_over| *is_over).await;
        }
    }

    /// Has calls end.
    pub(super) fn end_calls(&self) {
        self.is_over.send_replace(true);
    }

    /// One more job runs, until what is returned is dropped.
    pub(super) fn count(&self) -> Counted<'_> {
        self.running.send_modify(|running| *running += 1);
        Counted(&self.running)
    }

    /// Whether new jobs are refused, and when that changes.
    pub(super) fn follow(&self) -> watch::Receiver<bool> {
        self.begun.subscribe()
    }

    /// Whether new jobs are refused.
    pub(super) fn is_begun(&self) -> bool {
        *self.begun.borrow()
    }

    /// Refuses new jobs or takes them again, unless the agent goes down. How many run.
    pub(super) fn set(&self, draining: bool) -> usize {
        let draining = draining || self.is_last.load(Relaxed);
        if self.begun.send_replace(draining) != draining {
            tracing::info!(draining, "an operator says whether new jobs are taken");
        }
        *self.running.borrow()
    }
}

/// A job that runs.
pub(super) struct Counted<'a>(&'a watch::Sender<usize>);

impl Drop for Counted<'_> {
    fn drop(&mut self) {
        self.0.send_modify(|running| *running -= 1);
    }
}
