//! KV events: what an engine says about its prefix cache, and their msgpack form.
//!
//! Mirrors `vllm/distributed/kv_events.py` of vLLM 0.32 (`KVEventBatch`, `BlockStored`,
//! `BlockRemoved`, `AllBlocksCleared`). A batch is an array `[timestamp, events,
//! data_parallel_rank]`, an event is a map by field name with its class in `type`. Later versions
//! append: unknown events, fields and positions are skipped. SGLang 0.5.23
//! (`disaggregation/kv_events.py`, `mem_cache/events.py`) writes the same, but for signs of hashes
//! and for numbers that are no tokens.

mod decode;
mod decoder;
mod encode;

use chiasm_types::TokenId;

/// What one engine step did to the cache.
#[derive(Clone, Debug, PartialEq)]
pub struct KvEventBatch {
    /// Unix time in seconds at which the engine's scheduler collected the events.
    pub timestamp: f64,
    /// The changes in the order in which they happened.
    pub events: Vec<KvEvent>,
    /// The publishing rank.
    pub data_parallel_rank: Option<u32>,
}

/// One change of the cache.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum KvEvent {
    /// Blocks came to hold tokens.
    BlockStored(BlockStored),
    /// Blocks were evicted.
    BlockRemoved(BlockRemoved),
    /// The whole prefix cache was dropped. vLLM publishes it with the next step that has events.
    AllBlocksCleared,
    /// An event of a later version: its `type`. Its fields are not kept.
    Unknown(String),
}

/// An engine's own name of a block. Only good for comparing with others of the same engine.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum ExternalHash {
    /// vLLM's default: the low 64 bits of the hash, as an unsigned integer. SGLang's first 64 bits,
    /// which its events have as a signed one.
    U64(u64),
    /// The whole hash (`VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES=0`).
    Bytes(Vec<u8>),
}

/// Consecutive blocks of one prompt came to hold tokens.
///
/// The same hash is stored once per copy that the engine holds, and removed once per copy.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct BlockStored {
    /// One per block, in prompt order.
    pub block_hashes: Vec<ExternalHash>,
    /// The block before the first of these; `None` at the start of a prompt.
    pub parent_block_hash: Option<ExternalHash>,
    /// The tokens of all blocks, in prompt order. None where some are numbers beyond 32 bits, which
    /// SGLang has in the place of a media item's tokens: such blocks are known by their hashes
    /// alone.
    pub token_ids: Vec<TokenId>,
    /// Tokens per block.
    pub block_size: u32,
    /// Deprecated by vLLM in favour of `lora_name`.
    pub lora_id: Option<i64>,
    /// `GPU`, `CPU` or `STORAGE`.
    pub medium: Option<String>,
    /// The LoRA adapter that the tokens were computed with.
    pub lora_name: Option<String>,
    /// Per block, what distinguishes it beyond tokens and parent; see [`ExtraKey`].
    pub extra_keys: Option<Vec<Option<Vec<ExtraKey>>>>,
    /// The KV-cache group; models with several kinds of attention have several.
    pub group_idx: Option<u32>,
    /// `full_attention`, `sliding_window`, `mamba`, …
    pub kv_cache_spec_kind: Option<String>,
    /// Tokens of the window, if the group has one.
    pub kv_cache_spec_sliding_window: Option<u32>,
    /// `LOCAL` or `REMOTE`, seen from the engine.
    pub locality: Option<String>,
    /// Identifier of an offloading tier.
    pub ownership: Option<String>,
    /// The session whose request caused the event.
    pub session_id: Option<String>,
    /// Per block, the tokens after it that its hash covers too; `None` when hashes cover nothing
    /// but their blocks. Since vLLM 0.33, with drafters that read ahead.
    pub lookahead_token_ids: Option<Vec<Vec<TokenId>>>,
}

/// One distinguishing mark of a block, untagged on the wire.
///
/// Their order in a block is fixed (`generate_block_hash_extra_keys`): the LoRA name if there is
/// one, media items, the cache salt (first block of a prompt only), digests of prompt embeddings.
#[derive(Clone, Debug, PartialEq)]
pub enum ExtraKey {
    /// A media item that touches the block.
    Media {
        /// The item's `identifier` as the request gave it.
        identifier: String,
        /// Start of the item's placeholder minus start of the block, in tokens; negative when it
        /// started earlier.
        offset: i64,
    },
    /// A LoRA name or a cache salt.
    Text(String),
    /// Anything else, as its msgpack bytes: digests of prompt embeddings, or what a later version
    /// adds.
    Other(Vec<u8>),
}

/// Blocks were evicted: one copy of each hash.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct BlockRemoved {
    /// The blocks.
    pub block_hashes: Vec<ExternalHash>,
    /// The tier's name, as in [`BlockStored`].
    pub medium: Option<String>,
    /// The KV-cache group, as in [`BlockStored`].
    pub group_idx: Option<u32>,
    /// `LOCAL` or `REMOTE`, as in [`BlockStored`].
    pub locality: Option<String>,
    /// The offloading tier's identifier, as in [`BlockStored`].
    pub ownership: Option<String>,
}

pub use decode::decode;
pub use decoder::Decoder;
pub(crate) use decoder::with_decoded;

#[cfg(test)]
mod tests;
