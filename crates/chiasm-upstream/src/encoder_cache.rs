//! The size of a server's encoder cache, which servers do not report.

use chiasm_backend::LargestItem;

/// Tokens that a step of a server is taken to compute, which it does not tell: as many as vLLM's by
/// default on large GPUs. Only how many embeddings are kept follows from it.
const USUAL_STEP: usize = 8192;

/// Embeddings that a server keeps, of which it does not tell. vLLM has room for the largest item
/// that the model takes, often a video as long as the context. Where that is too much it matters
/// little; with too little, encoders would seem to be what all requests wait for.
pub(crate) fn encoder_cache(largest_item: &LargestItem, max_model_len: usize) -> u64 {
    largest_item.encoder_cache(USUAL_STEP, max_model_len).unwrap_or(max_model_len as u64)
}
