//! OpenAI's and Anthropic's protocols: bodies to requests, ordered events to bodies and events. No
//! I/O.
//!
//! | module | is |
//! |---|---|
//! | [`openai`] | chat completions, completions, tokens, adapters |
//! | [`responses`] | OpenAI's Responses API |
//! | [`anthropic`] | Anthropic's Messages API |
//! | [`forward`] | requests and answers that are forwarded unchanged |
//! | [`sse`] | server-sent events |
//! | `server_failure` | detection of errors that a server itself caused |
//! | `stream_begin` | detection of a stream's first event with content |
//! | `stream_end` | the events that end a stream in each API |
//! | `error` | errors as clients receive them |
#![forbid(unsafe_code)]

#[cfg(test)]
mod answer_order_tests;
pub mod anthropic;
mod error;
#[cfg(test)]
#[path = "../../chiasm/tests/support/event_grammar.rs"]
mod event_grammar;
pub mod forward;
pub mod openai;
pub mod responses;
mod server_failure;
pub mod sse;
mod stream_begin;
mod stream_end;

pub use error::{ApiError, ErrorKind, excerpt};
pub use stream_begin::LeadingEvent;
pub use stream_end::{StreamApi, StreamOutcome};
