//! A request and its answer as data: what the protocols and the pipeline share.
//!
//! | module | is |
//! |---|---|
//! | `request` | what to continue, and how |
//! | `conversation` | a conversation and its media items |
//! | `sampling` | the choice of tokens, and the end of the answer |
//! | `tools` | the functions that a model may call |
//! | `defaults` | the defaults of a model where a request is silent |
//! | `answer`, `answer_events` | one continuation: its deltas, and the whole |
//! | `outcome` | where a request went, and what that took |
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
pub use sampling::{Sampling, ThinkingBudget};
pub use tools::{ToolChoice, ToolUse};
