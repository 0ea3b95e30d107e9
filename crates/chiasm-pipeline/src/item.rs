//! Plans of a prompt's media items, made before anything is decoded.

use std::sync::Arc;

use chiasm_backend::{JobItem, MediaSource};
use chiasm_router::RouteItem;
use chiasm_types::{MmHash, Modality, Placeholder, TokenRun};

/// The plan of one item for workers of one plan class.
pub(super) struct ItemPlan {
    /// The item's modality.
    pub(super) modality: Modality,
    /// The item's identity.
    pub(super) hash: MmHash,
    /// The tokens that replace the item's marker.
    pub(super) runs: Vec<TokenRun>,
    /// The number of embeddings that the encoder computes: the tokens of `runs` that embed.
    pub(super) embeds: usize,
    /// The number of elements of the item's large tensor.
    pub(super) elements: u64,
    /// The number of embeddings that a worker must be able to encode at once; 0 if every worker of
    /// the class can.
    pub(super) encoder_tokens: usize,
    /// The source of the item's tensors.
    pub(super) source: Arc<dyn MediaSource>,
}

impl ItemPlan {
    /// Returns the item as the router sees it at a placeholder.
    pub(super) fn to_route(&self, placeholder: &Placeholder) -> RouteItem {
        RouteItem {
            hash: self.hash,
            end: placeholder.offset + placeholder.length,
            embeds: self.embeds,
            elements: self.elements,
        }
    }

    /// Returns the item as a backend sees it at a placeholder.
    pub(super) fn into_job(self, placeholder: Placeholder) -> JobItem {
        let Self { modality, hash, elements, source, .. } = self;
        JobItem { modality, hash, placeholder, elements, source }
    }
}
