//! Anthropic's Messages API: request bodies to
//! [`GenerateRequest`](chiasm_request::GenerateRequest), and results back to bodies and events. The
//! mapping is that of vLLM 0.33 (`vllm/entrypoints/anthropic/serving.py`).
//!
//! | module | is |
//! |---|---|
//! | `request`, `tools` | the fields of a body |
//! | `messages`, `blocks`, `sources` | the conversation, read without copies of large values |
//! | `response` | whole answers, and the types that answers and events share |
//! | `events` | streamed answers |
//!
//! Bodies are read by OpenAI's `Intake`, `Seed`, `Fields` and `read_list`, which are independent of
//! the protocol.

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
