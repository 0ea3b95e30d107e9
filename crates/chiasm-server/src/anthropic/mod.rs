//! Anthropic's Messages API: request bodies to [`crate::pipeline::GenerateRequest`], and results back to bodies and events. What
//! means what is as in vLLM 0.33 (`vllm/entrypoints/anthropic/serving.py`).
//!
//! | module | is |
//! |---|---|
//! | `answer` | the two endpoints |
//! | `request`, `tools` | the fields of a body |
//! | `messages`, `blocks`, `sources` | its conversation, read without copies of what is large |
//! | `response` | whole answers, and what answers and events share |
//! | `events` | streamed answers |
//! | `error` | errors, whoever found them |
//!
//! Bodies are read by OpenAI's `Intake`, `Seed`, `Fields` and `elements`, which know of no protocol.

pub(crate) mod answer;
mod blocks;
mod error;
mod events;
#[cfg(test)]
pub(crate) mod in_tests;
mod messages;
pub(crate) mod request;
mod response;
mod sources;
mod tools;

pub(crate) use error::{body_of as error_body, retold};

pub(crate) const MESSAGES: &str = "/v1/messages";
pub(crate) const COUNT_TOKENS: &str = "/v1/messages/count_tokens";
