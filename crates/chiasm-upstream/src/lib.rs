//! Backends over HTTP: servers that run already, and that somebody else has started.
//!
//! An [`Upstream`] says where a server is and what it speaks, an [`UpstreamConnector`] asks it what
//! it can do and makes the backend of one worker. `vllm serve` is driven in *token mode*, by its
//! `/inference/v1/generate`: it is given the prompt's tokens with one marker for each media item,
//! the items as the client sent them under our identities, and answers with tokens. What it expands
//! the markers to is compared with what was expected; where that differs nothing that is known of
//! its KV cache can be trusted for prompts with media, and
//! [`Backend::distrusted`](chiasm_backend::Backend::distrusted) says so.
//!
//! SGLang is driven in the same way by its `/generate` (`sglang`). Its KV events tell nothing of
//! its blocks but its own hashes of them, which are made here too, of prompts that it has not seen
//! yet.
//!
//! `vllm serve` in *chat mode* and `trtllm-serve` are given requests as they come, and still tell
//! what their KV caches hold. Any other server of OpenAI's API is given requests as they come, with
//! nothing but the model's name changed, and its answers are passed on as they are. What it holds
//! is not known; it is taken to hold what it was sent.
//!
//! Nothing that a server says is believed to be small, well formed or in time: answers are bounded,
//! checked and read as fast as their reader takes them.
//!
//! | module | is |
//! |---|---|
//! | `address` | what an upstream is given as |
//! | `client` | the HTTP client, whose connections let others have their turn |
//! | `server` | requests to one server, bounded in size and time |
//! | `server_key` | the key that a server is shown |
//! | `setup_error` | why an upstream's files can't be used |
//! | `unusable` | why a server can't be used |
//! | `gauges` | numbers out of Prometheus' text format |
//! | `found` | what a server says of itself, as capabilities |
//! | `models` | which of the models that a server lists is meant |
//! | `plain` | a server that is given requests as they come |
//! | `connector` | connecting to a server, again after each of its ends |
//! | `encoder_cache` | the assumed size of a server's encoder cache |
//! | `backend` | one server as a backend |
//! | `shared` | the state of a backend, its jobs and its tasks, and the task that watches the server |
//! | `request` | a job as the body of a request |
//! | `running` | one job that runs |
//! | `chunk` | what one event of an answer says |
//! | `sglang` | the same four for SGLang |
//! | `trtllm` | `trtllm-serve`, following its KV events, and learning from them what it calls images |
//! | `pieces` | the body of an answer as it comes, in as few pieces as may be |
//! | `events` | the stream of server-sent events, cut into its data |
#![forbid(unsafe_code)]

mod address;
mod backend;
mod chunk;
mod client;
mod connector;
mod encoder_cache;
mod events;
mod found;
mod gauges;
mod models;
mod pieces;
mod plain;
mod request;
mod running;
mod server;
mod server_key;
mod setup_error;
mod sglang;
mod shared;
mod trtllm;
mod unusable;

pub use address::{Upstream, UpstreamError};
pub use connector::UpstreamConnector;
pub use server_key::{KeyFileError, UpstreamKey};
pub use setup_error::{AuthoritiesError, SetupError};
