//! A job as the bodies of requests to `/generate` of SGLang 0.5.23 (`GenerateReqInput` in
//! `managers/io_struct.py`, `SamplingParams` in `sampling/sampling_params.py`), one for each
//! continuation.
//!
//! Each continuation is a request of its own, as it has to have a seed of its own, can be stopped
//! alone, and as a server that is asked for several computes the prompt in a request of its own
//! first: what it then tells to be cached is no news of what was.

use std::collections::BTreeMap;

use chiasm_backend::{Constraint, Input, Job, JobError, Sampling, Supports};
use chiasm_types::TokenId;
use serde::Serialize;

use super::Manner;
use crate::request::{data_url, is_default, numbers, refused};

#[derive(Serialize)]
struct Generate<'a> {
    rid: String,
    input_ids: &'a [u32],
    #[serde(skip_serializing_if = "Vec::is_empty")]
    image_data: Vec<String>,
    /// Of which it uses the low 64 bits.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    mm_hashes: Vec<String>,
    sampling_params: SamplingParams<'a>,
    stream: bool,
    #[serde(skip_serializing_if = "is_default")]
    return_logprob: bool,
    #[serde(skip_serializing_if = "is_default")]
    top_logprobs_num: u32,
    /// Whether to tell what the prompt has become, with each event.
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

/// How a job is asked for.
#[derive(Clone, Copy, Debug)]
pub(super) struct Asking {
    /// As in [`Manner`].
    pub(super) lower_is_earlier: Option<bool>,
    /// What names the job among all that the server is asked: an id that a client has given may be
    /// that of another request too.
    pub(super) mark: u32,
    /// Whether to ask what the prompt has become.
    pub(super) tells_prompt: bool,
}

/// The body of the request for one of the job's continuations.
///
/// # Errors
/// [`JobError::Refused`] names what such a server can't be asked for.
pub(super) fn of(job: &Job, asking: Asking, choice: usize) -> Result<Vec<u8>, JobError> {
    let Asking { lower_is_earlier, mark, tells_prompt } = asking;
    let Job {
        id,
        // In `tokens`.
        input: _,
        media,
        sampling,
        // Refused by `check`.
        adapter: _,
        cache_salt,
        priority,
        // The trace is in headers.
        trace: _,
        // A request has no place for it.
        reasoning: _,
        // A server computes whole requests: its worker has no role.
        stage: _,
        embedded: _,
    } = job;
    let body = Generate {
        rid: format!("{id}_{mark:08x}_{choice}"),
        input_ids: &numbers(tokens(job)?),
        image_data: media.iter().map(data_url).collect::<Result<_, _>>()?,
        mm_hashes: media.iter().map(|item| item.name()).collect(),
        sampling_params: sampling_params(sampling, choice),
        stream: true,
        return_logprob: sampling.logprobs.is_some(),
        top_logprobs_num: sampling.logprobs.unwrap_or(0),
        return_prompt_token_ids: tells_prompt,
        cache_salt: cache_salt.as_deref(),
        priority: lower_is_earlier.map(|lower_is_earlier| {
            if lower_is_earlier { *priority } else { priority.saturating_neg() }
        }),
    };
    // Strings and numbers of ours: nothing in it can fail.
    serde_json::to_vec(&body).map_err(|error| refused("body", &error.to_string()))
}

/// The prompt, with one marker for each image. With more of them, as in one that is expanded
/// already, a server may wait for ever: it looks for more images than there are.
fn tokens(job: &Job) -> Result<&[TokenId], JobError> {
    let (tokens, expanded) = match &job.input {
        Input::Marked { tokens, expanded } => (tokens, expanded),
        // Without items both are the same.
        Input::Tokens(tokens) if job.media.is_empty() => return Ok(tokens),
        Input::Tokens(_) | Input::Messages(_) => {
            return Err(refused(
                "input",
                "must be token ids with a marker for each item: the server takes nothing else",
            ));
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
    let is_marked = match tokens.len() + before == expanded.len() {
        true => tokens.iter().filter(is_marker).count() == job.media.len(),
        // Where a marker becomes more than the tokens of its image, what it is is not seen from
        // here.
        false => tokens.len() < expanded.len(),
    };
    match is_marked {
        true => Ok(tokens),
        false => Err(refused(
            "messages",
            "have another number of the model's image tokens than of images",
        )),
    }
}

/// The optional parts of jobs that SGLang supports. Models without images lack media too.
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

/// Refuses what the server would ignore.
///
/// # Errors
/// [`JobError::Refused`] names it.
pub(super) fn check(job: &Job, manner: &Manner) -> Result<(), JobError> {
    if job.adapter.is_some() {
        return Err(refused(
            "model",
            "is an adapter, and none are used at servers that somebody else has started",
        ));
    }
    if let Some(why) = manner.without_images.as_ref().filter(|_| !job.media.is_empty()) {
        return Err(refused("messages", &format!("have an image, and SGLang {why}")));
    }
    match SUPPORTS.first_missing(job.sampling.needs()) {
        Some(field) => Err(refused(field, "can't be asked of SGLang")),
        None => Ok(()),
    }
}

fn sampling_params(sampling: &Sampling, choice: usize) -> SamplingParams<'_> {
    let Sampling {
        // A request each.
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
        // The server has the tokenizer, and knows these two itself.
        eos_token: _,
        all_stop_token_ids: _,
        ignore_eos,
        // Beside the parameters.
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
        stop_token_ids: numbers(stop_token_ids),
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
