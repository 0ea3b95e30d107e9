//! Backends over HTTP: running servers that someone else has started.
//!
//! An [`Upstream`] is the address and the protocol of a server. An [`UpstreamConnector`] queries
//! the server for its capabilities and creates the backend of one worker.
//!
//! `vllm serve` is driven in *token mode*, through its `/inference/v1/generate`. A request has the
//! prompt's tokens with one marker for each media item, and the items as the client sent them,
//! under our identities. The server answers with tokens. Its expansion of the markers is compared
//! with the expected one. If they differ, knowledge of its KV cache is not reliable for prompts
//! with media, and [`Backend::distrusted`](chiasm_backend::Backend::distrusted) says so.
//!
//! SGLang is driven in the same way through its `/generate` (`sglang`). Its KV events only contain
//! its own hashes of blocks. This crate computes the same hashes, also for prompts that the server
//! has not seen yet.
//!
//! `vllm serve` in *chat mode* and `trtllm-serve` receive requests unchanged, and still report the
//! contents of their KV caches. Any other server of OpenAI's API receives requests unchanged except
//! for the model's name, and its answers are forwarded as they are. The contents of its cache are
//! unknown; it is assumed to hold the prompts that were sent to it.
//!
//! A server is not trusted to send small, well-formed or timely answers: answers are bounded,
//! checked, and read at the speed of their reader.
//!
//! | module | contents |
//! |---|---|
//! | `address` | the address of an upstream on the command line |
//! | `client` | the HTTP client, whose connections yield to other tasks |
//! | `server` | requests to one server, and the limits of their answers' size and time |
//! | `server_key` | the API key for a server |
//! | `setup_error` | errors of an upstream's files |
//! | `unusable` | errors of a server's description |
//! | `gauges` | numbers from Prometheus' text format |
//! | `vllm_info` | the description of a `vllm serve`, as capabilities |
//! | `models` | selection of a model from a server's list |
//! | `plain` | a server that receives requests unchanged |
//! | `connector` | connecting to a server, also again after it has ended |
//! | `encoder_cache` | the assumed size of a server's encoder cache |
//! | `backend` | the backend of one server |
//! | `shared` | the state shared by a backend, its jobs and its tasks; the liveness task |
//! | `request` | conversion of a job to the body of a request |
//! | `running` | a running job |
//! | `chunk` | one event of a streamed answer, with a limit on its choices |
//! | `sglang` | the counterparts of the last four modules for SGLang |
//! | `trtllm` | `trtllm-serve`: its KV events, and the identities of images learned from them |
//! | `pieces` | the body of an answer in as few pieces as possible |
//! | `events` | the parser of server-sent events, with a limit on their size |
#![forbid(unsafe_code)]

mod address;
mod backend;
mod chunk;
mod client;
mod connector;
mod encoder_cache;
mod events;
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
mod vllm_info;

pub use address::{Upstream, UpstreamError};
pub use connector::UpstreamConnector;
pub use server_key::{KeyFileError, UpstreamKey};
pub use setup_error::{AuthoritiesError, SetupError};
