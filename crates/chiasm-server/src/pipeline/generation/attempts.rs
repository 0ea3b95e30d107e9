//! Which attempt follows one that failed.

use std::sync::Arc;
use std::time::Duration;

use chiasm_backend::{Death, InputForm, JobError};
use chiasm_types::WorkerId;

use crate::fleet::{Condition, Worker};
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
#[derive(Clone, Debug, Default)]
pub(crate) struct Attempts {
    /// The workers that it was lost with, then those that never had it.
    pub(crate) exclude: Vec<WorkerId>,
    /// How many of them it was lost with.
    pub(crate) lost: usize,
    /// How many of those were given tokens: a server's failures don't say that a prompt kills engines.
    pub(crate) lost_in_engines: usize,
    /// A server that is given messages may answer it, too.
    pub(crate) may_be_passed_on: bool,
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
            false => Ok(prepared.tried.clone()),
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
        let error = match failure {
            Failure::NotTaken(worker) => {
                self.not_taken_by(frontend, worker);
                return Ok(());
            }
            Failure::Lost(_, death) if self.lost_in_engines == MAX_MOVES => {
                frontend.retries.quarantine(prepared);
                frontend.metrics.retried(Retry::Quarantined);
                tracing::warn!(%death, engines = MAX_MOVES + 1, "a prompt was in several engines when they died");
                return Err(Cause::EngineGone(death).into());
            }
            Failure::Lost(worker, death) => {
                self.lost_with(frontend, worker, death)?;
                self.lost_in_engines += 1;
                return Ok(());
            }
            Failure::Final(error) => self.or_servers(frontend, error),
        };
        if !matches!(error.cause, Cause::NoWorker(_)) || self.exclude.is_empty() {
            return Err(error);
        }
        if self.exclude.len() == self.lost || !frontend.fleet.can_answer() {
            return Err(Cause::NoOtherWorker.into());
        }
        self.exclude.truncate(self.lost);
        within(prepared.deadlines.first_token, tokio::time::sleep(PAUSE)).await
    }

    /// A worker never had the request: another one is to be tried.
    pub(crate) fn not_taken_by(&mut self, frontend: &Frontend, worker: WorkerId) {
        frontend.metrics.retried(Retry::NotTaken);
        self.exclude.push(worker);
    }

    /// A worker failed with the request in it: another one is to be tried.
    ///
    /// # Errors
    /// [`Cause::EngineGone`] when it may not move any more.
    pub(crate) fn lost_with(
        &mut self,
        frontend: &Frontend,
        worker: WorkerId,
        death: Death,
    ) -> Result<(), RequestError> {
        if self.lost == MAX_MOVES {
            return Err(Cause::EngineGone(death).into());
        }
        if !frontend.retries.may_move(frontend.slots.limit()) {
            frontend.metrics.retried(Retry::OverBudget);
            return Err(Cause::EngineGone(death).into());
        }
        tracing::warn!(%worker, %death, "a worker was lost before the client was sent a token, trying another");
        frontend.metrics.retried(Retry::Lost);
        self.exclude.insert(self.lost, worker);
        self.lost += 1;
        Ok(())
    }

    /// A worker is suspect with the request in it: what the attempt on another one has to know. `None` if it may not move any more.
    pub(super) fn moved_from(&self, frontend: &Frontend, worker: WorkerId) -> Option<Self> {
        if self.lost == MAX_MOVES {
            return None;
        }
        if !frontend.retries.may_move(frontend.slots.limit()) {
            frontend.metrics.retried(Retry::OverBudget);
            return None;
        }
        tracing::info!(%worker, "a request without a token is begun on another worker, too: its own says nothing");
        frontend.metrics.retried(Retry::Suspect);
        let mut moved = self.clone();
        moved.exclude.insert(moved.lost, worker);
        moved.lost += 1;
        Some(moved)
    }

    /// The error of a request that no worker takes which is given tokens. It is left to servers that are given messages if it may be and
    /// one of them is there that it has not been to.
    pub(crate) fn or_servers(&self, frontend: &Frontend, error: RequestError) -> RequestError {
        let is_for_want_of_workers = matches!(error.cause, Cause::NoWorker(_) | Cause::Busy(_));
        let can_be_asked = |worker: &Arc<Worker>| {
            worker.backend.capabilities().input == InputForm::Messages
                && worker.condition() == Condition::Answers
                && !self.exclude.contains(&worker.id)
        };
        match is_for_want_of_workers && self.may_be_passed_on && frontend.fleet.workers().iter().any(can_be_asked) {
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
