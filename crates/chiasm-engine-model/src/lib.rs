//! A model of vLLM 0.32's scheduler and caches: the tokens that an engine computes in each step,
//! and the blocks that its caches hold and evict. It has no time, no wire and no tensors.
//!
//! Two engines are built on it: the simulated one of `chiasm-sim-engine`, which is compared with
//! traces of vLLM's own block manager, and the modelled one of `chiasm-simulate`. Each publishes
//! the changes in its own format.
//!
//! ```
//! use chiasm_engine_model::{BlockTable, PagedCache};
//!
//! let hashes = [11_u64, 12, 13];
//! let mut cache: PagedCache<u64> = PagedCache::new(8, 16);
//! // A prompt of 40 tokens: two full blocks of 16, and a part of a third.
//! let mut table = BlockTable::default();
//! let mut evicted = Vec::new();
//! let mut hits = Vec::new();
//! cache.grow(&mut table, 40, |hash| evicted.push(hash));
//! assert_eq!(cache.store(&mut table, 40, |block| hashes[block]), 0..2);
//! cache.release(&mut table);
//!
//! cache.find(hashes, 39, &mut hits);
//! assert_eq!((hits.len(), cache.free(), evicted.len()), (2, 8, 0));
//! ```
//!
//! | module | contents |
//! |---|---|
//! | `batch` | continuous batching: the tokens of each request that a step computes |
//! | `paged_cache` | the KV cache: blocks that are found again by hash |
//! | `free_queue` | the order in which the free blocks of the cache are allocated |
//! | `encoder_cache` | the embeddings of images |
//! | `weighted_lru` | an LRU cache with a limited total weight |
#![forbid(unsafe_code)]

mod batch;
mod encoder_cache;
mod free_queue;
mod paged_cache;
mod weighted_lru;

pub use batch::{Batch, BatchEngine, BatchLimits, Scheduled};
pub use encoder_cache::{EncoderCache, EncoderLookup};
pub use free_queue::BlockId;
pub use paged_cache::{BlockTable, PagedCache};
pub use weighted_lru::WeightedLru;
