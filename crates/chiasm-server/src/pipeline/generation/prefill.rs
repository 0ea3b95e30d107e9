//! A prompt that another worker computes than the one that answers.

use std::sync::Arc;
use std::time::Duration;

use chiasm_backend::{Death, Delivered, Job, JobError, Left, Prefill, RunningJob, Stage};
use chiasm_router::Reservation;
use chiasm_types::{MmHash, WorkerId};
use tokio::time::Instant;

use super::attempts::Failure;
use super::job::job;
use super::moving::WaitsFor;
use crate::fleet::Trial;
use crate::frontend::Frontend;
use crate::pipeline::deadlines::within;
use crate::pipeline::prepare::Prepared;
use crate::pipeline::sampling::of_prompt;

/// What came of a prompt on a worker of its own.
pub(super) struct Prefilled {
    /// How the worker that answers gets its keys and values; `None` where it finds them by itself, as in a store that both share.
    pub(super) left: Option<Left>,
    /// Who computed it.
    pub(super) by: PrefilledBy,
}

/// The worker that computed a prompt, and what it found.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct PrefilledBy {
    /// The worker.
    pub worker: WorkerId,
    /// Leading blocks of the prompt that it held when it was picked.
    pub overlap_blocks: usize,
    /// How the media items travelled to it.
    pub delivered: Delivered,
    /// How it computed the prompt, by its own account.
    pub prefill: Prefill,
    /// Time that it took to take the job, with the media items that it lacked.
    pub hand_off: Duration,
    /// Time from when it was picked until it had left the prompt.
    pub took: Duration,
}

/// Has a worker compute a prompt and leave it. `embedded`: of its media items those whose embeddings the worker finds.
pub(super) async fn prefill(
    frontend: &Arc<Frontend>,
    prepared: &Prepared,
    mut reservation: Reservation,
    embedded: &[MmHash],
    waits_for: &WaitsFor,
) -> Result<Prefilled, Failure> {
    let started = Instant::now();
    let worker = reservation.worker;
    let serving = frontend.fleet.worker(worker).ok_or(Failure::NotTaken(worker))?;
    waits_for.set(&serving);
    let (plan, job) = job(frontend, prepared, &serving, Stage::Prefill, embedded.to_vec())?;
    let job = Job { sampling: of_prompt(job.sampling), ..job };
    let deadline = prepared.deadlines.first_token;
    let mut trial = Trial::begin(&frontend.fleet, serving.clone());
    let running = trial.within(deadline, serving.backend.start(Arc::new(job))).await?;
    let mut running = running.map_err(|error| Failure::of_job(worker, error))?;
    let began = started.elapsed();
    let computed = async {
        tokio::select! {
            found = to_end(running.as_mut(), &mut trial) => found.map_err(|error| Failure::of_job(worker, error)),
            () = serving.hung() => Err(Failure::Lost(worker, Death::new("it hangs"))),
        }
    };
    let found = within(deadline, computed).await;
    // Some backends tell of it behind their start.
    if running.delivered().unfound > 0 {
        frontend.fleet.router().forget_embeddings(worker, embedded);
    }
    let found = found??;
    reservation.first_token();
    let prefill = found.unwrap_or_default();
    if found.is_some() {
        let prompt = plan.tokens.len();
        frontend.metrics.prompt_found(&reservation, reservation.overlap_blocks, prompt, prefill.cached_tokens);
    }
    let by = PrefilledBy {
        worker,
        overlap_blocks: reservation.overlap_blocks,
        delivered: running.delivered(),
        prefill,
        hand_off: began + running.hand_off(),
        took: started.elapsed(),
    };
    frontend.metrics.prefilled(&by);
    Ok(Prefilled { left: running.left(), by })
}

/// Waits until a job has ended; how it computed its prompt, if it tells.
pub(super) async fn to_end(
    running: &mut (dyn RunningJob + 'static),
    trial: &mut Trial,
) -> Result<Option<Prefill>, JobError> {
    let mut found = None;
    while let Some(output) = running.next().await {
        found = output.inspect_err(|error| trial.failed(error))?.prefill.or(found);
    }
    trial.succeeded();
    Ok(found)
}
