//! The two completion endpoints: parse, prepare, generate, and put the answer into OpenAI's shape.

use std::collections::HashMap;
use std::sync::Arc;

use axum::extract::State;
use axum::http::{HeaderValue, header};
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use chiasm_api::StreamApi;
use chiasm_api::openai::chat::{self, ChatRequest};
use chiasm_api::openai::completions::{self, CompletionRequest, Echo, Echoed, Shown, ShownChoice};
use chiasm_api::openai::{AnswerHead, Common, Lists, Told, Usage};
use chiasm_backend::InputForm;
use chiasm_fleet::adapters::ServedAdapter;
use chiasm_media::Charge;
use chiasm_pipeline::cpu::{CpuBudget, price};
use chiasm_pipeline::{
    Caller, Generation, Prepared, RequestError, check_prompt_logprobs_of_all, collect, detokenize,
    prepare,
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

/// Log probabilities that are written in a hundred microseconds.
const FEW_CANDIDATES: usize = 100;
/// Tokens that take as long to write as one of them.
pub(crate) const TOKENS_OF_CANDIDATE: usize = 16;
/// Memory that each takes while an answer is written, which holds its text and what it stands in.
const BYTES_OF_CANDIDATE: u64 = 256;
/// So many are not counted, which take a megabyte: a usual answer should not fail at its very end
/// for want of memory.
const UNCOUNTED_CANDIDATES: usize = 4096;

/// `POST /v1/chat/completions`
pub(crate) async fn chat(
    State(state): State<Arc<EndpointState>>,
    request: Admitted<ChatRequest>,
) -> Result<Response, HttpError> {
    let state = &state;
    let told = |error| state.http_error(error);
    let Admitted { caller, admission, body: JsonBody { request, charge } } = request;
    let ChatRequest { common, generate } = request;
    let adapter = find_model(&state.pipeline, common.model.as_deref())?;
    admission.record.adapter(adapter.as_ref());
    admission.ends_with_client();
    let prepared = planned(state, generate, adapter.clone(), &caller).await.map_err(told)?;
    drop(charge);
    let head = AnswerHead::new("chatcmpl", &caller.id, model_name(state, adapter.as_ref()));
    let tokenizer = state.pipeline.model.tokenizer.clone();

    let Some(options) = common.stream else {
        let (choices, attempted) = collect(&state.pipeline, &prepared).await.map_err(told)?;
        let reads_reasoning = prepared.reads_reasoning();
        let usage = usage(&attempted, &choices, reads_reasoning);
        state.metrics.used(usage);
        admission.record.attempted(attempted);
        admission.record.used(usage);
        let prompt_tokens = shown_prompt(&prepared, &attempted, common.return_token_ids).cloned();
        let (fields, nvext) = (
            state.reasoning_fields,
            common.extra_fields.for_request(&attempted, caller.arrived.elapsed()),
        );
        let candidates = choices.iter().map(candidates).sum();
        let mut response = written(state, &caller, candidates, move || {
            let shown = chat::Shown {
                fields,
                prompt_tokens: prompt_tokens.as_ref().map(|tokens| tokens.as_slice()),
            };
            serde_json::to_vec(&chat::answer(&head, &tokenizer, &choices, shown, usage, nvext))
        })
        .await?;
        routing_headers(response.headers_mut(), &attempted);
        return Ok(response);
    };

    let generation = Generation::start(&state.pipeline, &prepared).await.map_err(told)?;
    let attempted = generation.attempted();
    let shown = shown_prompt(&prepared, &attempted, common.return_token_ids)
        .map(|tokens| tokens.as_slice());
    let chunks = chat::Chunks::new(&head, tokenizer, state.reasoning_fields, shown.is_some());
    let meter = Meter::new(state, options, vec![attempted], admission, prepared.reads_reasoning());
    let mut begin = Vec::new();
    (0..prepared.sampling().n as usize)
        .for_each(|index| chunks.write_role(&mut begin, index, shown, meter.in_chunks(0)));
    // A client has no use for chunks without anything.
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
            if delta.is_for_counts() || skips_empty && usage.is_none() && delta.says_nothing() {
                return;
            }
            let nvext = delta.finish.as_ref().and_then(|_| {
                common.extra_fields.for_request(&attempted, caller.arrived.elapsed())
            });
            chunks.write_delta(events, &delta, usage, nvext);
        },
        move |usage, events| {
            usage.into_iter().for_each(|usage| at_end.write_usage(events, usage));
            events.extend_from_slice(chiasm_api::sse::DONE);
        },
    );
    let mut response = sse::response(events);
    routing_headers(response.headers_mut(), &attempted);
    Ok(response)
}

/// `POST /v1/completions`
pub(crate) async fn completions(
    State(state): State<Arc<EndpointState>>,
    request: Admitted<CompletionRequest>,
) -> Result<Response, HttpError> {
    let state = &state;
    let told = |error| state.http_error(error);
    let Admitted { caller, admission, body: JsonBody { request, charge } } = request;
    let CompletionRequest { common, generate, echo } = request;
    let adapter = find_model(&state.pipeline, common.model.as_deref())?;
    admission.record.adapter(adapter.as_ref());
    admission.ends_with_client();
    let preparing =
        generate.into_iter().map(|request| planned(state, request, adapter.clone(), &caller));
    let prepared = try_join_all(preparing).await.map_err(told)?;
    drop(charge);
    // All of them are told in one answer.
    let tokens = prepared.iter().map(|prompt| prompt.text_tokens().len()).sum();
    check_prompt_logprobs_of_all(&common.sampling, tokens).map_err(told)?;
    let echoed = echoed(state, &caller, echo, &prepared, &common).await.map_err(told)?;
    let head = AnswerHead::new("cmpl", &caller.id, model_name(state, adapter.as_ref()));
    let with_ids = common.return_token_ids;

    let Some(options) = common.stream else {
        return completions_at_once(state, &caller, head, (&prepared, &echoed), &common, admission)
            .await;
    };
    let starting = prepared.iter().map(|prompt| Generation::start(&state.pipeline, prompt));
    let generations = try_join_all(starting).await.map_err(told)?;
    let attempted: Vec<_> = generations.iter().map(Generation::attempted).collect();
    let first = attempted.first().copied();
    let of_prompts = attempted.clone();
    let prompts: Vec<_> = prepared
        .iter()
        .zip(&attempted)
        .map(|(prompt, attempted)| shown_prompt(prompt, attempted, with_ids).cloned())
        .collect();
    let meter = Meter::new(state, options, attempted, admission, false);

    let deltas =
        generations.into_iter().zip(&echoed).enumerate().map(|(prompt, (started, echoed))| {
            let (state, cpu, echoed) = (state.clone(), caller.cpu.clone(), echoed.clone());
            let with_lists = move |delta| listed(state.clone(), cpu.clone(), echoed.clone(), delta);
            started
                .into_deltas()
                .then(with_lists)
                .map(move |delta| delta.map(|(delta, lists)| (prompt, delta, lists)))
                .boxed()
        });
    let deltas = select_all(deltas);
    let chunks = Arc::new(completions::Chunks::new(&head, state.pipeline.model.tokenizer.clone()));
    let at_end = chunks.clone();
    let mut told_so_far: HashMap<usize, Told> = HashMap::new();
    let events = meter::events(
        Vec::new(),
        deltas,
        meter,
        move |delta: Result<(usize, ChoiceDelta, Lists), _>, meter, events| {
            let (prompt, delta, lists) = match delta {
                Ok(delta) => delta,
                Err(error) => return StreamApi::Completions.write_failure(events, &error, 0),
            };
            let usage = meter.count(prompt, &delta);
            let index = prompt * prepared[prompt].sampling().n as usize + delta.index;
            let first = !told_so_far.contains_key(&index);
            if !first && delta.is_for_counts() {
                return;
            }
            let told = told_so_far.entry(index).or_default();
            let prompt_tokens =
                prompts[prompt].as_ref().filter(|_| first).map(|tokens| tokens.as_slice());
            let last = delta.finish.as_ref();
            let nvext = last.and_then(|_| {
                common.extra_fields.for_request(&of_prompts[prompt], caller.arrived.elapsed())
            });
            let echoed = echoed[prompt].as_deref().filter(|_| first).map(|echoed| (echoed, lists));
            let shown = Shown { index, told, with_ids, prompt_tokens, echoed, usage, nvext };
            chunks.write_delta(events, &delta, shown);
        },
        move |usage, events| {
            usage.into_iter().for_each(|usage| at_end.write_usage(events, usage));
            events.extend_from_slice(chiasm_api::sse::DONE);
        },
    );
    let mut response = sse::response(events);
    if let Some(first) = first {
        routing_headers(response.headers_mut(), &first);
    }
    Ok(response)
}

async fn completions_at_once(
    state: &Arc<EndpointState>,
    caller: &Caller,
    head: AnswerHead,
    (prepared, echoed): (&[Prepared], &[Option<Arc<Echoed>>]),
    common: &Common,
    admission: Admission,
) -> Result<Response, HttpError> {
    let answers = join_all(prepared.iter().map(|prompt| collect(&state.pipeline, prompt))).await;
    let answers: Vec<_> =
        answers.into_iter().collect::<Result<_, _>>().map_err(|error| state.http_error(error))?;
    let mut total = Usage::default();
    let mut choices = Vec::new();
    let first = answers.first().map(|(_, attempted)| *attempted);
    for ((prompt, echoed), (finished, attempted)) in prepared.iter().zip(echoed).zip(answers) {
        let usage = usage(&attempted, &finished, false);
        total += usage;
        admission.record.attempted(attempted);
        admission.record.used_by(attempted.explained, usage);
        let shown = shown_prompt(prompt, &attempted, common.return_token_ids).cloned();
        choices.extend(finished.into_iter().map(|choice| ShownChoice {
            choice,
            prompt_tokens: shown.clone(),
            echoed: echoed.clone(),
        }));
    }
    state.metrics.used(total);
    admission.record.used(total);
    // The first of several prompts tells, as in the headers.
    let nvext =
        first.and_then(|first| common.extra_fields.for_request(&first, caller.arrived.elapsed()));
    let tokenizer = state.pipeline.model.tokenizer.clone();
    let candidates = choices.iter().map(|shown| candidates(&shown.choice)).sum();
    let mut response = written(state, caller, candidates, move || {
        serde_json::to_vec(&completions::answer(&head, &tokenizer, &choices, total, nvext))
    })
    .await?;
    if let Some(attempted) = first {
        routing_headers(response.headers_mut(), &attempted);
    }
    Ok(response)
}

/// The prompts that begin their answers. As in vLLM their text does not, where token ids are asked
/// for.
async fn echoed(
    state: &EndpointState,
    caller: &Caller,
    echo: Option<Echo>,
    prepared: &[Prepared],
    common: &Common,
) -> Result<Vec<Option<Arc<Echoed>>>, RequestError> {
    let Some(Echo { texts, only }) = echo else { return Ok(vec![None; prepared.len()]) };
    let top = common.sampling.logprobs;
    let mut echoed = Vec::with_capacity(prepared.len());
    for (prompt, text) in prepared.iter().zip(texts) {
        let tokens = prompt.text_tokens();
        let text = match text {
            _ if common.return_token_ids => String::new(),
            Some(text) => text,
            None => detokenize(&state.pipeline, "prompt", tokens.clone(), caller).await?,
        };
        echoed.push(Some(Arc::new(Echoed { text, tokens, top, only })));
    }
    Ok(echoed)
}

/// A delta with the lists of its prompt's log probabilities, if it brings any.
async fn listed(
    state: Arc<EndpointState>,
    cpu: CpuBudget,
    echoed: Option<Arc<Echoed>>,
    delta: Result<ChoiceDelta, RequestError>,
) -> Result<(ChoiceDelta, Lists), RequestError> {
    let mut delta = delta?;
    let (Some(echoed), Some(logprobs)) = (echoed, delta.prompt_logprobs.take()) else {
        return Ok((delta, Lists::default()));
    };
    let tokenizer = state.pipeline.model.tokenizer.clone();
    let (small, cost) =
        (logprobs.tokens.len() <= FEW_CANDIDATES, price::logprobs(logprobs.tokens.len()));
    let list = move || echoed.lists(&tokenizer, Some(&logprobs));
    let lists = state.pipeline.cpu.run_or_here(small, &cpu, cost, list).await?;
    Ok((delta, lists))
}

/// Log probabilities that an answer tells of a continuation and its prompt; its tokens count as
/// some of them.
fn candidates(choice: &FinishedChoice) -> usize {
    let of_prompt = choice.prompt_logprobs.as_ref().map_or(0, |logprobs| logprobs.tokens.len());
    let of_answer: usize = choice.logprobs.iter().flatten().map(|token| 1 + token.top.len()).sum();
    of_prompt + of_answer + choice.tokens.len() / TOKENS_OF_CANDIDATE
}

/// Writes an answer. With many log probabilities, each of which has a text, that is not for the
/// async threads; and as a few bytes of a request can ask for gigabytes of them, such an answer is
/// counted like a request's body until its client has read it.
pub(crate) async fn written(
    state: &EndpointState,
    caller: &Caller,
    candidates: usize,
    write: impl FnOnce() -> serde_json::Result<Vec<u8>> + Send + 'static,
) -> Result<Response, HttpError> {
    let (small, cost) = (candidates <= FEW_CANDIDATES, price::logprobs(candidates));
    let bytes =
        if candidates <= UNCOUNTED_CANDIDATES { 0 } else { candidates as u64 * BYTES_OF_CANDIDATE };
    let budget = state.pipeline.media.budget();
    if bytes > budget.limit() {
        let message = format!(
            "the answer would take {bytes} bytes to write, more than there may be (--max-bytes-in-flight)"
        );
        return Err(HttpError::too_many("body", message));
    }
    let mut charge = budget.charge(bytes)?;
    let json = state.pipeline.cpu.run_or_here(small, &caller.cpu, cost, write).await;
    let json = json.map_err(|error| state.http_error(error.into()))?;
    let json =
        json.map_err(|error| HttpError::internal(format!("the answer can't be written: {error}")))?;
    charge.shrink_to(json.capacity() as u64);
    let json = Bytes::from_owner(Counted { json, _charge: charge });
    Ok(([(header::CONTENT_TYPE, HeaderValue::from_static("application/json"))], json)
        .into_response())
}

/// An answer, and what it takes of the memory that there may be.
struct Counted {
    json: Vec<u8>,
    _charge: Charge,
}

impl AsRef<[u8]> for Counted {
    fn as_ref(&self) -> &[u8] {
        &self.json
    }
}

/// Prepares a request for the workers that are given tokens and there now.
pub(crate) async fn planned(
    state: &EndpointState,
    request: GenerateRequest,
    adapter: Option<Arc<ServedAdapter>>,
    caller: &Caller,
) -> Result<Prepared, RequestError> {
    let mut classes = state.pipeline.fleet.classes();
    if classes.iter().any(|class| class.input != InputForm::Tokens) {
        classes =
            classes.iter().filter(|class| class.input == InputForm::Tokens).cloned().collect();
    }
    if classes.is_empty() {
        return Err(caller.tried.or_servers(&state.pipeline, RequestError::not_ready()));
    }
    prepare(&state.pipeline, request, adapter, caller, classes).await
}

/// The name of what answers.
pub(crate) fn model_name<'a>(
    state: &'a EndpointState,
    adapter: Option<&'a Arc<ServedAdapter>>,
) -> &'a str {
    adapter.map_or(&state.pipeline.model.name, |adapter| &adapter.name)
}

/// Returns the prompt as the worker that answered got it, if the client wants to see it.
fn shown_prompt<'a>(
    prepared: &'a Prepared,
    attempted: &RouteOutcome,
    wanted: bool,
) -> Option<&'a Arc<Vec<TokenId>>> {
    prepared.tokens(attempted.class).filter(|_| wanted)
}

/// The tokens of an answer.
pub(crate) fn usage(
    attempted: &RouteOutcome,
    choices: &[FinishedChoice],
    reads_reasoning: bool,
) -> Usage {
    let sum = |tokens: fn(&FinishedChoice) -> usize| choices.iter().map(tokens).sum();
    Usage {
        completion_tokens: sum(|choice| choice.tokens.len()),
        reasoning_tokens: reads_reasoning.then(|| sum(|choice| choice.reasoning_tokens)),
        ..Usage::of_prompt(attempted, reads_reasoning)
    }
}
