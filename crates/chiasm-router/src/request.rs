//! A request as the selection of a worker sees it.

use chiasm_kv::BlockKey;
use chiasm_types::{MmHash, PlanClassId, WorkerId};

/// The properties of a request that decide where it goes.
#[derive(Clone, Copy, Debug, Default)]
pub struct RouteRequest<'a> {
    /// Keys of the prompt's full blocks, in prompt order.
    pub keys: &'a [BlockKey],
    /// Tokens of the expanded prompt.
    pub prompt_tokens: usize,
    /// The media items, in any order.
    pub media: &'a [RouteItem],
    /// The plan class of the workers that these keys, tokens and items are for.
    pub class: PlanClassId,
    /// Embeddings, in tokens, that a worker must be able to encode at once. Set for an item that is
    /// larger than any that the model's own settings produce; otherwise 0.
    pub encoder_tokens: usize,
    /// The session of the request. Requests of one session go to the same worker as long as it is
    /// there and not busy.
    pub session: Option<u64>,
    /// Workers that must not get the request, such as those that have failed it.
    pub exclude: &'a [WorkerId],
}

/// One media item of a prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RouteItem {
    /// The item's identity.
    pub hash: MmHash,
    /// Index of the first prompt token after the item's placeholder.
    pub end: usize,
    /// Embeddings that the encoder makes of the item, in tokens.
    pub embeds: usize,
    /// Elements of the item's tensors.
    pub elements: u64,
}

/// The permission to compute a prompt on another worker than its answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Splitting {
    /// The request is split where workers have roles and splitting is cheaper.
    Allowed,
    /// One worker computes both.
    Forbidden,
}
