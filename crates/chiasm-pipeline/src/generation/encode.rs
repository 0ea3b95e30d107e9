//! Media items that other workers encode than the one that computes the prompt.

use std::sync::Arc;

use chiasm_backend::{Death, Input, Job, JobItem, ReasoningHints, Stage};
use chiasm_fleet::{Trial, Worker};
use chiasm_request::EncodeOutcome;
use chiasm_router::Encodes;
use chiasm_types::{MmHash, Placeholder, TokenId};
use futures_util::future::join_all;
use tokio::time::Instant;

use super::attempts::Failure;
use super::prefill::to_end;
use crate::Pipeline;
use crate::deadlines::{begun_within, within};
use crate::prepare::{Planned, Prepared};
use crate::sampling;

/// Has workers encode media items, all at the same time. Returns the items whose embeddings were
/// left, and who took longest. A worker that fails loses nothing: whoever computes the prompt has
/// the items too, and encodes what it does not find.
///
/// # Errors
/// [`Failure::Final`] when there is no time left for an answer.
pub(super) async fn encode(
    pipeline: &Arc<Pipeline>,
    prepared: &Prepared,
    encodes: Vec<Encodes>,
) -> Result<(Vec<MmHash>, Option<EncodeOutcome>), Failure> {
    // Adapters may change what is made of an item, whose identity does not tell.
    if encodes.is_empty() || prepared.adapter.is_some() {
        return Ok((Vec::new(), None));
    }
    let started = Instant::now();
    let each = encodes.iter().map(async |encodes| {
        let worker = encodes.reservation.worker;
        let left = match within(prepared.deadlines.first_token, encode_on(pipeline, prepared, encodes)).await? {
            Ok(left) => left,
            Err(failure) => {
                tracing::warn!(%worker, error = %describe(failure), "media items were not encoded: who computes the prompt does it");
                Vec::new()
            }
        };
        pipeline.metrics.encoded(worker, encodes.items.len(), left.len(), started.elapsed());
        Ok::<_, Failure>((worker, left, started.elapsed()))
    });
    let each = join_all(each).await.into_iter().collect::<Result<Vec<_>, _>>()?;
    let longest =
        each.iter().filter(|(_, left, _)| !left.is_empty()).max_by_key(|(.., took)| *took);
    let items = each.iter().map(|(_, left, _)| left.len()).sum();
    let by = longest.map(|&(worker, _, took)| EncodeOutcome { worker, items, took });
    Ok((each.into_iter().flat_map(|(_, left, _)| left).collect(), by))
}

/// Has one worker encode media items. Returns those whose embeddings it has left.
async fn encode_on(
    pipeline: &Arc<Pipeline>,
    prepared: &Prepared,
    encodes: &Encodes,
) -> Result<Vec<MmHash>, Failure> {
    let worker = encodes.reservation.worker;
    let serving = pipeline.fleet.worker(worker).ok_or(Failure::NotTaken(worker))?;
    let job = job(pipeline, prepared, &serving, &encodes.items)?;
    let mut trial = Trial::begin(&pipeline.fleet, serving.clone());
    let running = begun_within(None, &mut trial, serving.backend.start(Arc::new(job))).await?;
    let mut running = running.map_err(|error| Failure::of_job(worker, error))?;
    tokio::select! {
        ended = to_end(running.as_mut(), &mut trial) => ended.map_err(|error| Failure::of_job(worker, error))?,
        () = serving.hung() => return Err(Failure::Lost(worker, Death::new("it hangs"))),
    };
    let left = running.embeddings();
    left.iter().for_each(|left| encodes.reservation.encoded(left.item, left.bytes));
    Ok(left.into_iter().map(|left| left.item).collect())
}

/// The job of media items alone.
fn job(
    pipeline: &Pipeline,
    prepared: &Prepared,
    serving: &Worker,
    items: &[MmHash],
) -> Result<Job, Failure> {
    let plan = prepared.plan(serving.class).ok_or(Failure::NotTaken(serving.id))?;
    let (tokens, media) = alone(plan, items);
    let limits = serving.backend.capabilities();
    let resolved =
        sampling::resolve(&pipeline.model, &prepared.sampling, tokens.len(), limits.max_model_len)?;
    Ok(Job {
        id: prepared.id.clone(),
        input: Input::Tokens(Arc::new(tokens)),
        media: media.into(),
        sampling: sampling::of_prompt(resolved),
        adapter: None,
        cache_salt: prepared.cache_salt.clone(),
        priority: prepared.priority,
        trace: prepared.trace.clone(),
        reasoning: ReasoningHints::default(),
        stage: Stage::Encode,
        embedded: Vec::new(),
    })
}

/// A prompt that consists of media items only, each once, so that nobody has to read what stands
/// around them.
fn alone(plan: &Planned, items: &[MmHash]) -> (Vec<TokenId>, Vec<JobItem>) {
    let mut tokens = Vec::new();
    let once =
        items.iter().filter_map(|hash| plan.job_items.iter().find(|item| item.hash == *hash));
    let media = once.map(|item| {
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
