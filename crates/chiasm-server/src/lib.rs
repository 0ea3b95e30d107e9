//! The OpenAI HTTP frontend and the pipeline behind it.
//!
//! | module | is |
//! |---|---|
//! | `routes` | paths, headers that tell where a request went |
//! | `layers` | the identity of every request; its record and count |
//! | [`connections`] | connections of clients, and who makes room for whom |
//! | `http_rules` | what HTTP asks of every request |
//! | `access` | who may ask |
//! | `cors` | pages of which web sites may ask |
//! | `root_path` | the prefix of all paths behind a proxy |
//! | `tls` | the server's certificate |
//! | `owner`, `slots` | whom requests belong to, and how they share what there is |
//! | `arrival` | reading request bodies within limits of size and time |
//! | `admission` | what a request holds while it is answered, and who asks |
//! | `body` | understanding request bodies |
//! | `answer` | OpenAI's completion endpoints |
//! | `tokenize` | the endpoints that show tokens |
//! | [`adapters`] | LoRA adapters that requests may name |
//! | `lora` | the endpoints that load and unload them |
//! | [`answers`] | how a model's answers are read |
//! | `openai` | OpenAI's request bodies, answers and chunks |
//! | `forward` | requests that are passed on as they came |
//! | `responses` | OpenAI's Responses API, on the same pipeline |
//! | `anthropic` | Anthropic's Messages API, on the same pipeline |
//! | `cpu` | threads for CPU-heavy work, and what it costs |
//! | [`page`] | the live page |
//! | `turn` | turns of a connection's task |
//! | `traces` | which requests OpenTelemetry is told of, and what |
//! | `record` | the line in the log when a request has finished |
//! | `pipeline` | the way of a request: media, prompt, plan, keys, router, backend |
//! | [`fleet`] | workers: connecting to their backends, following their KV events, replacing the dead |
//! | [`model`] | the served model |
//! | `stream_begin` | the first event of a stream that says something of the answer |
//! | `stream_end` | the end of every stream, in the words of its API |
//! | `error` | errors to HTTP |
//! | `metrics` | Prometheus |
//! | `workers` | what is known of each worker, as JSON |
//!
//! [`connections::serve`] answers for a [`Frontend`]; the binary decides where it listens.
#![forbid(unsafe_code)]

mod access;
pub mod adapters;
mod admission;
mod answer;
pub mod answers;
mod anthropic;
mod arrival;
mod body;
pub mod connections;
mod cors;
mod cpu;
mod door_metrics;
mod error;
#[cfg(test)]
#[path = "../../chiasm/tests/support/event_grammar.rs"]
mod event_grammar;
pub mod fleet;
mod forward;
mod frontend;
mod generation_config;
mod http_rules;
mod layers;
mod lora;
mod meter;
mod metrics;
pub mod model;
mod openai;
mod owner;
pub mod page;
mod pipeline;
mod process_metrics;
mod record;
mod responses;
mod root_path;
mod routes;
mod slots;
mod sse;
#[cfg(test)]
mod stand;
mod stream_begin;
mod stream_end;
mod tls;
mod tokenize;
mod traces;
mod turn;
mod workers;

pub use access::{ApiKeys, CurrentKeys};
pub use cors::{Allowed, Cors, CorsError};
pub use frontend::{Frontend, ItemLimits, Limits, LogCounts, ReasoningFields, RoutingOptions};
pub use metrics::Objectives;
pub use owner::{Network, NoNetwork, TrustedProxies};
pub use pipeline::{
    AskForFile, CheckedJob, HelperOptions, ItemOrigin, MachineMedia, NotFetched, PlannedItem, PutError,
};
pub use root_path::{NoRootPath, RootPath};
pub use tls::{Certificate, CertificateError};
pub use traces::Traces;
