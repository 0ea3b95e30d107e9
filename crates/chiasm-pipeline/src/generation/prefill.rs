//! The prefill stage: a worker computes the prompt for the worker that answers.

use std::sync::Arc;

use chiasm_backend::{DeathReason, Job, JobError, KvTransferParams, Prefill, RunningJob, Stage};
use chiasm_fleet::Trial;
use chiasm_request::PrefillOutcome;
use chiasm_router::Reservation;
use chiasm_types::MmHash;
use tokio::time::Instant;

use super::attempts::Failure;
use super::job::build_job;
use super::moving::CurrentWorker;
use crate::Pipeline;
use crate::deadlines::{start_within, within};
use crate::prepare::Prepared;
use crate::sampling::for_prompt_only;

/// A prompt that a separate worker has computed.
pub(super) struct Prefilled {
    /// The parameters with which the answering worker gets the keys and values. `None` if it finds
    /// them by itself, as in a store that both workers share.
    pub(super) kv_transfer: Option<KvTransferParams>,
    /// The worker that computed the prompt, and its times.
    pub(super) outcome: PrefillOutcome,
}

/// Lets a worker compute a prompt for another worker. `embedded` has the media items whose
/// embeddings the worker can find.
pub(super) async fn prefill(
    pipeline: &Arc<Pipeline>,
    prepared: &Prepared,
    mut reservation: Reservation,
    embedded: &[MmHash],
    current_worker: &CurrentWorker,
) -> Result<Prefilled, Failure> {
    let started = Instant::now();
    let id = reservation.worker;
    let worker = pipeline.fleet.worker(id).ok_or(Failure::NotTaken(id))?;
    current_worker.set(&worker);
    let (plan, job) = build_job(pipeline, prepared, &worker, Stage::Prefill, embedded.to_vec())?;
    let job = Job { sampling: for_prompt_only(job.sampling), ..job };
    let deadline = prepared.deadlines.first_token;
    let mut trial = Trial::begin(&pipeline.fleet, worker.clone());
    let running = start_within(deadline, &mut trial, worker.backend.start(Arc::new(job))).await?;
    let mut running = running.map_err(|error| Failure::from_job_error(id, error))?;
    let hand_off = started.elapsed();
    let computed = async {
        tokio::select! {
            prefill = run_to_end(running.as_mut(), &mut trial) => {
                prefill.map_err(|error| Failure::from_job_error(id, error))
            }
            () = worker.wait_hung() => Err(Failure::Lost(id, DeathReason::new("the worker hangs"))),
        }
    };
    let computed = within(deadline, computed).await;
    // After the end of the job, because some backends report deliveries after their start.
    if running.delivered().unfound > 0 {
        pipeline.fleet.router().forget_embeddings(id, embedded);
    }
    let reported = computed??;
    reservation.first_token();
    let prefill = reported.unwrap_or_default();
    if reported.is_some() {
        let prompt = plan.tokens.len();
        pipeline.metrics.count_prompt_overlap_error(
            &reservation,
            reservation.overlap_blocks,
            prompt,
            prefill.cached_tokens,
        );
    }
    let outcome = PrefillOutcome {
        worker: id,
        overlap_blocks: reservation.overlap_blocks,
        delivered: running.delivered(),
        prefill,
        hand_off: hand_off + running.hand_off(),
        duration: started.elapsed(),
    };
    pipeline.metrics.count_prefilled(&outcome);
    Ok(Prefilled { kv_transfer: running.kv_transfer_params(), outcome })
}

/// Waits until a job has ended. Returns the statistics of its prefill, if the backend reports them.
pub(super) async fn run_to_end(
    running: &mut (dyn RunningJob + 'static),
    trial: &mut Trial,
) -> Result<Option<Prefill>, JobError> {
    let mut prefill = None;
    while let Some(output) = running.next().await {
        prefill = output.inspect_err(|error| trial.failed(error))?.prefill.or(prefill);
    }
    trial.succeeded();
    Ok(prefill)
}
