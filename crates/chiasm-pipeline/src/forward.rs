//! The place of a request that is passed on as it came, to a server that takes messages.
//!
//! Servers that tell what their KV caches hold are picked by the predicted prompt, others by an
//! approximation of it. Engines that are given tokens compete with both: if one is the better
//! place, the request is theirs. Until the first content of an answer a request can move to
//! another server.

mod foreseen;

use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;
use chiasm_backend::{
    Death, Forward, Forwarded, InputForm, JobError, JobItem, KeyScheme, Supports,
};
use chiasm_fleet::{PresentClass, Trial, Worker, WorkerFault, keys_for};
use chiasm_kv::{BlockKey, PromptBlocks};
use chiasm_request::{GenerateRequest, RouteOutcome};
use chiasm_router::{Explanation, Reservation, RouteError, RouteRequest};
use chiasm_types::{PlanClassId, TokenId, WorkerId};
use futures_util::future::BoxFuture;
use tokio::time::Instant;

use self::foreseen::Foreseen;
use crate::caller::Caller;
use crate::cpu::price;
use crate::deadlines::{Deadlines, begun_within};
use crate::error::RequestError;
use crate::observer::{ExplainedPlan, PromptEntry};
use crate::prepare::Planned;
use crate::shared::Pipeline;
use crate::tried::Attempts;

/// Bodies up to this many bytes are read at once.
const SMALL: usize = 64 << 10;

/// The body of a request that is passed on, and its answer, as their protocol has them.
pub trait ForwardedRequest: Send + Sync {
    /// Returns an approximation of the prompt, in pieces of about a token. `items` has the token
    /// count of each media item if these are known.
    fn pieces(&self, items: &[usize]) -> Vec<TokenId>;

    /// Returns the body with each image inline, under the name of its item, and the place of the
    /// model's name in it. `None` if the body has other images than these.
    fn with_names(&self, items: &[JobItem]) -> Option<(Bytes, Option<Range<usize>>)>;

    /// Waits until an answer has content or has ended.
    ///
    /// # Errors
    /// [`JobError::Dead`] if the server is lost before that, or reports its own failure.
    fn begun<'a>(
        &'a self,
        answer: Forwarded,
        server: &'a Worker,
    ) -> BoxFuture<'a, Result<Forwarded, JobError>>;
}

/// What a request that is passed on asks for, as an engine would be asked.
pub struct Understood {
    /// The request.
    pub request: GenerateRequest,
    /// Servers take names of media items in such a body.
    pub takes_names: bool,
    /// Servers count the tokens of such a prompt as we do.
    pub is_counted: bool,
}

/// The place that was found for a request.
pub enum Place {
    /// A server, which has begun to answer.
    Server(Box<ServerAnswer>),
    /// An engine that is given tokens, after these attempts.
    Engine(Attempts),
}

/// An answer that has begun, and the server that it is from.
pub struct ServerAnswer {
    /// What the request holds of the server.
    pub reservation: Reservation,
    /// The server.
    pub server: Arc<Worker>,
    /// The route of the request.
    pub route: RouteOutcome,
    /// The tokens of the prompt, where the server has to count as many.
    pub prompt_tokens: Option<usize>,
    /// The answer from its beginning.
    pub answer: Forwarded,
}

/// A request that is looking for its place.
struct Passing<'a> {
    pipeline: &'a Pipeline,
    caller: &'a Caller,
    request: Arc<dyn ForwardedRequest>,
    forward: Forward,
    prospects: Prospects,
    tried: Attempts,
    /// The request's entry on the live page.
    entry: PromptEntry,
}

/// A request as the router sees it, by what is known of the servers.
struct Prospects {
    /// For servers that tell nothing.
    texts: Vec<(PlanClassId, Vec<BlockKey>)>,
    /// For workers that tell what they hold.
    foreseen: Option<Foreseen>,
    /// For servers that do, of a request that can't be foreseen.
    unforeseen: Vec<PlanClassId>,
    /// The workers that lack what the request needs.
    unable: Vec<WorkerId>,
    /// About the tokens of the prompt.
    pieces: usize,
}

/// Finds the best place for a request among the workers of these classes. `understood` is called if
/// any of them tells what it holds.
///
/// The caller limits the time.
///
/// # Errors
/// No worker takes the request, or as many as may be tried have failed.
pub async fn find_place(
    pipeline: &Pipeline,
    caller: &Caller,
    request: Arc<dyn ForwardedRequest>,
    forward: Forward,
    classes: &[PresentClass],
    understood: impl Future<Output = Option<Understood>>,
) -> Result<Place, RequestError> {
    let prospects =
        Prospects::of(pipeline, caller, &request, forward.body.len(), classes, understood).await?;
    let entry = caller.entries.add_prompt();
    Passing { pipeline, caller, request, forward, prospects, tried: caller.tried.clone(), entry }
        .find()
        .await
}

impl Prospects {
    /// Prepares a request, whose body has so many bytes, for each class of workers.
    async fn of(
        pipeline: &Pipeline,
        caller: &Caller,
        request: &Arc<dyn ForwardedRequest>,
        bytes: usize,
        classes: &[PresentClass],
        understood: impl Future<Output = Option<Understood>>,
    ) -> Result<Self, RequestError> {
        if classes.is_empty() {
            return Err(RequestError::not_ready());
        }
        let (of_text, telling): (Vec<PresentClass>, Vec<PresentClass>) =
            classes.iter().cloned().partition(|class| class.class.keys == KeyScheme::Text);
        let understood = if telling.is_empty() { None } else { understood.await };
        let foreseen = match understood {
            Some(understood) => {
                Foreseen::of(pipeline, caller, understood, telling.clone().into()).await
            }
            None => None,
        };
        let knows = |class: &PresentClass| {
            foreseen.as_ref().is_some_and(|foreseen| foreseen.knows(class.id))
        };
        let is_unforeseen =
            |class: &&PresentClass| class.input == InputForm::Messages && !knows(class);
        let unforeseen: Vec<_> =
            telling.iter().filter(is_unforeseen).map(|class| class.id).collect();
        let pieces = if of_text.is_empty() && unforeseen.is_empty() {
            Vec::new()
        } else {
            let request = request.clone();
            let items = foreseen.as_ref().map_or_else(Vec::new, Foreseen::item_tokens);
            let cost = price::json(bytes, 0);
            pipeline
                .cpu
                .run_or_here(bytes <= SMALL, &caller.cpu, cost, move || request.pieces(&items))
                .await?
        };
        let blocks = PromptBlocks { tokens: &pieces, media: &[], lora: None, salt: None };
        let texts =
            of_text.iter().map(|class| (class.id, keys_for(&class.class, &blocks))).collect();
        let unable = pipeline
            .fleet
            .workers_lacking(foreseen.as_ref().map_or_else(Supports::default, Foreseen::needs));
        Ok(Self { texts, foreseen, unforeseen, unable, pieces: pieces.len().max(1) })
    }
}

impl Passing<'_> {
    /// Gives the request to one server after the other until one answers, or an engine is the best
    /// place.
    async fn find(mut self) -> Result<Place, RequestError> {
        loop {
            let begun = Instant::now();
            let picked = match self.pick() {
                Ok(picked) => picked,
                Err(error) => {
                    // No deadline here: the caller limits the time of all attempts together.
                    self.tried.await_worker(self.pipeline, None, error.into()).await?;
                    continue;
                }
            };
            let Some((reservation, explanation)) = picked else {
                return Ok(Place::Engine(self.tried));
            };
            let worker = reservation.worker;
            // The worker may be half-open, and gets no other request until a trial ends. So the
            // trial begins before anything can fail.
            let server = self.pipeline.fleet.worker(worker);
            let trial =
                server.map(|server| (Trial::begin(&self.pipeline.fleet, server.clone()), server));
            let taken = match trial {
                Some((_, server)) if server.backend.capabilities().input == InputForm::Tokens => {
                    return Ok(Place::Engine(self.tried));
                }
                Some((trial, server)) => {
                    let explained = self.show(explanation);
                    self.give(server, trial, reservation, begun, explained).await?
                }
                None => Err(JobError::NotTaken(Death::new("it left in this moment"))),
            };
            match taken {
                Ok(answer) => return Ok(Place::Server(Box::new(answer))),
                Err(error) => self.moves_on(worker, error)?,
            }
        }
    }

    /// Picks the best worker; `None` if no server could be given the request.
    fn pick(&self) -> Result<Option<(Reservation, Option<Explanation>)>, RouteError> {
        let Prospects { texts, foreseen, unforeseen, unable, pieces } = &self.prospects;
        let session = self.caller.session;
        let exclude = &*[&unable[..], &self.tried.exclude].concat();
        // Where a prompt is foreseen all workers have its items to encode.
        let media = foreseen.as_ref().map_or(&[][..], Foreseen::route_items);
        let known_by = |class, keys| RouteRequest {
            class,
            keys,
            prompt_tokens: *pieces,
            media,
            session,
            exclude,
            ..RouteRequest::default()
        };
        let of_texts = texts.iter().map(|(class, keys)| known_by(*class, keys));
        let of_foreseen = foreseen.iter().flat_map(|foreseen| foreseen.routes(session, exclude));
        let plans: Vec<_> = of_texts
            .chain(of_foreseen)
            .chain(unforeseen.iter().map(|class| known_by(*class, &[])))
            .collect();
        if plans.is_empty() {
            return Ok(None);
        }
        let router = self.pipeline.fleet.router();
        let observer = self.pipeline.observer.as_ref();
        let is_explained = observer.is_some_and(|observer| observer.wants_explanation());
        let picked = if is_explained {
            router.select_explained(&plans).map(|(picked, explanation)| (picked, Some(explanation)))
        } else {
            router.select_planned(&plans).map(|picked| (picked, None))
        };
        picked.map(Some)
    }

    /// Shows the route of the request to the observer. Returns its number there.
    fn show(&self, explanation: Option<Explanation>) -> Option<u64> {
        let observer = self.pipeline.observer.as_deref()?;
        let number = explanation.and_then(|explanation| {
            let Prospects { texts, foreseen, unforeseen, pieces, .. } = &self.prospects;
            let about = texts.iter().map(|(class, _)| class).chain(unforeseen);
            let about = about.map(|class| ExplainedPlan {
                class: *class,
                prompt_tokens: *pieces,
                items: &[],
            });
            let of_foreseen = foreseen.iter().flat_map(Foreseen::plans).map(Planned::explained);
            let plans: Vec<_> = about.chain(of_foreseen).collect();
            observer.explained(&self.forward.id, &plans, explanation)
        });
        self.entry.routed(observer, number);
        number
    }

    /// Gives the request to a server.
    async fn give(
        &self,
        server: Arc<Worker>,
        mut trial: Trial,
        reservation: Reservation,
        handed_over: Instant,
        explained: Option<u64>,
    ) -> Result<Result<ServerAnswer, JobError>, RequestError> {
        let class = server.class;
        let foreseen = self.prospects.foreseen.as_ref();
        let prompt_tokens = foreseen.and_then(|foreseen| foreseen.prompt_tokens(class));
        let full_blocks =
            foreseen.and_then(|foreseen| foreseen.full_blocks(class, reservation.block_size));
        let mut route = RouteOutcome {
            explained,
            ..self.route(&reservation, class, prompt_tokens, full_blocks, handed_over)
        };
        self.pipeline.metrics.routed(&route);
        let forward = match server.backend.capabilities().class.keys {
            KeyScheme::Text => self.forward.clone(),
            _ => {
                let prompt = foreseen.and_then(|foreseen| foreseen.to_learn_from(class));
                Forward { prompt, ..self.with_names(class).await? }
            }
        };
        let first_token = Deadlines::of(self.caller.arrived, &self.pipeline.limits).first_token;
        let begins = async {
            let answer = server.backend.forward(forward).await?;
            route.hand_off = handed_over.elapsed();
            self.request.begun(answer, &server).await
        };
        let answer = begun_within(first_token, &mut trial, begins).await?;
        // A refusal does not say whether the server works.
        if answer.as_ref().is_ok_and(|answer| (200..300).contains(&answer.status)) {
            trial.succeeded();
        }
        Ok(answer.map(|answer| ServerAnswer { reservation, server, route, prompt_tokens, answer }))
    }

    /// The request for a server that knows media items by names.
    async fn with_names(&self, class: PlanClassId) -> Result<Forward, RequestError> {
        let items = self.prospects.foreseen.as_ref().and_then(|foreseen| foreseen.items(class));
        if let Some(items) = items {
            let bytes = self.forward.body.len();
            let request = self.request.clone();
            let named = move || request.with_names(&items);
            let cost = price::json(bytes, 0);
            let named = self
                .pipeline
                .cpu
                .run_or_here(bytes <= SMALL, &self.caller.cpu, cost, named)
                .await?;
            if let Some((body, model)) = named {
                return Ok(Forward { body, model, ..self.forward.clone() });
            }
        }
        Ok(self.forward.clone())
    }

    /// Takes note of a failed attempt.
    ///
    /// # Errors
    /// The error for the client if there is to be no other attempt.
    fn moves_on(&mut self, worker: WorkerId, error: JobError) -> Result<(), RequestError> {
        match error {
            JobError::NotTaken(death) => {
                tracing::debug!(%worker, %death, "a request was not taken");
                self.tried.not_taken_by(self.pipeline, worker);
                Ok(())
            }
            error => match WorkerFault::from_error(&error, Instant::now()) {
                Some(fault @ WorkerFault::Failed { .. }) => {
                    self.tried.faults.push(fault.clone());
                    self.tried.lost_with(self.pipeline, worker, fault)
                }
                Some(fault) => {
                    self.tried.declined_by(self.pipeline, worker, fault);
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
        begun: Instant,
    ) -> RouteOutcome {
        RouteOutcome {
            overlap_blocks: reservation.overlap_blocks,
            total_blocks: full_blocks.unwrap_or(reservation.total_blocks),
            // Tokens of a prompt that is not foreseen are not known.
            prompt_tokens: prompt_tokens.unwrap_or(0),
            picked: begun.saturating_duration_since(self.caller.arrived),
            moves: self.tried.lost,
            ..RouteOutcome::on(reservation.worker, class)
        }
    }
}
