//! Requests that are passed on as they came, to servers that take messages.
//!
//! The text and the media items of a request alone decide its server. For servers that tell what
//! their KV caches hold, the predicted prompt decides. Only the model's name and the names of media
//! items are changed; nothing is refused. A fleet may also have engines that are given tokens. A
//! request then goes to the better of both kinds, and may move from one kind to the other as long
//! as its client has been sent nothing.
//!
//! | module | is |
//! |---|---|
//! | `begun` | the wait for an answer's first content |
//! | `body` | what is passed on |
//! | `client_names` | clients' names of media items, which are not passed on |
//! | `engines` | answers of engines, in a fleet of both kinds |
//! | `pieces` | an approximation of the prompt, for servers that don't say what they hold |
//! | `foreseen` | the predicted prompt, for servers that do |
//! | `named` | bodies whose images have names of ours |
//! | `passage` | the answer as it comes |
//! | `relay` | the events of a streamed answer, whole ones only |

mod begun;
mod body;
mod client_names;
mod engines;
mod foreseen;
mod named;
mod passage;
mod pieces;
mod relay;

use std::sync::Arc;

use axum::extract::State;
use axum::response::Response;
use bytes::Bytes;
use chiasm_backend::{Death, Forward, Forwarded, InputForm, JobError, KeyScheme, Supports};
use chiasm_fleet::{PresentClass, Trial, Worker, WorkerFault, keys_for};
use chiasm_kv::{BlockKey, PromptBlocks};
use chiasm_pipeline::cpu::price;
use chiasm_pipeline::{
    Attempts, Caller, Cause, Deadlines, ExplainedPlan, Planned, PromptEntry, RequestError, begun_within, within,
};
use chiasm_request::RouteOutcome;
use chiasm_router::{Explanation, Reservation, RouteError, RouteRequest};
use chiasm_types::{PlanClassId, WorkerId};
use serde_json::{Map, Value};
use tokio::time::Instant;

use self::begun::begun;
pub(crate) use self::body::ForwardBody;
use self::body::model_in;
use self::foreseen::Foreseen;
use self::named::named;
use self::passage::response;
use self::pieces::pieces;
use crate::admission::{Admission, Admitted};
use crate::arrival::Arrived;
use crate::body::{JsonBody, parse};
use crate::endpoint_state::EndpointState;
use crate::endpoints::find_model;
use crate::error::HttpError;
use crate::paths::COUNT_TOKENS;

/// Text up to this many bytes is cut into pieces at once.
const SMALL: usize = 64 << 10;

/// A request that is looking for its place.
struct Passing<'a> {
    state: &'a Arc<EndpointState>,
    path: &'static str,
    caller: &'a Caller,
    fields: Arc<Map<String, Value>>,
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

/// A server that has begun to answer.
struct Passed {
    reservation: Reservation,
    server: Arc<Worker>,
    attempted: RouteOutcome,
    /// The tokens of the prompt, where the server has to count as many.
    foreseen: Option<usize>,
    answer: Forwarded,
}

/// The place that was found for a request.
enum Taken {
    /// To a server, which has begun to answer.
    Passed(Box<Passed>),
    /// To an engine that is given tokens, after this.
    Engine(Attempts),
}

/// Passes on a request that was sent to this path, unless an engine that is given tokens is the better place for it.
pub(crate) async fn forward(
    path: &'static str,
    State(state): State<Arc<EndpointState>>,
    request: Admitted<ForwardBody>,
) -> Result<Response, HttpError> {
    let Admitted { mut caller, admission, body: JsonBody { request, charge } } = request;
    let is_for_adapter = find_model(&state.pipeline, request.name.as_deref())?.is_some();
    let classes = state.pipeline.fleet.classes();
    let has_engines = classes.iter().any(|class| class.input == InputForm::Tokens);
    if is_for_adapter && !has_engines {
        return Err(HttpError::invalid(
            "model",
            "is an adapter, and none are used at servers that somebody else has started",
        ));
    }
    admission.ends_with_client();
    let arrived = request.arrived();
    // Counting needs no engine.
    if has_engines && (is_for_adapter || path == COUNT_TOKENS) {
        return engines::answer(path, state, caller, admission, arrived).await;
    }
    let taken = place(&state, path, &caller, request, &classes).await;
    drop(charge);
    match taken.map_err(|error| state.http_error(error))? {
        Taken::Passed(passed) => {
            state.pipeline.retries.earn();
            Ok(response(path, state, admission, *passed, caller.arrived))
        }
        Taken::Engine(tried) => {
            if let Some(observer) = &state.pipeline.observer {
                caller.entries.begin_anew(&**observer);
            }
            caller.tried = Attempts { may_be_passed_on: true, ..tried };
            by_engine(path, state, caller, admission, arrived).await
        }
    }
}

/// Has an engine answer. Where none can, and the client has been sent nothing, a server is tried after all: for that the body is kept until
/// the answer begins.
async fn by_engine(
    path: &'static str,
    state: Arc<EndpointState>,
    mut caller: Caller,
    admission: Admission,
    body: Arrived,
) -> Result<Response, HttpError> {
    let answer = engines::answer(path, state.clone(), caller.clone(), admission.clone(), body.clone()).await;
    let mut error = match answer {
        Ok(answer) => return Ok(answer),
        Err(error) => error,
    };
    let Some(tried) = error.left_to_servers.take() else { return Err(error) };
    caller.tried = *tried;
    let JsonBody { request, charge } = parse::<ForwardBody>(&state, &caller.cpu, body).await?;
    let classes = state.pipeline.fleet.classes();
    let servers: Vec<_> = classes.iter().filter(|class| class.input == InputForm::Messages).cloned().collect();
    let taken = place(&state, path, &caller, request, &servers).await;
    drop(charge);
    match taken {
        Ok(Taken::Passed(passed)) => Ok(response(path, state, admission, *passed, caller.arrived)),
        // A request that no server takes is still valid if an engine takes it: the engine's error
        // is told.
        Ok(Taken::Engine(_)) | Err(RequestError { cause: Cause::Invalid(_), .. }) => Err(error),
        Err(error) => Err(state.http_error(error)),
    }
}

/// Finds the best place for a request that was sent to this path, among the workers of these classes.
async fn place(
    state: &Arc<EndpointState>,
    path: &'static str,
    caller: &Caller,
    request: ForwardBody,
    classes: &[PresentClass],
) -> Result<Taken, RequestError> {
    let deadlines = Deadlines::of(caller.arrived, &state.pipeline.limits);
    if let Some(observer) = &state.pipeline.observer {
        caller.entries.begin_anew(&**observer);
    }
    let placing = async {
        let (request, _charge) = client_names::resolve(state, caller, request).await?;
        let arrived = request.arrived();
        let ForwardBody { body, model, fields, .. } = request;
        let prospects = prospects(state, path, &arrived, &fields, caller, classes).await?;
        let below = path.trim_start_matches('/');
        let forward =
            Forward { id: caller.id.clone(), path: below, body, model, trace: caller.trace.clone(), prompt: None };
        let entry = caller.entries.add_prompt();
        Passing { state, path, prospects, fields, forward, tried: caller.tried.clone(), caller, entry }.find().await
    };
    within(deadlines.first_token, placing).await.and_then(|taken| taken)
}

/// Prepares the request for each class of workers.
async fn prospects(
    state: &EndpointState,
    path: &str,
    body: &Arrived,
    fields: &Arc<Map<String, Value>>,
    caller: &Caller,
    classes: &[PresentClass],
) -> Result<Prospects, RequestError> {
    if classes.is_empty() {
        return Err(RequestError::not_ready());
    }
    let (of_text, telling): (Vec<PresentClass>, Vec<PresentClass>) =
        classes.iter().cloned().partition(|class| class.class.keys == KeyScheme::Text);
    let foreseen =
        if telling.is_empty() { None } else { Foreseen::of(state, path, body, caller, telling.clone().into()).await };
    let knows = |class: &PresentClass| foreseen.as_ref().is_some_and(|foreseen| foreseen.knows(class.id));
    let is_unforeseen = |class: &&PresentClass| class.input == InputForm::Messages && !knows(class);
    let unforeseen: Vec<_> = telling.iter().filter(is_unforeseen).map(|class| class.id).collect();
    let pieces = if of_text.is_empty() && unforeseen.is_empty() {
        Vec::new()
    } else {
        let small = body.bytes.len() <= SMALL;
        let cost = price::json(body.bytes.len(), 0);
        let fields = fields.clone();
        let images = foreseen.as_ref().map_or_else(Vec::new, Foreseen::item_tokens);
        state.pipeline.cpu.run_or_here(small, &caller.cpu, cost, move || pieces(&fields, &images)).await?
    };
    let blocks = PromptBlocks { tokens: &pieces, media: &[], lora: None, salt: None };
    let texts = of_text.iter().map(|class| (class.id, keys_for(&class.class, &blocks))).collect();
    let unable =
        state.pipeline.fleet.workers_lacking(foreseen.as_ref().map_or_else(Supports::default, Foreseen::needs));
    Ok(Prospects { texts, foreseen, unforeseen, unable, pieces: pieces.len().max(1) })
}

impl Passing<'_> {
    /// Gives the request to one server after the other until one answers, or an engine is the best place.
    async fn find(mut self) -> Result<Taken, RequestError> {
        loop {
            let begun = Instant::now();
            let picked = match self.pick() {
                Ok(picked) => picked,
                Err(error) => {
                    // No deadline here: the caller limits the time of all attempts together.
                    self.tried.await_worker(&self.state.pipeline, None, error.into()).await?;
                    continue;
                }
            };
            let Some((reservation, explanation)) = picked else { return Ok(Taken::Engine(self.tried)) };
            let worker = reservation.worker;
            // The worker may be half-open, and gets no other request until a trial ends. So the trial begins
            // before anything can fail.
            let server = self.state.pipeline.fleet.worker(worker);
            let trial = server.map(|server| (Trial::begin(&self.state.pipeline.fleet, server.clone()), server));
            let taken = match trial {
                Some((_, server)) if server.backend.capabilities().input == InputForm::Tokens => {
                    return Ok(Taken::Engine(self.tried));
                }
                Some((trial, server)) => {
                    let explained = self.show(explanation);
                    self.give(server, trial, reservation, begun, explained).await?
                }
                None => Err(JobError::NotTaken(Death::new("it left in this moment"))),
            };
            match taken {
                Ok(passed) => return Ok(Taken::Passed(Box::new(passed))),
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
        let plans: Vec<_> =
            of_texts.chain(of_foreseen).chain(unforeseen.iter().map(|class| known_by(*class, &[]))).collect();
        if plans.is_empty() {
            return Ok(None);
        }
        let router = self.state.pipeline.fleet.router();
        let observer = self.state.pipeline.observer.as_ref();
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
        let observer = self.state.pipeline.observer.as_deref()?;
        let number = explanation.and_then(|explanation| {
            let Prospects { texts, foreseen, unforeseen, pieces, .. } = &self.prospects;
            let about = texts.iter().map(|(class, _)| class).chain(unforeseen);
            let about = about.map(|class| ExplainedPlan { class: *class, prompt_tokens: *pieces, items: &[] });
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
    ) -> Result<Result<Passed, JobError>, RequestError> {
        let class = server.class;
        let foreseen = self.prospects.foreseen.as_ref().and_then(|foreseen| foreseen.prompt_tokens(class));
        let full_blocks =
            self.prospects.foreseen.as_ref().and_then(|foreseen| foreseen.full_blocks(class, reservation.block_size));
        let mut attempted =
            RouteOutcome { explained, ..self.attempted(&reservation, class, foreseen, full_blocks, handed_over) };
        self.state.pipeline.metrics.routed(&attempted);
        let forward = match server.backend.capabilities().class.keys {
            KeyScheme::Text => self.forward.clone(),
            _ => {
                let prompt = self.prospects.foreseen.as_ref().and_then(|foreseen| foreseen.to_learn_from(class));
                Forward { prompt, ..self.with_names(class).await? }
            }
        };
        let first_token = Deadlines::of(self.caller.arrived, &self.state.pipeline.limits).first_token;
        let begins = async {
            let answer = server.backend.forward(forward).await?;
            attempted.hand_off = handed_over.elapsed();
            begun(self.path, answer, &server).await
        };
        let answer = begun_within(first_token, &mut trial, begins).await?;
        // A refusal does not say whether the server works.
        if answer.as_ref().is_ok_and(|answer| (200..300).contains(&answer.status)) {
            trial.succeeded();
        }
        Ok(answer.map(|answer| Passed { reservation, server, attempted, foreseen, answer }))
    }

    /// The request for a server that knows media items by names.
    async fn with_names(&self, class: PlanClassId) -> Result<Forward, RequestError> {
        let items = self.prospects.foreseen.as_ref().and_then(|foreseen| foreseen.items(class));
        if let Some(items) = items {
            let small = self.forward.body.len() <= SMALL;
            let cost = price::json(self.forward.body.len(), 0);
            let fields = self.fields.clone();
            let named = move || {
                let body = Bytes::from(named(&fields, &items)?);
                let model = model_in(&body).ok()?;
                Some((body, model))
            };
            if let Some((body, model)) =
                self.state.pipeline.cpu.run_or_here(small, &self.caller.cpu, cost, named).await?
            {
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
                self.tried.not_taken_by(&self.state.pipeline, worker);
                Ok(())
            }
            error => match WorkerFault::from_error(&error, Instant::now()) {
                Some(fault @ WorkerFault::Failed { .. }) => {
                    self.tried.faults.push(fault.clone());
                    self.tried.lost_with(&self.state.pipeline, worker, fault)
                }
                Some(fault) => {
                    self.tried.declined_by(&self.state.pipeline, worker, fault);
                    Ok(())
                }
                None => Err(error.into()),
            },
        }
    }

    fn attempted(
        &self,
        reservation: &Reservation,
        class: PlanClassId,
        foreseen: Option<usize>,
        full_blocks: Option<usize>,
        begun: Instant,
    ) -> RouteOutcome {
        RouteOutcome {
            overlap_blocks: reservation.overlap_blocks,
            total_blocks: full_blocks.unwrap_or(reservation.total_blocks),
            // Tokens of a prompt that is not foreseen are not known.
            prompt_tokens: foreseen.unwrap_or(0),
            picked: begun.saturating_duration_since(self.caller.arrived),
            moves: self.tried.lost,
            ..RouteOutcome::on(reservation.worker, class)
        }
    }
}
