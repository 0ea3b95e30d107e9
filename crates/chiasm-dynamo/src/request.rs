//! A job as what a worker is asked (`PreprocessedRequest` of Dynamo 1.6,
//! `protocols/common/preprocessor.rs`).

use std::collections::BTreeMap;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use chiasm_backend::{Constraint, Input, Job, JobError, JobItem, Sampling, Structured, Supports};
use chiasm_types::{Modality, TokenId};
use serde::Serialize;
use serde_json::value::RawValue;
use serde_json::{Value, json};

use crate::tensors::{ExtraArgs, Packed};

#[derive(Serialize)]
struct Request<'a> {
    model: &'a str,
    token_ids: Vec<u32>,
    stop_conditions: StopConditions,
    sampling_options: SamplingOptions,
    output_options: OutputOptions,
    eos_token_ids: Vec<u32>,
    annotations: [&'static str; 0],
    #[serde(skip_serializing_if = "Option::is_none")]
    routing: Option<Routing>,
    /// Media items by their kind, in the order of their markers.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    multi_modal_data: BTreeMap<&'static str, Vec<Medium>>,
    /// What their blocks are known by.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    multi_modal_uuids: BTreeMap<&'static str, Vec<String>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    extra_args: Option<ExtraArgs<'a>>,
}

#[derive(Serialize)]
enum Medium {
    Url(String),
}

/// The kind of images.
const IMAGES: &str = "image_url";

#[derive(Serialize)]
struct StopConditions {
    max_tokens: u32,
    min_tokens: u32,
    ignore_eos: bool,
    /// Those of the request and the end of text.
    stop_token_ids_hidden: Vec<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    max_thinking_tokens: Option<u32>,
}

#[derive(Serialize)]
struct SamplingOptions {
    n: u8,
    temperature: f64,
    top_p: f64,
    top_k: i32,
    min_p: f64,
    presence_penalty: f64,
    frequency_penalty: f64,
    repetition_penalty: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    seed: Option<i64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    guided_decoding: Option<Value>,
}

#[derive(Serialize)]
struct OutputOptions {
    #[serde(skip_serializing_if = "Option::is_none")]
    logprobs: Option<u32>,
    skip_special_tokens: bool,
}

#[derive(Serialize)]
struct Routing {
    priority: i32,
}

/// The bodies of one request for each continuation of a job: workers tell what was cached for the
/// first of several alone. Images are part of them for a worker that takes some, with their tensors
/// where these are packed.
///
/// # Errors
/// [`JobError::Refused`] names what no worker of Dynamo can be asked for, or not all of them.
pub(crate) fn of(
    job: &Job,
    model: &str,
    takes_images: bool,
    packed: Option<&Packed>,
) -> Result<Vec<Vec<u8>>, JobError> {
    let tokens = taken(job, takes_images)?;
    let Job {
        input,
        media,
        sampling,
        priority,
        // Beside the request.
        id: _,
        // A request has no place for these.
        trace: _,
        reasoning: _,
        // Refused by `taken`.
        adapter: _,
        cache_salt: _,
        // A worker computes whole requests, or has others of Dynamo help: it has no role here.
        stage: _,
        embedded: _,
    } = job;
    let Sampling {
        n,
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
        eos_token,
        // The worker makes them of the others.
        all_stop_token_ids: _,
        ignore_eos,
        logprobs,
        ref structured,
        thinking_budget,
        // Refused by `taken`.
        prompt_logprobs: _,
        skip_reading_prefix_cache: _,
        logit_bias: _,
        allowed_token_ids: _,
        bad_words: _,
        repetition: _,
    } = *sampling;
    let numbers = |tokens: &[TokenId]| tokens.iter().map(|token| token.0).collect::<Vec<u32>>();
    let eos = eos_token.map(|token| token.0);
    let urls: Vec<Medium> = media.iter().map(image).collect::<Result<_, _>>()?;
    let uuids: Vec<String> = media.iter().map(JobItem::name).collect();
    let has_images = !media.is_empty();
    let expanded = match input {
        Input::Marked { expanded, .. } if packed.is_some() => numbers(expanded),
        _ => Vec::new(),
    };
    let mut request = Request {
        model,
        token_ids: numbers(tokens),
        stop_conditions: StopConditions {
            max_tokens,
            min_tokens,
            ignore_eos,
            stop_token_ids_hidden: numbers(stop_token_ids).into_iter().chain(eos).collect(),
            max_thinking_tokens: thinking_budget,
        },
        sampling_options: SamplingOptions {
            n: 1,
            temperature,
            top_p,
            // 0 is all tokens here, and not to all engines.
            top_k: if top_k == 0 { -1 } else { top_k },
            min_p,
            presence_penalty,
            frequency_penalty,
            repetition_penalty,
            // Of each continuation its own.
            seed: None,
            guided_decoding: structured.as_ref().map(guided_decoding).transpose()?,
        },
        output_options: OutputOptions { logprobs, skip_special_tokens: false },
        eos_token_ids: eos.into_iter().collect(),
        annotations: [],
        routing: routing(*priority)?,
        multi_modal_data: has_images.then_some((IMAGES, urls)).into_iter().collect(),
        multi_modal_uuids: has_images.then_some((IMAGES, uuids)).into_iter().collect(),
        extra_args: packed
            .filter(|_| !expanded.is_empty())
            .and_then(|packed| packed.told(job, &expanded)),
    };
    (0..n)
        .map(|choice| {
            request.sampling_options.seed = seed.map(|seed| seed.wrapping_add(choice as i64));
            // Strings and numbers of ours: nothing in it can fail.
            rmp_serde::to_vec_named(&request).map_err(|error| refused("body", &error.to_string()))
        })
        .collect()
}

/// Returns the priority as workers expect it: there the higher is the more urgent.
fn routing(priority: i64) -> Result<Option<Routing>, JobError> {
    if priority == 0 {
        return Ok(None);
    }
    let number = priority.checked_neg().and_then(|priority| i32::try_from(priority).ok());
    let priority =
        number.ok_or_else(|| refused("priority", "is of 32 bits for a worker of Dynamo"))?;
    Ok(Some(Routing { priority }))
}

/// Returns a constraint in Dynamo's words.
fn guided_decoding(structured: &Structured) -> Result<Value, JobError> {
    let Structured { constraint, field } = structured;
    let json = |text: &str| {
        let value: Result<&RawValue, _> = serde_json::from_str(text);
        let value = value.and_then(|raw| serde_json::from_str::<Value>(raw.get()));
        value.map_err(|error| refused(field, &format!("is no JSON: {error}")))
    };
    Ok(match constraint {
        Constraint::JsonSchema(schema) => json!({"json": json(schema)?}),
        // Not all engines know a word for it.
        Constraint::JsonObject => json!({"json": {"type": "object"}}),
        Constraint::Regex(regex) => json!({"regex": &**regex}),
        Constraint::Grammar(grammar) => json!({"grammar": &**grammar}),
        Constraint::StructuralTag(tag) => json!({"structural_tag": json(tag)?}),
    })
}

fn refused(field: &str, message: &str) -> JobError {
    JobError::Refused { field: field.to_owned(), message: message.to_owned() }
}

/// An image as its file, which the worker reads.
fn image(item: &JobItem) -> Result<Medium, JobError> {
    let unusable = |why: &str| refused("messages", why);
    if item.modality != Modality::Image {
        return Err(unusable(
            "has an item that is no image: workers of Dynamo are given images alone",
        ));
    }
    let encoded = item.source.encoded();
    let encoded =
        encoded.ok_or_else(|| unusable("has an image that only vLLM's own processor can make"))?;
    if !matches!(encoded.processor_kwargs.trim(), "" | "{}") {
        return Err(refused("mm_processor_kwargs", "can't be passed on to workers of Dynamo"));
    }
    let mut url = format!("data:{};base64,", encoded.media_type);
    STANDARD.encode_string(&encoded.bytes, &mut url);
    Ok(Medium::Url(url))
}

/// The optional parts of jobs that a request to a worker has a place for. Workers for text alone
/// lack media too.
pub(crate) const SUPPORTS: Supports = Supports {
    bad_words: false,
    prompt_logprobs: false,
    processor_kwargs: false,
    logit_bias: false,
    allowed_token_ids: false,
    thinking_budget: true,
    repetition: false,
    skip_reading_prefix_cache: false,
    media: true,
    cache_salt: false,
};

/// The tokens that a worker is given, if it can be asked for a job at all.
///
/// # Errors
/// [`JobError::Refused`] names what no worker of Dynamo can be asked for, or not all of them.
pub(crate) fn taken(job: &Job, takes_images: bool) -> Result<&[TokenId], JobError> {
    let tokens = match &job.input {
        Input::Marked { tokens, .. } | Input::Tokens(tokens) if job.media.is_empty() => tokens,
        Input::Marked { tokens, .. } if takes_images => tokens,
        Input::Marked { .. } | Input::Tokens(_) => {
            return Err(refused(
                "messages",
                "has media items, and these workers of Dynamo are given text alone",
            ));
        }
        Input::Messages(_) => {
            return Err(refused(
                "input",
                "must be token ids: a worker of Dynamo takes nothing else",
            ));
        }
    };
    if job.adapter.is_some() {
        return Err(refused("model", "is an adapter, and none are used at workers of Dynamo"));
    }
    if job.cache_salt.is_some() {
        return Err(refused("cache_salt", "is not known to all workers of Dynamo"));
    }
    match SUPPORTS.first_missing(job.sampling.needs()) {
        Some(field) => Err(refused(field, "can't be passed on to workers of Dynamo")),
        None => Ok(tokens),
    }
}
