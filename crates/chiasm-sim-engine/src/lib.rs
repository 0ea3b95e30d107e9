//! A simulated vLLM engine that a frontend can't distinguish from a real one.
//!
//! It connects to a frontend's handshake socket as `vllm serve --headless` does, speaks
//! EngineCore's protocol on the same sockets, and publishes and replays the same KV events. It has
//! the same caches: paged KV blocks with prefix reuse, a receiver cache of media items, a cache of
//! encoded images.
//!
//! It computes nothing: a time model determines how long each step takes, and every answer
//! describes what the engine observed. An example is `1 image 280x224 (80 tokens, 9f2c1a07); 64 of
//! 109 prompt tokens were cached`, where `9f2c1a07` is a digest of the pixels' bytes. Messages that
//! break an unmodified engine break this one in the same way.
//!
//! It also has Chiasm's plugin: it attaches a frontend's arena, accepts handles in place of
//! tensors, and keeps its views of slots as long as vLLM does. A view is kept by the receiver
//! cache, by the request until the step after its end, and by the input thread until another
//! request arrives. A slot that is overwritten while it is lent kills the engine. Unlike a killed
//! process it returns its leases when it ends.
//!
//! ```no_run
//! use chiasm_sim_engine::{Exit, Pace, SimConfig, SimEngine};
//!
//! # async fn run() {
//! let config = SimConfig {
//!     pace: Pace { speedup: 10.0, ..Pace::default() },
//!     ..SimConfig::new("tcp://127.0.0.1:5555")
//! };
//! let engine = SimEngine::start(config);
//! // … the frontend at that address sends requests …
//! assert!(matches!(engine.stop().await, Exit::Stopped));
//! # }
//! ```
//!
//! | part | modules |
//! |---|---|
//! | lifecycle | `engine` (start, kill, stop), `config`, `faults`, `error` |
//! | connections | `handshake`, `connection`, `sockets`, `intake`, `outbox`, `kv_publisher` |
//! | loop | `core`, `work`, `scheduler`, `sequence`, `step_outputs`, `utility`, `pace` |
//! | engines that step together | `group` |
//! | times | `monotonic_time`, `moment_log` |
//! | caches | `cache_events` (on `block_chain`), `receiver_cache` |
//! | adapters | `loras`: the loaded ones; the limit of adapters per step is not simulated |
//! | shared memory | `plugin`, `handle`, `lent_slot` |
//! | prompts for other engines | `prompt_store`, `prompt_digest` |
//! | items for other engines | `embeddings` |
//! | answers | `item`, `image`, `digest`, `reply`, `logprobs`, `sampling_rules` |
//!
//! The batches, the KV cache and the cache of encoded images are those of `chiasm-engine-model`.
//!
//! Not simulated: pooling, structured outputs, speculative decoding, the transfer time of a prompt
//! to another engine, priority scheduling, and the one step by which vLLM's asynchronous scheduling
//! runs ahead.
#![forbid(unsafe_code)]

mod block_chain;
mod cache_events;
mod config;
mod connection;
mod core;
mod digest;
mod embeddings;
mod engine;
mod error;
mod faults;
mod group;
mod handle;
mod handshake;
mod image;
mod intake;
mod item;
mod kv_publisher;
mod lent_slot;
mod logprobs;
mod loras;
mod moment_log;
mod monotonic_time;
mod outbox;
mod pace;
mod plugin;
mod prompt_digest;
mod prompt_store;
mod receiver_cache;
mod reply;
mod sampling_rules;
mod scheduler;
mod sequence;
mod sockets;
mod step_outputs;
mod utility;
mod work;

pub use config::{ImageRules, KvEvents, LoraLimits, SimConfig, TextToTokens};
pub use embeddings::EmbeddingFolder;
pub use engine::{Exit, SimEngine};
pub use error::SimError;
pub use faults::{Death, Faults};
pub use pace::Pace;
