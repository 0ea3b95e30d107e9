//! The encode stage: workers encode media items for the worker that computes the prompt.

use std::sync::Arc;
use std::time::Duration;

use chiasm_backend::{DeathReason, Input, Job, JobItem, ReasoningHints, Stage};
use chiasm_fleet::{Trial, Worker};
use chiasm_request::EncodeOutcome;
use chiasm_router::EncodeStage;
use chiasm_types::{MmHash, Placeholder, TokenId, WorkerId};
use futures_util::future::join_all;
use tokio::time::Instant;

use super::attempts::Failure;
use super::prefill::run_to_end;
use crate::Pipeline;
use crate::deadlines::{start_within, within};
use crate::prepare::{ClassPlan, Prepared};
use crate::sampling;

/// Lets workers encode media items concurrently. Returns the items whose embeddings were stored,
/// and the slowest worker.
///
/// A failure loses nothing: the worker that computes the prompt also has the items, and encodes
/// those whose embeddings it does not find.
///
/// # Errors
/// Returns [`Failure::Final`] if the deadline passes, or if an item differs from its plan: then the
/// worker that computes the prompt can't encode the item either.
pub(super) async fn encode(
    pipeline: &Arc<Pipeline>,
    prepared: &Prepared,
    stages: Vec<EncodeStage>,
) -> Result<(Vec<MmHash>, Option<EncodeOutcome>), Failure> {
    // An adapter may change an item's embeddings, but not its identity.
    if stages.is_empty() || prepared.adapter.is_some() {
        return Ok((Vec::new(), None));
    }
    let started = Instant::now();
    let encoded = stages.iter().map(async |stage| {
        let worker = stage.reservation.worker;
        let encoding = encode_on(pipeline, prepared, stage);
        let stored = match within(prepared.deadlines.first_token, encoding).await? {
            Ok(stored) => stored,
            Err(Failure::Final(error)) if error.is_stale_plan() => return Err(error.into()),
            Err(failure) => {
                tracing::warn!(
                    %worker, error = %describe(failure),
                    "a worker failed to encode media items; the prefill worker encodes them"
                );
                Vec::new()
            }
        };
        let duration = started.elapsed();
        pipeline.metrics.count_encoded(worker, stage.items.len(), stored.len(), duration);
        Ok::<_, Failure>(StoredEmbeddings { worker, items: stored, duration })
    });
    let encoded = join_all(encoded).await.into_iter().collect::<Result<Vec<_>, _>>()?;
    let with_items = encoded.iter().filter(|stored| !stored.items.is_empty());
    let slowest = with_items.max_by_key(|stored| stored.duration);
    let items = encoded.iter().map(|stored| stored.items.len()).sum();
    let outcome = slowest.map(|&StoredEmbeddings { worker, duration, .. }| EncodeOutcome {
        worker,
        items,
        duration,
    });
    Ok((encoded.into_iter().flat_map(|stored| stored.items).collect(), outcome))
}

/// The embeddings that one worker has stored.
struct StoredEmbeddings {
    worker: WorkerId,
    items: Vec<MmHash>,
    duration: Duration,
}

/// Lets one worker encode media items. Returns the items whose embeddings it has stored.
async fn encode_on(
    pipeline: &Arc<Pipeline>,
    prepared: &Prepared,
    stage: &EncodeStage,
) -> Result<Vec<MmHash>, Failure> {
    let id = stage.reservation.worker;
    let worker = pipeline.fleet.worker(id).ok_or(Failure::NotTaken(id))?;
    let job = build_encode_job(pipeline, prepared, &worker, &stage.items)?;
    let mut trial = Trial::begin(&pipeline.fleet, worker.clone());
    let running = start_within(None, &mut trial, worker.backend.start(Arc::new(job))).await?;
    let mut running = running.map_err(|error| Failure::from_job_error(id, error))?;
    tokio::select! {
        ended = run_to_end(running.as_mut(), &mut trial) => {
            ended.map_err(|error| Failure::from_job_error(id, error))?
        }
        () = worker.wait_hung() => {
            return Err(Failure::Lost(id, DeathReason::new("the worker hangs")));
        }
    };
    let stored = running.stored_embeddings();
    stored.iter().for_each(|stored| stage.reservation.encoded(stored.item, stored.bytes));
    Ok(stored.into_iter().map(|stored| stored.item).collect())
}

/// Builds a job of media items alone.
fn build_encode_job(
    pipeline: &Pipeline,
    prepared: &Prepared,
    worker: &Worker,
    items: &[MmHash],
) -> Result<Job, Failure> {
    let plan = prepared.plan(worker.class).ok_or(Failure::NotTaken(worker.id))?;
    let (tokens, media) = media_only_prompt(plan, items);
    let max_model_len = worker.backend.capabilities().max_model_len;
    let resolved =
        sampling::resolve(&pipeline.model, &prepared.sampling, tokens.len(), max_model_len)?;
    Ok(Job {
        id: prepared.id.clone(),
        input: Input::Tokens(Arc::new(tokens)),
        media: media.into(),
        sampling: sampling::for_prompt_only(resolved),
        adapter: None,
        cache_salt: prepared.cache_salt.clone(),
        priority: prepared.priority,
        trace: prepared.trace.clone(),
        reasoning: ReasoningHints::default(),
        stage: Stage::Encode,
        embedded: Vec::new(),
    })
}

/// Builds a prompt of media items only, each once, so that no worker has to compute the text around
/// them.
fn media_only_prompt(plan: &ClassPlan, items: &[MmHash]) -> (Vec<TokenId>, Vec<JobItem>) {
    let mut tokens = Vec::new();
    let distinct =
        items.iter().filter_map(|hash| plan.job_items.iter().find(|item| item.hash == *hash));
    let media = distinct.map(|item| {
        let Placeholder { offset, length, ref is_embed } = item.placeholder;
        let placeholder = Placeholder { offset: tokens.len(), length, is_embed: is_embed.clone() };
        tokens.extend_from_slice(&plan.tokens[offset..offset + length]);
        JobItem { placeholder, ..item.clone() }
    });
    let media = media.collect();
    (tokens, media)
}

fn describe(failure: Failure) -> String {
    match failure {
        Failure::NotTaken(_) => "the worker has left".to_owned(),
        Failure::Lost(_, death) => death.to_string(),
        Failure::Declined(_, fault) | Failure::Failed(_, fault) => fault.message().to_owned(),
        Failure::Final(error) => error.to_string(),
    }
}
