//! What making a prompt takes, judged before it is made.

use std::time::Duration;

use chiasm_prompt::ChatMessage;
use chiasm_request::{Chat, Prompt};

use crate::cpu::{CpuBudget, price};
use crate::model::ServedModel;

/// Token ids of a prompt whose keys are computed in a hundred microseconds.
pub(super) const SMALL_TOKENS: usize = 16 << 10;
/// Messages that a template renders in as much time.
const FEW_MESSAGES: usize = 8;

/// Whether a prompt is made in so little time that another thread would not be faster.
pub(super) fn is_small(prompt: &Prompt, model: &ServedModel) -> bool {
    match prompt {
        Prompt::Text(text) => text.len() <= model.tokenizer.quick_bytes(),
        Prompt::Tokens(tokens) => tokens.len() <= SMALL_TOKENS,
        Prompt::Chat(chat) => is_small_chat(chat, model),
    }
}

/// Whether a conversation is rendered and tokenized in so little time.
pub(super) fn is_small_chat(chat: &Chat, model: &ServedModel) -> bool {
    chat.messages.len() <= FEW_MESSAGES
        && chat.messages.iter().all(|message| message.tool_calls.is_none())
        && chat.messages.iter().map(ChatMessage::text_bytes).sum::<usize>()
            <= model.tokenizer.quick_bytes()
        && chat.media.len() <= FEW_MESSAGES
        && chat.template_kwargs.is_empty()
}

/// Messages whose texts are looked at for the price: a hundred microseconds' worth. Those of more
/// messages cost much anyway.
const PRICED_MESSAGES: usize = 10_000;

/// What rendering, tokenizing and keying a prompt takes, for a request that has had its body
/// parsed.
pub(super) fn price_of(prompt: &Prompt, model: &ServedModel, cpu: &CpuBudget) -> Duration {
    match prompt {
        Prompt::Text(text) => price::tokenizing(text.len(), model.tokenizer.quick_bytes()),
        Prompt::Tokens(tokens) => price::keys(tokens.len()),
        Prompt::Chat(chat) => price_of_chat(chat, model, cpu),
    }
}

/// What rendering and tokenizing a conversation takes, for a request that has had its body parsed.
pub(super) fn price_of_chat(chat: &Chat, model: &ServedModel, cpu: &CpuBudget) -> Duration {
    let messages = || chat.messages.iter().take(PRICED_MESSAGES);
    let bytes = messages().map(ChatMessage::text_bytes).sum();
    // How large they are is not known, but they were parsed: writing them again takes no less.
    let has_json =
        !chat.template_kwargs.is_empty() || messages().any(|message| message.tool_calls.is_some());
    let json = if has_json { cpu.spent() } else { Duration::ZERO };
    let tokenizing = price::tokenizing(bytes, model.tokenizer.quick_bytes());
    price::template(chat.messages.len(), bytes).saturating_add(tokenizing).saturating_add(json)
}
