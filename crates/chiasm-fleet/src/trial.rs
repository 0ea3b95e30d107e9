//! Outcomes of requests, which open and close their workers' breakers.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use chiasm_backend::JobError;
use chiasm_router::Admission;
use serde_json::{Value, json};
use tokio::sync::watch;
use tokio::time::{Instant, sleep_until};

use crate::breaker::{Breaker, BreakerState, Change, WorkerFault};
use crate::{Condition, Fleet, Worker, lock};

impl Worker {
    /// Returns the state of the worker's breaker.
    pub fn breaker(&self) -> BreakerState {
        self.breaker.state.borrow().0
    }

    /// Returns `true` if the worker answers and its breaker is not open.
    pub fn is_available(&self) -> bool {
        self.condition() == Condition::Answers && self.breaker() != BreakerState::Open
    }

    /// Returns the worker's last fault if its breaker is not closed.
    pub fn outage(&self) -> Option<WorkerFault> {
        let breaker = lock(&self.breaker.breaker);
        breaker.fault().filter(|_| breaker.state() != BreakerState::Closed).cloned()
    }

    /// Returns the breaker for `GET /workers`.
    pub fn breaker_report(&self) -> Value {
        let breaker = lock(&self.breaker.breaker);
        let until =
            breaker.open_until().map(|until| until.saturating_duration_since(Instant::now()));
        json!({
            "state": breaker.state().name(),
            "failures": breaker.failures(),
            "reason": breaker.fault().map(WorkerFault::message),
            "seconds_to_probe": until.map(|until| until.as_secs_f64()),
        })
    }

    /// Waits until the pause of an open breaker is over. Cancel-safe.
    pub(crate) async fn breaker_pause_ended(&self) {
        let mut state = self.breaker.state.subscribe();
        loop {
            let until = state.borrow_and_update().1;
            let pause = async {
                match until {
                    Some(until) => sleep_until(until).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                () = pause => return,
                // Never fails: this worker holds the sender.
                _ = state.changed() => {}
            }
        }
    }
}

impl Fleet {
    /// Changes a worker's breaker, and notifies the router and everything that waits for workers.
    fn change(&self, worker: &Worker, change: impl FnOnce(&mut Breaker, Instant) -> Change) {
        let mut breaker = lock(&worker.breaker.breaker);
        let change = change(&mut breaker, Instant::now());
        let is_clean = breaker.state() == BreakerState::Closed && breaker.failures() == 0;
        worker.breaker.is_clean.store(is_clean, Ordering::Relaxed);
        worker.breaker.state.send_replace((breaker.state(), breaker.open_until()));
        if change == Change::None {
            return;
        }
        let admission = match breaker.state() {
            BreakerState::Closed => Admission::All,
            BreakerState::HalfOpen if breaker.needs_probe() => Admission::One,
            BreakerState::HalfOpen | BreakerState::Open => Admission::None,
        };
        // A later backend of the worker has a breaker of its own.
        if self.worker(worker.id).is_some_and(|present| present.life == worker.life) {
            self.router.set_admission(worker.id, admission);
        }
        if let Change::Opened { is_first } = change {
            log_opened(worker, &breaker, is_first);
        }
        drop(breaker);
        if change == Change::Closed {
            tracing::info!(
                worker = %worker.id,
                what = worker.description,
                "the worker's circuit breaker closed; it gets requests again"
            );
        }
        self.state().notify(&self.ready);
    }

    /// Lets one request probe a worker whose pause is over.
    pub(crate) fn half_open(&self, worker: &Worker) {
        self.change(worker, Breaker::end_pause);
    }

    /// Returns the last faults of all workers whose breakers are not closed.
    pub fn outages(&self) -> Vec<WorkerFault> {
        self.workers().iter().filter_map(|worker| worker.outage()).collect()
    }

    /// Returns a receiver that is notified when a worker joins, leaves, changes its condition or
    /// changes its breaker.
    pub fn changes(&self) -> watch::Receiver<usize> {
        self.ready.subscribe()
    }
}

/// Logs once per outage that a worker gets no requests, with the remedy.
fn log_opened(worker: &Worker, breaker: &Breaker, is_first: bool) {
    let Some(fault) = breaker.fault() else { return };
    let id = worker.id;
    let what = &worker.description;
    let reason = fault.message();
    match fault {
        _ if !is_first => {
            tracing::debug!(
                worker = %id, what, reason,
                "the probe failed; the worker's circuit breaker stays open"
            );
        }
        WorkerFault::KeyRefused { .. } => tracing::error!(
            worker = %id, what, reason,
            "the server refuses its API key and gets no requests: put a valid key into the \
             file of api-key-file=FILE after its address"
        ),
        WorkerFault::Overloaded { .. } => {
            tracing::warn!(
                worker = %id, what, reason,
                "the server is overloaded and gets no requests during the pause that it requested"
            );
        }
        WorkerFault::Failed { .. } | WorkerFault::UnknownModel { .. } => tracing::warn!(
            worker = %id, what, reason, failures = breaker.failures(),
            "the worker's circuit breaker opened: it gets no requests until a probe succeeds"
        ),
    }
}

/// A request at a worker whose outcome is not known yet. A trial that is dropped without an outcome
/// does not count against the worker.
pub struct Trial {
    fleet: Arc<Fleet>,
    worker: Arc<Worker>,
    is_probe: bool,
}

impl Trial {
    /// Begins a trial. Required for each picked worker: a half-open breaker admits no other request
    /// until the trial ends.
    pub fn begin(fleet: &Arc<Fleet>, worker: Arc<Worker>) -> Self {
        let is_probe = !worker.breaker.is_clean.load(Ordering::Relaxed)
            && lock(&worker.breaker.breaker).begin();
        Self { fleet: fleet.clone(), worker, is_probe }
    }

    /// Records that the worker began an answer.
    pub fn succeeded(&mut self) {
        self.is_probe = false;
        if !self.worker.breaker.is_clean.load(Ordering::Relaxed) {
            self.fleet.change(&self.worker, Breaker::succeeded);
        }
    }

    /// Records that a job failed. Errors that are the job's own fault do not count.
    pub fn failed(&mut self, error: &JobError) {
        if let Some(fault) = WorkerFault::from_error(error, Instant::now()) {
            self.record(fault);
        }
    }

    /// Records that the worker did not answer before the deadline of the request.
    pub fn timed_out(&mut self) {
        self.record(WorkerFault::Failed {
            status: 504,
            message: "the server does not answer in time".to_owned(),
        });
    }

    fn record(&mut self, fault: WorkerFault) {
        self.is_probe = false;
        self.fleet.change(&self.worker, |breaker, now| breaker.failed(fault, now));
    }
}

impl Drop for Trial {
    fn drop(&mut self) {
        if self.is_probe {
            self.fleet.change(&self.worker, |breaker, _| breaker.probe_ended());
        }
    }
}
