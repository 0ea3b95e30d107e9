//! Decides about the attempt that follows a failed one.

use std::sync::Arc;
use std::time::Duration;

use chiasm_backend::{DeathReason, InputForm, JobError};
use chiasm_fleet::{Worker, WorkerFault};
use chiasm_metrics::Retry;
use chiasm_types::WorkerId;
use tokio::time::Instant;

use crate::Pipeline;
use crate::deadlines::{Deadline, within};
use crate::error::{Cause, RequestError};
use crate::past_attempts::Attempts;
use crate::prepare::Prepared;
use crate::retries::MAX_MOVES;

/// The pause before another attempt with workers that could not accept a request.
const RETRY_PAUSE: Duration = Duration::from_millis(50);

/// The status of a server's failure if the connection broke, also as reported by a proxy.
const BAD_GATEWAY: u16 = 502;

/// The reason for the early end of an attempt.
pub(super) enum Failure {
    /// The worker left before it had the request.
    NotTaken(WorkerId),
    /// The worker declined the request before it began.
    Declined(WorkerId, WorkerFault),
    /// The worker died or hung while it had the request.
    Lost(WorkerId, DeathReason),
    /// The worker, which is a server, failed while it had the request.
    Failed(WorkerId, WorkerFault),
    /// The request can't be served.
    Final(RequestError),
}

impl Attempts {
    /// Returns the state before the first attempt of a prepared request.
    ///
    /// # Errors
    /// Returns [`Cause::Quarantined`] if several engines have died with this prompt.
    pub(super) fn start(pipeline: &Pipeline, prepared: &Prepared) -> Result<Self, RequestError> {
        pipeline.retries.on_request();
        if pipeline.retries.is_quarantined(|state| prepared.fingerprint(state)) {
            return Err(Cause::Quarantined.into());
        }
        Ok(prepared.attempts.clone())
    }

    /// Records a failed attempt, and waits until the next attempt may begin.
    ///
    /// A worker that never had the request costs nothing, so other workers are tried until the
    /// deadline. A request that was in an engine when the engine died may have killed it, and costs
    /// the next engine the same work again.
    ///
    /// A request with a stale plan is planned again; the worker is not at fault.
    ///
    /// # Errors
    /// Returns the error for the client if no other attempt is allowed.
    pub(super) async fn prepare_next(
        &mut self,
        pipeline: &Pipeline,
        prepared: &mut Prepared,
        failure: Failure,
    ) -> Result<(), RequestError> {
        match failure {
            Failure::NotTaken(worker) => {
                self.record_not_taken(pipeline, worker);
                Ok(())
            }
            Failure::Declined(worker, fault) => {
                self.record_declined(pipeline, worker, fault);
                Ok(())
            }
            Failure::Lost(worker, death) => {
                let cause = Cause::EngineGone(death);
                self.record_lost_in_engine(pipeline, prepared, worker, cause)
            }
            Failure::Failed(worker, fault) => {
                // A server that reports its own failure was not killed by the prompt.
                let may_have_died =
                    matches!(fault, WorkerFault::Failed { status: BAD_GATEWAY, .. });
                self.faults.push(fault.clone());
                if may_have_died {
                    self.record_lost_in_engine(pipeline, prepared, worker, fault.into())
                } else {
                    self.record_lost(pipeline, worker, fault)
                }
            }
            Failure::Final(error) if error.is_stale_plan() => {
                prepared.plan_again(pipeline, error).await
            }
            Failure::Final(error) => {
                let error = self.or_leave_to_servers(pipeline, error);
                self.await_worker(pipeline, prepared.deadlines.first_token, error).await
            }
        }
    }

    /// Records that a worker died or hung while it had the request.
    ///
    /// # Errors
    /// Returns `cause` if the request may not move again. Quarantines the prompt if it was in too
    /// many engines.
    fn record_lost_in_engine(
        &mut self,
        pipeline: &Pipeline,
        prepared: &Prepared,
        worker: WorkerId,
        cause: Cause,
    ) -> Result<(), RequestError> {
        if self.lost_in_engines == MAX_MOVES {
            pipeline.retries.quarantine(|state| prepared.fingerprint(state));
            pipeline.metrics.count_retry(Retry::Quarantined);
            tracing::warn!(
                reason = %cause, engines = MAX_MOVES + 1,
                "a prompt was in several engines when they died"
            );
            return Err(cause.into());
        }
        self.record_lost(pipeline, worker, cause)?;
        self.lost_in_engines += 1;
        Ok(())
    }

    /// Waits until another attempt to pick a worker may succeed, within the deadline.
    ///
    /// A suspect worker may respond at any time. A worker that could not accept the request may
    /// accept it soon.
    ///
    /// # Errors
    /// Returns `error` if waiting can't help, or the fault of a worker if there is no worker to
    /// wait for.
    pub(crate) async fn await_worker(
        &mut self,
        pipeline: &Pipeline,
        deadline: Option<Deadline>,
        error: RequestError,
    ) -> Result<(), RequestError> {
        if !matches!(error.cause, Cause::NoWorker(_) | Cause::Silent) {
            return Err(error);
        }
        // Subscribes before it checks the workers, so that no change is missed.
        let mut changes = pipeline.fleet.changes();
        let final_exclusions = self.lost + self.declined;
        let was_suspect = matches!(error.cause, Cause::Silent);
        if was_suspect && pipeline.fleet.has_suspect() {
            self.exclude.truncate(final_exclusions);
            // `changed` never fails: the fleet holds the sender.
            return within(deadline, changes.changed()).await.map(drop);
        }
        // A suspect worker may have responded since the pick.
        if (was_suspect || self.exclude.len() > final_exclusions) && pipeline.fleet.can_answer() {
            self.exclude.truncate(final_exclusions);
            return within(deadline, tokio::time::sleep(RETRY_PAUSE)).await;
        }
        Err(self.final_error(pipeline, error))
    }

    /// Returns the error of a request that no worker can accept.
    fn final_error(&self, pipeline: &Pipeline, error: RequestError) -> RequestError {
        let outages = pipeline.fleet.outages();
        let faults = self.faults.iter().chain(&outages);
        // First the outage that ends soonest, then the most informative fault.
        let rank = |fault: &&WorkerFault| match fault {
            WorkerFault::Overloaded { until, .. } => (0, Some(*until)),
            WorkerFault::Failed { .. } => (1, None),
            WorkerFault::KeyRefused { .. } => (2, None),
            WorkerFault::UnknownModel { .. } => (3, None),
        };
        match faults.min_by_key(rank) {
            Some(fault) => Cause::from(fault.clone()).into(),
            None if self.exclude.is_empty() => error,
            None => Cause::NoOtherWorker.into(),
        }
    }

    /// Records that a worker left before it had the request.
    pub(crate) fn record_not_taken(&mut self, pipeline: &Pipeline, worker: WorkerId) {
        pipeline.metrics.count_retry(Retry::NotTaken);
        self.exclude.push(worker);
    }

    /// Records that a worker declined the request before it began.
    pub(crate) fn record_declined(
        &mut self,
        pipeline: &Pipeline,
        worker: WorkerId,
        fault: WorkerFault,
    ) {
        pipeline.metrics.count_retry(Retry::NotTaken);
        self.exclude.insert(self.lost + self.declined, worker);
        self.declined += 1;
        self.faults.push(fault);
    }

    /// Records that a worker died, hung or failed while it had the request.
    ///
    /// # Errors
    /// Returns `cause` if the request may not move again.
    pub(crate) fn record_lost(
        &mut self,
        pipeline: &Pipeline,
        worker: WorkerId,
        cause: impl Into<Cause>,
    ) -> Result<(), RequestError> {
        let cause = cause.into();
        if self.lost == MAX_MOVES {
            return Err(cause.into());
        }
        if !pipeline.retries.spend_move(pipeline.in_flight_limit()) {
            pipeline.metrics.count_retry(Retry::OverBudget);
            return Err(cause.into());
        }
        let reason = match &cause {
            Cause::EngineGone(death) => death.to_string(),
            Cause::ServerFailed { message, .. } => message.clone(),
            other => other.to_string(),
        };
        tracing::warn!(
            %worker, %reason,
            "a worker was lost before the first token; the request moves to another worker"
        );
        pipeline.metrics.count_retry(Retry::Lost);
        self.exclude.insert(self.lost, worker);
        self.lost += 1;
        Ok(())
    }

    /// Returns the state of a second attempt beside the one at `worker`, which is suspect. Returns
    /// `None` if the request may not move again.
    pub(super) fn move_from(&self, pipeline: &Pipeline, worker: WorkerId) -> Option<Self> {
        if self.lost == MAX_MOVES {
            return None;
        }
        if !pipeline.retries.spend_move(pipeline.in_flight_limit()) {
            pipeline.metrics.count_retry(Retry::OverBudget);
            return None;
        }
        tracing::info!(
            %worker,
            "a worker is silent before the first token; the request also begins on another worker"
        );
        pipeline.metrics.count_retry(Retry::Suspect);
        let mut moved = self.clone();
        moved.exclude.insert(moved.lost, worker);
        moved.lost += 1;
        Some(moved)
    }

    /// Returns the state after both of two attempts have failed: adds the first attempt's failure.
    pub(super) fn after_failure(self, failure: &Failure) -> Self {
        let was_in_engine = matches!(failure, Failure::Lost(..));
        Self { lost_in_engines: self.lost_in_engines + usize::from(was_in_engine), ..self }
    }

    /// Returns the error of a request that no engine accepts: [`Cause::LeftToServers`] if the
    /// request may be forwarded and an untried server that accepts messages is available, otherwise
    /// `error`.
    pub fn or_leave_to_servers(&self, pipeline: &Pipeline, error: RequestError) -> RequestError {
        let lacks_worker =
            matches!(error.cause, Cause::NoWorker(_) | Cause::Busy(_) | Cause::Silent);
        let is_untried_server = |worker: &Arc<Worker>| {
            worker.backend.capabilities().input == InputForm::Messages
                && worker.is_available()
                && !self.exclude.contains(&worker.id)
        };
        let can_leave = lacks_worker
            && self.can_forward
            && pipeline.fleet.workers().iter().any(is_untried_server);
        if can_leave {
            let cause = Box::new(error.cause);
            Cause::LeftToServers { cause, attempts: self.clone() }.into()
        } else {
            error
        }
    }
}

impl Failure {
    /// Converts the error of a job at a worker.
    pub(super) fn from_job_error(worker: WorkerId, error: JobError) -> Self {
        match error {
            JobError::NotTaken(_) => Self::NotTaken(worker),
            JobError::Dead(death) => Self::Lost(worker, death),
            // Presumably the worker failed with this job alone.
            JobError::Failed => Self::Final(error.into()),
            error => match WorkerFault::from_error(&error, Instant::now()) {
                Some(fault @ WorkerFault::Failed { .. }) => Self::Failed(worker, fault),
                Some(fault) => Self::Declined(worker, fault),
                None => Self::Final(error.into()),
            },
        }
    }
}

impl From<RequestError> for Failure {
    fn from(error: RequestError) -> Self {
        Self::Final(error)
    }
}

impl From<Failure> for RequestError {
    fn from(failure: Failure) -> Self {
        match failure {
            Failure::NotTaken(_) => Cause::NoOtherWorker.into(),
            Failure::Lost(_, death) => Cause::EngineGone(death).into(),
            Failure::Declined(_, fault) | Failure::Failed(_, fault) => Cause::from(fault).into(),
            Failure::Final(error) => error,
        }
    }
}
