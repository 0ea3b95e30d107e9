//! A request as the choice of a worker sees it.

use chiasm_kv::BlockKey;
use chiasm_types::{MmHash, PlanClassId, WorkerId};

/// What decides where a request goes.
#[derive(Clone, Copy, Debug, Default)]
pub struct RouteRequest<'a> {
    /// Keys of the prompt's full blocks, in prompt order.
    pub keys: &'a [BlockKey],
    /// Tokens of the expanded prompt.
    pub prompt_tokens: usize,
    /// The media items, in any order.
    pub media: &'a [RouteItem],
    /// The class of the workers that these keys, tokens and items are for.
    pub class: PlanClassId,
    /// Embeddings, in tokens, that a worker must be able to encode at once: those of an item that
    /// is larger than the model's own settings make any; else 0.
    pub encoder_tokens: usize,
    /// Requests with the same number go to the same worker as long as it is there and not busy.
    pub session: Option<u64>,
    /// Workers that must not get it, such as those that have failed it.
    pub exclude: &'a [WorkerId],
}

/// One media item of a prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RouteItem {
    /// The item's identity.
    pub hash: MmHash,
    /// Index of the prompt token after its placeholder.
    pub end: usize,
    /// Embeddings that the encoder makes of it, in tokens.
    pub embeds: usize,
    /// Elements of its tensors.
    pub elements: u64,
}

/// Whether the prompt of a request may be computed elsewhere than its answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Splitting {
    /// Where workers have roles, and where it is cheaper.
    Allowed,
    /// One worker does both.
    Forbidden,
}
