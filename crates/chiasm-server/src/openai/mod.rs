//! OpenAI's protocol: request bodies to [`crate::pipeline::GenerateRequest`], and results back to bodies and chunks.

pub(crate) mod chat;
pub(crate) mod completions;
mod fields;
mod head;
mod logprobs;
mod messages;
mod sampling;
mod usage;

pub(crate) use head::AnswerHead;
pub(crate) use sampling::{Common, StreamOptions};
pub(crate) use usage::Usage;

use chiasm_types::TokenId;
use serde_json::Value;

/// Token ids as a JSON list.
fn ids(tokens: &[TokenId]) -> Value {
    tokens.iter().map(|token| Value::from(token.0)).collect()
}
