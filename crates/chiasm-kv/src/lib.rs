//! Who holds what: block keys, the KV events of engines, and the prefix index built from them.
//!
//! ```no_run
//! use chiasm_kv::{KvError, KvEventReceiver, PrefixIndex, Subscriber, SubscriberConfig, SubscriberCounters};
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
//! let (worker, index) = (WorkerId(0), PrefixIndex::new());
//! index.add_worker(worker, BlockSize::new(32).unwrap());
//!
//! let config = SubscriberConfig::new("tcp://127.0.0.1:5557", Some("tcp://127.0.0.1:5558".into()));
//! let _until_dropped = Subscriber::counting(config, Feed(index, worker), SubscriberCounters::default());
//! # }
//! ```
//!
//! | module | is about |
//! |---|---|
//! | `block_key` | our identity of a block |
//! | `identifier` | whose media item an engine talks about |
//! | [`event`] | what engines publish, and its msgpack form in both directions |
//! | `subscriber` | following an engine's events without gaps |
//! | `index` | who holds which blocks |
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
