//! Converts a job to the body of a request to `/inference/v1/generate` of vLLM 0.31 to 0.33
//! (`GenerateRequest` in `entrypoints/scale_out/token_in_token_out/protocol.py`).

use std::collections::BTreeMap;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use chiasm_backend::{
    Constraint, EncodedItem, Input, Job, JobError, JobItem, ReasoningHints, Repetition, RequestId,
    Sampling, Supports, TraceContext,
};
use chiasm_types::{Modality, TokenId};
use reqwest::header::{HeaderMap, HeaderName, HeaderValue};
use serde::{Serialize, Serializer};
use serde_json::value::RawValue;
use serde_json::{Map, Value, json};

/// The assumed number of bytes of a token id in a body, with its comma.
const BYTES_PER_TOKEN: usize = 7;
/// The capacity for all other fields of a usual body.
const OTHER_FIELDS_BYTES: usize = 1 << 10;

#[derive(Serialize)]
struct Generate<'a> {
    #[serde(serialize_with = "write_token_ids")]
    token_ids: &'a [TokenId],
    sampling_params: SamplingParams<'a>,
    output_mode: &'static str,
    stream: bool,
    stream_options: StreamOptions,
    /// Requests the expanded prompt in the answer.
    return_token_ids: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    cache_salt: Option<&'a str>,
    #[serde(skip_serializing_if = "is_default")]
    priority: i64,
    #[serde(skip_serializing_if = "Option::is_none")]
    reasoning_ended: Option<bool>,
    #[serde(skip_serializing_if = "Option::is_none")]
    reasoning_parser_kwargs: Option<Value>,
}

type TokenIdNumber = u32;

#[derive(Serialize)]
struct StreamOptions {
    include_usage: bool,
}

/// The subset of vLLM's `SamplingParams` that a request may have.
#[derive(Serialize)]
struct SamplingParams<'a> {
    n: usize,
    max_tokens: u32,
    min_tokens: u32,
    temperature: f64,
    top_p: f64,
    top_k: i32,
    min_p: f64,
    presence_penalty: f64,
    frequency_penalty: f64,
    repetition_penalty: f64,
    ignore_eos: bool,
    /// Always `false`: this frontend detokenizes.
    detokenize: bool,
    stop_token_ids: Vec<TokenIdNumber>,
    #[serde(skip_serializing_if = "Option::is_none")]
    seed: Option<i64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    logprobs: Option<u32>,
    #[serde(skip_serializing_if = "is_default")]
    skip_reading_prefix_cache: bool,
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    logit_bias: BTreeMap<TokenIdNumber, f64>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    allowed_token_ids: Vec<TokenIdNumber>,
    #[serde(skip_serializing_if = "Option::is_none")]
    structured_outputs: Option<StructuredOutputs<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    thinking_token_budget: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    repetition_detection: Option<RepetitionDetection>,
}

#[derive(Serialize)]
#[serde(rename_all = "snake_case")]
enum StructuredOutputs<'a> {
    Json(&'a str),
    JsonObject(bool),
    Regex(&'a str),
    Grammar(&'a str),
    StructuralTag(&'a str),
}

#[derive(Serialize)]
struct RepetitionDetection {
    max_pattern_size: u32,
    min_pattern_size: u32,
    min_count: u32,
}

pub(crate) fn is_default<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}

/// Builds the body of a job's request and the headers that identify the request.
///
/// # Errors
/// Returns [`JobError::Refused`] with the field that `vllm serve` does not support.
pub(crate) fn build(job: &Job) -> Result<(Vec<u8>, HeaderMap), JobError> {
    let Job {
        id,
        input,
        media,
        sampling,
        adapter,
        cache_salt,
        priority,
        trace,
        reasoning: ReasoningHints { is_over, variables },
        // A server computes whole requests, so its worker has no role.
        stage: _,
        embedded: _,
    } = job;
    let tokens = match input {
        Input::Marked { tokens, .. } => tokens,
        // Without items both forms are equal.
        Input::Tokens(tokens) if media.is_empty() => tokens,
        Input::Tokens(_) | Input::Messages(_) => {
            return Err(refused("input", "must be token ids with a marker for each item"));
        }
    };
    if adapter.is_some() {
        return Err(refused("model", "is a LoRA adapter, which upstream servers do not support"));
    }
    let has_variables = !variables.is_empty();
    let variables = || variables.iter().map(|&(name, value)| (name.to_owned(), Value::Bool(value)));
    let body = Generate {
        token_ids: tokens,
        sampling_params: sampling_params(sampling)?,
        output_mode: "tokens",
        stream: true,
        stream_options: StreamOptions { include_usage: true },
        return_token_ids: !media.is_empty(),
        cache_salt: cache_salt.as_deref(),
        priority: *priority,
        reasoning_ended: is_over.then_some(true),
        reasoning_parser_kwargs: has_variables
            .then(|| json!({"chat_template_kwargs": variables().collect::<Map<String, Value>>()})),
    };
    let images = media
        .iter()
        .map(|item| Ok((encoded(item)?, item.name())))
        .collect::<Result<Vec<_>, JobError>>()?;
    let image_bytes: usize =
        images.iter().map(|(image, _)| image.bytes.len() / 3 * 4 + OTHER_FIELDS_BYTES).sum();
    let mut written =
        Vec::with_capacity(BYTES_PER_TOKEN * tokens.len() + image_bytes + OTHER_FIELDS_BYTES);
    // The body has only strings and numbers from this process, so serializing does not fail.
    serde_json::to_writer(&mut written, &body)
        .map_err(|error| refused("body", &error.to_string()))?;
    if !images.is_empty() {
        add_images(&mut written, &images);
    }
    Ok((written, headers(id, trace.as_ref())))
}

/// Appends images to the serialized object. They are written without escaping, which would take as
/// long as all the rest: neither their types nor their names have characters to escape.
fn add_images(body: &mut Vec<u8>, images: &[(EncodedItem, String)]) {
    body.pop();
    let mut before: &[u8] = br#","content_parts":["#;
    for (EncodedItem { bytes, media_type, .. }, name) in images {
        body.extend_from_slice(before);
        before = b",";
        body.extend_from_slice(br#"{"type":"image_url","url":"data:"#);
        body.extend_from_slice(media_type.as_bytes());
        body.extend_from_slice(b";base64,");
        body.extend_from_slice(STANDARD.encode(bytes).as_bytes());
        body.extend_from_slice(br#"","uuid":""#);
        body.extend_from_slice(name.as_bytes());
        body.extend_from_slice(br#""}"#);
    }
    body.extend_from_slice(b"]}");
}

pub(crate) fn refused(field: &str, message: &str) -> JobError {
    JobError::Refused { field: field.to_owned(), message: message.to_owned() }
}

fn write_token_ids<S: Serializer>(tokens: &[TokenId], serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_seq(tokens.iter().map(|token| token.0))
}

pub(crate) fn token_ids(tokens: &[TokenId]) -> Vec<TokenIdNumber> {
    tokens.iter().map(|token| token.0).collect()
}

/// Returns an image's file as a data URL.
///
/// # Errors
/// Returns [`JobError::Refused`] as [`encoded`] does.
pub(crate) fn data_url(item: &JobItem) -> Result<String, JobError> {
    let EncodedItem { bytes, media_type, .. } = encoded(item)?;
    let mut url = format!("data:{media_type};base64,");
    STANDARD.encode_string(&bytes, &mut url);
    Ok(url)
}

/// Returns an image's file.
///
/// # Errors
/// Returns [`JobError::Refused`] for items that such servers would process in another way.
fn encoded(item: &JobItem) -> Result<EncodedItem, JobError> {
    let unusable = |why: &str| refused("messages", why);
    if item.modality != Modality::Image {
        return Err(unusable(
            "has an item that is not an image; upstream servers only support images",
        ));
    }
    let encoded = item.source.encoded();
    let encoded =
        encoded.ok_or_else(|| unusable("has an image that only vLLM's own processor supports"))?;
    // A request has no field for these settings.
    if !is_empty_object(&encoded.processor_kwargs) {
        return Err(refused("mm_processor_kwargs", "is not supported for upstream servers"));
    }
    Ok(encoded)
}

fn is_empty_object(text: &str) -> bool {
    text.is_empty()
        || serde_json::from_str::<BTreeMap<String, Box<RawValue>>>(text)
            .is_ok_and(|map| map.is_empty())
}

/// The optional parts of jobs that a server supports in token mode.
pub(crate) const SUPPORTS: Supports = Supports {
    bad_words: false,
    prompt_logprobs: false,
    processor_kwargs: false,
    logit_bias: true,
    allowed_token_ids: true,
    thinking_budget: true,
    repetition: true,
    skip_reading_prefix_cache: true,
    media: true,
    cache_salt: true,
};

fn sampling_params(sampling: &Sampling) -> Result<SamplingParams<'_>, JobError> {
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
        // The server derives these two from its tokenizer.
        eos_token: _,
        all_stop_token_ids: _,
        ignore_eos,
        logprobs,
        prompt_logprobs,
        skip_reading_prefix_cache,
        ref logit_bias,
        ref allowed_token_ids,
        ref bad_words,
        ref structured,
        thinking_budget,
        repetition,
    } = *sampling;
    if !bad_words.is_empty() {
        return Err(refused("bad_words", "is not supported for upstream servers"));
    }
    if prompt_logprobs.is_some() {
        return Err(refused(
            "prompt_logprobs",
            "is not available from upstream servers, which stream their answers",
        ));
    }
    Ok(SamplingParams {
        n,
        max_tokens,
        min_tokens,
        temperature,
        top_p,
        top_k,
        min_p,
        presence_penalty,
        frequency_penalty,
        repetition_penalty,
        ignore_eos,
        detokenize: false,
        stop_token_ids: token_ids(stop_token_ids),
        seed,
        logprobs,
        skip_reading_prefix_cache,
        logit_bias: logit_bias.iter().map(|&(token, bias)| (token.0, bias)).collect(),
        allowed_token_ids: token_ids(allowed_token_ids),
        structured_outputs: structured.as_ref().map(|structured| match &structured.constraint {
            Constraint::JsonSchema(schema) => StructuredOutputs::Json(schema),
            Constraint::JsonObject => StructuredOutputs::JsonObject(true),
            Constraint::Regex(regex) => StructuredOutputs::Regex(regex),
            Constraint::Grammar(grammar) => StructuredOutputs::Grammar(grammar),
            Constraint::StructuralTag(tag) => StructuredOutputs::StructuralTag(tag),
        }),
        thinking_token_budget: thinking_budget,
        repetition_detection: repetition.map(|Repetition { max_pattern, min_pattern, count }| {
            RepetitionDetection {
                max_pattern_size: max_pattern,
                min_pattern_size: min_pattern,
                min_count: count,
            }
        }),
    })
}

/// Returns the headers with the request's id, which connects both logs, and its trace.
pub(crate) fn headers(id: &RequestId, trace: Option<&TraceContext>) -> HeaderMap {
    let mut headers = HeaderMap::new();
    let trace = trace.into_iter().flat_map(|trace| trace.headers());
    for (name, value) in trace.chain([("x-request-id", id.as_str())]) {
        // The ids were validated when the request arrived.
        if let (Ok(name), Ok(value)) = (HeaderName::try_from(name), HeaderValue::from_str(value)) {
            headers.insert(name, value);
        }
    }
    headers
}
