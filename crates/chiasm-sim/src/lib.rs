//! A simulated vLLM engine that a frontend can't tell from a real one.
//!
//! It connects to a frontend's handshake socket as `vllm serve --headless` does, speaks EngineCore's protocol on the
//! same sockets, publishes and replays the same KV events, and has the same caches: paged KV blocks with prefix reuse,
//! a receiver cache of media items, a cache of encoded images. It computes nothing: a time model says how long each
//! step takes, and every answer says what the engine saw, for example
//! `1 image 280x224 (80 tokens); 64 of 109 prompt tokens were cached`. What would break an unmodified engine breaks
//! this one in the same way.
//!
//! ```no_run
//! use chiasm_sim::{Exit, Pace, SimConfig, SimEngine};
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
//! | the loop | `core`, `scheduler`, `sequence`, `step_outputs`, `utility`, `pace`, `clock` |
//! | caches | `paged_cache` (on `block_chain`, `free_queue`), `receiver_cache`, `encoder_cache` |
//! | what it sees and says | `image`, `reply`, `logprobs`, `sampling_rules` |
//!
//! Not simulated: LoRA, pooling, structured outputs, speculative decoding, KV connectors, priority scheduling, and the
//! one step by which vLLM's asynchronous scheduling runs ahead.
#![forbid(unsafe_code)]

mod block_chain;
mod clock;
mod config;
mod connection;
mod core;
mod encoder_cache;
mod engine;
mod error;
mod faults;
mod free_queue;
mod handshake;
mod image;
mod intake;
mod kv_publisher;
mod logprobs;
mod outbox;
mod pace;
mod paged_cache;
mod receiver_cache;
mod reply;
mod sampling_rules;
mod scheduler;
mod sequence;
mod sockets;
mod step_outputs;
mod utility;

pub use config::{ImageRules, KvEvents, SimConfig, TextToTokens};
pub use engine::{Exit, SimEngine};
pub use error::SimError;
pub use faults::{Death, Faults};
pub use pace::Pace;
