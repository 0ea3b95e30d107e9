use std::fmt;
use std::sync::Arc;

/// The number of embeddings of a model's largest media item, if it is known. The number depends on
/// the context length, which an engine reports when it is ready.
#[derive(Clone, Default)]
pub struct LargestItem(Option<EmbeddingsOfContext>);

/// A function from tokens of a context to embeddings.
type EmbeddingsOfContext = Arc<dyn Fn(usize) -> usize + Send + Sync>;

impl LargestItem {
    /// Creates the size that the model defines. `embeddings` maps the tokens of a context to the
    /// embeddings of the largest item; 0 means that no item is taken.
    pub fn known(embeddings: impl Fn(usize) -> usize + Send + Sync + 'static) -> Self {
        Self(Some(Arc::new(embeddings)))
    }

    /// Creates an unknown size.
    pub fn unknown() -> Self {
        Self(None)
    }

    /// Returns the capacity of vLLM's encoder cache in embeddings, for an engine whose steps
    /// compute `step` tokens and whose context has `context` tokens. `None` if the largest item is
    /// not known.
    ///
    /// The capacity is `step`, or the embeddings of the largest item if these are more; 0 if no
    /// item is taken (`compute_mm_encoder_budget` in vLLM's `encoder_cache_manager.py`).
    pub fn encoder_cache(&self, step: usize, context: usize) -> Option<u64> {
        let largest = (self.0.as_ref()?)(context);
        Some(if largest == 0 { 0 } else { largest.max(step) as u64 })
    }
}

impl fmt::Debug for LargestItem {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(if self.0.is_some() { "LargestItem(known)" } else { "LargestItem(unknown)" })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn encoder_cache_holds_a_step_or_the_largest_item() {
        let item = LargestItem::known(|context| context / 2);
        assert_eq!(item.encoder_cache(8192, 32_768), Some(16_384));
        assert_eq!(item.encoder_cache(8192, 4096), Some(8192));
        assert_eq!(LargestItem::known(|_| 0).encoder_cache(8192, 4096), Some(0));
        assert_eq!(LargestItem::unknown().encoder_cache(8192, 4096), None);
    }
}
