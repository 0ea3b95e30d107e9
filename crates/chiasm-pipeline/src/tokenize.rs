//! The tokens of a prompt, and the text of tokens. No engine is asked.

use std::sync::Arc;

use chiasm_fleet::{PresentClass, PresentClasses};
use chiasm_request::Tokenizable;
use chiasm_request::{Chat, GenerateRequest, Prompt, Sampling};
use chiasm_types::TokenId;

use super::caller::Caller;
use super::deadlines::{Deadlines, within};
use super::error::RequestError;
use super::prepare::{check_tokens, prepare};
use super::prompt_price::SMALL_TOKENS;
use crate::Pipeline;
use crate::cpu::price;

/// Conversations are counted also where no worker has room for them, up to so many tokens: media
/// may be made as large as a request likes, and become as many.
const MOST_TOKENS: usize = 1 << 20;

/// The tokens that an engine would be given. Where workers differ in what media items become, it is
/// those of the class that has been there for the longest time.
///
/// # Errors
/// Those of [`prepare`], but not for a prompt that is too long for the workers, or empty.
pub async fn tokenize(
    pipeline: &Pipeline,
    prompt: Tokenizable,
    caller: &Caller,
) -> Result<Arc<Vec<TokenId>>, RequestError> {
    let (text, add_special_tokens) = match prompt {
        Tokenizable::Chat(chat) => return tokenize_chat(pipeline, chat, caller).await,
        Tokenizable::Text { text, add_special_tokens } => (text, add_special_tokens),
    };
    let model = pipeline.model.clone();
    let quick = model.tokenizer.quick_bytes();
    let (small, cost) = (text.len() <= quick, price::tokenizing(text.len(), quick));
    let deadlines = Deadlines::of(caller.arrived, &pipeline.limits);
    let encode = move || model.tokenizer.encode(&text, add_special_tokens);
    let tokens =
        within(deadlines.first_token, pipeline.cpu.run_or_here(small, &caller.cpu, cost, encode))
            .await?;
    let tokens = tokens.map_err(|error| RequestError::from(error).at("prompt"))?;
    tokens.map(Arc::new).map_err(|error| RequestError::from(error).at("prompt"))
}

async fn tokenize_chat(
    pipeline: &Pipeline,
    chat: Chat,
    caller: &Caller,
) -> Result<Arc<Vec<TokenId>>, RequestError> {
    let request = GenerateRequest {
        prompt: Prompt::Chat(chat),
        sampling: Sampling::default(),
        cache_salt: None,
        priority: 0,
        tools: None,
        without_reasoning: false,
    };
    let roomy = |class: &PresentClass| PresentClass {
        max_model_len: class.max_model_len.max(MOST_TOKENS),
        ..class.clone()
    };
    let classes: PresentClasses = pipeline.fleet.classes().iter().map(roomy).collect();
    let prepared = prepare(pipeline, request, None, caller, classes).await?;
    prepared.plans.into_iter().next().map(|plan| plan.tokens).ok_or_else(RequestError::not_ready)
}

/// The text of tokens that `field` holds, special ones included.
///
/// # Errors
/// A token that the model does not have, too much work, or too little time.
pub async fn detokenize(
    pipeline: &Pipeline,
    field: &str,
    tokens: Arc<Vec<TokenId>>,
    caller: &Caller,
) -> Result<String, RequestError> {
    let model = pipeline.model.clone();
    // Each may have a hundred bytes.
    if tokens.len() > MOST_TOKENS {
        let message =
            format!("'{field}' has {} tokens, at most {MOST_TOKENS} are allowed", tokens.len());
        return Err(RequestError::invalid(field, message));
    }
    if !tokens.is_empty() {
        check_tokens(&tokens, model.last_token()).map_err(|error| error.at(field))?;
    }
    let (small, cost) = (tokens.len() <= SMALL_TOKENS / 16, price::detokenizing(tokens.len()));
    let deadlines = Deadlines::of(caller.arrived, &pipeline.limits);
    let decode = move || model.tokenizer.decode(&tokens, false);
    let text =
        within(deadlines.first_token, pipeline.cpu.run_or_here(small, &caller.cpu, cost, decode))
            .await?;
    text.map_err(|error| RequestError::from(error).at(field))
}
