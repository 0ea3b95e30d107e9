//! Tokenizing and detokenizing for clients, without an engine.

use std::sync::Arc;

use chiasm_fleet::{PresentClass, PresentClasses};
use chiasm_request::Tokenizable;
use chiasm_request::{Chat, ClientSampling, GenerateRequest, Prompt};
use chiasm_types::TokenId;

use super::deadlines::{Deadlines, within};
use super::error::RequestError;
use super::prepare::{check_tokens, prepare};
use super::prompt_price::SMALL_TOKENS;
use super::request_context::RequestContext;
use crate::Pipeline;
use chiasm_cpu::price;

/// The maximum number of tokens. Prompts that are too long for every worker are tokenized too, but
/// a request could make its media arbitrarily large.
const MAX_TOKENS: usize = 1 << 20;

/// Returns the tokens that an engine would be sent. If workers differ in how they expand media
/// items, these are the tokens for the oldest class.
///
/// # Errors
/// Returns the errors of [`prepare`], except for a prompt that is too long for the workers, or
/// empty.
pub async fn tokenize(
    pipeline: &Pipeline,
    prompt: Tokenizable,
    context: &RequestContext,
) -> Result<Arc<Vec<TokenId>>, RequestError> {
    let (text, add_special_tokens) = match prompt {
        Tokenizable::Chat(chat) => return tokenize_chat(pipeline, chat, context).await,
        Tokenizable::Text { text, add_special_tokens } => (text, add_special_tokens),
    };
    let model = pipeline.model.clone();
    let small_bytes = model.tokenizer.bytes_per_100_micros();
    let is_small = text.len() <= small_bytes;
    let cost = price::tokenizing(text.len(), small_bytes);
    let deadlines = Deadlines::new(context.arrived, &pipeline.limits);
    let encode = move || model.tokenizer.encode(&text, add_special_tokens);
    let encoded = pipeline.cpu.run_inline_if(is_small, &context.cpu, cost, encode);
    let tokens = within(deadlines.first_token, encoded).await?;
    let tokens = tokens.map_err(|error| RequestError::from(error).at("prompt"))?;
    tokens.map(Arc::new).map_err(|error| RequestError::from(error).at("prompt"))
}

async fn tokenize_chat(
    pipeline: &Pipeline,
    chat: Chat,
    context: &RequestContext,
) -> Result<Arc<Vec<TokenId>>, RequestError> {
    let request = GenerateRequest {
        prompt: Prompt::Chat(chat),
        sampling: ClientSampling::default(),
        cache_salt: None,
        priority: 0,
        tools: None,
        without_reasoning: false,
    };
    let enlarged = |class: &PresentClass| PresentClass {
        max_model_len: class.max_model_len.max(MAX_TOKENS),
        ..class.clone()
    };
    let classes: PresentClasses = pipeline.fleet.classes().iter().map(enlarged).collect();
    let prepared = prepare(pipeline, request, None, context, classes).await?;
    prepared.plans.into_iter().next().map(|plan| plan.tokens).ok_or_else(RequestError::not_ready)
}

/// Returns the text of `tokens`, special tokens included. `field` is the request's field with them.
///
/// # Errors
/// Returns an error if the model lacks a token, or if there are too many tokens or too little time.
pub async fn detokenize(
    pipeline: &Pipeline,
    field: &str,
    tokens: Arc<Vec<TokenId>>,
    context: &RequestContext,
) -> Result<String, RequestError> {
    let model = pipeline.model.clone();
    // The text of each token may have a hundred bytes.
    if tokens.len() > MAX_TOKENS {
        let message =
            format!("'{field}' has {} tokens, at most {MAX_TOKENS} are allowed", tokens.len());
        return Err(RequestError::invalid(field, message));
    }
    if !tokens.is_empty() {
        check_tokens(&tokens, model.last_token()).map_err(|error| error.at(field))?;
    }
    let is_small = tokens.len() <= SMALL_TOKENS / 16;
    let cost = price::detokenizing(tokens.len());
    let deadlines = Deadlines::new(context.arrived, &pipeline.limits);
    let decode = move || model.tokenizer.decode(&tokens, false);
    let decoded = pipeline.cpu.run_inline_if(is_small, &context.cpu, cost, decode);
    let text = within(deadlines.first_token, decoded).await?;
    text.map_err(|error| RequestError::from(error).at(field))
}
