//! Block keys, KV events and the prefix index: which worker holds which KV-cache blocks.
//!
//! A request is cheapest on a worker that already has the start of its prompt in its cache. An
//! engine such as vLLM keeps computed tokens in blocks of `block_size` tokens, and reuses a block
//! for each prompt that begins in the same way. It publishes an event whenever it stores or removes
//! blocks. This crate follows these events and answers one question: how many leading blocks of a
//! prompt does each worker hold?
//!
//! - [`block_keys`] turns a prompt into one [`BlockKey`] per full block. A key identifies the block
//!   and everything before it.
//! - [`Subscriber`] receives an engine's events without gaps and passes them to a
//!   [`KvEventReceiver`].
//! - [`PrefixIndex`] records the blocks of all workers and looks up the overlap of a prompt with
//!   each of them.
//!
//! The example connects the last two:
//!
//! ```no_run
//! use chiasm_kv::{
//!     KvError, KvEventReceiver, PrefixIndex, Subscriber, SubscriberConfig, SubscriberCounters,
//! };
//! use chiasm_types::{BlockSize, WorkerId};
//!
//! struct Feed(PrefixIndex, WorkerId);
//!
//! impl KvEventReceiver for Feed {
//!     fn batch(&mut self, _seq: u64, payload: &[u8]) -> Result<(), KvError> {
//!         self.0.apply_payload(self.1, payload, &mut Vec::new(), |_| ())
//!     }
//!
//!     fn reset(&mut self) {
//!         self.0.clear(self.1);
//!     }
//!
//!     fn set_caught_up(&mut self, _: bool) {}
//! }
//!
//! # async fn follow() {
//! let worker = WorkerId(0);
//! let index = PrefixIndex::new();
//! index.add_worker(worker, BlockSize::new(32).unwrap());
//!
//! let config = SubscriberConfig::new("tcp://127.0.0.1:5557", Some("tcp://127.0.0.1:5558".into()));
//! // The subscriber runs until it is dropped.
//! let _subscriber =
//!     Subscriber::start(config, Feed(index, worker), SubscriberCounters::default());
//! # }
//! ```
//!
//! | module | holds |
//! |---|---|
//! | `block_key` | block keys and the keyed hash behind them |
//! | `identifier` | the identity of the media items that events name |
//! | [`event`] | the events that engines publish, and their msgpack codec |
//! | `subscriber` | the task that follows one engine's events |
//! | `index` | the blocks of all workers, and lookups |
#![deny(unsafe_code)]

mod block_key;
mod error;
pub mod event;
mod identifier;
mod index;
mod subscriber;

pub use block_key::{
    BlockKey, BuildBlockKeyHasher, EngineHashKeys, EngineHashing, KeyScheme, KeySecret,
    KeySecretInUse, MediaSpan, PromptBlocks, block_keys,
};
pub use error::KvError;
pub use index::{
    Chore, IndexStats, Overlaps, PrefixIndex, Snapshot, SnapshotError, WorkerIndexStats,
};
pub use subscriber::{
    KvEventReceiver, StreamPosition, Subscriber, SubscriberConfig, SubscriberCounters,
    SubscriberStats,
};
