//! KV events: the changes of its prefix cache that an engine publishes, and their msgpack codec.
//!
//! The types mirror `vllm/distributed/kv_events.py` of vLLM 0.32 (`KVEventBatch`, `BlockStored`,
//! `BlockRemoved`, `AllBlocksCleared`). A batch is an array `[timestamp, events,
//! data_parallel_rank]`. An event is a map by field name, with its class in `type`. Later versions
//! append to these, so unknown events, fields and positions are skipped.
//!
//! SGLang 0.5.23 (`disaggregation/kv_events.py`, `mem_cache/events.py`) writes the same form with
//! two differences: its hashes are signed, and its token ids include numbers that are no tokens.

mod decode;
mod decoder;
mod encode;

use chiasm_types::TokenId;

/// The changes of the cache in one engine step.
#[derive(Clone, Debug, PartialEq)]
pub struct KvEventBatch {
    /// The Unix time in seconds at which the engine's scheduler collected the events.
    pub timestamp: f64,
    /// The changes, in the order in which they happened.
    pub events: Vec<KvEvent>,
    /// The data-parallel rank that published the batch.
    pub data_parallel_rank: Option<u32>,
}

/// A change of the cache.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum KvEvent {
    /// Blocks were filled with tokens.
    BlockStored(BlockStored),
    /// Blocks were evicted.
    BlockRemoved(BlockRemoved),
    /// The whole prefix cache was dropped. vLLM publishes this with the next step that has events.
    AllBlocksCleared,
    /// The `type` of an event of a later version. Its fields are not kept.
    Unknown(String),
}

/// An engine's own hash of a block, comparable only with hashes of the same engine.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum ExternalHash {
    /// vLLM's default: the low 64 bits of the hash, an unsigned integer on the wire. For SGLang,
    /// the first 64 bits, a signed integer on the wire.
    U64(u64),
    /// The full hash (`VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES=0`).
    Bytes(Vec<u8>),
}

/// Consecutive blocks of one prompt were filled with tokens.
///
/// An engine may hold several copies of a block. Each copy is stored and removed by its own event.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct BlockStored {
    /// The hash of each block, in prompt order.
    pub block_hashes: Vec<ExternalHash>,
    /// The hash of the block before the first one; `None` at the start of a prompt.
    pub parent_block_hash: Option<ExternalHash>,
    /// The tokens of all blocks, in prompt order. Empty if any number exceeds 32 bits: SGLang
    /// substitutes such numbers for a media item's tokens, and the blocks are only known by hash.
    pub token_ids: Vec<TokenId>,
    /// The number of tokens per block.
    pub block_size: u32,
    /// The adapter's id, deprecated by vLLM in favour of `lora_name`.
    pub lora_id: Option<i64>,
    /// The tier: `GPU`, `CPU` or `STORAGE`.
    pub medium: Option<String>,
    /// The LoRA adapter that the tokens were computed with.
    pub lora_name: Option<String>,
    /// The distinguishing marks of each block beyond tokens and parent; see [`ExtraKey`].
    pub extra_keys: Option<Vec<Option<Vec<ExtraKey>>>>,
    /// The KV-cache group. Models with several kinds of attention have several groups.
    pub group_idx: Option<u32>,
    /// The group's kind: `full_attention`, `sliding_window`, `mamba`, …
    pub kv_cache_spec_kind: Option<String>,
    /// The size of the group's attention window in tokens, if it has one.
    pub kv_cache_spec_sliding_window: Option<u32>,
    /// The location seen from the engine: `LOCAL` or `REMOTE`.
    pub locality: Option<String>,
    /// The identifier of an offloading tier.
    pub ownership: Option<String>,
    /// The session whose request caused the event.
    pub session_id: Option<String>,
    /// The tokens after each block that its hash also covers; `None` if hashes cover only their
    /// blocks. Since vLLM 0.33, with drafters that read ahead.
    pub lookahead_token_ids: Option<Vec<Vec<TokenId>>>,
}

/// A distinguishing mark of a block, untagged on the wire.
///
/// The order of a block's marks is fixed (`generate_block_hash_extra_keys`): the LoRA name if there
/// is one, media items, the cache salt (first block of a prompt only), digests of prompt
/// embeddings.
#[derive(Clone, Debug, PartialEq)]
pub enum ExtraKey {
    /// A media item that touches the block.
    Media {
        /// The item's `identifier` from the request.
        identifier: String,
        /// The start of the item's placeholder minus the start of the block, in tokens. Negative if
        /// the placeholder started in an earlier block.
        offset: i64,
    },
    /// A LoRA name or a cache salt.
    Text(String),
    /// The msgpack bytes of any other mark: a digest of prompt embeddings, or a mark of a later
    /// version.
    Other(Vec<u8>),
}

/// Blocks were evicted: one copy of each hash.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct BlockRemoved {
    /// The hashes of the blocks.
    pub block_hashes: Vec<ExternalHash>,
    /// The tier, as in [`BlockStored`].
    pub medium: Option<String>,
    /// The KV-cache group, as in [`BlockStored`].
    pub group_idx: Option<u32>,
    /// The location, as in [`BlockStored`].
    pub locality: Option<String>,
    /// The identifier of an offloading tier, as in [`BlockStored`].
    pub ownership: Option<String>,
}

pub use decode::decode;
pub use decoder::Decoder;
pub(crate) use decoder::with_decoded;

#[cfg(test)]
mod tests;
