//! Converts a job to the bodies of requests to `/generate` of SGLang 0.5.23 (`GenerateReqInput` in
//! `managers/io_struct.py`, `SamplingParams` in `sampling/sampling_params.py`), one for each
//! choice.
//!
//! Each choice is a request of its own, because it needs its own seed and can be stopped alone.
//! Besides, a server that gets one request for several choices first computes the prompt in a
//! separate request, so its report of cached tokens would say nothing about the cache before the
//! request.

use std::collections::BTreeMap;

use chiasm_backend::{Constraint, Input, Job, JobError, Sampling, Supports};
use chiasm_types::TokenId;
use serde::Serialize;

use super::RequestRules;
use crate::request::{data_url, is_default, refused, token_ids};

#[derive(Serialize)]
struct Generate<'a> {
    rid: String,
    input_ids: &'a [u32],
    #[serde(skip_serializing_if = "Vec::is_empty")]
    image_data: Vec<String>,
    /// The identities of the images; the server uses the low 64 bits.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    mm_hashes: Vec<String>,
    sampling_params: SamplingParams<'a>,
    stream: bool,
    #[serde(skip_serializing_if = "is_default")]
    return_logprob: bool,
    #[serde(skip_serializing_if = "is_default")]
    top_logprobs_num: u32,
    /// Requests the expanded prompt with each event.
    #[serde(skip_serializing_if = "is_default")]
    return_prompt_token_ids: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    cache_salt: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    priority: Option<i64>,
}

#[derive(Serialize)]
struct SamplingParams<'a> {
    max_new_tokens: u32,
    min_new_tokens: u32,
    temperature: f64,
    top_p: f64,
    top_k: i32,
    min_p: f64,
    presence_penalty: f64,
    frequency_penalty: f64,
    repetition_penalty: f64,
    ignore_eos: bool,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    stop_token_ids: Vec<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    sampling_seed: Option<i64>,
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    logit_bias: BTreeMap<u32, f64>,
    #[serde(flatten)]
    constraint: Option<Grammar<'a>>,
}

#[derive(Serialize)]
#[serde(rename_all = "snake_case")]
enum Grammar<'a> {
    JsonSchema(&'a str),
    Regex(&'a str),
    Ebnf(&'a str),
    StructuralTag(&'a str),
}

/// The settings of a job's requests that do not come from the job.
#[derive(Clone, Copy, Debug)]
pub(super) struct RequestOptions {
    /// The order of priorities, as in [`RequestRules`].
    pub(super) lower_is_earlier: Option<bool>,
    /// Makes the request id unique at the server. Ids from clients may repeat.
    pub(super) nonce: u32,
    /// Requests the expanded prompt.
    pub(super) returns_prompt: bool,
}

/// Builds the body of the request for one choice of the job.
///
/// # Errors
/// Returns [`JobError::Refused`] with the field that SGLang does not support.
pub(super) fn build(
    job: &Job,
    options: RequestOptions,
    choice: usize,
) -> Result<Vec<u8>, JobError> {
    let RequestOptions { lower_is_earlier, nonce, returns_prompt } = options;
    let Job {
        id,
        // Converted by `tokens`.
        input: _,
        media,
        sampling,
        // Refused by `check`.
        adapter: _,
        cache_salt,
        priority,
        // The trace is in the headers.
        trace: _,
        // A request has no field for hints about reasoning.
        reasoning: _,
        // A server computes whole requests, so its worker has no role.
        stage: _,
        embedded: _,
    } = job;
    let body = Generate {
        rid: format!("{id}_{nonce:08x}_{choice}"),
        input_ids: &token_ids(tokens(job)?),
        image_data: media.iter().map(data_url).collect::<Result<_, _>>()?,
        mm_hashes: media.iter().map(|item| item.name()).collect(),
        sampling_params: sampling_params(sampling, choice),
        stream: true,
        return_logprob: sampling.logprobs.is_some(),
        top_logprobs_num: sampling.logprobs.unwrap_or(0),
        return_prompt_token_ids: returns_prompt,
        cache_salt: cache_salt.as_deref(),
        priority: lower_is_earlier.map(|lower_is_earlier| {
            if lower_is_earlier { *priority } else { priority.saturating_neg() }
        }),
    };
    // The body has only strings and numbers from this process, so serializing does not fail.
    serde_json::to_vec(&body).map_err(|error| refused("body", &error.to_string()))
}

/// Returns the prompt with one marker for each image. With more markers, as in an expanded prompt,
/// a server may wait forever for images that do not exist.
fn tokens(job: &Job) -> Result<&[TokenId], JobError> {
    let (tokens, expanded) = match &job.input {
        Input::Marked { tokens, expanded } => (tokens, expanded),
        // Without items both forms are equal.
        Input::Tokens(tokens) if job.media.is_empty() => return Ok(tokens),
        Input::Tokens(_) | Input::Messages(_) => {
            return Err(refused("input", "must be token ids with a marker for each item"));
        }
    };
    let mut before = 0;
    let mut markers = Vec::with_capacity(job.media.len());
    for item in &*job.media {
        let place = item.placeholder.offset.checked_sub(before);
        markers.extend(place.and_then(|place| tokens.get(place)));
        before += item.placeholder.length.saturating_sub(1);
    }
    let is_marker = |token: &&TokenId| markers.first() == Some(token);
    let is_marked = if tokens.len() + before == expanded.len() {
        tokens.iter().filter(is_marker).count() == job.media.len()
    } else {
        // A marker expands to more than the tokens of its image, so it can't be recognized here.
        tokens.len() < expanded.len()
    };
    if !is_marked {
        return Err(refused("messages", "must have as many of the model's image tokens as images"));
    }
    Ok(tokens)
}

/// The optional parts of jobs that SGLang supports. Models without images also lack media.
pub(super) const SUPPORTS: Supports = Supports {
    bad_words: false,
    prompt_logprobs: false,
    processor_kwargs: false,
    logit_bias: true,
    allowed_token_ids: false,
    thinking_budget: false,
    repetition: false,
    skip_reading_prefix_cache: false,
    media: true,
    cache_salt: true,
};

/// Refuses a job with a part that the server would ignore.
///
/// # Errors
/// Returns [`JobError::Refused`] with the field.
pub(super) fn check(job: &Job, rules: &RequestRules) -> Result<(), JobError> {
    if job.adapter.is_some() {
        return Err(refused("model", "is a LoRA adapter, which upstream servers do not support"));
    }
    if let Some(why) = rules.without_images.as_ref().filter(|_| !job.media.is_empty()) {
        return Err(refused("messages", &format!("has an image, but SGLang {why}")));
    }
    match SUPPORTS.first_missing(job.sampling.needs()) {
        Some(field) => Err(refused(field, "is not supported by SGLang")),
        None => Ok(()),
    }
}

fn sampling_params(sampling: &Sampling, choice: usize) -> SamplingParams<'_> {
    let Sampling {
        // Each choice is a request of its own.
        n: _,
        max_tokens,
        min_tokens,
        temperature,
        top_p,
        top_k,
        min_p,
        seed,
        presence_penalty,
        frequency_penalty,
        repetition_penalty,
        ref stop_token_ids,
        // The server derives these two from its tokenizer.
        eos_token: _,
        all_stop_token_ids: _,
        ignore_eos,
        // A field of the request itself.
        logprobs: _,
        ref logit_bias,
        ref structured,
        // Refused by `check`.
        prompt_logprobs: _,
        skip_reading_prefix_cache: _,
        allowed_token_ids: _,
        bad_words: _,
        thinking_budget: _,
        repetition: _,
    } = *sampling;
    SamplingParams {
        max_new_tokens: max_tokens,
        min_new_tokens: min_tokens,
        temperature,
        top_p,
        top_k: if top_k == 0 { -1 } else { top_k },
        min_p,
        presence_penalty,
        frequency_penalty,
        repetition_penalty,
        ignore_eos,
        stop_token_ids: token_ids(stop_token_ids),
        sampling_seed: seed.map(|seed| seed.wrapping_add_unsigned(choice as u64)),
        logit_bias: logit_bias.iter().map(|&(token, bias)| (token.0, bias)).collect(),
        constraint: structured.as_ref().map(|structured| match &structured.constraint {
            Constraint::JsonSchema(schema) => Grammar::JsonSchema(schema),
            Constraint::JsonObject => Grammar::JsonSchema(r#"{"type": "object"}"#),
            Constraint::Regex(regex) => Grammar::Regex(regex),
            Constraint::Grammar(grammar) => Grammar::Ebnf(grammar),
            Constraint::StructuralTag(tag) => Grammar::StructuralTag(tag),
        }),
    }
}
