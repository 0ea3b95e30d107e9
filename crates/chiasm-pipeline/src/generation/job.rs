//! What a worker is given of a request.

use chiasm_backend::{Job, Stage};
use chiasm_fleet::Worker;
use chiasm_types::MmHash;

use super::attempts::Failure;
use crate::Pipeline;
use crate::prepare::{Planned, Prepared};
use crate::sampling;

/// The job of this stage, and the plan that it follows. `embedded`: of its media items those whose
/// embeddings the worker finds.
///
/// # Errors
/// [`Failure::NotTaken`] if the worker's engine was replaced meanwhile by one without the adapter,
/// or of another class, and [`Failure::Final`] if there is no room for an answer.
pub(super) fn job<'a>(
    pipeline: &Pipeline,
    prepared: &'a Prepared,
    serving: &Worker,
    stage: Stage,
    embedded: Vec<MmHash>,
) -> Result<(&'a Planned, Job), Failure> {
    if prepared.adapter.as_ref().is_some_and(|adapter| !serving.has_adapter(adapter)) {
        return Err(Failure::NotTaken(serving.id));
    }
    let plan = prepared.plan(serving.class).ok_or(Failure::NotTaken(serving.id))?;
    let limits = serving.backend.capabilities();
    let sampling = sampling::resolve(
        &pipeline.model,
        &prepared.sampling,
        plan.tokens.len(),
        limits.max_model_len,
    )?;
    let job = Job {
        id: prepared.id.clone(),
        input: plan.input(),
        media: plan.job_items.clone(),
        sampling,
        adapter: prepared.adapter.as_ref().map(|adapter| adapter.engine().clone()),
        cache_salt: prepared.cache_salt.clone(),
        priority: prepared.priority,
        trace: prepared.trace.clone(),
        reasoning: prepared.reasoning.clone(),
        stage,
        embedded,
    };
    Ok((plan, job))
}
