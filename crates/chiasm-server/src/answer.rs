//! The two completion endpoints: parse, prepare, generate, and put the answer into OpenAI's shape.

use std::collections::HashMap;
use std::sync::Arc;

use axum::Json;
use axum::response::{IntoResponse, Response};
use chiasm_types::TokenId;
use futures_util::future::{join_all, try_join_all};
use futures_util::stream::{StreamExt, iter, select_all};

use crate::body::JsonBody;
use crate::error::ApiError;
use crate::frontend::Frontend;
use crate::meter::{Meter, metered};
use crate::openai::chat::{self, ChatRequest};
use crate::openai::completions::{self, CompletionRequest};
use crate::openai::{AnswerHead, Common, Usage};
use crate::pipeline::{Attempted, Caller, ChoiceDelta, Generation, Prepared, collect, prepare};
use crate::routes::{Held, routing_headers};
use crate::sse;

/// `POST /v1/chat/completions`
pub(crate) async fn chat(
    frontend: &Arc<Frontend>,
    held: Held,
    caller: Caller,
    body: JsonBody,
) -> Result<Response, ApiError> {
    let JsonBody { value, charge } = body;
    let ChatRequest { common, mut generate } = ChatRequest::parse(value)?;
    generate.caller = caller;
    check_model(frontend, &common)?;
    let prepared = prepare(frontend, generate, frontend.fleet.shape_or_unavailable()?).await?;
    drop(charge);
    let head = AnswerHead::new("chatcmpl", &frontend.model.name);
    let shown = common.return_token_ids.then(|| prepared.tokens.clone());

    let Some(options) = common.stream else {
        let (choices, attempted) = collect(frontend, &prepared).await?;
        let tokens = choices.iter().map(|choice| choice.tokens.len()).sum();
        let usage = usage(&prepared, tokens, attempted);
        frontend.metrics.used(usage);
        let body = chat::answer(&head, &frontend.model.tokenizer, &choices, shown.as_deref(), usage);
        let mut response = Json(body).into_response();
        routing_headers(response.headers_mut(), &attempted);
        return Ok(response);
    };

    let generation = Generation::start(frontend, &prepared).await?;
    let attempted = generation.attempted();
    let roles: Vec<_> =
        (0..prepared.sampling.n as usize).map(|index| Ok(chat::role_chunk(&head, index, shown.as_deref()))).collect();
    let meter = Meter::new(frontend, options, vec![usage(&prepared, 0, attempted)], held);
    let tokenizer = frontend.model.tokenizer.clone();
    let with_ids = shown.is_some();
    let body_head = head.clone();
    let chunks = metered(
        generation.into_deltas(),
        meter,
        move |delta, meter: &mut Meter| {
            let mut chunk = chat::delta_chunk(&body_head, &tokenizer, &delta, with_ids);
            meter.count(0, &delta, &mut chunk);
            chunk
        },
        move |usage| {
            let mut chunk = head.body("chat.completion.chunk", Vec::new());
            chunk["usage"] = usage.to_json();
            chunk
        },
    );
    let mut response = sse::response(iter(roles).chain(chunks));
    routing_headers(response.headers_mut(), &attempted);
    Ok(response)
}

/// `POST /v1/completions`
pub(crate) async fn completions(
    frontend: &Arc<Frontend>,
    held: Held,
    caller: Caller,
    body: JsonBody,
) -> Result<Response, ApiError> {
    let JsonBody { value, charge } = body;
    let CompletionRequest { common, mut generate } = CompletionRequest::parse(value)?;
    generate.iter_mut().for_each(|request| request.caller = caller.clone());
    check_model(frontend, &common)?;
    let shape = frontend.fleet.shape_or_unavailable()?;
    let prepared = try_join_all(generate.into_iter().map(|request| prepare(frontend, request, shape))).await?;
    drop(charge);
    let head = AnswerHead::new("cmpl", &frontend.model.name);

    let Some(options) = common.stream else {
        return completions_at_once(frontend, &head, &prepared, common.return_token_ids).await;
    };
    let generations = try_join_all(prepared.iter().map(|prompt| Generation::start(frontend, prompt))).await?;
    let attempted = generations[0].attempted();
    let usages =
        prepared.iter().zip(&generations).map(|(prompt, started)| usage(prompt, 0, started.attempted())).collect();
    let meter = Meter::new(frontend, options, usages, held);

    let deltas = select_all(
        generations
            .into_iter()
            .enumerate()
            .map(|(prompt, started)| started.into_deltas().map(move |delta| delta.map(|d| (prompt, d))).boxed()),
    );
    let tokenizer = frontend.model.tokenizer.clone();
    let with_ids = common.return_token_ids;
    let body_head = head.clone();
    let mut offsets: HashMap<usize, usize> = HashMap::new();
    let chunks = metered(
        deltas,
        meter,
        move |(prompt, delta): (usize, ChoiceDelta), meter: &mut Meter| {
            let index = prompt * prepared[prompt].sampling.n as usize + delta.index;
            let first = !offsets.contains_key(&index);
            let offset = offsets.entry(index).or_default();
            let prompt_tokens: Option<&[TokenId]> = (with_ids && first).then_some(prepared[prompt].tokens.as_slice());
            let mut chunk =
                completions::delta_chunk(&body_head, &tokenizer, &delta, index, offset, with_ids, prompt_tokens);
            meter.count(prompt, &delta, &mut chunk);
            chunk
        },
        move |usage| {
            let mut chunk = head.body("text_completion", Vec::new());
            chunk["usage"] = usage.to_json();
            chunk
        },
    );
    let mut response = sse::response(chunks);
    routing_headers(response.headers_mut(), &attempted);
    Ok(response)
}

async fn completions_at_once(
    frontend: &Arc<Frontend>,
    head: &AnswerHead,
    prepared: &[Prepared],
    with_ids: bool,
) -> Result<Response, ApiError> {
    let answers = join_all(prepared.iter().map(|prompt| collect(frontend, prompt)))
        .await
        .into_iter()
        .collect::<Result<Vec<_>, _>>()?;
    let mut total = Usage::default();
    let mut choices = Vec::new();
    let mut first = None;
    for (prompt, (finished, attempted)) in prepared.iter().zip(answers) {
        first.get_or_insert(attempted);
        total += usage(prompt, finished.iter().map(|choice| choice.tokens.len()).sum(), attempted);
        choices.extend(finished.into_iter().map(|choice| (choice, with_ids.then(|| prompt.tokens.clone()))));
    }
    frontend.metrics.used(total);
    let mut response = Json(completions::answer(head, &frontend.model.tokenizer, &choices, total)).into_response();
    if let Some(attempted) = first {
        routing_headers(response.headers_mut(), &attempted);
    }
    Ok(response)
}

fn check_model(frontend: &Frontend, common: &Common) -> Result<(), ApiError> {
    match &common.model {
        Some(model) if *model != frontend.model.name => Err(ApiError {
            param: Some("model".to_owned()),
            ..ApiError::not_found(
                format!("the model '{model}' is not served here; '{}' is", frontend.model.name),
                "model_not_found",
            )
        }),
        _ => Ok(()),
    }
}

fn usage(prepared: &Prepared, completion_tokens: usize, attempted: Attempted) -> Usage {
    Usage { prompt_tokens: prepared.tokens.len(), completion_tokens, cached_tokens: attempted.cached_tokens }
}
