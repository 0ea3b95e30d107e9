//! Anthropic's Messages API: request bodies to
//! [`GenerateRequest`](chiasm_request::GenerateRequest), and results back to bodies and events.
//! What means what is as in vLLM 0.33 (`vllm/entrypoints/anthropic/serving.py`).
//!
//! | module | is |
//! |---|---|
//! | `request`, `tools` | the fields of a body |
//! | `messages`, `blocks`, `sources` | its conversation, read without copies of what is large |
//! | `response` | whole answers, and what answers and events share |
//! | `events` | streamed answers |
//!
//! Bodies are read by OpenAI's `Intake`, `Seed`, `Fields` and `elements`, which know of no
//! protocol.

mod blocks;
pub mod events;
#[cfg(test)]
pub(crate) mod in_tests;
mod messages;
pub mod request;
pub mod response;
mod result_content;
mod sources;
mod tools;

pub use messages::{append_user_to_results, put_system_first};
pub use request::{CountRequest, MessagesRequest};
pub use response::Head;
