//! Which worker a prepared request goes to.

use std::sync::Arc;

use chiasm_fleet::Worker;
use chiasm_fleet::adapters::ServedAdapter;
use chiasm_router::{Route, RouteRequest, Splitting};
use chiasm_types::WorkerId;

use super::error::{Cause, RequestError};
use super::prepare::{Planned, Prepared};
use crate::Pipeline;

/// Picks a worker, each judged by the plan of its class, but none of `exclude`, and where workers
/// have roles perhaps another one for the prompt. The number is that of the request on the live
/// page, if that tells of it.
///
/// # Errors
/// [`Cause::NoWorker`] and [`Cause::NoAdapter`].
pub(super) fn pick(
    pipeline: &Pipeline,
    prepared: &Prepared,
    exclude: &[WorkerId],
) -> Result<(Route, Option<u64>), RequestError> {
    let router = pipeline.fleet.router();
    let lacking =
        prepared.adapter.as_ref().map(|adapter| without(pipeline, adapter, exclude)).transpose()?;
    let exclude = lacking.as_deref().unwrap_or(exclude);
    let unable = unable(pipeline, prepared, exclude);
    let exclude = unable.as_deref().unwrap_or(exclude);
    let observer = pipeline.observer.as_deref();
    if let Some(observer) = observer.filter(|observer| observer.wants_explanation()) {
        let plans: Vec<_> =
            prepared.plans.iter().map(|plan| to_route(plan, prepared, exclude)).collect();
        let (route, explanation) = router.select_stages_explained(&plans, splitting(prepared))?;
        let plans: Vec<_> = prepared.plans.iter().map(Planned::explained).collect();
        let number = observer.explained(&prepared.id, &plans, explanation);
        prepared.entry.routed(observer, number);
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
        prepared.entry.routed(observer, None);
    }
    Ok((route, None))
}

/// What a worker leaves of a prompt is good for one continuation, and of no use to a request that
/// has all of its prompt computed where it is answered, as for log probabilities.
fn splitting(prepared: &Prepared) -> Splitting {
    match prepared.sampling.n == 1 && prepared.sampling.reads_prefix_cache() {
        true => Splitting::Allowed,
        false => Splitting::Forbidden,
    }
}

/// The workers that can't be given a request with an adapter.
fn without(
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

/// The workers that can't be given a request, if it has parts that some can't and others can. Where
/// none can, whichever is asked says what it lacks.
fn unable(pipeline: &Pipeline, prepared: &Prepared, exclude: &[WorkerId]) -> Option<Vec<WorkerId>> {
    let lacking = pipeline.fleet.workers_lacking(prepared.needs);
    if lacking.is_empty() {
        return None;
    }
    let can = |worker: &Arc<Worker>| {
        !lacking.contains(&worker.id) && prepared.plan(worker.class).is_some()
    };
    pipeline.fleet.workers().iter().any(can).then(|| [&lacking, exclude].concat())
}

fn to_route<'a>(
    plan: &'a Planned,
    prepared: &'a Prepared,
    exclude: &'a [WorkerId],
) -> RouteRequest<'a> {
    RouteRequest {
        class: plan.class,
        // What its worker holds is of no use to a request that has all of its prompt computed.
        keys: if prepared.sampling.reads_prefix_cache() { &plan.keys } else { &[] },
        prompt_tokens: plan.tokens.len(),
        media: &plan.route_items,
        encoder_tokens: plan.encoder_tokens,
        session: prepared.session,
        exclude,
    }
}
