//! Jobs that frontends have given to this machine's engines.

use std::pin::pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use chiasm_backend::{Adapter, Death, Input, Job, JobError, OthersJob, Stage};
use chiasm_fleet::{Fleet, Worker};
use chiasm_pipeline::{CheckedJob, MachineMedia, NotFetched, PlanError};
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

/// How long it may take until a frontend hears that a job has begun, if nothing else is to be told
/// before. Those of earlier versions wait for it, and do not see meanwhile that the engine hangs.
const STARTED_WITHIN: Duration = Duration::from_secs(1);

/// Where jobs run, and for whom.
pub(super) struct Place {
    pub(super) fleet: Arc<Fleet>,
    pub(super) media: Arc<MachineMedia>,
    /// The frontend's share of memory: what jobs hold is counted in it.
    pub(super) memory: Share,
    pub(super) worker: Arc<Worker>,
    pub(super) frontend: u64,
    /// Of the engine.
    pub(super) announcements: Arc<Announcements>,
    /// Whether the agent takes no new ones, and which run.
    pub(super) drain: Drain,
}

/// Tells a frontend of one job.
#[derive(Clone)]
pub(super) struct Teller {
    pub(super) job: u64,
    pub(super) events: mpsc::UnboundedSender<JobEvent>,
}

impl Teller {
    pub(super) fn tell(&self, event: Event) {
        // Nobody hears it any more when the frontend is gone.
        let _ = self.events.send(JobEvent { job: self.job, event: Some(event) });
    }
}

/// Runs a job to its end, and tells of it. Continuations that are to end come out of `stops`.
pub(super) async fn run(
    place: Arc<Place>,
    job: proto::Job,
    stops: mpsc::UnboundedReceiver<usize>,
    teller: Teller,
) {
    let _counted = place.drain.count();
    let last = match run_to_end(&place, job, stops, &teller).await {
        Ok(()) => Event::Ended(true),
        Err(error) => Event::Failure(failure_to_message(&error)),
    };
    teller.tell(last);
}

async fn run_to_end(
    place: &Place,
    job: proto::Job,
    mut stops: mpsc::UnboundedReceiver<usize>,
    teller: &Teller,
) -> Result<(), JobError> {
    let began = Instant::now();
    if place.drain.is_begun() {
        return Err(JobError::NotTaken(Death::new("the agent takes no new jobs")));
    }
    let parts =
        job::from_message(job).map_err(|(field, message)| JobError::Refused { field, message })?;
    // Let go of last: the engine has let go of the job before it may forget the adapter.
    let adapter = match &parts.adapter {
        // The frontend learns of what there is now when it connects again.
        Some(name) => Some(place.fleet.adapter_of(&place.worker, name).ok_or_else(|| {
            JobError::NotTaken(Death::new(format!(
                "the engine has no LoRA adapter that it knows as '{name}'"
            )))
        })?),
        None => None,
    };
    let engine_adapter = adapter.as_ref().map(|adapter| adapter.engine().clone());
    let (job, told) = checked(place, parts, engine_adapter, teller).await?;
    let mut announced = place.announcements.begin(place.frontend, rand::random(), told);
    let mut running = place.worker.backend.start(Arc::new(job)).await?;
    let mut delivered = running.delivered();
    let hand_off = began.elapsed();
    // It goes with the first output: a message of its own costs both sides more than it is worth.
    let mut untold = Some(Event::Started(delivered_to_message(delivered, hand_off)));
    let mut late = pin!(sleep(STARTED_WITHIN));
    loop {
        let next = tokio::select! {
            Some(choice) = stops.recv() => {
                running.stop(choice);
                continue;
            }
            next = running.next() => Some(next),
            () = &mut late, if untold.is_some() => None,
        };
        if let Some(started) = untold.take() {
            teller.tell(started);
        }
        let Some(next) = next else { continue };
        if running.delivered() != delivered {
            delivered = running.delivered();
            teller.tell(Event::Delivered(delivered_to_message(delivered, hand_off)));
        }
        // Before the output: with the last one the frontend has heard all.
        if let Some(left) = running.left() {
            teller.tell(Event::Left(left.words().clone()));
        }
        let embeddings = running.embeddings();
        if !embeddings.is_empty() {
            let items = embeddings.iter().map(embeddings_to_message).collect();
            teller.tell(Event::Embeddings(EmbeddingsLeft { items }));
        }
        match next {
            Some(Ok(output)) => {
                announced.computed();
                teller.tell(Event::Output(output_to_message(output)));
            }
            Some(Err(error)) => return Err(error),
            None => return Ok(()),
        }
    }
}

/// The job as the engine is to have it, and what other frontends are told of it.
async fn checked(
    place: &Place,
    parts: JobParts,
    adapter: Option<Arc<Adapter>>,
    teller: &Teller,
) -> Result<(Job, impl FnOnce() -> OthersJob + Send + use<>), JobError> {
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
    let asking = teller.clone();
    let ask = Arc::new(move |item: usize, why: Option<NotFetched>| {
        let (not_fetched, reason) =
            why.map(|why| (why.cause.to_owned(), why.reason)).unwrap_or_default();
        asking.tell(Event::Lacking(Lacking { items: vec![item as u32], not_fetched, reason }));
    });
    let lora = adapter.as_ref().map(|adapter| adapter.name.as_str());
    let tokens = Arc::new(tokens);
    let checked =
        place.media.check(&place.worker, &tokens, media, lora, cache_salt.as_deref(), ask).await;
    let CheckedJob { items: media, told } = checked.map_err(|error| to_job_error(&error))?;
    // What the engine holds is of no use to it.
    let reads_nothing = sampling.skip_reading_prefix_cache || stage == Stage::Encode;
    let told = move || match reads_nothing {
        true => OthersJob { keys: Vec::new(), ..told() },
        false => told(),
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
    Ok((job, told))
}

/// Returns what a frontend is told of a plan that failed its check. An engine that left is not the
/// client's fault: the job moves.
fn to_job_error(error: &PlanError) -> JobError {
    match error {
        PlanError::EngineGone => JobError::NotTaken(Death::new(error.to_string())),
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
    fn engine_that_left_during_the_check_has_not_taken_the_job() {
        assert!(matches!(to_job_error(&PlanError::EngineGone), JobError::NotTaken(_)));
        let wrong_item = PlanError::Item { number: 1, error: ItemError::Order };
        assert!(matches!(to_job_error(&wrong_item), JobError::Refused { .. }));
    }
}
