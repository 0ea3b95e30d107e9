//! The two completion endpoints: parse, prepare, generate, and put the answer into OpenAI's shape.

use std::collections::HashMap;
use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use futures_util::future::{join_all, try_join_all};
use futures_util::stream::{StreamExt, iter, select_all};

use crate::admission::{Admission, Admitted};
use crate::body::JsonBody;
use crate::error::ApiError;
use crate::frontend::Frontend;
use crate::meter::{Meter, metered};
use crate::openai::chat::{self, ChatRequest};
use crate::openai::completions::{self, CompletionRequest, Shown};
use crate::openai::{AnswerHead, Common, Usage};
use crate::pipeline::{
    Attempted, Caller, ChoiceDelta, FinishedChoice, GenerateRequest, Generation, Planned, Prepared, RequestError,
    collect, prepare,
};
use crate::routes::routing_headers;
use crate::sse;

/// `POST /v1/chat/completions`
pub(crate) async fn chat(
    State(frontend): State<Arc<Frontend>>,
    request: Admitted<ChatRequest>,
) -> Result<Response, ApiError> {
    let frontend = &frontend;
    let told = |error| frontend.told(error);
    let Admitted { caller, admission, body: JsonBody { request, charge } } = request;
    let ChatRequest { common, generate } = request;
    check_model(frontend, &common)?;
    admission.ends_with_client();
    let prepared = planned(frontend, generate, &caller).await.map_err(told)?;
    drop(charge);
    let head = AnswerHead::new("chatcmpl", &caller.id, &frontend.model.name);
    let tokenizer = frontend.model.tokenizer.clone();

    let Some(options) = common.stream else {
        let (choices, attempted) = collect(frontend, &prepared).await.map_err(told)?;
        let reads_reasoning = prepared.reads_reasoning();
        let usage = usage(&attempted, &choices, reads_reasoning);
        frontend.metrics.used(usage);
        admission.record.attempted(attempted);
        admission.record.used(usage);
        let shown = shown_prompt(&prepared, &attempted, common.return_token_ids);
        let prompt_tokens = shown.map(|plan| plan.tokens.as_slice());
        let shown = chat::Shown { fields: frontend.reasoning_fields, prompt_tokens };
        let nvext = common.extra_fields.of(&attempted, caller.arrived);
        let mut response = Json(chat::answer(&head, &tokenizer, &choices, shown, usage, nvext)).into_response();
        routing_headers(response.headers_mut(), &attempted);
        return Ok(response);
    };

    let generation = Generation::start(frontend, &prepared).await.map_err(told)?;
    let attempted = generation.attempted();
    let shown = shown_prompt(&prepared, &attempted, common.return_token_ids);
    let shown = shown.map(|plan| plan.tokens.as_slice());
    let roles: Vec<_> = (0..prepared.sampling.n as usize).map(|index| chat::role_chunk(&head, index, shown)).collect();
    let meter = Meter::new(frontend, options, vec![attempted], admission, prepared.reads_reasoning());
    let with_ids = shown.is_some();
    let (is_read, fields) = (prepared.reading.is_some(), frontend.reasoning_fields);
    let last_head = head.clone();
    let events = metered(
        generation.into_deltas(),
        meter,
        move |delta, meter: &mut Meter| {
            let usage = meter.count(0, &delta);
            // A client has no use for chunks without anything.
            if is_read && usage.is_none() && !with_ids && delta.says_nothing() {
                return None;
            }
            let nvext = delta.finish.as_ref().and_then(|_| common.extra_fields.of(&attempted, caller.arrived));
            Some(chat::delta_chunk(&head, &tokenizer, &delta, fields, with_ids, usage, nvext))
        },
        move |usage| chat::usage_chunk(&last_head, usage),
    );
    let mut response = sse::response(iter(roles).chain(events));
    routing_headers(response.headers_mut(), &attempted);
    Ok(response)
}

/// `POST /v1/completions`
pub(crate) async fn completions(
    State(frontend): State<Arc<Frontend>>,
    request: Admitted<CompletionRequest>,
) -> Result<Response, ApiError> {
    let frontend = &frontend;
    let told = |error| frontend.told(error);
    let Admitted { caller, admission, body: JsonBody { request, charge } } = request;
    let CompletionRequest { common, generate } = request;
    check_model(frontend, &common)?;
    admission.ends_with_client();
    let preparing = generate.into_iter().map(|request| planned(frontend, request, &caller));
    let prepared = try_join_all(preparing).await.map_err(told)?;
    drop(charge);
    let head = AnswerHead::new("cmpl", &caller.id, &frontend.model.name);
    let with_ids = common.return_token_ids;

    let Some(options) = common.stream else {
        return completions_at_once(frontend, &head, &prepared, &common, admission).await;
    };
    let starting = prepared.iter().map(|prompt| Generation::start(frontend, prompt));
    let generations = try_join_all(starting).await.map_err(told)?;
    let attempted: Vec<_> = generations.iter().map(Generation::attempted).collect();
    let first = attempted.first().copied();
    let of_prompts = attempted.clone();
    let prompts: Vec<_> = prepared
        .iter()
        .zip(&attempted)
        .map(|(prompt, attempted)| shown_prompt(prompt, attempted, with_ids).map(|plan| plan.tokens.clone()))
        .collect();
    let meter = Meter::new(frontend, options, attempted, admission, false);

    let deltas = select_all(
        generations
            .into_iter()
            .enumerate()
            .map(|(prompt, started)| started.into_deltas().map(move |delta| delta.map(|d| (prompt, d))).boxed()),
    );
    let tokenizer = frontend.model.tokenizer.clone();
    let last_head = head.clone();
    let mut offsets: HashMap<usize, usize> = HashMap::new();
    let events = metered(
        deltas,
        meter,
        move |(prompt, delta): (usize, ChoiceDelta), meter: &mut Meter| {
            let usage = meter.count(prompt, &delta);
            let index = prompt * prepared[prompt].sampling.n as usize + delta.index;
            let first = !offsets.contains_key(&index);
            let offset = offsets.entry(index).or_default();
            let prompt_tokens = prompts[prompt].as_ref().filter(|_| first).map(|tokens| tokens.as_slice());
            let last = delta.finish.as_ref();
            let nvext = last.and_then(|_| common.extra_fields.of(&of_prompts[prompt], caller.arrived));
            let shown = Shown { index, offset, with_ids, prompt_tokens, usage, nvext };
            Some(completions::delta_chunk(&head, &tokenizer, &delta, shown))
        },
        move |usage| completions::usage_chunk(&last_head, usage),
    );
    let mut response = sse::response(events);
    if let Some(first) = first {
        routing_headers(response.headers_mut(), &first);
    }
    Ok(response)
}

async fn completions_at_once(
    frontend: &Arc<Frontend>,
    head: &AnswerHead,
    prepared: &[Prepared],
    common: &Common,
    admission: Admission,
) -> Result<Response, ApiError> {
    let answers = join_all(prepared.iter().map(|prompt| collect(frontend, prompt))).await;
    let answers: Vec<_> = answers.into_iter().collect::<Result<_, _>>().map_err(|error| frontend.told(error))?;
    let mut total = Usage::default();
    let mut choices = Vec::new();
    let first = answers.first().map(|(_, attempted)| *attempted);
    for (prompt, (finished, attempted)) in prepared.iter().zip(answers) {
        total += usage(&attempted, &finished, false);
        let shown = shown_prompt(prompt, &attempted, common.return_token_ids).map(|plan| plan.tokens.clone());
        choices.extend(finished.into_iter().map(|choice| (choice, shown.clone())));
    }
    frontend.metrics.used(total);
    admission.record.used(total);
    // The first of several prompts tells, as in the headers.
    let arrived = prepared.first().map(|prompt| prompt.arrived);
    let nvext = first.zip(arrived).and_then(|(first, arrived)| common.extra_fields.of(&first, arrived));
    let tokenizer = &frontend.model.tokenizer;
    let mut response = Json(completions::answer(head, tokenizer, &choices, total, nvext)).into_response();
    if let Some(attempted) = first {
        admission.record.attempted(attempted);
        routing_headers(response.headers_mut(), &attempted);
    }
    Ok(response)
}

/// Prepares a request for the workers that are there now.
pub(crate) async fn planned(
    frontend: &Frontend,
    request: GenerateRequest,
    caller: &Caller,
) -> Result<Prepared, RequestError> {
    let classes = frontend.fleet.classes();
    if classes.is_empty() {
        return Err(RequestError::not_ready());
    }
    prepare(frontend, request, caller, classes).await
}

fn check_model(frontend: &Frontend, common: &Common) -> Result<(), ApiError> {
    match &common.model {
        Some(model) if *model != frontend.model.name => Err(ApiError::no_such_model(model, &frontend.model.name)),
        _ => Ok(()),
    }
}

/// What the prompt became for the worker that answered, if the client wants to see it.
fn shown_prompt<'a>(prepared: &'a Prepared, attempted: &Attempted, wanted: bool) -> Option<&'a Planned> {
    prepared.plan(attempted.class).filter(|_| wanted)
}

pub(crate) fn usage(attempted: &Attempted, choices: &[FinishedChoice], reads_reasoning: bool) -> Usage {
    let sum = |tokens: fn(&FinishedChoice) -> usize| choices.iter().map(tokens).sum();
    Usage {
        prompt_tokens: attempted.prompt_tokens,
        completion_tokens: sum(|choice| choice.tokens.len()),
        cached_tokens: attempted.prefill.cached_tokens,
        reasoning_tokens: reads_reasoning.then(|| sum(|choice| choice.reasoning_tokens)),
    }
}
