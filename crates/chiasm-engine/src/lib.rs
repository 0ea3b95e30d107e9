//! Drives vLLM's EngineCore: its wire, the connection to one engine, and engines as child
//! processes.
//!
//! An engine is a headless vLLM (`vllm serve --headless`) or a simulated one; both speak the same
//! messages over the same three ZMQ sockets, which the frontend binds. One [`EngineClient`] is the
//! connection to one start of one engine.
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
//! let mut spec = LaunchSpec::new("engine_0", "vllm", "/models/qwen2-vl", &pending.endpoints().handshake);
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
//! | [`ReceiverMirror`] | what the engine's receiver cache holds |
//! | [`Delivered`] | how media items reached the engine: not at all, in shared memory, in the message |
//! | [`EngineConnector`] | the way from an [`EngineHost`] to a `Backend`: jobs, media on demand, capabilities |
//! | [`EngineEndpoints`], [`SocketDir`] | where the sockets are |
//! | [`launch`] | headless vLLM as a child process |
//! | [`state`] | what the next frontend has to know of engines that outlive this one |
//! | [`EngineError`], [`DeathCause`] | what can go wrong |
#![forbid(unsafe_code)]

mod backend;
mod client;
mod endpoints;
mod error;
pub mod launch;
mod mirror;
pub mod state;
pub mod wire;

pub use backend::{
    ArenaPolicy, AttachHost, EcConnector, EmbeddingStore, EngineConnector, EngineHost,
    EngineOptions, FormatPolicy, KeptAs, KvConnector, LaunchHost, RunningEngine, ShmTooSmall,
    to_item,
};
pub use client::{
    AttachError, ClientOptions, CountedRows, Delivered, EngineClient, OutputStream, PendingEngine,
    Plugin,
};
pub use endpoints::{EngineEndpoints, SocketDir};
pub use error::{DeathCause, EngineError};
pub use mirror::ReceiverMirror;
