use std::fmt;
use std::sync::Arc;

/// How many embeddings the largest media item of a model has, as far as that is known. It follows
/// from the tokens of a context, of which an engine tells when it is ready.
#[derive(Clone, Default)]
pub struct LargestItem(Option<Embeddings>);

/// Tokens of a context → embeddings.
type Embeddings = Arc<dyn Fn(usize) -> usize + Send + Sync>;

impl LargestItem {
    /// What the model says. `embeddings` is given the tokens of a context; 0 means that no item is
    /// taken.
    pub fn known(embeddings: impl Fn(usize) -> usize + Send + Sync + 'static) -> Self {
        Self(Some(Arc::new(embeddings)))
    }

    /// Nobody says.
    pub fn unknown() -> Self {
        Self(None)
    }

    /// Embeddings that the encoder cache of vLLM holds where a step computes `step` tokens: as
    /// many, and those of the largest item if it has more; none where no item is taken
    /// (`compute_mm_encoder_budget` in its `encoder_cache_manager.py`). `None` if the largest item
    /// is not known.
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
    fn a_cache_holds_a_step_and_the_largest_item() {
        let item = LargestItem::known(|context| context / 2);
        assert_eq!(item.encoder_cache(8192, 32_768), Some(16_384));
        assert_eq!(item.encoder_cache(8192, 4096), Some(8192));
        assert_eq!(LargestItem::known(|_| 0).encoder_cache(8192, 4096), Some(0));
        assert_eq!(LargestItem::unknown().encoder_cache(8192, 4096), None);
    }
}
