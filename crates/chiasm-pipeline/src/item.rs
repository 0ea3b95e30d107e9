//! Media items of a prompt: what each becomes, before anything is decoded.

use std::sync::Arc;

use chiasm_backend::{JobItem, MediaSource};
use chiasm_router::RouteItem;
use chiasm_types::{MmHash, Modality, Placeholder, TokenRun};

/// What one item becomes for workers of one plan class.
pub(super) struct ItemPlan {
    /// What kind of thing it is.
    pub(super) modality: Modality,
    /// Its identity.
    pub(super) hash: MmHash,
    /// The tokens that take its marker's place.
    pub(super) runs: Vec<TokenRun>,
    /// Embeddings that the encoder makes of it: the tokens of `runs` that embed.
    pub(super) embeds: usize,
    /// Elements of its large tensor.
    pub(super) elements: u64,
    /// Embeddings that a worker must be able to encode at once for it; 0 if any worker of the class
    /// can.
    pub(super) encoder_tokens: usize,
    /// Where its tensors can be had.
    pub(super) source: Arc<dyn MediaSource>,
}

impl ItemPlan {
    /// What the router has to know of the item at its place.
    pub(super) fn to_route(&self, at: &Placeholder) -> RouteItem {
        RouteItem {
            hash: self.hash,
            end: at.offset + at.length,
            embeds: self.embeds,
            elements: self.elements,
        }
    }

    /// What a backend has to know of the item at its place.
    pub(super) fn into_job(self, at: Placeholder) -> JobItem {
        let Self { modality, hash, elements, source, .. } = self;
        JobItem { modality, hash, placeholder: at, elements, source }
    }
}
