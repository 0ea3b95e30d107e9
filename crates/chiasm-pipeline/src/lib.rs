//! The path of a request, from parsed fields to text: the only crate, apart from `chiasm` which
//! wires them, that sees media, prompt, vision, KV, router and backends together.
//!
//! [`prepare`](prepare::prepare) needs no pixel: for each plan class in the fleet it ends with the
//! expanded prompt, the identity of its media items and its block keys. [`Generation`] picks a
//! worker, gives its backend a job, and yields the answer; what the backend lacks of the media it
//! asks for itself.
//!
//! | module | is |
//! |---|---|
//! | `caller` | the client that a request is from |
//! | `shared` | the parts that all requests share |
//! | `metrics` | counts for Prometheus |
//! | `observer` | the observer of routes, such as the live page |
//! | `prepare` | turns a parsed request into prompts that can be routed |
//! | `opening` | loads the bytes of a request's media items |
//! | `prompt_price` | what making a prompt takes |
//! | `item` | media items, whatever they are |
//! | `image` | images: their plans and their tensors |
//! | `machine` | media items of jobs that a frontend on another machine has planned |
//! | `helped` | media items that vLLM's own processor makes |
//! | `plans`, `processed` | plans and tensors of items that are kept for later requests |
//! | `sampling` | the model's defaults and the room in the context, filled in |
//! | `pick` | picks the worker of a request |
//! | `displaced` | the queue of requests on suspect workers |
//! | `generation` | a prepared prompt on a worker, and on another one if that dies |
//! | `forward` | a request that is passed on, at a server or on its way to an engine |
//! | `limits` | the bounds on the work for a request |
//! | `deadlines` | how long a request may take |
//! | `retries` | which requests may move to another worker |
//! | `choice` | one continuation, from tokens to text |
//! | `text_logprobs` | the tokens of a continuation's text, and their log probabilities |
//! | `reading` | parses a continuation's text into reasoning, text and calls; how a model is made to call |
//! | `tried` | the attempts of a request so far |
//! | `tokenize` | the tokens of a prompt, and the text of tokens, for whoever wants to see them |
//! | [`model`] | the served model |
//! | [`answers`] | the parsers of a model's answers |
//! | [`cpu`] | threads for CPU-heavy work, and its cost |
//! | `error` | why a request can't be answered |
#![forbid(unsafe_code)]

pub mod answers;
mod caller;
mod choice;
pub mod cpu;
mod deadlines;
mod displaced;
mod error;
mod forward;
mod generation;
mod helped;
mod image;
mod item;
mod limits;
mod machine;
mod metrics;
pub mod model;
mod observer;
mod opening;
mod pick;
mod plans;
mod prepare;
mod processed;
mod prompt_price;
mod reading;
mod retries;
mod sampling;
mod shared;
#[cfg(any(test, feature = "test-support"))]
pub mod test_support;
mod text_logprobs;
mod tokenize;
mod tried;

pub use caller::Caller;
pub use deadlines::{Deadline, Deadlines, within};
pub use error::{Cause, RequestError};
pub use forward::{ForwardedRequest, Place, ServerAnswer, Understood, find_place};
pub use generation::{Generation, collect};
pub use helped::HelperOptions;
pub use helped::Helpers;
pub use image::{Images, TensorsError};
pub use limits::{ItemLimits, PipelineLimits};
pub use machine::{
    AskForFile, CheckedJob, ItemError, ItemOrigin, MachineMedia, NotFetched, PlanError,
    PlannedItem, PutError,
};
pub use metrics::{
    FinishedLabel, Found, LatencyCounts, LatencyHistogram, MediaState, Objectives, PipelineMetrics,
    PromptTokens, Retry, Stage, by_source,
};
pub use observer::{Entries, ExplainedPlan, RouteObserver};
pub use opening::check_counts;
pub use prepare::{Prepared, prepare};
pub use retries::Retries;
pub use sampling::check_prompt_logprobs_of_all;
pub use shared::Pipeline;
pub use tokenize::{detokenize, tokenize};
pub use tried::Attempts;
