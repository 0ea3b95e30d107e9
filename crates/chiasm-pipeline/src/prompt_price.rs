//! The CPU time that a prompt takes, estimated before it is rendered and tokenized.

use std::time::Duration;

use chiasm_prompt::ChatMessage;
use chiasm_request::{Chat, Prompt};

use crate::model::ServedModel;
use chiasm_cpu::{CpuBudget, price};

/// The number of token ids whose block keys are computed in a hundred microseconds.
pub(super) const SMALL_TOKENS: usize = 16 << 10;
/// The number of messages that a template renders in a hundred microseconds.
const SMALL_MESSAGES: usize = 8;

/// Returns `true` if a prompt is rendered and tokenized so quickly that another thread would not be
/// faster.
pub(super) fn is_small(prompt: &Prompt, model: &ServedModel) -> bool {
    match prompt {
        Prompt::Text(text) => text.len() <= model.tokenizer.bytes_per_100_micros(),
        Prompt::Tokens(tokens) => tokens.len() <= SMALL_TOKENS,
        Prompt::Chat(chat) => is_small_chat(chat, model),
    }
}

/// Returns `true` if a conversation is rendered and tokenized so quickly that another thread would
/// not be faster.
pub(super) fn is_small_chat(chat: &Chat, model: &ServedModel) -> bool {
    chat.messages.len() <= SMALL_MESSAGES
        && chat.messages.iter().all(|message| message.tool_calls.is_none())
        && chat.messages.iter().map(ChatMessage::text_bytes).sum::<usize>()
            <= model.tokenizer.bytes_per_100_micros()
        && chat.media.len() <= SMALL_MESSAGES
        && chat.template_kwargs.is_empty()
}

/// The maximum number of messages whose texts are measured, which takes a hundred microseconds. A
/// conversation with more messages is expensive anyway.
const MAX_MEASURED_MESSAGES: usize = 10_000;

/// Estimates the time to render, tokenize and key a prompt. `cpu` must have paid for parsing the
/// body.
pub(super) fn price_of(prompt: &Prompt, model: &ServedModel, cpu: &CpuBudget) -> Duration {
    match prompt {
        Prompt::Text(text) => price::tokenizing(text.len(), model.tokenizer.bytes_per_100_micros()),
        Prompt::Tokens(tokens) => price::keys(tokens.len()),
        Prompt::Chat(chat) => price_of_chat(chat, model, cpu),
    }
}

/// Estimates the time to render and tokenize a conversation. `cpu` must have paid for parsing the
/// body.
pub(super) fn price_of_chat(chat: &Chat, model: &ServedModel, cpu: &CpuBudget) -> Duration {
    let messages = || chat.messages.iter().take(MAX_MEASURED_MESSAGES);
    let bytes = messages().map(ChatMessage::text_bytes).sum();
    // The size of JSON values is unknown, but writing them takes at least as long as parsing did.
    let has_json =
        !chat.template_kwargs.is_empty() || messages().any(|message| message.tool_calls.is_some());
    let json = if has_json { cpu.spent() } else { Duration::ZERO };
    let tokenizing = price::tokenizing(bytes, model.tokenizer.bytes_per_100_micros());
    price::template(chat.messages.len(), bytes).saturating_add(tokenizing).saturating_add(json)
}
