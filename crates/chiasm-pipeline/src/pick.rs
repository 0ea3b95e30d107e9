//! Picks the worker of a prepared request.

use std::sync::Arc;

use chiasm_fleet::Worker;
use chiasm_fleet::adapters::ServedAdapter;
use chiasm_router::{Route, RouteRequest, Splitting};
use chiasm_types::WorkerId;

use super::error::{Cause, RequestError};
use super::prepare::{ClassPlan, Prepared};
use crate::Pipeline;

/// Picks a worker that is not in `exclude`, by the plan of its class. If workers have roles, the
/// route may have another worker for the prompt. Also returns the number of the route's entry on
/// the live page, if there is one.
///
/// # Errors
/// Returns [`Cause::NoWorker`] or [`Cause::NoAdapter`].
pub(super) fn pick(
    pipeline: &Pipeline,
    prepared: &Prepared,
    exclude: &[WorkerId],
) -> Result<(Route, Option<u64>), RequestError> {
    let router = pipeline.fleet.router();
    let adapter = prepared.adapter.as_ref();
    let without_adapter =
        adapter.map(|adapter| exclude_without_adapter(pipeline, adapter, exclude)).transpose()?;
    let exclude = without_adapter.as_deref().unwrap_or(exclude);
    let unsupporting = exclude_unsupporting(pipeline, prepared, exclude);
    let exclude = unsupporting.as_deref().unwrap_or(exclude);
    let observer = pipeline.observer.as_deref();
    if let Some(observer) = observer.filter(|observer| observer.should_explain()) {
        let plans: Vec<_> =
            prepared.plans.iter().map(|plan| to_route(plan, prepared, exclude)).collect();
        let (route, explanation) = router.select_stages_explained(&plans, splitting(prepared))?;
        let plans: Vec<_> = prepared.plans.iter().map(ClassPlan::explained).collect();
        let number = observer.record_explanation(&prepared.id, &plans, explanation);
        prepared.entry.set_routed(observer, number);
        return Ok((route, number));
    }
    let route = match prepared.plans.as_slice() {
        [only] => router.select_stages(&[to_route(only, prepared, exclude)], splitting(prepared)),
        plans => {
            let plans: Vec<_> =
                plans.iter().map(|plan| to_route(plan, prepared, exclude)).collect();
            router.select_stages(&plans, splitting(prepared))
        }
    };
    let route = route?;
    if let Some(observer) = observer {
        prepared.entry.set_routed(observer, None);
    }
    Ok((route, None))
}

/// Returns the rule for splitting a request between two workers.
///
/// A prompt that one worker computes for another serves a single continuation. It is useless to a
/// request whose prompt must be computed by the answering worker, as for log probabilities.
fn splitting(prepared: &Prepared) -> Splitting {
    if prepared.sampling.n == 1 && prepared.sampling.reads_prefix_cache() {
        Splitting::Allowed
    } else {
        Splitting::Forbidden
    }
}

/// Returns `exclude` with the workers that lack an adapter.
///
/// # Errors
/// Returns [`Cause::NoAdapter`] if all workers lack it.
fn exclude_without_adapter(
    pipeline: &Pipeline,
    adapter: &ServedAdapter,
    exclude: &[WorkerId],
) -> Result<Vec<WorkerId>, RequestError> {
    let lacking = pipeline.fleet.workers_without(adapter).map_err(|error| {
        let why = error.map_or_else(String::new, |error| format!(": {error}"));
        Cause::NoAdapter(format!("no engine has loaded the LoRA adapter '{}'{why}", adapter.name))
    });
    Ok([&lacking?, exclude].concat())
}

/// Returns `exclude` with the workers that do not support all parts of a request.
///
/// Returns `None` if all workers support them. Also returns `None` if no worker does: the picked
/// worker then reports what it lacks.
fn exclude_unsupporting(
    pipeline: &Pipeline,
    prepared: &Prepared,
    exclude: &[WorkerId],
) -> Option<Vec<WorkerId>> {
    let lacking = pipeline.fleet.workers_lacking(prepared.needs);
    if lacking.is_empty() {
        return None;
    }
    let supports_all = |worker: &Arc<Worker>| {
        !lacking.contains(&worker.id) && prepared.plan(worker.class).is_some()
    };
    pipeline.fleet.workers().iter().any(supports_all).then(|| [&lacking, exclude].concat())
}

fn to_route<'a>(
    plan: &'a ClassPlan,
    prepared: &'a Prepared,
    exclude: &'a [WorkerId],
) -> RouteRequest<'a> {
    RouteRequest {
        class: plan.class,
        // Cached blocks are useless to a request whose whole prompt must be computed.
        keys: if prepared.sampling.reads_prefix_cache() { &plan.keys } else { &[] },
        prompt_tokens: plan.tokens.len(),
        media: &plan.route_items,
        encoder_tokens: plan.encoder_tokens,
        session: prepared.session,
        exclude,
    }
}
