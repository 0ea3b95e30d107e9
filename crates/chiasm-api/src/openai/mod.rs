//! OpenAI's protocol: request bodies to [`GenerateRequest`](chiasm_request::GenerateRequest), and
//! results back to bodies and chunks.

mod body;
mod body_limits;
pub mod chat;
pub mod completions;
pub mod fields;
mod finish;
mod harmless;
pub mod intake;
mod logprobs;
pub mod lora;
pub mod media_parts;
pub mod messages;
mod nvext;
mod prompt_logprobs;
mod prompts;
mod reasoning_fields;
pub mod request;
pub mod sampling;
mod stream_options;
pub mod structured;
pub mod tokenize;
pub mod tools;
mod type_errors;
mod usage;
mod value;

pub use body::{AnswerHead, unix_seconds};
pub use body_limits::BodyLimits;
pub use intake::Intake;
pub use logprobs::{LogprobLists, LogprobState, token_json};
pub use nvext::Nvext;
pub use reasoning_fields::ReasoningFields;
pub use request::RequestBody;
pub use sampling::CommonFields;
pub use stream_options::StreamOptions;
pub use usage::Usage;
