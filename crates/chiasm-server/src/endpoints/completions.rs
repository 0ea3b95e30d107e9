//! OpenAI's two completion endpoints: parse, prepare, generate, and format the answer.

use std::collections::HashMap;
use std::sync::Arc;

use axum::extract::State;
use axum::http::{HeaderValue, header};
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use chiasm_api::StreamApi;
use chiasm_api::openai::chat::{self, ChatRequest};
use chiasm_api::openai::completions::{
    self, ChunkOptions, CompletionChoice, CompletionRequest, Echo, EchoedPrompt,
};
use chiasm_api::openai::{AnswerHead, CommonFields, LogprobLists, LogprobState, Usage};
use chiasm_backend::InputForm;
use chiasm_cpu::{CpuBudget, price};
use chiasm_fleet::adapters::ServedAdapter;
use chiasm_media::Charge;
use chiasm_pipeline::{
    Generation, Prepared, RequestContext, RequestError, check_total_prompt_logprobs, collect,
    detokenize, prepare,
};
use chiasm_request::{ChoiceDelta, FinishedChoice, GenerateRequest, RouteOutcome};
use chiasm_types::TokenId;
use futures_util::future::{join_all, try_join_all};
use futures_util::stream::{StreamExt, select_all};

use crate::admission::{Admission, Admitted};
use crate::body::JsonBody;
use crate::endpoint_state::EndpointState;
use crate::endpoints::find_model;
use crate::error::HttpError;
use crate::meter::{self, Meter};
use crate::routing_headers::routing_headers;
use crate::sse;

/// The maximum number of log probabilities that are written on an async thread, which takes a
/// hundred microseconds.
const MAX_INLINE_CANDIDATES: usize = 100;
/// The number of tokens that take as long to write as one log probability.
pub(crate) const TOKENS_PER_CANDIDATE: usize = 16;
/// The memory that a log probability takes while an answer is written, in bytes: its text and its
/// entry.
const BYTES_PER_CANDIDATE: u64 = 256;
/// The maximum number of log probabilities whose memory, a megabyte, is not charged. A usual answer
/// should not fail at its very end for lack of memory.
const MAX_UNCHARGED_CANDIDATES: usize = 4096;

/// `POST /v1/chat/completions`
pub(crate) async fn chat(
    State(state): State<Arc<EndpointState>>,
    request: Admitted<ChatRequest>,
) -> Result<Response, HttpError> {
    let state = &state;
    let to_http = |error| state.http_error(error);
    let Admitted { caller, admission, body: JsonBody { request, charge } } = request;
    let ChatRequest { common, generate } = request;
    let adapter = find_model(&state.pipeline, common.model.as_deref())?;
    admission.record.set_adapter(adapter.as_ref());
    admission.cancel_on_disconnect();
    let mut prepared =
        prepare_for_engines(state, generate, adapter.clone(), &caller).await.map_err(to_http)?;
    drop(charge);
    let head = AnswerHead::new("chatcmpl", &caller.id, model_name(state, adapter.as_ref()));
    let tokenizer = state.pipeline.model.tokenizer.clone();

    let Some(options) = common.stream else {
        let (choices, route) = collect(&state.pipeline, &mut prepared).await.map_err(to_http)?;
        let reads_reasoning = prepared.reads_reasoning();
        let usage = answer_usage(&route, &choices, reads_reasoning);
        state.metrics.count_tokens(usage);
        admission.record.set_route(route);
        admission.record.set_usage(usage);
        let prompt_tokens = shown_prompt(&prepared, &route, common.return_token_ids).cloned();
        let fields = state.reasoning_fields;
        let nvext = common.extra_fields.for_request(&route, caller.arrived.elapsed());
        let candidates = choices.iter().map(count_candidates).sum();
        let mut response = json_response(state, &caller, candidates, move || {
            let shown = chat::AnswerOptions {
                fields,
                prompt_tokens: prompt_tokens.as_ref().map(|tokens| tokens.as_slice()),
            };
            serde_json::to_vec(&chat::answer(&head, &tokenizer, &choices, shown, usage, nvext))
        })
        .await?;
        routing_headers(response.headers_mut(), &route);
        return Ok(response);
    };

    let generation = Generation::start(&state.pipeline, &mut prepared).await.map_err(to_http)?;
    let route = generation.route();
    let shown =
        shown_prompt(&prepared, &route, common.return_token_ids).map(|tokens| tokens.as_slice());
    let chunks = chat::Chunks::new(&head, tokenizer, state.reasoning_fields, shown.is_some());
    let meter = Meter::new(state, options, vec![route], admission, prepared.reads_reasoning());
    let mut begin = Vec::new();
    (0..prepared.sampling().n as usize)
        .for_each(|index| chunks.write_role(&mut begin, index, shown, meter.chunk_usage(0)));
    // Empty chunks are of no use to clients.
    let skips_empty = prepared.parses_answers() && shown.is_none();
    let chunks = Arc::new(chunks);
    let at_end = chunks.clone();
    let events = meter::events(
        begin,
        generation.into_deltas(),
        meter,
        move |delta: Result<ChoiceDelta, _>, meter, events| {
            let delta = match delta {
                Ok(delta) => delta,
                Err(error) => return StreamApi::Completions.write_failure(events, &error, 0),
            };
            let usage = meter.count(0, &delta);
            if delta.has_only_counts()
                || skips_empty && usage.is_none() && delta.is_empty_for_client()
            {
                return;
            }
            let nvext = delta
                .finish
                .as_ref()
                .and_then(|_| common.extra_fields.for_request(&route, caller.arrived.elapsed()));
            chunks.write_delta(events, &delta, usage, nvext);
        },
        move |usage, events| {
            usage.into_iter().for_each(|usage| at_end.write_usage(events, usage));
            events.extend_from_slice(chiasm_api::sse::DONE);
        },
    );
    let mut response = sse::response(events);
    routing_headers(response.headers_mut(), &route);
    Ok(response)
}

/// `POST /v1/completions`
pub(crate) async fn completions(
    State(state): State<Arc<EndpointState>>,
    request: Admitted<CompletionRequest>,
) -> Result<Response, HttpError> {
    let state = &state;
    let to_http = |error| state.http_error(error);
    let Admitted { caller, admission, body: JsonBody { request, charge } } = request;
    let CompletionRequest { common, generate, echo } = request;
    let adapter = find_model(&state.pipeline, common.model.as_deref())?;
    admission.record.set_adapter(adapter.as_ref());
    admission.cancel_on_disconnect();
    let preparing = generate
        .into_iter()
        .map(|request| prepare_for_engines(state, request, adapter.clone(), &caller));
    let mut prepared = try_join_all(preparing).await.map_err(to_http)?;
    drop(charge);
    // One answer has the log probabilities of all prompts.
    let tokens = prepared.iter().map(|prompt| prompt.text_tokens().len()).sum();
    check_total_prompt_logprobs(&common.sampling, tokens).map_err(to_http)?;
    let echoed = echoed_prompts(state, &caller, echo, &prepared, &common).await.map_err(to_http)?;
    let head = AnswerHead::new("cmpl", &caller.id, model_name(state, adapter.as_ref()));
    let with_ids = common.return_token_ids;

    let Some(options) = common.stream else {
        return complete_at_once(state, &caller, head, (prepared, &echoed), &common, admission)
            .await;
    };
    let starting = prepared.iter_mut().map(|prompt| Generation::start(&state.pipeline, prompt));
    let generations = try_join_all(starting).await.map_err(to_http)?;
    let routes: Vec<_> = generations.iter().map(Generation::route).collect();
    let first_route = routes.first().copied();
    let prompt_routes = routes.clone();
    let prompts: Vec<_> = prepared
        .iter()
        .zip(&routes)
        .map(|(prompt, route)| shown_prompt(prompt, route, with_ids).cloned())
        .collect();
    let meter = Meter::new(state, options, routes, admission, false);

    let deltas =
        generations.into_iter().zip(&echoed).enumerate().map(|(prompt, (started, echoed))| {
            let state = state.clone();
            let cpu = caller.cpu.clone();
            let echoed = echoed.clone();
            let with_lists =
                move |delta| with_logprob_lists(state.clone(), cpu.clone(), echoed.clone(), delta);
            started
                .into_deltas()
                .then(with_lists)
                .map(move |delta| delta.map(|(delta, lists)| (prompt, delta, lists)))
                .boxed()
        });
    let deltas = select_all(deltas);
    let chunks = Arc::new(completions::Chunks::new(&head, state.pipeline.model.tokenizer.clone()));
    let at_end = chunks.clone();
    let mut states: HashMap<usize, LogprobState> = HashMap::new();
    let events = meter::events(
        Vec::new(),
        deltas,
        meter,
        move |delta: Result<(usize, ChoiceDelta, LogprobLists), _>, meter, events| {
            let (prompt, delta, lists) = match delta {
                Ok(delta) => delta,
                Err(error) => return StreamApi::Completions.write_failure(events, &error, 0),
            };
            let usage = meter.count(prompt, &delta);
            let index = prompt * prepared[prompt].sampling().n as usize + delta.index;
            let is_first = !states.contains_key(&index);
            if !is_first && delta.has_only_counts() {
                return;
            }
            let logprob_state = states.entry(index).or_default();
            let prompt_tokens =
                prompts[prompt].as_ref().filter(|_| is_first).map(|tokens| tokens.as_slice());
            let last = delta.finish.as_ref();
            let nvext = last.and_then(|_| {
                common.extra_fields.for_request(&prompt_routes[prompt], caller.arrived.elapsed())
            });
            let echoed =
                echoed[prompt].as_deref().filter(|_| is_first).map(|echoed| (echoed, lists));
            let options = ChunkOptions {
                index,
                logprob_state,
                with_ids,
                prompt_tokens,
                echoed,
                usage,
                nvext,
            };
            chunks.write_delta(events, &delta, options);
        },
        move |usage, events| {
            usage.into_iter().for_each(|usage| at_end.write_usage(events, usage));
            events.extend_from_slice(chiasm_api::sse::DONE);
        },
    );
    let mut response = sse::response(events);
    if let Some(route) = first_route {
        routing_headers(response.headers_mut(), &route);
    }
    Ok(response)
}

async fn complete_at_once(
    state: &Arc<EndpointState>,
    caller: &RequestContext,
    head: AnswerHead,
    (mut prepared, echoed): (Vec<Prepared>, &[Option<Arc<EchoedPrompt>>]),
    common: &CommonFields,
    admission: Admission,
) -> Result<Response, HttpError> {
    let answers =
        join_all(prepared.iter_mut().map(|prompt| collect(&state.pipeline, prompt))).await;
    let answers: Vec<_> =
        answers.into_iter().collect::<Result<_, _>>().map_err(|error| state.http_error(error))?;
    let mut total = Usage::default();
    let mut choices = Vec::new();
    let first_route = answers.first().map(|(_, route)| *route);
    for ((prompt, echoed), (finished, route)) in prepared.iter().zip(echoed).zip(answers) {
        let usage = answer_usage(&route, &finished, false);
        total += usage;
        admission.record.set_route(route);
        admission.record.set_prompt_usage(route.explanation_id, usage);
        let shown = shown_prompt(prompt, &route, common.return_token_ids).cloned();
        choices.extend(finished.into_iter().map(|choice| CompletionChoice {
            choice,
            prompt_tokens: shown.clone(),
            echoed: echoed.clone(),
        }));
    }
    state.metrics.count_tokens(total);
    admission.record.set_usage(total);
    // Like the headers, these fields are of the first of several prompts.
    let nvext = first_route
        .and_then(|route| common.extra_fields.for_request(&route, caller.arrived.elapsed()));
    let tokenizer = state.pipeline.model.tokenizer.clone();
    let candidates = choices.iter().map(|shown| count_candidates(&shown.choice)).sum();
    let mut response = json_response(state, caller, candidates, move || {
        serde_json::to_vec(&completions::answer(&head, &tokenizer, &choices, total, nvext))
    })
    .await?;
    if let Some(route) = first_route {
        routing_headers(response.headers_mut(), &route);
    }
    Ok(response)
}

/// Returns the prompts to be echoed at the beginning of their answers. As in vLLM, their text is
/// left out if token ids are requested.
async fn echoed_prompts(
    state: &EndpointState,
    caller: &RequestContext,
    echo: Option<Echo>,
    prepared: &[Prepared],
    common: &CommonFields,
) -> Result<Vec<Option<Arc<EchoedPrompt>>>, RequestError> {
    let Some(Echo { texts, prompt_only }) = echo else { return Ok(vec![None; prepared.len()]) };
    let top = common.sampling.logprobs;
    let mut echoed = Vec::with_capacity(prepared.len());
    for (prompt, text) in prepared.iter().zip(texts) {
        let tokens = prompt.text_tokens();
        let text = match text {
            _ if common.return_token_ids => String::new(),
            Some(text) => text,
            None => detokenize(&state.pipeline, "prompt", tokens.clone(), caller).await?,
        };
        echoed.push(Some(Arc::new(EchoedPrompt { text, tokens, top, prompt_only })));
    }
    Ok(echoed)
}

/// Returns a delta with the lists of its prompt's log probabilities, if it has any.
async fn with_logprob_lists(
    state: Arc<EndpointState>,
    cpu: CpuBudget,
    echoed: Option<Arc<EchoedPrompt>>,
    delta: Result<ChoiceDelta, RequestError>,
) -> Result<(ChoiceDelta, LogprobLists), RequestError> {
    let mut delta = delta?;
    let (Some(echoed), Some(logprobs)) = (echoed, delta.prompt_logprobs.take()) else {
        return Ok((delta, LogprobLists::default()));
    };
    let tokenizer = state.pipeline.model.tokenizer.clone();
    let is_small = logprobs.tokens.len() <= MAX_INLINE_CANDIDATES;
    let cost = price::logprobs(logprobs.tokens.len());
    let list = move || echoed.logprob_lists(&tokenizer, Some(&logprobs));
    let lists = state.pipeline.cpu.run_inline_if(is_small, &cpu, cost, list).await?;
    Ok((delta, lists))
}

/// Counts the log probabilities of a continuation and its prompt. Tokens count as a part of one:
/// see [`TOKENS_PER_CANDIDATE`].
fn count_candidates(choice: &FinishedChoice) -> usize {
    let prompt_logprobs =
        choice.prompt_logprobs.as_ref().map_or(0, |logprobs| logprobs.tokens.len());
    let answer_logprobs: usize =
        choice.logprobs.iter().flatten().map(|token| 1 + token.top.len()).sum();
    prompt_logprobs + answer_logprobs + choice.tokens.len() / TOKENS_PER_CANDIDATE
}

/// Serializes an answer and returns the response.
///
/// An answer with many log probabilities, each of which has a text, is written off the async
/// threads. As a few bytes of a request can ask for gigabytes of them, such an answer is charged
/// like a request body until its client has read it.
pub(crate) async fn json_response(
    state: &EndpointState,
    caller: &RequestContext,
    candidates: usize,
    write: impl FnOnce() -> serde_json::Result<Vec<u8>> + Send + 'static,
) -> Result<Response, HttpError> {
    let is_small = candidates <= MAX_INLINE_CANDIDATES;
    let cost = price::logprobs(candidates);
    let bytes = if candidates <= MAX_UNCHARGED_CANDIDATES {
        0
    } else {
        candidates as u64 * BYTES_PER_CANDIDATE
    };
    let budget = state.pipeline.media.budget();
    if bytes > budget.limit() {
        let message = format!(
            "the answer would take {bytes} bytes, more than allowed (--max-bytes-in-flight)"
        );
        return Err(HttpError::too_many("body", message));
    }
    let mut charge = budget.charge(bytes)?;
    let json = state.pipeline.cpu.run_inline_if(is_small, &caller.cpu, cost, write).await;
    let json = json.map_err(|error| state.http_error(error.into()))?;
    let json =
        json.map_err(|error| HttpError::internal(format!("the answer can't be written: {error}")))?;
    charge.shrink_to(json.capacity() as u64);
    let json = Bytes::from_owner(ChargedJson { json, _charge: charge });
    Ok(([(header::CONTENT_TYPE, HeaderValue::from_static("application/json"))], json)
        .into_response())
}

/// A serialized answer, and the charge for its memory.
struct ChargedJson {
    json: Vec<u8>,
    _charge: Charge,
}

impl AsRef<[u8]> for ChargedJson {
    fn as_ref(&self) -> &[u8] {
        &self.json
    }
}

/// Prepares a request for the current workers that take tokens.
pub(crate) async fn prepare_for_engines(
    state: &EndpointState,
    request: GenerateRequest,
    adapter: Option<Arc<ServedAdapter>>,
    caller: &RequestContext,
) -> Result<Prepared, RequestError> {
    let mut classes = state.pipeline.fleet.classes();
    if classes.iter().any(|class| class.input != InputForm::Tokens) {
        classes =
            classes.iter().filter(|class| class.input == InputForm::Tokens).cloned().collect();
    }
    if classes.is_empty() {
        return Err(caller
            .attempts
            .or_leave_to_servers(&state.pipeline, RequestError::not_ready()));
    }
    prepare(&state.pipeline, request, adapter, caller, classes).await
}

/// Returns the name of the model or adapter that answers.
pub(crate) fn model_name<'a>(
    state: &'a EndpointState,
    adapter: Option<&'a Arc<ServedAdapter>>,
) -> &'a str {
    adapter.map_or(&state.pipeline.model.name, |adapter| &adapter.name)
}

/// Returns the prompt as it was sent to the worker that answered, if the client wants to see it.
fn shown_prompt<'a>(
    prepared: &'a Prepared,
    route: &RouteOutcome,
    wanted: bool,
) -> Option<&'a Arc<Vec<TokenId>>> {
    prepared.tokens(route.class).filter(|_| wanted)
}

/// Returns the usage of an answer.
pub(crate) fn answer_usage(
    route: &RouteOutcome,
    choices: &[FinishedChoice],
    reads_reasoning: bool,
) -> Usage {
    let sum = |tokens: fn(&FinishedChoice) -> usize| choices.iter().map(tokens).sum();
    Usage {
        completion_tokens: sum(|choice| choice.tokens.len()),
        reasoning_tokens: reads_reasoning.then(|| sum(|choice| choice.reasoning_tokens)),
        ..Usage::for_prompt(route, reads_reasoning)
    }
}
