//! Draining an agent: first no new jobs, then no more calls.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;

use tokio::sync::watch;

/// The drain state of an agent. Clones share the state.
#[derive(Clone, Default)]
pub struct Drain {
    /// The number of running jobs, including those that have not started yet.
    running: Arc<watch::Sender<usize>>,
    /// `true` if new jobs are refused; frontends follow this.
    draining: Arc<watch::Sender<bool>>,
    /// `true` once the agent goes down, which can't be undone.
    is_final: Arc<AtomicBool>,
    /// Holds `true` once calls should end: jobs have ended, or their time is up.
    calls_ended: Arc<watch::Sender<bool>>,
}

impl Drain {
    /// Refuses new jobs from now on and waits for the running ones. Returns `true` if they have
    /// ended within `timeout`.
    pub async fn finish_jobs(&self, timeout: Duration) -> bool {
        self.is_final.store(true, Relaxed);
        self.draining.send_replace(true);
        let mut running = self.running.subscribe();
        let finished = running.wait_for(|running| *running == 0);
        tokio::time::timeout(timeout, finished).await.is_ok()
    }

    /// Returns a future that resolves when calls should end.
    pub(super) fn wait_calls_ended(&self) -> impl Future<Output = ()> + Send + use<> {
        let mut calls_ended = self.calls_ended.subscribe();
        async move {
            // Fails if the sender is dropped, and with it the agent.
            let _ = calls_ended.wait_for(|ended| *ended).await;
        }
    }

    /// Makes all calls end.
    pub(super) fn end_calls(&self) {
        self.calls_ended.send_replace(true);
    }

    /// Counts a job as running until the guard is dropped.
    pub(super) fn track_job(&self) -> JobGuard<'_> {
        self.running.send_modify(|running| *running += 1);
        JobGuard(&self.running)
    }

    /// Returns a receiver that is `true` while new jobs are refused.
    pub(super) fn subscribe(&self) -> watch::Receiver<bool> {
        self.draining.subscribe()
    }

    /// Returns `true` if new jobs are refused.
    pub(super) fn is_draining(&self) -> bool {
        *self.draining.borrow()
    }

    /// Refuses new jobs or accepts them again; an agent that goes down keeps refusing. Returns the
    /// number of running jobs.
    pub(super) fn set_draining(&self, draining: bool) -> usize {
        let draining = draining || self.is_final.load(Relaxed);
        if self.draining.send_replace(draining) != draining {
            tracing::info!(draining, "an operator changed the drain state");
        }
        *self.running.borrow()
    }
}

/// Counts a job as running until this is dropped.
pub(super) struct JobGuard<'a>(&'a watch::Sender<usize>);

impl Drop for JobGuard<'_> {
    fn drop(&mut self) {
        self.0.send_modify(|running| *running -= 1);
    }
}
