//! A driver of vLLM's EngineCore: its wire, the connection to one engine, and engines as child
//! processes.
//!
//! An engine is a headless vLLM (`vllm serve --headless`) or a simulated one. Both exchange the
//! same messages over the same three ZMQ sockets, which the frontend binds. One [`EngineClient`] is
//! the connection to one start of one engine.
//!
//! ```no_run
//! use chiasm_engine::launch::{KvEventEndpoints, LaunchSpec};
//! use chiasm_engine::wire::{EngineCoreRequest, SamplingParams};
//! use chiasm_engine::{ClientOptions, EngineClient, EngineEndpoints, SocketDir};
//! use chiasm_types::TokenId;
//!
//! # async fn example() -> Result<(), Box<dyn std::error::Error>> {
//! // Listen first, at a free port, then start the engine that connects there.
//! let dir = SocketDir::new()?;
//! let endpoints = EngineEndpoints::local("tcp://127.0.0.1:0", &dir);
//! let pending = EngineClient::bind(endpoints, ClientOptions::default()).await?;
//! let handshake = &pending.endpoints().handshake;
//! let mut spec = LaunchSpec::new("engine_0", "vllm", "/models/qwen2-vl", handshake);
//! spec.kv_events = Some(KvEventEndpoints::ipc(&dir));
//! let process = spec.launch()?;
//! let engine = tokio::select! {
//!     engine = pending.ready() => engine?,
//!     report = process.exited() => return Err(report.to_string().into()),
//! };
//!
//! let mut stream = engine.submit(EngineCoreRequest {
//!     request_id: "a".into(),
//!     prompt_token_ids: vec![TokenId(1), TokenId(2)].into(),
//!     sampling_params: SamplingParams { max_tokens: 8, ..SamplingParams::default() },
//!     ..EngineCoreRequest::default()
//! })?;
//! while let Some(output) = stream.next().await {
//!     println!("{:?}", output?.new_token_ids);
//! }
//! # Ok(())
//! # }
//! ```
//!
//! | part | is |
//! |---|---|
//! | [`wire`] | the messages, encoded and decoded in both directions; no sockets |
//! | [`EngineClient`] | handshake, requests, streams, aborts, method calls, death |
//! | [`ReceiverMirror`] | a mirror of the engine's receiver cache |
//! | [`ItemDelivery`] | the number of media items sent in shared memory, in the message, or not at all |
//! | [`EngineConnector`] | makes a `Backend` of an [`EngineHost`]'s engine: jobs, media on demand, capabilities |
//! | [`EngineEndpoints`], [`SocketDir`] | the addresses of the sockets |
//! | [`group`] | engines that step together: one life for all, and their coordinator |
//! | [`launch`] | headless vLLM as a child process |
//! | [`state`] | records of engines that outlive this frontend, for the next one |
//! | [`EngineError`], [`DeathCause`] | errors |
#![forbid(unsafe_code)]

mod backend;
mod client;
mod endpoints;
mod error;
pub mod group;
pub mod launch;
mod mirror;
pub mod state;
pub mod wire;

pub use backend::{
    ArenaPolicy, AttachHost, EcConnector, EmbeddingStore, EngineConnector, EngineHost,
    EngineOptions, FormatPolicy, GroupHost, KvConnector, LaunchHost, RecordName, RunningEngine,
    ShmTooSmall, to_item,
};
pub use client::{
    AttachError, ClientOptions, CountedRows, EngineClient, ItemDelivery, OutputStream,
    PendingEngine, Plugin,
};
pub use endpoints::{EngineEndpoints, SocketDir};
pub use error::{DeathCause, EngineError};
pub use mirror::ReceiverMirror;
