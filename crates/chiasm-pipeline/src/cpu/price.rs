//! What pieces of work cost, from what is known before they are done: time of one core.
//!
//! The rates are rounded up from what the release build took on an AMD Zen 5 with AVX-512; a usual
//! core is within a factor of two. They decide what is done before what, and what is refused, so
//! they need no more than the right magnitude. Decoding has its own in `chiasm-media`.

use std::time::Duration;

use chiasm_prompt::RenderLimits;

/// Understanding JSON: `values` beside the first, in so many bytes.
pub fn json(bytes: usize, values: u64) -> Duration {
    nanos(bytes as u64, 1).saturating_add(nanos(values, 250))
}

/// Rendering a conversation: each message is made a template's value, and the template goes through
/// them for as many steps as it may take.
pub fn template(messages: usize, bytes: usize) -> Duration {
    let steps = nanos(messages as u64, 10_000).min(nanos(RenderLimits::default().fuel, 20));
    steps.saturating_add(nanos(messages as u64, 1_000)).saturating_add(nanos(bytes as u64, 2))
}

/// Making tokens of text, with the keys of their blocks, by a tokenizer that takes a hundred
/// microseconds for `quick` bytes.
pub fn tokenizing(bytes: usize, quick: usize) -> Duration {
    nanos(bytes as u64, 100_000 / quick.max(1) as u64)
}

/// Making text of tokens.
pub fn detokenizing(tokens: usize) -> Duration {
    nanos(tokens as u64, 200)
}

/// Writing log probabilities of tokens, with their texts.
pub fn logprobs(candidates: usize) -> Duration {
    nanos(candidates as u64, 1_000)
}

/// Making the keys of a prompt's blocks.
pub fn keys(tokens: usize) -> Duration {
    nanos(tokens as u64, 10)
}

/// Making a tensor of decoded pixels: all of them are read, few may be written.
pub fn tensor(pixels: u64, tensor_bytes: usize) -> Duration {
    nanos(pixels, 1).saturating_add(nanos(tensor_bytes as u64, 1))
}

/// Copying a tensor to where another engine reads it.
pub fn copy(tensor_bytes: usize) -> Duration {
    Duration::from_nanos(tensor_bytes as u64 / 2)
}

fn nanos(count: u64, each: u64) -> Duration {
    Duration::from_nanos(count.saturating_mul(each))
}
