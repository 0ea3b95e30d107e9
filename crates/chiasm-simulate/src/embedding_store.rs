//! The store of embeddings that the engines of a machine share.

use std::cell::RefCell;
use std::rc::Rc;

use chiasm_engine_model::WeightedLru;

use crate::model::EngineModel;
use crate::sequence::Image;

/// A store of embeddings that evicts the least recently used ones. All engines of a fleet share
/// one, because a simulated fleet is one machine. Clones are the same store.
#[derive(Clone)]
pub(crate) struct EmbeddingStore {
    images: Rc<RefCell<WeightedLru<u64, ()>>>,
    bytes_per_embed: f64,
}

impl EmbeddingStore {
    /// Creates an empty store.
    pub(crate) fn new(model: &EngineModel) -> Self {
        let images = Rc::new(RefCell::new(WeightedLru::new(model.embedding_store_bytes)));
        Self { images, bytes_per_embed: model.embed_bytes }
    }

    /// Marks an image as used and returns `true` if its embeddings are stored.
    pub(crate) fn touch(&self, image: Image) -> bool {
        self.images.borrow_mut().get(&image.id).is_some()
    }

    /// Stores an image's embeddings, or marks them as used if they are stored already.
    pub(crate) fn insert(&self, image: Image) {
        if !self.touch(image) {
            self.images.borrow_mut().insert(image.id, self.bytes(image), ());
        }
    }

    /// Returns the size of an image's embeddings.
    pub(crate) fn bytes(&self, image: Image) -> u64 {
        (f64::from(image.embeds) * self.bytes_per_embed) as u64
    }
}
