//! Estimates of the CPU time of pieces of work, on one core, made before the work is done.
//!
//! The rates are rounded up from measurements of the release build on an AMD Zen 5 with AVX-512; a
//! usual core is within a factor of two. They only decide the order of work and what is refused, so
//! the right magnitude is enough. `chiasm-media` has the rates of decoding.

use std::time::Duration;

use chiasm_prompt::RenderLimits;

/// Estimates parsing JSON of `bytes` bytes with `values` values beside the first.
pub fn json(bytes: usize, values: u64) -> Duration {
    nanos(bytes as u64, 1).saturating_add(nanos(values, 250))
}

/// Estimates rendering a conversation: converting each message to a template value, and running the
/// template for at most as many steps as its fuel allows.
pub fn template(messages: usize, bytes: usize) -> Duration {
    let steps = nanos(messages as u64, 10_000).min(nanos(RenderLimits::default().fuel, 20));
    steps.saturating_add(nanos(messages as u64, 1_000)).saturating_add(nanos(bytes as u64, 2))
}

/// Estimates tokenizing text and computing its block keys. The tokenizer takes a hundred
/// microseconds for `bytes_per_100_micros` bytes.
pub fn tokenizing(bytes: usize, bytes_per_100_micros: usize) -> Duration {
    nanos(bytes as u64, 100_000 / bytes_per_100_micros.max(1) as u64)
}

/// Estimates detokenizing.
pub fn detokenizing(tokens: usize) -> Duration {
    nanos(tokens as u64, 200)
}

/// Estimates writing log probabilities of tokens, with their texts.
pub fn logprobs(candidates: usize) -> Duration {
    nanos(candidates as u64, 1_000)
}

/// Estimates computing the block keys of a prompt.
pub fn keys(tokens: usize) -> Duration {
    nanos(tokens as u64, 10)
}

/// Estimates processing decoded pixels to a tensor. All pixels are read, but few may be written.
pub fn tensor(pixels: u64, tensor_bytes: usize) -> Duration {
    nanos(pixels, 1).saturating_add(nanos(tensor_bytes as u64, 1))
}

/// Estimates reading the index of a video file, which has headers between its samples.
pub fn video_index(bytes: usize) -> Duration {
    Duration::from_micros(500).saturating_add(Duration::from_nanos(bytes as u64 / 2))
}

/// Estimates reading the length of a recording, whose frames may all have checksums.
pub fn recording_length(bytes: usize) -> Duration {
    Duration::from_micros(20).saturating_add(Duration::from_nanos(bytes as u64 * 3))
}

/// Estimates copying a tensor to the memory of another engine.
pub fn copy(tensor_bytes: usize) -> Duration {
    Duration::from_nanos(tensor_bytes as u64 / 2)
}

fn nanos(count: u64, each: u64) -> Duration {
    Duration::from_nanos(count.saturating_mul(each))
}
