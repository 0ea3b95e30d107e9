//! Converts a job to requests to a worker (`PreprocessedRequest` of Dynamo 1.6,
//! `protocols/common/preprocessor.rs`).

use std::collections::BTreeMap;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use chiasm_backend::{Constraint, Input, Job, JobError, JobItem, Sampling, Structured, Supports};
use chiasm_types::{Modality, TokenId};
use serde::Serialize;
use serde_json::value::RawValue;
use serde_json::{Value, json};

use crate::tensors::{ExtraArgs, PackedTensors};

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
    /// Media items by kind, in the order of their markers.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    multi_modal_data: BTreeMap<&'static str, Vec<Medium>>,
    /// The identities of the items, which enter the hashes of blocks.
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
    /// The stop tokens of the request, and the end-of-sequence token.
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

/// Builds the bodies of one request for each choice of a job, because workers report cached tokens
/// only for the first of several choices.
///
/// Images are included for a worker that accepts images, with their tensors if `packed` is given.
///
/// # Errors
/// Returns [`JobError::Refused`] with the field that workers of Dynamo, or some of them, do not
/// support.
pub(crate) fn build(
    job: &Job,
    model: &str,
    takes_images: bool,
    packed: Option<&PackedTensors>,
) -> Result<Vec<Vec<u8>>, JobError> {
    let tokens = supported_tokens(job, takes_images)?;
    let Job {
        input,
        media,
        sampling,
        priority,
        // Sent beside the body.
        id: _,
        // A request has no field for these.
        trace: _,
        reasoning: _,
        // Refused by `supported_tokens`.
        adapter: _,
        cache_salt: _,
        // A worker computes whole requests, possibly with the help of other workers of Dynamo. It
        // has no role here.
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
        // The worker derives these from the other fields.
        all_stop_token_ids: _,
        ignore_eos,
        logprobs,
        ref structured,
        thinking_budget,
        // Refused by `supported_tokens`.
        prompt_logprobs: _,
        skip_reading_prefix_cache: _,
        logit_bias: _,
        allowed_token_ids: _,
        bad_words: _,
        repetition: _,
    } = *sampling;
    let token_ids = |tokens: &[TokenId]| tokens.iter().map(|token| token.0).collect::<Vec<u32>>();
    let eos = eos_token.map(|token| token.0);
    let urls: Vec<Medium> = media.iter().map(image).collect::<Result<_, _>>()?;
    let uuids: Vec<String> = media.iter().map(JobItem::name).collect();
    let has_images = !media.is_empty();
    let expanded = match input {
        Input::Marked { expanded, .. } if packed.is_some() => token_ids(expanded),
        _ => Vec::new(),
    };
    let mut request = Request {
        model,
        token_ids: token_ids(tokens),
        stop_conditions: StopConditions {
            max_tokens,
            min_tokens,
            ignore_eos,
            stop_token_ids_hidden: token_ids(stop_token_ids).into_iter().chain(eos).collect(),
            max_thinking_tokens: thinking_budget,
        },
        sampling_options: SamplingOptions {
            n: 1,
            temperature,
            top_p,
            // 0 stands for all tokens here, but not in all engines.
            top_k: if top_k == 0 { -1 } else { top_k },
            min_p,
            presence_penalty,
            frequency_penalty,
            repetition_penalty,
            // Each choice has its own seed.
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
            .and_then(|packed| packed.extra_args(job, &expanded)),
    };
    (0..n)
        .map(|choice| {
            request.sampling_options.seed = seed.map(|seed| seed.wrapping_add(choice as i64));
            // The body has only strings and numbers from this process, so serializing does not
            // fail.
            rmp_serde::to_vec_named(&request).map_err(|error| refused("body", &error.to_string()))
        })
        .collect()
}

/// Returns the priority as workers expect it: higher values are more urgent.
fn routing(priority: i64) -> Result<Option<Routing>, JobError> {
    if priority == 0 {
        return Ok(None);
    }
    let number = priority.checked_neg().and_then(|priority| i32::try_from(priority).ok());
    let priority =
        number.ok_or_else(|| refused("priority", "must fit in 32 bits for Dynamo workers"))?;
    Ok(Some(Routing { priority }))
}

/// Converts a constraint to Dynamo's form.
fn guided_decoding(structured: &Structured) -> Result<Value, JobError> {
    let Structured { constraint, field } = structured;
    let json = |text: &str| {
        let value: Result<&RawValue, _> = serde_json::from_str(text);
        let value = value.and_then(|raw| serde_json::from_str::<Value>(raw.get()));
        value.map_err(|error| refused(field, &format!("is not valid JSON: {error}")))
    };
    Ok(match constraint {
        Constraint::JsonSchema(schema) => json!({"json": json(schema)?}),
        // Not all engines have a keyword for any JSON object.
        Constraint::JsonObject => json!({"json": {"type": "object"}}),
        Constraint::Regex(regex) => json!({"regex": &**regex}),
        Constraint::Grammar(grammar) => json!({"grammar": &**grammar}),
        Constraint::StructuralTag(tag) => json!({"structural_tag": json(tag)?}),
    })
}

fn refused(field: &str, message: &str) -> JobError {
    JobError::Refused { field: field.to_owned(), message: message.to_owned() }
}

/// Returns an image as its file, which the worker decodes.
fn image(item: &JobItem) -> Result<Medium, JobError> {
    let unusable = |why: &str| refused("messages", why);
    if item.modality != Modality::Image {
        return Err(unusable(
            "has an item that is not an image; Dynamo workers only support images",
        ));
    }
    let encoded = item.source.encoded();
    let encoded =
        encoded.ok_or_else(|| unusable("has an image that only vLLM's own processor supports"))?;
    if !matches!(encoded.processor_kwargs.trim(), "" | "{}") {
        return Err(refused("mm_processor_kwargs", "is not supported for Dynamo workers"));
    }
    let mut url = format!("data:{};base64,", encoded.media_type);
    STANDARD.encode_string(&encoded.bytes, &mut url);
    Ok(Medium::Url(url))
}

/// The optional parts of jobs that a request to a worker has a field for. Workers for text also
/// lack media.
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

/// Returns the tokens for a worker, if workers support the job.
///
/// # Errors
/// Returns [`JobError::Refused`] with the field that workers of Dynamo, or some of them, do not
/// support.
pub(crate) fn supported_tokens(job: &Job, takes_images: bool) -> Result<&[TokenId], JobError> {
    let tokens = match &job.input {
        Input::Marked { tokens, .. } | Input::Tokens(tokens) if job.media.is_empty() => tokens,
        Input::Marked { tokens, .. } if takes_images => tokens,
        Input::Marked { .. } | Input::Tokens(_) => {
            return Err(refused(
                "messages",
                "has media items, but these Dynamo workers only accept text",
            ));
        }
        Input::Messages(_) => {
            return Err(refused("input", "must be token ids for Dynamo workers"));
        }
    };
    if job.adapter.is_some() {
        return Err(refused("model", "is a LoRA adapter, which Dynamo workers do not support"));
    }
    if job.cache_salt.is_some() {
        return Err(refused("cache_salt", "is not supported by all Dynamo workers"));
    }
    match SUPPORTS.first_missing(job.sampling.needs()) {
        Some(field) => Err(refused(field, "is not supported for Dynamo workers")),
        None => Ok(tokens),
    }
}
