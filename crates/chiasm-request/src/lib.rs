//! Requests and answers as plain data, shared by the protocols and the pipeline.
//!
//! | module | contents |
//! |---|---|
//! | `request` | a request: the prompt and how to continue it |
//! | `conversation` | a conversation and its media items |
//! | `sampling` | sampling settings and stop conditions |
//! | `tools` | the functions that a model may call |
//! | `defaults` | a model's defaults for fields that a request does not set |
//! | `answer`, `answer_events` | a continuation: deltas, events, and the finished choice |
//! | `outcome` | a request's route, with the times of its stages |
#![forbid(unsafe_code)]

mod answer;
mod answer_events;
mod conversation;
mod defaults;
mod outcome;
mod request;
mod sampling;
mod tools;

pub use answer::{ChoiceDelta, FinishedChoice, TextLogprob};
pub use answer_events::{AnswerEvent, AnswerEvents, WholeCall};
pub use conversation::{Chat, MediaKwargs, MediaRef};
pub use defaults::{ChatDefaults, GenerationConfig};
pub use outcome::{
    EncodeOutcome, MediaTokens, PrefillOutcome, RequestedSampling, RouteOutcome, StageTimes,
};
pub use request::{GenerateRequest, Prompt, Tokenizable};
pub use sampling::{ClientSampling, ThinkingBudget};
pub use tools::{ToolChoice, ToolUse};
