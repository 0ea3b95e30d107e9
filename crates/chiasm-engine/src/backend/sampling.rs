//! A job's sampling as the engine is told it.

use chiasm_backend::{Repetition, Sampling};

use crate::wire::{RepetitionDetection, SamplingParams, StructuredOutputs, XGRAMMAR};

/// The engine's parameters for one continuation. An engine request has one, so `n` becomes so many requests.
pub(super) fn params(sampling: &Sampling, choice: usize) -> SamplingParams {
    SamplingParams {
        presence_penalty: sampling.presence_penalty,
        frequency_penalty: sampling.frequency_penalty,
        repetition_penalty: sampling.repetition_penalty,
        temperature: sampling.temperature,
        top_p: sampling.top_p,
        top_k: sampling.top_k,
        min_p: sampling.min_p,
        // vLLM does so for parallel sampling, so that the continuations differ and are repeatable.
        seed: sampling.seed.map(|seed| seed.wrapping_add(choice as i64)),
        stop_token_ids: sampling.stop_token_ids.clone(),
        ignore_eos: sampling.ignore_eos,
        max_tokens: sampling.max_tokens,
        min_tokens: sampling.min_tokens,
        logprobs: sampling.logprobs.and_then(|top| i32::try_from(top).ok()),
        prompt_logprobs: sampling.prompt_logprobs.and_then(|top| i32::try_from(top).ok()),
        skip_reading_prefix_cache: sampling.skip_reading_prefix_cache.then_some(true),
        eos_token_id: sampling.eos_token,
        all_stop_token_ids: sampling.all_stop_token_ids.clone(),
        logit_bias: sampling.logit_bias.clone(),
        allowed_token_ids: sampling.allowed_token_ids.clone(),
        bad_words: sampling.bad_words.clone(),
        structured_outputs: sampling.structured.as_ref().map(|structured| StructuredOutputs {
            constraint: structured.constraint.clone(),
            backend: XGRAMMAR.to_owned(),
        }),
        thinking_token_budget: sampling.thinking_budget,
        repetition_detection: sampling.repetition.map(|Repetition { max_pattern, min_pattern, count }| {
            RepetitionDetection { max_pattern_size: max_pattern, min_pattern_size: min_pattern, min_count: count }
        }),
        extra_args: None,
    }
}
