//! Running jobs of frontends on this machine's engines.

use std::pin::pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use chiasm_backend::{Adapter, DeathReason, ForeignJob, Input, Job, JobError, Stage};
use chiasm_fleet::{Fleet, Worker};
use chiasm_pipeline::{
    CheckedJob, CutFailure, FetchFailure, MachineMedia, PlanError, RequestReason,
};
use tokio::sync::mpsc;
use tokio::time::sleep;

use super::announcements::Announcements;
use super::drain::Drain;
use super::shares::Share;
use crate::answer::{
    delivered_to_message, embeddings_to_message, failure_to_message, output_to_message,
};
use crate::job::{self, JobParts};
use crate::proto::job_event::Event;
use crate::proto::{self, EmbeddingsLeft, JobEvent, Lacking};

/// The time after which a job's start is reported to its frontend even if there is no output yet.
/// Older frontends wait for the report, and do not notice during the wait if the engine hangs.
const STARTED_TIMEOUT: Duration = Duration::from_secs(1);

/// The context of the jobs of one frontend on one engine.
pub(super) struct JobContext {
    pub(super) fleet: Arc<Fleet>,
    pub(super) media: Arc<MachineMedia>,
    /// The frontend's share of memory, which its jobs count towards.
    pub(super) memory: Share,
    pub(super) worker: Arc<Worker>,
    pub(super) frontend: u64,
    /// The announcements of the engine's jobs.
    pub(super) announcements: Arc<Announcements>,
    /// The drain state of the agent.
    pub(super) drain: Drain,
}

/// Sends events of one job to its frontend.
#[derive(Clone)]
pub(super) struct JobSender {
    pub(super) job: u64,
    pub(super) events: mpsc::UnboundedSender<JobEvent>,
}

impl JobSender {
    pub(super) fn send(&self, event: Event) {
        // Fails if the frontend has disconnected.
        let _ = self.events.send(JobEvent { job: self.job, event: Some(event) });
    }
}

/// Runs a job to its end and sends its events. `stops` has the continuations to stop.
pub(super) async fn run(
    context: Arc<JobContext>,
    job: proto::Job,
    stops: mpsc::UnboundedReceiver<usize>,
    sender: JobSender,
) {
    let _guard = context.drain.track_job();
    let last = match run_to_end(&context, job, stops, &sender).await {
        Ok(()) => Event::Ended(true),
        Err(error) => Event::Failure(failure_to_message(&error)),
    };
    sender.send(last);
}

async fn run_to_end(
    context: &JobContext,
    job: proto::Job,
    mut stops: mpsc::UnboundedReceiver<usize>,
    sender: &JobSender,
) -> Result<(), JobError> {
    let start = Instant::now();
    if context.drain.is_draining() {
        return Err(JobError::NotTaken(DeathReason::new("the agent is draining")));
    }
    let parts =
        job::from_message(job).map_err(|(field, message)| JobError::Refused { field, message })?;
    // Declared first and so dropped last: the engine must release the job before the adapter may be
    // unloaded.
    let adapter = match &parts.adapter {
        // The frontend learns the current adapters when it reconnects.
        Some(name) => {
            Some(context.fleet.adapter_by_engine_name(&context.worker, name).ok_or_else(|| {
                JobError::NotTaken(DeathReason::new(format!(
                    "the engine has no LoRA adapter '{name}'"
                )))
            })?)
        }
        None => None,
    };
    let engine_adapter = adapter.as_ref().map(|adapter| adapter.engine().clone());
    let (job, describe) = check(context, parts, engine_adapter, sender).await?;
    let mut announced = context.announcements.announce(context.frontend, rand::random(), describe);
    let mut running = context.worker.backend.start(Arc::new(job)).await?;
    let mut delivered = running.delivered();
    let hand_off = start.elapsed();
    // Sent together with the first output: a separate message costs both sides too much.
    let mut started = Some(Event::Started(delivered_to_message(delivered, hand_off)));
    let mut started_timeout = pin!(sleep(STARTED_TIMEOUT));
    loop {
        let next = tokio::select! {
            Some(choice) = stops.recv() => {
                running.stop(choice);
                continue;
            }
            next = running.next() => Some(next),
            () = &mut started_timeout, if started.is_some() => None,
        };
        if let Some(started) = started.take() {
            sender.send(started);
        }
        let Some(next) = next else { continue };
        if running.delivered() != delivered {
            delivered = running.delivered();
            sender.send(Event::Delivered(delivered_to_message(delivered, hand_off)));
        }
        // Sent before the output, because the frontend stops listening after the last output.
        if let Some(left) = running.kv_transfer_params() {
            sender.send(Event::Left(left.bytes().clone()));
        }
        let embeddings = running.stored_embeddings();
        if !embeddings.is_empty() {
            let items = embeddings.iter().map(embeddings_to_message).collect();
            sender.send(Event::Embeddings(EmbeddingsLeft { items }));
        }
        match next {
            Some(Ok(output)) => {
                announced.prompt_computed();
                sender.send(Event::Output(output_to_message(output)));
            }
            Some(Err(error)) => return Err(error),
            None => return Ok(()),
        }
    }
}

/// Checks a job. Returns the job for the engine, and a function that describes it to other
/// frontends.
async fn check(
    context: &JobContext,
    parts: JobParts,
    adapter: Option<Arc<Adapter>>,
    sender: &JobSender,
) -> Result<(Job, impl FnOnce() -> ForeignJob + Send + use<>), JobError> {
    let JobParts {
        id,
        tokens,
        media,
        sampling,
        cache_salt,
        priority,
        trace,
        reasoning,
        stage,
        embedded,
        ..
    } = parts;
    let sender = sender.clone();
    let request_item = Arc::new(move |item: usize, reason: RequestReason| {
        sender.send(Event::Lacking(lacking(item, reason)));
    });
    let lora = adapter.as_ref().map(|adapter| adapter.name.as_str());
    let tokens = Arc::new(tokens);
    let checked = context
        .media
        .check(&context.worker, &tokens, media, lora, cache_salt.as_deref(), request_item)
        .await;
    let CheckedJob { items: media, foreign_job } = checked.map_err(|error| to_job_error(&error))?;
    // The engine does not use cached blocks for these jobs.
    let skips_cache = sampling.skip_reading_prefix_cache || stage == Stage::Encode;
    let describe = move || {
        let job = foreign_job();
        if skips_cache { ForeignJob { keys: Vec::new(), ..job } } else { job }
    };
    let input = Input::Tokens(tokens);
    let job = Job {
        id,
        input,
        media,
        sampling,
        adapter,
        cache_salt,
        priority,
        trace,
        reasoning,
        stage,
        embedded,
    };
    Ok((job, describe))
}

/// Returns the request for an item.
fn lacking(item: usize, reason: RequestReason) -> Lacking {
    let lacking = Lacking { items: vec![item as u32], ..Lacking::default() };
    match reason {
        RequestReason::Lacking => lacking,
        RequestReason::NotFetched(FetchFailure { cause, reason }) => {
            Lacking { not_fetched: cause.to_owned(), reason, ..lacking }
        }
        RequestReason::NotDecoded(CutFailure { cause, reason }) => {
            Lacking { not_decoded: cause.to_owned(), reason, ..lacking }
        }
    }
}

/// Converts the error of a plan that failed its check. If the engine is gone, the client is not at
/// fault, and the job moves to another worker.
fn to_job_error(error: &PlanError) -> JobError {
    match error {
        PlanError::EngineGone => JobError::NotTaken(DeathReason::new(error.to_string())),
        PlanError::Tokens(_) | PlanError::Item { .. } => {
            JobError::Refused { field: "messages".to_owned(), message: error.to_string() }
        }
    }
}

#[cfg(test)]
mod tests {
    use chiasm_pipeline::ItemError;

    use super::*;

    #[test]
    fn engine_lost_during_the_check_does_not_take_the_job() {
        assert!(matches!(to_job_error(&PlanError::EngineGone), JobError::NotTaken(_)));
        let wrong_item = PlanError::Item { number: 1, error: ItemError::Order };
        assert!(matches!(to_job_error(&wrong_item), JobError::Refused { .. }));
    }
}
