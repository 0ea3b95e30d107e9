//! The OpenAI HTTP frontend and the pipeline behind it.
//!
//! | module | is |
//! |---|---|
//! | [`routes`] | paths, limits, headers |
//! | `body` | reading request bodies |
//! | `answer` | the completion endpoints |
//! | `openai` | OpenAI's request bodies, answers and chunks |
//! | [`pipeline`] | the way of a request: media, prompt, plan, keys, router, engine |
//! | [`fleet`] | workers: starting engines, following their KV events, replacing the dead |
//! | [`model`] | the served model |
//! | [`error`] | errors to HTTP |
//! | [`metrics`] | Prometheus |
//! | `workers` | what is known of each worker, as JSON |
//!
//! [`routes::router`] makes an [`axum::Router`] from a [`Frontend`]; the binary decides where it listens.
#![forbid(unsafe_code)]

mod answer;
mod body;
pub mod connections;
pub mod cpu;
mod door_metrics;
pub mod error;
pub mod fleet;
mod frontend;
pub mod generation_config;
mod meter;
pub mod metrics;
pub mod model;
mod openai;
pub mod pipeline;
pub mod routes;
mod sse;
mod workers;

pub use frontend::{Frontend, Limits, RoutingOptions};
