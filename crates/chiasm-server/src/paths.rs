//! Paths, and the APIs that are at them.

use chiasm_api::StreamApi;

pub(crate) const CHAT: &str = "/v1/chat/completions";
pub(crate) const COMPLETIONS: &str = "/v1/completions";
pub(crate) const RESPONSES: &str = "/v1/responses";
pub(crate) const MESSAGES: &str = "/v1/messages";
pub(crate) const COUNT_TOKENS: &str = "/v1/messages/count_tokens";
pub(crate) const TOKENIZE: &str = "/tokenize";
pub(crate) const DETOKENIZE: &str = "/detokenize";
pub(crate) const LOAD_LORA: &str = "/v1/load_lora_adapter";
pub(crate) const UNLOAD_LORA: &str = "/v1/unload_lora_adapter";

/// Returns the API of streams that answer requests to `path`.
pub(crate) fn stream_api(path: &str) -> StreamApi {
    match path {
        RESPONSES => StreamApi::Responses,
        MESSAGES => StreamApi::Messages,
        _ => StreamApi::Completions,
    }
}

/// The path below which all paths of the live page are.
pub const PAGE: &str = "/ui";
