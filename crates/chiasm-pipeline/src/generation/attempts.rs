//! Which attempt follows one that failed.

use std::sync::Arc;
use std::time::Duration;

use chiasm_backend::{Death, InputForm, JobError};
use chiasm_fleet::{Worker, WorkerFault};
use chiasm_types::WorkerId;
use tokio::time::Instant;

use crate::Pipeline;
use crate::deadlines::{Deadline, within};
use crate::error::{Cause, RequestError};
use crate::metrics::Retry;
use crate::prepare::Prepared;
use crate::retries::MAX_MOVES;
use crate::tried::Attempts;

/// Before workers are tried again that could not be given a request, as they were about to leave.
const PAUSE: Duration = Duration::from_millis(50);

/// The status of a server's failure if its connection broke, or if a proxy says so.
const BAD_GATEWAY: u16 = 502;

/// Why an attempt ended early.
pub(super) enum Failure {
    /// The worker was gone before it had the request.
    NotTaken(WorkerId),
    /// The worker's answer shows that it did not begin, and will not.
    Declined(WorkerId, WorkerFault),
    /// The worker died or hangs with the request in it.
    Lost(WorkerId, Death),
    /// The worker, a server, failed with the request in it.
    Failed(WorkerId, WorkerFault),
    /// The request can't be served.
    Final(RequestError),
}

impl Attempts {
    /// Before the first attempt.
    ///
    /// # Errors
    /// [`Cause::Quarantined`] when engines have died with this prompt.
    pub(super) fn begin(pipeline: &Pipeline, prepared: &Prepared) -> Result<Self, RequestError> {
        pipeline.retries.earn();
        match pipeline.retries.is_quarantined(|state| prepared.fingerprint(state)) {
            true => Err(Cause::Quarantined.into()),
            false => Ok(prepared.tried.clone()),
        }
    }

    /// After a failed attempt: returns if there is to be another one, else with the error to tell.
    ///
    /// A worker that never had the request has cost nothing: others are tried for as long as there
    /// is time. A request that was in an engine when that died may be what it died of, and costs
    /// the next one the work that this one has done.
    pub(super) async fn again(
        &mut self,
        pipeline: &Pipeline,
        prepared: &Prepared,
        failure: Failure,
    ) -> Result<(), RequestError> {
        match failure {
            Failure::NotTaken(worker) => {
                self.not_taken_by(pipeline, worker);
                Ok(())
            }
            Failure::Declined(worker, fault) => {
                self.declined_by(pipeline, worker, fault);
                Ok(())
            }
            Failure::Lost(worker, death) => {
                let cause = Cause::EngineGone(death);
                self.lost_in_engine(pipeline, prepared, worker, cause)
            }
            Failure::Failed(worker, fault) => {
                // A server that tells its own failure was not killed by the prompt.
                let may_have_died =
                    matches!(fault, WorkerFault::Failed { status: BAD_GATEWAY, .. });
                self.faults.push(fault.clone());
                if may_have_died {
                    self.lost_in_engine(pipeline, prepared, worker, fault.into())
                } else {
                    self.lost_with(pipeline, worker, fault)
                }
            }
            Failure::Final(error) => {
                let error = self.or_servers(pipeline, error);
                self.await_worker(pipeline, prepared.deadlines.first_token, error).await
            }
        }
    }

    fn lost_in_engine(
        &mut self,
        pipeline: &Pipeline,
        prepared: &Prepared,
        worker: WorkerId,
        cause: Cause,
    ) -> Result<(), RequestError> {
        if self.lost_in_engines == MAX_MOVES {
            pipeline.retries.quarantine(|state| prepared.fingerprint(state));
            pipeline.metrics.retried(Retry::Quarantined);
            tracing::warn!(death = %cause, engines = MAX_MOVES + 1, "a prompt was in several engines when they died");
            return Err(cause.into());
        }
        self.lost_with(pipeline, worker, cause)?;
        self.lost_in_engines += 1;
        Ok(())
    }

    /// After no worker could be picked: waits until one may take the request, within the deadline.
    ///
    /// A worker that is merely suspect may answer at any time. One that could not take the request
    /// may do so soon.
    ///
    /// # Errors
    /// `error` if no worker can mend it, or the fault of a worker if there is none to wait for.
    pub(crate) async fn await_worker(
        &mut self,
        pipeline: &Pipeline,
        deadline: Option<Deadline>,
        error: RequestError,
    ) -> Result<(), RequestError> {
        if !matches!(error.cause, Cause::NoWorker(_) | Cause::Silent) {
            return Err(error);
        }
        // Before the look at the workers, so that no change is missed.
        let mut changes = pipeline.fleet.changes();
        let final_exclusions = self.lost + self.declined;
        let was_suspect = matches!(error.cause, Cause::Silent);
        if was_suspect && pipeline.fleet.has_suspect() {
            self.exclude.truncate(final_exclusions);
            // It can't fail: the fleet has the sender.
            return within(deadline, changes.changed()).await.map(drop);
        }
        // A suspect worker may have answered since the pick.
        if (was_suspect || self.exclude.len() > final_exclusions) && pipeline.fleet.can_answer() {
            self.exclude.truncate(final_exclusions);
            return within(deadline, tokio::time::sleep(PAUSE)).await;
        }
        Err(self.without_worker(pipeline, error))
    }

    /// Returns the error of a request that no worker can take.
    fn without_worker(&self, pipeline: &Pipeline, error: RequestError) -> RequestError {
        let outages = pipeline.fleet.outages();
        let faults = self.faults.iter().chain(&outages);
        // First the outage that ends soonest, then the fault that says most about the servers.
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

    /// A worker never had the request: another one is to be tried.
    pub(crate) fn not_taken_by(&mut self, pipeline: &Pipeline, worker: WorkerId) {
        pipeline.metrics.retried(Retry::NotTaken);
        self.exclude.push(worker);
    }

    /// Records that a worker did not begin with the request, and will not: another one is to be
    /// tried.
    pub(crate) fn declined_by(
        &mut self,
        pipeline: &Pipeline,
        worker: WorkerId,
        fault: WorkerFault,
    ) {
        pipeline.metrics.retried(Retry::NotTaken);
        self.exclude.insert(self.lost + self.declined, worker);
        self.declined += 1;
        self.faults.push(fault);
    }

    /// A worker failed with the request in it: another one is to be tried.
    ///
    /// # Errors
    /// `cause` when the request may not move any more.
    pub(crate) fn lost_with(
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
            pipeline.metrics.retried(Retry::OverBudget);
            return Err(cause.into());
        }
        let death = match &cause {
            Cause::EngineGone(death) => death.to_string(),
            Cause::ServerFailed { message, .. } => message.clone(),
            other => other.to_string(),
        };
        tracing::warn!(%worker, %death, "a worker was lost before the client was sent a token, trying another");
        pipeline.metrics.retried(Retry::Lost);
        self.exclude.insert(self.lost, worker);
        self.lost += 1;
        Ok(())
    }

    /// Returns the state of an attempt beside the one at `worker`, which is suspect with the
    /// request in it. `None` if the request may not move any more.
    pub(super) fn moved_from(&self, pipeline: &Pipeline, worker: WorkerId) -> Option<Self> {
        if self.lost == MAX_MOVES {
            return None;
        }
        if !pipeline.retries.spend_move(pipeline.in_flight_limit()) {
            pipeline.metrics.retried(Retry::OverBudget);
            return None;
        }
        tracing::info!(%worker, "a request without a token is begun on another worker, too: its own says nothing");
        pipeline.metrics.retried(Retry::Suspect);
        let mut moved = self.clone();
        moved.exclude.insert(moved.lost, worker);
        moved.lost += 1;
        Some(moved)
    }

    /// Returns the state after the attempt that the request was moved from has failed, too.
    pub(super) fn after_failure(self, failure: &Failure) -> Self {
        let is_in_engine = matches!(failure, Failure::Lost(..));
        Self { lost_in_engines: self.lost_in_engines + usize::from(is_in_engine), ..self }
    }

    /// The error of a request that no worker takes which is given tokens. It is left to servers
    /// that are given messages if it may be and one of them is there that it has not been to.
    pub fn or_servers(&self, pipeline: &Pipeline, error: RequestError) -> RequestError {
        let is_for_want_of_workers =
            matches!(error.cause, Cause::NoWorker(_) | Cause::Busy(_) | Cause::Silent);
        let can_be_asked = |worker: &Arc<Worker>| {
            worker.backend.capabilities().input == InputForm::Messages
                && worker.can_be_asked()
                && !self.exclude.contains(&worker.id)
        };
        match is_for_want_of_workers
            && self.may_be_passed_on
            && pipeline.fleet.workers().iter().any(can_be_asked)
        {
            true => Cause::LeftToServers { why: Box::new(error.cause), tried: self.clone() }.into(),
            false => error,
        }
    }
}

impl Failure {
    /// What an error of a worker's backend is.
    pub(super) fn of_job(worker: WorkerId, error: JobError) -> Self {
        match error {
            JobError::NotTaken(_) => Self::NotTaken(worker),
            JobError::Dead(death) => Self::Lost(worker, death),
            // As far as is known the worker failed with this job alone.
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
