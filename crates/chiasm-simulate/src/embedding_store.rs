//! The embeddings that engines of a machine leave for each other.

use std::cell::RefCell;
use std::rc::Rc;

use chiasm_engine_model::WeightedLru;

use crate::model::EngineModel;
use crate::sequence::Image;

/// What was left and has not made room for others yet: what was used longest ago goes first. All
/// engines of a fleet have the same one, as a fleet is one machine.
#[derive(Clone)]
pub(crate) struct EmbeddingStore {
    kept: Rc<RefCell<WeightedLru<u64, ()>>>,
    bytes_per_embed: f64,
}

impl EmbeddingStore {
    pub(crate) fn new(model: &EngineModel) -> Self {
        let kept = Rc::new(RefCell::new(WeightedLru::new(model.embedding_store_bytes)));
        Self { kept, bytes_per_embed: model.embed_bytes }
    }

    /// Whether an image's embeddings are there, to be used now.
    pub(crate) fn has(&self, image: Image) -> bool {
        self.kept.borrow_mut().get(&image.id).is_some()
    }

    /// An image's embeddings are left, or used if they are there.
    pub(crate) fn leave(&self, image: Image) {
        if !self.has(image) {
            self.kept.borrow_mut().insert(image.id, self.bytes(image), ());
        }
    }

    /// What an image's embeddings take.
    pub(crate) fn bytes(&self, image: Image) -> u64 {
        (f64::from(image.embeds) * self.bytes_per_embed) as u64
    }
}
