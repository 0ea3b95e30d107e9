//! Validation of requests that would break an engine instead of failing alone.
//!
//! vLLM checks requests in its own frontend, and its engine trusts them: a request that it can't
//! decode kills its input thread, and others kill its main loop. Measured with 0.32. The bounds of
//! sampling parameters are those of `SamplingParams._verify_args` in `vllm/sampling_params.py`,
//! which the engine runs while decoding.

use std::borrow::Cow;

use chiasm_types::{Placeholder, TokenId};

use super::{ClientOptions, CountedRows};
use crate::error::EngineError;
use crate::wire::{
    EngineCoreRequest, EngineReady, FieldKind, MmData, MmFeature, MmItem, SamplingParams,
    TensorData, WireTensor,
};

type Check = Result<(), EngineError>;

/// The fault of a placeholder. The texts complete "mm_position: …".
#[derive(Debug, thiserror::Error)]
enum PositionError {
    #[error("is empty")]
    Empty,
    #[error("{length} tokens from {offset} reach past the prompt of {prompt}")]
    PastPrompt { length: usize, offset: usize, prompt: usize },
    #[error("is_embed has {entries} entries for {tokens} tokens")]
    MaskLength { entries: usize, tokens: usize },
    #[error("is_embed leaves no token for the item")]
    EmptyMask,
    #[error("starts at {offset}, before the item in front of it ends at {end_of_last}")]
    Overlap { offset: usize, end_of_last: usize },
}

/// The fault of a tensor of an item. The texts complete "pixel_values: …".
#[derive(Debug, thiserror::Error)]
enum TensorError {
    #[error("has no tensors")]
    NoTensors,
    #[error("has no data")]
    NoData,
    #[error("has {rows} rows, but its slices end at {end:?}")]
    Slices { rows: usize, end: Option<i64> },
    #[error("has an unknown dtype {0:?} or too large a shape")]
    UnknownSize(Cow<'static, str>),
    #[error("has {given} bytes, shape {shape:?} of {dtype} needs {needed}")]
    Size { given: usize, shape: Vec<usize>, dtype: Cow<'static, str>, needed: usize },
    #[error("must be three integers in the message")]
    Grid,
    #[error("has {rows} rows, its grid is {grid:?}")]
    Rows { rows: usize, grid: Vec<i64> },
}

/// Checks a request, except for the uniqueness of its id.
pub(super) fn check(
    request: &EngineCoreRequest,
    engine: &EngineReady,
    options: &ClientOptions,
) -> Check {
    if request.request_id.is_empty() {
        return refuse("request_id", "must not be empty");
    }
    if !request.arrival_time.is_finite() {
        return refuse("arrival_time", "must be finite");
    }
    if request.client_index != 0 {
        return refuse("client_index", "must be 0, the engine has one output address");
    }
    if let Some(lora) = &request.lora_request {
        // Without LoRA the engine ignores the adapter, but caches the blocks under its name.
        if !engine.supports_lora {
            return refuse("lora_request", "LoRA is not enabled in the engine");
        }
        if let Err(error) = lora.validate() {
            return refuse("lora_request", error.to_string());
        }
    }
    check_prompt(request, engine, options)?;
    check_sampling(&request.sampling_params, options)?;
    check_features(request, options)
}

fn refuse(field: impl Into<String>, message: impl Into<String>) -> Check {
    Err(EngineError::invalid(field, message))
}

fn check_prompt(
    request: &EngineCoreRequest,
    engine: &EngineReady,
    options: &ClientOptions,
) -> Check {
    let len = request.prompt_token_ids.len();
    if len == 0 {
        return refuse("prompt_token_ids", "must not be empty");
    }
    // At exactly max_model_len the engine produces empty outputs without end.
    if len >= engine.max_model_len {
        let message =
            format!("has {len} tokens, the engine takes fewer than {}", engine.max_model_len);
        return refuse("prompt_token_ids", message);
    }
    check_tokens("prompt_token_ids", &request.prompt_token_ids, options)
}

fn check_tokens(field: &str, tokens: &[TokenId], options: &ClientOptions) -> Check {
    let Some(vocab_size) = options.vocab_size else {
        return Ok(());
    };
    match tokens.iter().copied().max() {
        Some(token) if token.0 >= vocab_size => {
            refuse(field, format!("token {token} is outside the vocabulary of {vocab_size}"))
        }
        _ => Ok(()),
    }
}

fn check_sampling(params: &SamplingParams, options: &ClientOptions) -> Check {
    // The comparisons are false for NaN.
    let bounds = [
        ("presence_penalty", (-2.0..=2.0).contains(&params.presence_penalty), "must be in [-2, 2]"),
        (
            "frequency_penalty",
            (-2.0..=2.0).contains(&params.frequency_penalty),
            "must be in [-2, 2]",
        ),
        (
            "repetition_penalty",
            params.repetition_penalty > 0.0 && params.repetition_penalty.is_finite(),
            "must be more than 0 and finite",
        ),
        ("temperature", (0.0..=2.0).contains(&params.temperature), "must be in [0, 2]"),
        ("top_p", params.top_p > 0.0 && params.top_p <= 1.0, "must be in (0, 1]"),
        ("top_k", params.top_k >= -1, "must be -1 or more"),
        ("min_p", (0.0..=1.0).contains(&params.min_p), "must be in [0, 1]"),
        ("max_tokens", params.max_tokens >= 1, "must be at least 1"),
        ("min_tokens", params.min_tokens <= params.max_tokens, "must not exceed max_tokens"),
        ("logprobs", params.logprobs.is_none_or(|count| count >= -1), "must be -1 or more"),
        (
            "prompt_logprobs",
            params.prompt_logprobs.is_none_or(|count| count >= -1),
            "must be -1 or more",
        ),
        (
            "logit_bias",
            params.logit_bias.iter().all(|(_, bias)| bias.is_finite()),
            "must be finite",
        ),
    ];
    if let Some((field, _, message)) = bounds.into_iter().find(|(_, holds, _)| !holds) {
        return refuse(format!("sampling_params.{field}"), message);
    }
    let biased: Vec<_> = params.logit_bias.iter().map(|&(token, _)| token).collect();
    for (field, ids) in [
        ("stop_token_ids", &params.stop_token_ids[..]),
        ("_all_stop_token_ids", &params.all_stop_token_ids),
        ("_eos_token_id", params.eos_token_id.as_slice()),
        ("allowed_token_ids", &params.allowed_token_ids),
        ("logit_bias", &biased),
    ] {
        check_tokens(&format!("sampling_params.{field}"), ids, options)?;
    }
    for word in &params.bad_words {
        if word.is_empty() {
            return refuse("sampling_params._bad_words_token_ids", "must have no empty word");
        }
        check_tokens("sampling_params._bad_words_token_ids", word, options)?;
    }
    Ok(())
}

fn check_features(request: &EngineCoreRequest, options: &ClientOptions) -> Check {
    let mut end_of_last = 0;
    let mut previous: Option<&Placeholder> = None;
    for (index, feature) in request.mm_features.iter().enumerate() {
        let field = |name: &str| format!("mm_features[{index}].{name}");
        let is_interleaved =
            previous.is_some_and(|previous| are_interleaved(previous, &feature.position));
        let free_from = if is_interleaved { 0 } else { end_of_last };
        let end = check_position(feature, request.prompt_token_ids.len(), free_from)
            .map_err(|error| EngineError::invalid(field("mm_position"), error.to_string()))?;
        end_of_last = end.max(end_of_last);
        previous = Some(&feature.position);
        if feature.identifier.is_empty() {
            return refuse(field("identifier"), "must not be empty");
        }
        match &feature.data {
            None if options.receiver_cache_bytes.is_none() => {
                return refuse(field("data"), "is missing, and the engine has no receiver cache");
            }
            None => {}
            Some(item) => {
                if let Err((name, error)) = check_tensors(item)
                    .and_then(|()| check_counted_rows(item, &options.counted_rows))
                {
                    return refuse(field(name), error.to_string());
                }
            }
        }
    }
    Ok(())
}

/// Returns `true` if two items have the same range and no token of it embeds both, as a video and
/// its sound in Qwen2.5-Omni.
fn are_interleaved(one: &Placeholder, other: &Placeholder) -> bool {
    let masks = one.is_embed.as_ref().zip(other.is_embed.as_ref());
    (one.offset, one.length) == (other.offset, other.length)
        && masks
            .is_some_and(|(one, other)| one.iter().zip(other).all(|(one, other)| !(*one && *other)))
}

/// Checks a placeholder and returns the end of its last embedding.
///
/// Placeholders may share tokens that embed no item: vLLM merges the line breaks around Gemma 3's
/// images into one token.
fn check_position(
    feature: &MmFeature,
    prompt_len: usize,
    end_of_last: usize,
) -> Result<usize, PositionError> {
    let Placeholder { offset, length, is_embed } = &feature.position;
    let offset = *offset;
    let length = *length;
    if length == 0 {
        return Err(PositionError::Empty);
    }
    let end = offset.checked_add(length).filter(|&end| end <= prompt_len);
    let end = end.ok_or(PositionError::PastPrompt { length, offset, prompt: prompt_len })?;
    let mut first_embedding = offset;
    let mut end_of_embeddings = end;
    if let Some(mask) = is_embed {
        if mask.len() != length {
            return Err(PositionError::MaskLength { entries: mask.len(), tokens: length });
        }
        let embeds = |embeds: &bool| *embeds;
        let first = mask.iter().position(embeds).ok_or(PositionError::EmptyMask)?;
        let last = mask.iter().rposition(embeds).ok_or(PositionError::EmptyMask)?;
        first_embedding = offset + first;
        end_of_embeddings = offset + last + 1;
    }
    if first_embedding < end_of_last {
        return Err(PositionError::Overlap { offset, end_of_last });
    }
    Ok(end_of_embeddings)
}

/// Checks an item's tensors. Returns the name of the first invalid one and its fault.
fn check_tensors(item: &MmItem) -> Result<(), (&str, TensorError)> {
    if item.0.is_empty() {
        return Err(("data", TensorError::NoTensors));
    }
    for (name, field) in &item.0 {
        let check = || -> Result<(), TensorError> {
            let Some(data) = &field.data else {
                return Err(TensorError::NoData);
            };
            check_sizes(data)?;
            if let (FieldKind::Flat { slices, dim: 0, .. }, MmData::Tensor(tensor)) =
                (&field.kind, data)
            {
                let rows = tensor.shape.first().copied().unwrap_or(0);
                let end = slices.last().and_then(|slice| slice[1]);
                if end != Some(rows as i64) {
                    return Err(TensorError::Slices { rows, end });
                }
            }
            Ok(())
        };
        check().map_err(|error| (name.as_str(), error))?;
    }
    Ok(())
}

/// Checks that every tensor has the number of bytes that its shape needs.
fn check_sizes(data: &MmData) -> Result<(), TensorError> {
    match data {
        MmData::Tensor(tensor) => {
            let WireTensor { dtype, shape, data } = tensor;
            let nbytes = tensor.nbytes().ok_or_else(|| TensorError::UnknownSize(dtype.clone()))?;
            let given = match data {
                TensorData::Bytes(bytes) => bytes.len(),
                TensorData::Slot(slot) => slot.len(),
                TensorData::OutOfBand(_) => nbytes,
            };
            if given == nbytes {
                return Ok(());
            }
            Err(TensorError::Size {
                given,
                shape: shape.clone(),
                dtype: dtype.clone(),
                needed: nbytes,
            })
        }
        MmData::List(list) => list.iter().try_for_each(check_sizes),
        MmData::Int(_) | MmData::Float(_) => Ok(()),
    }
}

/// Checks that tensors have the number of rows that their grids give. A mismatch kills the engine's
/// main loop.
fn check_counted_rows<'a>(
    item: &MmItem,
    rules: &'a [CountedRows],
) -> Result<(), (&'a str, TensorError)> {
    for CountedRows { rows_of, grid } in rules {
        let tensor = |name| item.get(name).and_then(|field| field.tensor());
        let Some(grid_tensor) = tensor(grid) else {
            continue;
        };
        let Some(extents) = grid_tensor.integers().filter(|extents| extents.len() == 3) else {
            return Err((grid, TensorError::Grid));
        };
        let rows = tensor(rows_of).and_then(|counted| counted.shape.first().copied());
        let product = extents.iter().try_fold(1_usize, |product, &extent| {
            product.checked_mul(usize::try_from(extent).ok()?)
        });
        if rows.is_none() || rows == Some(0) || rows != product {
            return Err((rows_of, TensorError::Rows { rows: rows.unwrap_or(0), grid: extents }));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests;
