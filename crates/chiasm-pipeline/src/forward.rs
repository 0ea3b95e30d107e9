//! Forwarding of a request in the client's own form, to a server that accepts messages.
//!
//! Servers that report their KV caches are picked by the predicted prompt, other servers by an
//! approximation of it. Engines that accept tokens compete with both: if an engine is the best
//! worker, the request is left to it. Until the first content of an answer a request can move to
//! another server.

mod prediction;

use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;
use chiasm_backend::{
    DeathReason, ForwardRequest, ForwardResponse, InputForm, JobError, JobItem, KeyScheme, Supports,
};
use chiasm_fleet::{PresentClass, Trial, Worker, WorkerFault, keys_for};
use chiasm_kv::{BlockKey, PromptBlocks};
use chiasm_request::{GenerateRequest, RouteOutcome};
use chiasm_router::{Explanation, Reservation, RouteError, RouteRequest};
use chiasm_types::{PlanClassId, TokenId, WorkerId};
use futures_util::future::BoxFuture;
use tokio::time::Instant;

use self::prediction::PromptPrediction;
use crate::Pipeline;
use crate::deadlines::{Deadlines, start_within};
use crate::error::RequestError;
use crate::observer::{ExplainedPlan, PromptEntry};
use crate::past_attempts::Attempts;
use crate::prepare::ClassPlan;
use crate::request_context::RequestContext;
use chiasm_cpu::price;

/// The maximum size of a body that is read inline.
const MAX_INLINE_BYTES: usize = 64 << 10;

/// A request to forward, in the terms of its protocol.
pub trait ForwardedRequest: Send + Sync {
    /// Returns an approximation of the prompt, in pieces of about a token each. `items` has the
    /// token count of each media item if these counts are known.
    fn approximate_prompt(&self, items: &[usize]) -> Vec<TokenId>;

    /// Returns the body with each image inline, under the name of its item, and the range of the
    /// model's name in it. Returns `None` if the body has other images than `items`.
    fn with_item_names(&self, items: &[JobItem]) -> Option<(Bytes, Option<Range<usize>>)>;

    /// Waits until an answer has content or has ended.
    ///
    /// # Errors
    /// Returns [`JobError::Dead`] if the server is lost before that, or reports its own failure.
    fn wait_for_content<'a>(
        &'a self,
        answer: ForwardResponse,
        server: &'a Worker,
    ) -> BoxFuture<'a, Result<ForwardResponse, JobError>>;
}

/// A request to forward, parsed as for an engine.
pub struct ParsedRequest {
    /// The request.
    pub request: GenerateRequest,
    /// `true` if servers accept names of media items in such a body.
    pub accepts_item_names: bool,
    /// `true` if servers count the prompt's tokens as this process does.
    pub has_same_token_count: bool,
}

/// The outcome of forwarding a request.
pub enum ForwardOutcome {
    /// A server has begun to answer.
    Server(Box<ForwardedAnswer>),
    /// An engine that accepts tokens is the best worker, after these attempts.
    Engine(Attempts),
}

/// An answer that a server has begun.
pub struct ForwardedAnswer {
    /// The reserved load at the server.
    pub reservation: Reservation,
    /// The server.
    pub server: Arc<Worker>,
    /// The route of the request.
    pub route: RouteOutcome,
    /// The number of prompt tokens, if the server must count the same number.
    pub prompt_tokens: Option<usize>,
    /// The whole answer, from its start.
    pub answer: ForwardResponse,
}

/// A request that is being forwarded.
struct Forwarding<'a> {
    pipeline: &'a Pipeline,
    context: &'a RequestContext,
    request: Arc<dyn ForwardedRequest>,
    forward: ForwardRequest,
    candidates: RoutingCandidates,
    attempts: Attempts,
    /// The request's entry on the live page.
    entry: PromptEntry,
}

/// A request as the router sees it, for each class of workers.
struct RoutingCandidates {
    /// The block keys of the approximate prompt, for classes that do not report their KV caches.
    approximate: Vec<(PlanClassId, Vec<BlockKey>)>,
    /// The predicted prompt, for classes that report their KV caches.
    prediction: Option<PromptPrediction>,
    /// The classes of servers that report their KV caches, but without a predicted prompt.
    unpredicted: Vec<PlanClassId>,
    /// The workers that do not support the request.
    unsupporting: Vec<WorkerId>,
    /// The approximate number of prompt tokens.
    approximate_tokens: usize,
}

/// Forwards a request to the best server among the workers of `classes`, unless an engine is
/// better.
///
/// `parsed` is awaited if any worker reports its KV cache. The caller limits the time.
///
/// # Errors
/// Returns an error if no worker accepts the request, or if the maximum number of workers failed.
pub async fn forward_request(
    pipeline: &Pipeline,
    context: &RequestContext,
    request: Arc<dyn ForwardedRequest>,
    forward: ForwardRequest,
    classes: &[PresentClass],
    parsed: impl Future<Output = Option<ParsedRequest>>,
) -> Result<ForwardOutcome, RequestError> {
    let body_bytes = forward.body.len();
    let candidates =
        RoutingCandidates::prepare(pipeline, context, &request, body_bytes, classes, parsed)
            .await?;
    let attempts = context.attempts.clone();
    let entry = context.entries.add_prompt();
    Forwarding { pipeline, context, request, forward, candidates, attempts, entry }.run().await
}

impl RoutingCandidates {
    /// Prepares a request with a body of `body_bytes` bytes for each class of workers.
    async fn prepare(
        pipeline: &Pipeline,
        context: &RequestContext,
        request: &Arc<dyn ForwardedRequest>,
        body_bytes: usize,
        classes: &[PresentClass],
        parsed: impl Future<Output = Option<ParsedRequest>>,
    ) -> Result<Self, RequestError> {
        if classes.is_empty() {
            return Err(RequestError::not_ready());
        }
        let (unreporting, reporting): (Vec<PresentClass>, Vec<PresentClass>) =
            classes.iter().cloned().partition(|class| class.class.keys == KeyScheme::Text);
        let parsed = if reporting.is_empty() { None } else { parsed.await };
        let prediction = match parsed {
            Some(parsed) => {
                PromptPrediction::new(pipeline, context, parsed, reporting.clone().into()).await
            }
            None => None,
        };
        let is_predicted = |class: &PresentClass| {
            prediction.as_ref().is_some_and(|prediction| prediction.covers(class.id))
        };
        let is_unpredicted =
            |class: &&PresentClass| class.input == InputForm::Messages && !is_predicted(class);
        let unpredicted: Vec<_> =
            reporting.iter().filter(is_unpredicted).map(|class| class.id).collect();
        let pieces = if unreporting.is_empty() && unpredicted.is_empty() {
            Vec::new()
        } else {
            let request = request.clone();
            let items = prediction.as_ref().map_or_else(Vec::new, PromptPrediction::item_tokens);
            let is_small = body_bytes <= MAX_INLINE_BYTES;
            let cost = price::json(body_bytes, 0);
            let approximate = move || request.approximate_prompt(&items);
            pipeline.cpu.run_inline_if(is_small, &context.cpu, cost, approximate).await?
        };
        let blocks = PromptBlocks { tokens: &pieces, media: &[], lora: None, salt: None };
        let approximate =
            unreporting.iter().map(|class| (class.id, keys_for(&class.class, &blocks))).collect();
        let needs = prediction.as_ref().map_or_else(Supports::default, PromptPrediction::needs);
        let unsupporting = pipeline.fleet.workers_lacking(needs);
        let approximate_tokens = pieces.len().max(1);
        Ok(Self { approximate, prediction, unpredicted, unsupporting, approximate_tokens })
    }
}

impl Forwarding<'_> {
    /// Sends the request to one server after the other until one answers, or until an engine is the
    /// best worker.
    async fn run(mut self) -> Result<ForwardOutcome, RequestError> {
        loop {
            let started = Instant::now();
            let picked = match self.pick() {
                Ok(picked) => picked,
                Err(error) => {
                    // No deadline here: the caller limits the time of all attempts together.
                    self.attempts.await_worker(self.pipeline, None, error.into()).await?;
                    continue;
                }
            };
            let Some((reservation, explanation)) = picked else {
                return Ok(ForwardOutcome::Engine(self.attempts));
            };
            let worker = reservation.worker;
            // A half-open worker gets no other request until a trial ends, so the trial begins
            // before anything can fail.
            let server = self.pipeline.fleet.worker(worker);
            let trial =
                server.map(|server| (Trial::begin(&self.pipeline.fleet, server.clone()), server));
            let answer = match trial {
                Some((_, server)) if server.backend.capabilities().input == InputForm::Tokens => {
                    return Ok(ForwardOutcome::Engine(self.attempts));
                }
                Some((trial, server)) => {
                    let entry = self.record_route(explanation);
                    self.send(server, trial, reservation, started, entry).await?
                }
                None => Err(JobError::NotTaken(DeathReason::new("the worker has just left"))),
            };
            match answer {
                Ok(answer) => return Ok(ForwardOutcome::Server(Box::new(answer))),
                Err(error) => self.record_failure(worker, error)?,
            }
        }
    }

    /// Picks the best worker. Returns `None` if no class can handle the request.
    fn pick(&self) -> Result<Option<(Reservation, Option<Explanation>)>, RouteError> {
        let RoutingCandidates {
            approximate,
            prediction,
            unpredicted,
            unsupporting,
            approximate_tokens,
        } = &self.candidates;
        let session = self.context.session;
        let exclude = &*[&unsupporting[..], &self.attempts.exclude].concat();
        // The items of a predicted prompt have to be encoded by any worker.
        let media = prediction.as_ref().map_or(&[][..], PromptPrediction::route_items);
        let approximate_route = |class, keys| RouteRequest {
            class,
            keys,
            prompt_tokens: *approximate_tokens,
            media,
            session,
            exclude,
            ..RouteRequest::default()
        };
        let approximate = approximate.iter().map(|(class, keys)| approximate_route(*class, keys));
        let predicted =
            prediction.iter().flat_map(|prediction| prediction.routes(session, exclude));
        let unpredicted = unpredicted.iter().map(|class| approximate_route(*class, &[]));
        let plans: Vec<_> = approximate.chain(predicted).chain(unpredicted).collect();
        if plans.is_empty() {
            return Ok(None);
        }
        let router = self.pipeline.fleet.router();
        let observer = self.pipeline.observer.as_ref();
        let is_explained = observer.is_some_and(|observer| observer.should_explain());
        let picked = if is_explained {
            router.select_explained(&plans).map(|(picked, explanation)| (picked, Some(explanation)))
        } else {
            router.select_planned(&plans).map(|picked| (picked, None))
        };
        picked.map(Some)
    }

    /// Reports the route to the observer. Returns the number of its entry, if there is one.
    fn record_route(&self, explanation: Option<Explanation>) -> Option<u64> {
        let observer = self.pipeline.observer.as_deref()?;
        let number = explanation.and_then(|explanation| {
            let RoutingCandidates {
                approximate, prediction, unpredicted, approximate_tokens, ..
            } = &self.candidates;
            let classes = approximate.iter().map(|(class, _)| class).chain(unpredicted);
            let approximate = classes.map(|class| ExplainedPlan {
                class: *class,
                prompt_tokens: *approximate_tokens,
                items: &[],
            });
            let predicted = prediction.iter().flat_map(PromptPrediction::plans);
            let plans: Vec<_> = approximate.chain(predicted.map(ClassPlan::explained)).collect();
            observer.record_explanation(&self.forward.id, &plans, explanation)
        });
        self.entry.set_routed(observer, number);
        number
    }

    /// Sends the request to a server and waits for the first content of the answer.
    async fn send(
        &self,
        server: Arc<Worker>,
        mut trial: Trial,
        reservation: Reservation,
        picked_at: Instant,
        explanation_id: Option<u64>,
    ) -> Result<Result<ForwardedAnswer, JobError>, RequestError> {
        let class = server.class;
        let prediction = self.candidates.prediction.as_ref();
        let prompt_tokens = prediction.and_then(|prediction| prediction.prompt_tokens(class));
        let full_blocks =
            prediction.and_then(|prediction| prediction.full_blocks(class, reservation.block_size));
        let mut route = RouteOutcome {
            explanation_id,
            ..self.route(&reservation, class, prompt_tokens, full_blocks, picked_at)
        };
        self.pipeline.metrics.count_routed(&route);
        self.context.last_route.set(route);
        let forward = match server.backend.capabilities().class.keys {
            KeyScheme::Text => self.forward.clone(),
            _ => {
                let prompt = prediction.and_then(|prediction| prediction.prompt_to_learn(class));
                ForwardRequest { prompt, ..self.with_item_names(class).await? }
            }
        };
        let first_token = Deadlines::new(self.context.arrived, &self.pipeline.limits).first_token;
        let start = async {
            let answer = server.backend.forward(forward).await?;
            route.hand_off = picked_at.elapsed();
            self.request.wait_for_content(answer, &server).await
        };
        let answer = start_within(first_token, &mut trial, start).await?;
        // A refused request does not prove that the server works.
        if answer.as_ref().is_ok_and(|answer| (200..300).contains(&answer.status)) {
            trial.succeeded();
        }
        Ok(answer.map(|answer| ForwardedAnswer {
            reservation,
            server,
            route,
            prompt_tokens,
            answer,
        }))
    }

    /// Returns the request for a server that identifies media items by names.
    async fn with_item_names(&self, class: PlanClassId) -> Result<ForwardRequest, RequestError> {
        let prediction = self.candidates.prediction.as_ref();
        if let Some(items) = prediction.and_then(|prediction| prediction.items_to_name(class)) {
            let body_bytes = self.forward.body.len();
            let request = self.request.clone();
            let add_names = move || request.with_item_names(&items);
            let is_small = body_bytes <= MAX_INLINE_BYTES;
            let cost = price::json(body_bytes, 0);
            let cpu = &self.pipeline.cpu;
            let named = cpu.run_inline_if(is_small, &self.context.cpu, cost, add_names).await?;
            if let Some((body, model)) = named {
                return Ok(ForwardRequest { body, model, ..self.forward.clone() });
            }
        }
        Ok(self.forward.clone())
    }

    /// Records a failed attempt.
    ///
    /// # Errors
    /// Returns the error for the client if no other attempt is allowed.
    fn record_failure(&mut self, worker: WorkerId, error: JobError) -> Result<(), RequestError> {
        match error {
            JobError::NotTaken(death) => {
                tracing::debug!(%worker, %death, "a worker did not accept a request");
                self.attempts.record_not_taken(self.pipeline, worker);
                Ok(())
            }
            error => match WorkerFault::from_error(&error, Instant::now()) {
                Some(fault @ WorkerFault::Failed { .. }) => {
                    self.attempts.faults.push(fault.clone());
                    self.attempts.record_lost(self.pipeline, worker, fault)
                }
                Some(fault) => {
                    self.attempts.record_declined(self.pipeline, worker, fault);
                    Ok(())
                }
                None => Err(error.into()),
            },
        }
    }

    fn route(
        &self,
        reservation: &Reservation,
        class: PlanClassId,
        prompt_tokens: Option<usize>,
        full_blocks: Option<usize>,
        picked_at: Instant,
    ) -> RouteOutcome {
        RouteOutcome {
            overlap_blocks: reservation.overlap_blocks,
            total_blocks: full_blocks.unwrap_or(reservation.total_blocks),
            // Unknown without a predicted prompt.
            prompt_tokens: prompt_tokens.unwrap_or(0),
            picked_after: picked_at.saturating_duration_since(self.context.arrived),
            moves: self.attempts.lost,
            ..RouteOutcome::new(reservation.worker, class)
        }
    }
}
