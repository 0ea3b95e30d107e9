//! The request pipeline, from parsed fields to text.
//!
//! Apart from `chiasm`, which wires everything, this is the only crate that uses media, prompt,
//! vision, KV, router and backends together.
//!
//! [`prepare`](prepare::prepare) decodes no pixels. For each plan class in the fleet it computes
//! the expanded prompt, the identities of its media items and its block keys. [`Generation`] picks
//! a worker, starts a job on its backend, and yields the answer. The backend requests the tensors
//! that it lacks.
//!
//! | module | is |
//! |---|---|
//! | `request_context` | a request's identity, client, budget and attempts |
//! | `pipeline` | the state that all requests share |
//! | `last_route` | the latest route of a request, for its log line |
//! | `observer` | the observer of routes, such as the live page |
//! | `prepare` | turns a parsed request into routable prompts |
//! | `opening` | loads the bytes of a request's media items |
//! | `prompt_price` | the CPU time that a prompt takes, by estimate |
//! | `item` | plans of media items of any modality |
//! | `image` | images: their plans and their tensors |
//! | `video` | videos: their plans and their tensors |
//! | `machine` | media items of jobs that a frontend on another machine has planned |
//! | `processor_items` | media items that vLLM's own processor makes |
//! | `plans`, `processed` | caches of items' plans and tensors |
//! | `sampling` | sampling parameters, with the model's defaults and limits |
//! | `pick` | picks the worker of a request |
//! | `displaced` | the queue of requests on suspect workers |
//! | `generation` | runs a prepared prompt on a worker, and on another one if that dies |
//! | `forward` | forwards a request to a server, or leaves it to an engine |
//! | `limits` | the limits of a pipeline: per request and in total |
//! | `deadlines` | the deadlines of a request |
//! | `retries` | retry budget and quarantine |
//! | `choice` | one continuation, from tokens to text |
//! | `text_logprobs` | the tokens of a continuation's text, and their log probabilities |
//! | `output_parsing` | parses a continuation's text into reasoning, text and calls |
//! | `past_attempts` | the attempts of a request so far; `generation` decides about the next one |
//! | `tokenize` | tokenizing and detokenizing for clients |
//! | [`model`] | the served model |
//! | [`answers`] | the formats of a model's answers |
//! | `error` | errors of requests |
#![forbid(unsafe_code)]

pub mod answers;
mod choice;
mod deadlines;
mod displaced;
mod error;
mod forward;
mod generation;
mod image;
mod item;
mod last_route;
mod limits;
mod machine;
pub mod model;
mod observer;
mod opening;
mod output_parsing;
mod past_attempts;
mod pick;
mod pipeline;
mod plans;
mod prepare;
mod processed;
mod processor_items;
mod prompt_price;
mod request_context;
mod retries;
mod sampling;
#[cfg(any(test, feature = "test-support"))]
pub mod test_support;
mod text_logprobs;
mod tokenize;
mod video;

pub use chiasm_metrics::{
    CacheStats, FinishedLabel, LatencyCounts, LatencyHistogram, MediaState, Objectives,
    PipelineMetrics, PromptTokens, Retry, Stage, by_source,
};
pub use deadlines::{Deadline, Deadlines, within};
pub use error::{Cause, RequestError};
pub use forward::{
    ForwardOutcome, ForwardedAnswer, ForwardedRequest, ParsedRequest, forward_request,
};
pub use generation::{Generation, collect};
pub use image::{Images, TensorsError};
pub use last_route::LastRoute;
pub use limits::{ItemLimits, PipelineLimits};
pub use machine::{
    CheckedJob, CutError, CutFailure, FetchFailure, ItemError, ItemOrigin, MachineMedia, PlanError,
    PlannedItem, PutError, RequestItem, RequestReason,
};
pub use observer::{ExplainedPlan, PageEntries, RouteObserver};
pub use opening::check_counts;
pub use past_attempts::Attempts;
pub use pipeline::Pipeline;
pub use prepare::{Prepared, prepare};
pub use processor_items::{VllmProcessorOptions, VllmProcessors};
pub use request_context::RequestContext;
pub use retries::Retries;
pub use sampling::check_total_prompt_logprobs;
pub use tokenize::{detokenize, tokenize};
