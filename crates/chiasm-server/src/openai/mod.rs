//! OpenAI's protocol: request bodies to [`crate::pipeline::GenerateRequest`], and results back to bodies and chunks.

mod body;
mod body_limits;
pub(crate) mod chat;
pub(crate) mod completions;
pub(crate) mod fields;
mod finish;
mod harmless;
pub(crate) mod intake;
mod logprobs;
pub(crate) mod lora;
pub(crate) mod media_parts;
pub(crate) mod messages;
mod nvext;
mod prompt_logprobs;
mod prompts;
pub(crate) mod request;
pub(crate) mod sampling;
mod stream_options;
pub(crate) mod structured;
pub(crate) mod tokenize;
pub(crate) mod tools;
mod usage;
mod value;

pub(crate) use body::{AnswerHead, unix_seconds};
pub use body_limits::BodyLimits;
pub(crate) use intake::Intake;
pub(crate) use logprobs::{Lists, Told, token_json};
pub(crate) use nvext::Nvext;
pub(crate) use request::RequestBody;
pub(crate) use sampling::Common;
pub(crate) use stream_options::StreamOptions;
pub(crate) use usage::Usage;
