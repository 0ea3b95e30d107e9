//! OpenAI's protocol: request bodies to [`crate::pipeline::GenerateRequest`], and results back to bodies and chunks.

mod body;
pub(crate) mod chat;
pub(crate) mod completions;
mod fields;
mod finish;
mod logprobs;
mod messages;
mod sampling;
mod usage;

pub(crate) use body::AnswerHead;
pub(crate) use sampling::{Common, StreamOptions};
pub(crate) use usage::Usage;
