//! Resolves a request's sampling parameters with the model's defaults and the context's limit.

use chiasm_backend as backend;
use chiasm_backend::Supports;
use chiasm_request::{ClientSampling, ThinkingBudget};
use chiasm_types::TokenId;

use super::error::{Cause, RequestError};
use crate::model::ServedModel;

/// The minimum temperature. vLLM clamps lower temperatures to it (`_MAX_TEMP` in
/// `vllm/sampling_params.py`).
const MIN_TEMPERATURE: f64 = 0.01;

/// The maximum number of prompt tokens' log probabilities for one prompt.
const MAX_PROMPT_LOGPROBS: usize = 1 << 18;
/// The maximum number of prompt tokens' log probabilities for all prompts of one answer.
const MAX_TOTAL_PROMPT_LOGPROBS: usize = 1 << 20;

/// Resolves the sampling of a prompt with `prompt_tokens` tokens, on a worker with this context.
///
/// # Errors
/// Returns an error if a parameter is invalid, or if the context leaves no room for an answer.
pub(super) fn resolve(
    model: &ServedModel,
    sampling: &ClientSampling,
    prompt_tokens: usize,
    max_model_len: usize,
) -> Result<backend::Sampling, RequestError> {
    let ClientSampling {
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
        // This process detokenizes and applies stop strings.
        stop: _,
        include_stop: _,
        ref stop_token_ids,
        ignore_eos,
        skip_special_tokens: _,
        logprobs,
        logprobs_of_text: _,
        prompt_logprobs,
        // Converted by `reads_prefix_cache`.
        skip_reading_prefix_cache: _,
        ref logit_bias,
        ref allowed_token_ids,
        bad_words: ref words,
        ref structured,
        // Converted by `thinking_budget`.
        thinking_budget: _,
        repetition,
    } = *sampling;
    let defaults = &model.generation;
    // An engine would spin on a prompt that leaves no room for a token.
    let room = max_model_len.saturating_sub(prompt_tokens);
    if room == 0 {
        return Err(Cause::ContextFull { tokens: prompt_tokens, max_model_len }.into());
    }
    let room = u32::try_from(room).unwrap_or(u32::MAX);
    let max_tokens = max_tokens.or(defaults.max_new_tokens).unwrap_or(room).min(room).max(1);
    if min_tokens > max_tokens {
        let limit = if sampling.max_tokens == Some(max_tokens) {
            format!("'max_tokens' = {max_tokens}")
        } else {
            max_tokens.to_string()
        };
        return Err(RequestError::invalid(
            "min_tokens",
            format!("'min_tokens' must be at most {limit}, got {min_tokens}"),
        ));
    }
    check_prompt_logprobs(sampling, prompt_tokens, MAX_PROMPT_LOGPROBS)?;
    // A token outside the vocabulary would crash the engine.
    let biased: Vec<TokenId> = logit_bias.iter().map(|&(token, _)| token).collect();
    for (field, tokens) in [
        ("stop_token_ids", stop_token_ids),
        ("allowed_token_ids", allowed_token_ids),
        ("logit_bias", &biased),
    ] {
        if let Some(token) = tokens.iter().find(|&&token| token > model.last_token()) {
            return Err(RequestError::invalid(
                field,
                format!("'{field}': {}", outside_vocabulary(*token, model.last_token())),
            ));
        }
    }

    let mut temperature = temperature.or(defaults.temperature).unwrap_or(1.0);
    let greedy = temperature == 0.0;
    if greedy && n > 1 {
        return Err(RequestError::invalid(
            "n",
            format!("'n' must be 1 with greedy sampling, got {n}"),
        ));
    }
    if !greedy {
        temperature = temperature.max(MIN_TEMPERATURE);
    }
    let top_k = top_k.or(defaults.top_k).unwrap_or(0);

    let eos = model.tokenizer.eos_token();
    let mut stop_token_ids = stop_token_ids.clone();
    let mut all_stop_token_ids = stop_token_ids.clone();
    all_stop_token_ids.extend(eos);
    for token in defaults.eos_tokens() {
        all_stop_token_ids.push(token);
        if !ignore_eos && Some(token) != eos {
            stop_token_ids.push(token);
        }
    }
    Ok(backend::Sampling {
        n: n as usize,
        presence_penalty: presence_penalty.or(defaults.presence_penalty).unwrap_or(0.0),
        frequency_penalty: frequency_penalty.or(defaults.frequency_penalty).unwrap_or(0.0),
        repetition_penalty: repetition_penalty.or(defaults.repetition_penalty).unwrap_or(1.0),
        temperature,
        top_p: if greedy { 1.0 } else { top_p.or(defaults.top_p).unwrap_or(1.0) },
        top_k: if greedy { 0 } else { i32::try_from(top_k).unwrap_or(0) },
        min_p: if greedy { 0.0 } else { min_p.or(defaults.min_p).unwrap_or(0.0) },
        // -1 means no seed.
        seed: seed.filter(|&seed| seed != -1),
        stop_token_ids: distinct(stop_token_ids),
        ignore_eos,
        max_tokens,
        min_tokens,
        logprobs,
        prompt_logprobs,
        skip_reading_prefix_cache: !sampling.reads_prefix_cache(),
        logit_bias: logit_bias.clone(),
        allowed_token_ids: allowed_token_ids.clone(),
        bad_words: bad_words(model, words)?,
        structured: structured.clone(),
        thinking_budget: thinking_budget(model, sampling)?,
        repetition,
        eos_token: eos.filter(|_| !ignore_eos),
        all_stop_token_ids: distinct(all_stop_token_ids),
    })
}

/// Returns the optional parts that a request's sampling needs. The other parts of the request are
/// not considered.
pub(super) fn needs(sampling: &ClientSampling) -> Supports {
    let ClientSampling {
        // Every worker supports these.
        n: _,
        max_tokens: _,
        min_tokens: _,
        temperature: _,
        top_p: _,
        top_k: _,
        min_p: _,
        seed: _,
        presence_penalty: _,
        frequency_penalty: _,
        repetition_penalty: _,
        stop_token_ids: _,
        ignore_eos: _,
        // Backends refuse these themselves, as `backend::Sampling::needs` says.
        logprobs: _,
        structured: _,
        // This process handles these.
        stop: _,
        include_stop: _,
        skip_special_tokens: _,
        logprobs_of_text: _,
        prompt_logprobs,
        skip_reading_prefix_cache,
        logit_bias,
        allowed_token_ids,
        bad_words,
        thinking_budget,
        repetition,
    } = sampling;
    Supports {
        bad_words: !bad_words.is_empty(),
        prompt_logprobs: prompt_logprobs.is_some(),
        logit_bias: !logit_bias.is_empty(),
        allowed_token_ids: !allowed_token_ids.is_empty(),
        thinking_budget: thinking_budget.is_some(),
        repetition: repetition.is_some(),
        skip_reading_prefix_cache: *skip_reading_prefix_cache,
        processor_kwargs: false,
        media: false,
        cache_salt: false,
    }
}

/// Returns the sampling of a stage that only computes a prompt: one token, which is discarded,
/// without anything expensive or that could end the job in another way.
pub(super) fn for_prompt_only(sampling: backend::Sampling) -> backend::Sampling {
    let backend::Sampling {
        temperature,
        top_p,
        top_k,
        min_p,
        seed,
        presence_penalty,
        frequency_penalty,
        repetition_penalty,
        skip_reading_prefix_cache,
        logit_bias,
        allowed_token_ids,
        // Replaced below.
        n: _,
        max_tokens: _,
        min_tokens: _,
        stop_token_ids: _,
        eos_token: _,
        all_stop_token_ids: _,
        ignore_eos: _,
        logprobs: _,
        prompt_logprobs: _,
        bad_words: _,
        structured: _,
        thinking_budget: _,
        repetition: _,
    } = sampling;
    backend::Sampling {
        n: 1,
        max_tokens: 1,
        min_tokens: 0,
        temperature,
        top_p,
        top_k,
        min_p,
        seed,
        presence_penalty,
        frequency_penalty,
        repetition_penalty,
        stop_token_ids: Vec::new(),
        eos_token: None,
        all_stop_token_ids: Vec::new(),
        ignore_eos: true,
        logprobs: None,
        prompt_logprobs: None,
        skip_reading_prefix_cache,
        logit_bias,
        allowed_token_ids,
        bad_words: Vec::new(),
        structured: None,
        thinking_budget: None,
        repetition: None,
    }
}

/// Returns the maximum number of reasoning tokens.
///
/// Only an engine with a reasoning parser knows when a model thinks, and the parser needs a token
/// that ends reasoning. vLLM refuses a budget without the parser, too.
///
/// # Errors
/// Returns an error if a budget is set, but the model has no such parser or token.
fn thinking_budget(
    model: &ServedModel,
    sampling: &ClientSampling,
) -> Result<Option<u32>, RequestError> {
    match sampling.thinking_budget {
        Some(ThinkingBudget { field, .. }) if model.answers.engine_parser().is_none() => {
            let missing = if model.answers.may_think() {
                "a token that ends reasoning, which this model's tokenizer lacks"
            } else {
                "a reasoning parser, which this model lacks (--reasoning-parser)"
            };
            let message = format!("'{field}' requires {missing}");
            Err(RequestError::invalid(field, message))
        }
        budget => Ok(budget.map(|budget| budget.tokens)),
    }
}

/// Limits the log probabilities of prompt tokens in one answer. `prompt_tokens` is the total of all
/// prompts; `resolve` checks each prompt alone.
///
/// # Errors
/// Returns an error if there are too many.
pub fn check_total_prompt_logprobs(
    sampling: &ClientSampling,
    prompt_tokens: usize,
) -> Result<(), RequestError> {
    check_prompt_logprobs(sampling, prompt_tokens, MAX_TOTAL_PROMPT_LOGPROBS)
}

/// Limits the log probabilities of prompt tokens. Each takes some hundred bytes of an answer.
fn check_prompt_logprobs(
    sampling: &ClientSampling,
    prompt_tokens: usize,
    limit: usize,
) -> Result<(), RequestError> {
    let Some(top) = sampling.prompt_logprobs else { return Ok(()) };
    let candidates =
        prompt_tokens.saturating_mul(top as usize + 1).saturating_mul(sampling.n as usize);
    if candidates <= limit {
        return Ok(());
    }
    let message = format!(
        "{prompt_tokens} prompt tokens with {top} alternatives in {} choices have {candidates} \
         log probabilities, at most {limit} are allowed",
        sampling.n
    );
    Err(RequestError::invalid("prompt_logprobs", message))
}

/// Tokenizes bad words: each at the start of a text, and after a space if that gives another first
/// token (`SamplingParams.update_from_tokenizer` in `vllm/sampling_params.py`).
fn bad_words(model: &ServedModel, words: &[String]) -> Result<Vec<Vec<TokenId>>, RequestError> {
    let mut tokens: Vec<Vec<TokenId>> = Vec::new();
    for (i, word) in words.iter().enumerate() {
        let word = word.trim_start();
        let field = || format!("bad_words[{i}]");
        let encode = |text: &str| {
            model
                .tokenizer
                .encode(text, false)
                .map_err(|error| RequestError::invalid(field(), error.to_string()))
        };
        let at_start = encode(word)?;
        let after_space = encode(&format!(" {word}"))?;
        if at_start.is_empty() {
            return Err(RequestError::invalid(field(), "the word has no tokens"));
        }
        let differs =
            after_space.len() == at_start.len() && after_space.first() != at_start.first();
        tokens.push(at_start);
        tokens.extend(differs.then_some(after_space));
    }
    Ok(tokens)
}

/// Sorts tokens and removes duplicates.
fn distinct(mut tokens: Vec<TokenId>) -> Vec<TokenId> {
    tokens.sort_unstable();
    tokens.dedup();
    tokens
}

/// Returns the message for a token above the vocabulary's last.
pub(super) fn outside_vocabulary(token: TokenId, last: TokenId) -> String {
    let size = u64::from(last.0) + 1;
    format!("token id {token} is outside the vocabulary of {size} tokens")
}

#[cfg(test)]
mod tests {
    use std::path::Path;
    use std::sync::Arc;

    use chiasm_backend::{Content, Output};
    use chiasm_prompt::StopStrings;

    use super::*;
    use crate::choice::Choice;

    const MODEL: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../chiasm/assets/model");

    fn model(generation_config: &str) -> ServedModel {
        let mut model = ServedModel::load(Path::new(MODEL), "m", None).unwrap();
        model.generation = serde_json::from_str(generation_config).unwrap();
        model
    }

    #[test]
    fn model_defaults_fill_unset_parameters() {
        let model = model(
            r#"{"temperature": 0.5, "top_p": 0.6, "top_k": 7, "min_p": 0.8, "presence_penalty": 0.9,
                "frequency_penalty": 1.1, "repetition_penalty": 1.2, "max_new_tokens": 13}"#,
        );
        let resolved = resolve(&model, &ClientSampling::default(), 10, 100).unwrap();
        assert_eq!((resolved.temperature, resolved.top_p), (0.5, 0.6));
        assert_eq!((resolved.top_k, resolved.min_p), (7, 0.8));
        assert_eq!(
            (resolved.presence_penalty, resolved.frequency_penalty, resolved.repetition_penalty),
            (0.9, 1.1, 1.2)
        );
        assert_eq!(resolved.max_tokens, 13);
        let sampling = ClientSampling {
            presence_penalty: Some(0.0),
            frequency_penalty: Some(-1.0),
            ..ClientSampling::default()
        };
        let resolved = resolve(&model, &sampling, 10, 100).unwrap();
        assert_eq!((resolved.presence_penalty, resolved.frequency_penalty), (0.0, -1.0));
    }

    #[test]
    fn min_tokens_over_max_tokens_name_the_limit() {
        let message = |max_tokens: Option<u32>| {
            let sampling =
                ClientSampling { min_tokens: 91, max_tokens, ..ClientSampling::default() };
            resolve(&model("{}"), &sampling, 10, 100).unwrap_err().cause.to_string()
        };
        assert_eq!(message(Some(3)), "'min_tokens' must be at most 'max_tokens' = 3, got 91");
        assert_eq!(message(None), "'min_tokens' must be at most 90, got 91");
    }

    #[test]
    fn unknown_tokens_are_refused_bad_words_tokenized() {
        let model = model("{}");
        let beyond = TokenId(model.last_token().0 + 1);
        let field_at_fault = |sampling: ClientSampling| {
            resolve(&model, &sampling, 10, 100).unwrap_err().field.unwrap()
        };
        let biased = ClientSampling {
            logit_bias: vec![(TokenId(1), 1.0), (beyond, 1.0)],
            ..ClientSampling::default()
        };
        let message = resolve(&model, &biased, 10, 100).unwrap_err().cause.to_string();
        let size = beyond.0;
        let expected =
            format!("'logit_bias': token id {size} is outside the vocabulary of {size} tokens");
        assert_eq!(message, expected);
        assert_eq!(field_at_fault(biased), "logit_bias");
        assert_eq!(
            field_at_fault(ClientSampling {
                allowed_token_ids: vec![beyond],
                ..ClientSampling::default()
            }),
            "allowed_token_ids"
        );
        assert_eq!(
            field_at_fault(ClientSampling {
                stop_token_ids: vec![beyond],
                ..ClientSampling::default()
            }),
            "stop_token_ids"
        );
        let sampling = ClientSampling {
            bad_words: vec!["  the".to_owned(), "ä".to_owned()],
            ..ClientSampling::default()
        };
        let found = resolve(&model, &sampling, 10, 100).unwrap().bad_words;
        let encode = |text: &str| model.tokenizer.encode(text, false).unwrap();
        let expected: Vec<_> = ["the", "ä"]
            .into_iter()
            .flat_map(|word| {
                let first = encode(word);
                let spaced = encode(&format!(" {word}"));
                let both = spaced.len() == first.len() && spaced[0] != first[0];
                [Some(first), both.then_some(spaced)].into_iter().flatten()
            })
            .collect();
        assert_eq!(found, expected);
        assert!(found.len() >= 2, "{found:?}");
    }

    #[test]
    fn model_default_decides_about_special_tokens() {
        let text = |model: &Arc<ServedModel>, skip_special_tokens| {
            let sampling = ClientSampling { skip_special_tokens, ..ClientSampling::default() };
            let tokens = ["<|im_end|>", "<|im_start|>"]
                .map(|token| model.tokenizer.token_to_id(token).unwrap());
            let content = Content::Tokens { tokens: tokens.to_vec(), logprobs: None };
            Choice::new(0, model, &[], &sampling, StopStrings::new(Vec::new(), false), None)
                .push(Output {
                    choice: 0,
                    content,
                    finish: None,
                    prefill: None,
                    prompt_logprobs: None,
                })
                .events
                .text()
                .into_owned()
        };
        let silent = Arc::new(model("{}"));
        let open = Arc::new(model(r#"{"skip_special_tokens": false}"#));
        assert_eq!(
            (text(&silent, None), text(&silent, Some(false))),
            ("".into(), "<|im_end|><|im_start|>".into())
        );
        assert_eq!(
            (text(&open, None), text(&open, Some(true))),
            ("<|im_end|><|im_start|>".into(), "".into())
        );
    }
}
