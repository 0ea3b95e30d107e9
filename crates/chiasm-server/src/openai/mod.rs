//! OpenAI's protocol: request bodies to [`crate::pipeline::GenerateRequest`], and results back to bodies and chunks.

mod body;
pub(crate) mod chat;
pub(crate) mod completions;
mod fields;
mod finish;
mod intake;
mod logprobs;
mod media_parts;
mod messages;
mod nvext;
mod prompt_logprobs;
mod prompts;
mod request;
mod sampling;
mod structured;
pub(crate) mod tokenize;
mod tools;
mod usage;
mod value;

pub(crate) use body::AnswerHead;
pub(crate) use intake::Intake;
pub(crate) use logprobs::{Lists, Told};
pub(crate) use nvext::Nvext;
pub(crate) use request::RequestBody;
pub(crate) use sampling::{Common, StreamOptions};
pub(crate) use usage::Usage;
