//! The way of a request, from parsed fields to text: the only place that sees media, prompt, vision, KV, router and
//! backends together.
//!
//! [`prepare`](prepare::prepare) needs no pixel: for each plan class in the fleet it ends with the expanded prompt, the
//! identity of its media items and its block keys. [`Generation`] picks a worker, gives its backend a job, and yields the
//! answer; what the backend lacks of the media it asks for itself.
//!
//! | module | is |
//! |---|---|
//! | `request` | what a client asks for, parsed and in range |
//! | `prepare` | from that to prompts that can be routed |
//! | `opening` | the bytes of its media items |
//! | `prompt_price` | what making its prompt takes |
//! | `item` | media items, whatever they are |
//! | `image` | images: their plans and their tensors |
//! | `machine` | media items of jobs that a frontend on another machine has planned |
//! | `helped` | media items that vLLM's own processor makes |
//! | `plans`, `processed`, `turns` | what is remembered of items, and whose turn it is to make one |
//! | `sampling` | the model's defaults and the room in the context, filled in |
//! | `pick` | which worker it goes to |
//! | `generation` | a prepared prompt on a worker, and on another one if that dies |
//! | `deadlines` | how long a request may take |
//! | `retries` | which requests may move to another worker |
//! | `choice` | one continuation, from tokens to text |
//! | `answer_events` | reasoning, text and calls of a continuation, in their order |
//! | `text_logprobs` | the tokens of that text, and their log probabilities |
//! | `reading` | what that text says: reasoning, calls, and how a model is made to call |
//! | `tokenize` | the tokens of a prompt, and the text of tokens, for whoever wants to see them |
//! | `error` | why a request can't be answered |

mod answer_events;
mod choice;
mod deadlines;
mod error;
mod generation;
mod helped;
mod image;
mod item;
mod keys;
mod machine;
mod opening;
mod pick;
mod plans;
mod prepare;
mod processed;
mod prompt_price;
mod reading;
mod request;
mod retries;
mod sampling;
mod text_logprobs;
mod tokenize;
mod turns;

pub(crate) use answer_events::{AnswerEvent, AnswerEvents};
pub(crate) use chiasm_backend::{Repetition, Structured};
pub(crate) use choice::{ChoiceDelta, FinishedChoice};
pub(crate) use deadlines::{Deadline, Deadlines, within};
pub(crate) use error::{Cause, RequestError};
pub(crate) use generation::{Asked, Attempted, Attempts, Displaced, Generation, MediaTokens, PrefilledBy, collect};
pub use helped::HelperOptions;
pub(crate) use helped::Helpers;
pub(crate) use image::Images;
pub(crate) use keys::{index_scheme, keys_for};
pub use machine::{AskForFile, CheckedJob, ItemOrigin, MachineMedia, NotFetched, PlannedItem, PutError};
pub(crate) use opening::check_counts;
pub(crate) use prepare::{Planned, Prepared, prepare};
pub(crate) use request::{
    Caller, Chat, GenerateRequest, MediaKwargs, MediaRef, Prompt, Sampling, ThinkingBudget, ToolChoice, ToolUse,
};
pub(crate) use retries::Retries;
pub(crate) use sampling::check_prompt_logprobs_of_all;
pub(crate) use text_logprobs::TextLogprob;
pub(crate) use tokenize::{Tokenizable, detokenize, tokenize};
