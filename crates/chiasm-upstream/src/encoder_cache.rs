//! The size of a server's encoder cache, which servers do not report.

use chiasm_backend::LargestItem;

/// The assumed number of tokens per step, which servers do not report: vLLM's default on large
/// GPUs. Only the size of the encoder cache follows from this number.
const ASSUMED_STEP_TOKENS: usize = 8192;

/// Returns the assumed size of a server's encoder cache, in embeddings.
///
/// vLLM has room for the largest item that the model accepts, often a video as long as the context.
/// Too large a value does little harm. With too small a value the encoder would look like the
/// bottleneck of all requests.
pub(crate) fn encoder_cache_tokens(largest_item: &LargestItem, max_model_len: usize) -> u64 {
    largest_item.encoder_cache(ASSUMED_STEP_TOKENS, max_model_len).unwrap_or(max_model_len as u64)
}
