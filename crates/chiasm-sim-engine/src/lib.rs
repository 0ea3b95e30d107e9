//! A simulated vLLM engine that a frontend can't tell from a real one.
//!
//! It connects to a frontend's handshake socket as `vllm serve --headless` does, speaks
//! EngineCore's protocol on the same sockets, publishes and replays the same KV events, and has the
//! same caches: paged KV blocks with prefix reuse, a receiver cache of media items, a cache of
//! encoded images. It computes nothing: a time model says how long each step takes, and every
//! answer says what the engine saw, for example `1 image 280x224 (80 tokens, 9f2c1a07); 64 of 109
//! prompt tokens were cached`, where `9f2c1a07` is a digest of the pixels' bytes. What would break
//! an unmodified engine breaks this one in the same way.
//!
//! It has Chiasm's plugin, too: it attaches a frontend's arena, takes handles in place of tensors,
//! and keeps its views of slots as long as vLLM does. That is until the last of these lets go: the
//! receiver cache, the request until the step after its end, the input thread until another request
//! has come. A slot that is written to while it is lent kills the engine. Unlike a killed process
//! it returns its leases when it ends.
//!
//! ```no_run
//! use chiasm_sim_engine::{Exit, Pace, SimConfig, SimEngine};
//!
//! # async fn run() {
//! let config = SimConfig { pace: Pace { speedup: 10.0, ..Pace::default() }, ..SimConfig::new("tcp://127.0.0.1:5555") };
//! let engine = SimEngine::start(config);
//! // … the frontend at that address sends requests …
//! assert!(matches!(engine.stop().await, Exit::Stopped));
//! # }
//! ```
//!
//! | part | modules |
//! |---|---|
//! | life of an engine | `engine` (start, kill, stop), `config`, `faults`, `error` |
//! | towards the frontend | `handshake`, `connection`, `sockets`, `intake`, `outbox`, `kv_publisher` |
//! | the loop | `core`, `work`, `scheduler`, `sequence`, `step_outputs`, `utility`, `pace`, `monotonic_time`, `moment_log` |
//! | caches | `cache_events` (on `block_chain`), `receiver_cache`; batches, the KV cache and that of encoded images are `chiasm-engine-model`'s |
//! | adapters | `loras`: which are loaded; that a step uses at most so many of them is not simulated |
//! | shared memory | `plugin`, `handle`, `lent_slot` |
//! | other engines | `left_prompts`, `computed`: prompts that one computes for another; `embeddings`: items that one encodes for others |
//! | what it sees and says | `item`, `image`, `digest`, `reply`, `logprobs`, `sampling_rules` |
//!
//! Not simulated: pooling, structured outputs, speculative decoding, the time that a prompt takes
//! to another engine, priority scheduling, and the one step by which vLLM's asynchronous scheduling
//! runs ahead.
#![forbid(unsafe_code)]

mod block_chain;
mod cache_events;
mod computed;
mod config;
mod connection;
mod core;
mod digest;
mod embeddings;
mod engine;
mod error;
mod faults;
mod handle;
mod handshake;
mod image;
mod intake;
mod item;
mod kv_publisher;
mod left_prompts;
mod lent_slot;
mod logprobs;
mod loras;
mod moment_log;
mod monotonic_time;
mod outbox;
mod pace;
mod plugin;
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
