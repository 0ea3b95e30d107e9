//! Builds a request's job for a worker.

use chiasm_backend::{Job, Stage};
use chiasm_fleet::Worker;
use chiasm_types::MmHash;

use super::attempts::Failure;
use crate::Pipeline;
use crate::prepare::{ClassPlan, Prepared};
use crate::sampling;

/// Builds the job of a stage, and returns the plan that it follows. `embedded` has the media items
/// whose embeddings the worker can find.
///
/// # Errors
/// Returns [`Failure::NotTaken`] if the worker's engine was replaced meanwhile by one without the
/// adapter or of another class, and [`Failure::Final`] if there is no room for an answer.
pub(super) fn build_job<'a>(
    pipeline: &Pipeline,
    prepared: &'a Prepared,
    worker: &Worker,
    stage: Stage,
    embedded: Vec<MmHash>,
) -> Result<(&'a ClassPlan, Job), Failure> {
    if prepared.adapter.as_ref().is_some_and(|adapter| !worker.has_adapter(adapter)) {
        return Err(Failure::NotTaken(worker.id));
    }
    let plan = prepared.plan(worker.class).ok_or(Failure::NotTaken(worker.id))?;
    let capabilities = worker.backend.capabilities();
    let sampling = sampling::resolve(
        &pipeline.model,
        &prepared.sampling,
        plan.tokens.len(),
        capabilities.max_model_len,
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
