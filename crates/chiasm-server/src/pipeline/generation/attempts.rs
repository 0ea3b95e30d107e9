//! Which attempt follows one that failed.

use std::time::Duration;

use chiasm_backend::{Death, JobError};
use chiasm_types::WorkerId;

use crate::frontend::Frontend;
use crate::metrics::Retry;
use crate::pipeline::deadlines::within;
use crate::pipeline::error::{Cause, RequestError};
use crate::pipeline::prepare::Prepared;
use crate::pipeline::retries::MAX_MOVES;

/// Before workers are tried again that could not be given a request, as they were about to leave.
const PAUSE: Duration = Duration::from_millis(50);

/// Why an attempt ended early.
pub(super) enum Failure {
    /// The worker was gone before it had the request.
    NotTaken(WorkerId),
    /// The worker died or hangs with the request in it.
    Lost(WorkerId, Death),
    /// The request can't be served.
    Final(RequestError),
}

/// What a request has been through.
#[derive(Default)]
pub(super) struct Attempts {
    /// The workers that it was lost with, then those that never had it.
    pub(super) exclude: Vec<WorkerId>,
    /// How many of them it was lost with.
    pub(super) lost: usize,
}

impl Attempts {
    /// Before the first attempt.
    ///
    /// # Errors
    /// [`Cause::Quarantined`] when engines have died with this prompt.
    pub(super) fn begin(frontend: &Frontend, prepared: &Prepared) -> Result<Self, RequestError> {
        frontend.retries.earn();
        match frontend.retries.is_quarantined(prepared) {
            true => Err(Cause::Quarantined.into()),
            false => Ok(Self::default()),
        }
    }

    /// After a failed attempt: returns if there is to be another one, else with the error to tell.
    ///
    /// A worker that never had the request has cost nothing: others are tried for as long as there is time. A request that was
    /// in an engine when that died may be what it died of, and costs the next one the work that this one has done.
    pub(super) async fn again(
        &mut self,
        frontend: &Frontend,
        prepared: &Prepared,
        failure: Failure,
    ) -> Result<(), RequestError> {
        let metrics = &frontend.metrics;
        match failure {
            Failure::NotTaken(worker) => {
                metrics.retried(Retry::NotTaken);
                self.exclude.push(worker);
                Ok(())
            }
            Failure::Lost(_, death) if self.lost == MAX_MOVES => {
                frontend.retries.quarantine(prepared);
                metrics.retried(Retry::Quarantined);
                tracing::warn!(%death, engines = MAX_MOVES + 1, "a prompt was in several engines when they died");
                Err(Cause::EngineGone(death).into())
            }
            Failure::Lost(_, death) if !frontend.retries.may_move(frontend.slots.limit()) => {
                metrics.retried(Retry::OverBudget);
                Err(Cause::EngineGone(death).into())
            }
            Failure::Lost(worker, death) => {
                tracing::warn!(%worker, %death, "engine lost before the client was sent a token, trying another");
                metrics.retried(Retry::Lost);
                self.exclude.insert(self.lost, worker);
                self.lost += 1;
                Ok(())
            }
            Failure::Final(RequestError { cause: Cause::NoWorker(_), .. }) if !self.exclude.is_empty() => {
                if self.exclude.len() == self.lost || !frontend.fleet.can_answer() {
                    return Err(Cause::NoOtherWorker.into());
                }
                self.exclude.truncate(self.lost);
                within(prepared.deadlines.first_token, tokio::time::sleep(PAUSE)).await
            }
            Failure::Final(error) => Err(error),
        }
    }
}

impl Failure {
    /// What an error of a worker's backend is.
    pub(super) fn of_job(worker: WorkerId, error: JobError) -> Self {
        match error {
            JobError::NotTaken(_) => Self::NotTaken(worker),
            JobError::Dead(death) => Self::Lost(worker, death),
            error => Self::Final(error.into()),
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
            Failure::Final(error) => error,
        }
    }
}
