//! A prompt that another worker computes than the one that answers.

use std::sync::Arc;

use chiasm_backend::{Death, Job, JobError, Left, Prefill, RunningJob, Stage};
use chiasm_fleet::Trial;
use chiasm_request::PrefillOutcome;
use chiasm_router::Reservation;
use chiasm_types::MmHash;
use tokio::time::Instant;

use super::attempts::Failure;
use super::job::job;
use super::moving::WaitsFor;
use crate::Pipeline;
use crate::deadlines::{begun_within, within};
use crate::prepare::Prepared;
use crate::sampling::of_prompt;

/// What came of a prompt on a worker of its own.
pub(super) struct Prefilled {
    /// How the worker that answers gets its keys and values; `None` where it finds them by itself,
    /// as in a store that both share.
    pub(super) left: Option<Left>,
    /// Who computed it.
    pub(super) by: PrefillOutcome,
}

/// Has a worker compute a prompt and leave it. `embedded`: of its media items those whose
/// embeddings the worker finds.
pub(super) async fn prefill(
    pipeline: &Arc<Pipeline>,
    prepared: &Prepared,
    mut reservation: Reservation,
    embedded: &[MmHash],
    waits_for: &WaitsFor,
) -> Result<Prefilled, Failure> {
    let started = Instant::now();
    let worker = reservation.worker;
    let serving = pipeline.fleet.worker(worker).ok_or(Failure::NotTaken(worker))?;
    waits_for.set(&serving);
    let (plan, job) = job(pipeline, prepared, &serving, Stage::Prefill, embedded.to_vec())?;
    let job = Job { sampling: of_prompt(job.sampling), ..job };
    let deadline = prepared.deadlines.first_token;
    let mut trial = Trial::begin(&pipeline.fleet, serving.clone());
    let running = begun_within(deadline, &mut trial, serving.backend.start(Arc::new(job))).await?;
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
        pipeline.fleet.router().forget_embeddings(worker, embedded);
    }
    let found = found??;
    reservation.first_token();
    let prefill = found.unwrap_or_default();
    if found.is_some() {
        let prompt = plan.tokens.len();
        pipeline.metrics.prompt_found(
            &reservation,
            reservation.overlap_blocks,
            prompt,
            prefill.cached_tokens,
        );
    }
    let by = PrefillOutcome {
        worker,
        overlap_blocks: reservation.overlap_blocks,
        delivered: running.delivered(),
        prefill,
        hand_off: began + running.hand_off(),
        took: started.elapsed(),
    };
    pipeline.metrics.prefilled(&by);
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
