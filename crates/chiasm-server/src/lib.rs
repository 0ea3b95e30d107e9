//! The OpenAI HTTP frontend.
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
//! | `proxies` | the proxies that are believed about the address that a request is from |
//! | `slots` | the shares that owners have of the requests in flight |
//! | `arrival` | reading request bodies within limits of size and time |
//! | `admission` | what a request holds while it is answered, and who asks |
//! | `body` | understanding request bodies |
//! | `answer` | OpenAI's completion endpoints |
//! | `tokenize` | the endpoints that show tokens |
//! | `lora` | the endpoints that load and unload them |
//! | `openai` | OpenAI's request bodies, answers and chunks |
//! | `forward` | requests that are passed on as they came |
//! | `responses` | OpenAI's Responses API, on the same pipeline |
//! | `anthropic` | Anthropic's Messages API, on the same pipeline |
//! | [`page`] | the live page |
//! | `poll_epoch` | epochs of a connection's task, one for each call of its `poll` |
//! | `traces` | which requests OpenTelemetry is told of, and what |
//! | `record` | the line in the log when a request has finished |
//! | `stream_begin` | the first event of a stream that says something of the answer |
//! | `stream_end` | the end of every stream, in the words of its API |
//! | `error` | errors to HTTP |
//! | `metrics` | Prometheus |
//! | `workers` | what is known of each worker, as JSON |
//!
//! [`connections::serve`] answers for a [`Frontend`]; the binary decides where it listens.
#![forbid(unsafe_code)]

mod access;
mod admission;
mod answer;
#[cfg(test)]
mod answer_order_tests;
mod anthropic;
mod arrival;
mod body;
pub mod connections;
mod cors;
mod error;
#[cfg(test)]
#[path = "../../chiasm/tests/support/event_grammar.rs"]
mod event_grammar;
mod forward;
mod frontend;
mod http_rules;
mod layers;
mod lora;
mod meter;
mod metrics;
mod openai;
pub mod page;
mod poll_epoch;
mod process_metrics;
mod proxies;
mod record;
mod responses;
mod root_path;
mod routes;
mod slots;
mod sse;
mod stream_begin;
mod stream_end;
#[cfg(test)]
mod test_server;
mod tls;
mod tokenize;
mod traces;
mod workers;

pub use chiasm_fleet as fleet;
pub use chiasm_fleet::adapters;
pub use chiasm_pipeline as pipeline;
pub use chiasm_pipeline::{answers, cpu, model};

pub use access::{ApiKeys, CurrentKeys};
pub use cors::{Allowed, Cors, CorsError};
pub use frontend::{Frontend, HttpLimits, LogCounts, ReasoningFields, RoutingOptions};
pub use openai::BodyLimits;
pub use proxies::{Network, NoNetwork, TrustedProxies};
pub use root_path::{NoRootPath, RootPath};
pub use tls::{Certificate, CertificateError};
pub use traces::Traces;
