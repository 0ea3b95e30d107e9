//! A request's sampling, the model's defaults and the room in the context become what a backend is
//! told.

use chiasm_backend as backend;
use chiasm_backend::Supports;
use chiasm_request::{Sampling, ThinkingBudget};
use chiasm_types::TokenId;

use super::error::{Cause, RequestError};
use crate::model::ServedModel;

/// vLLM clamps lower temperatures to this (`_MAX_TEMP` in `vllm/sampling_params.py`).
const LOWEST_TEMPERATURE: f64 = 0.01;

/// Most log probabilities of prompt tokens that are told of one prompt, and of all prompts in one
/// answer.
const MAX_PROMPT_LOGPROBS: usize = 1 << 18;
const MAX_PROMPT_LOGPROBS_OF_ALL: usize = 1 << 20;

/// The sampling of a prompt with `prompt_tokens` tokens, on a worker with this context.
pub(super) fn resolve(
    model: &ServedModel,
    sampling: &Sampling,
    prompt_tokens: usize,
    max_model_len: usize,
) -> Result<backend::Sampling, RequestError> {
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
        // Text is made here, and ends here.
        stop: _,
        include_stop: _,
        ref stop_token_ids,
        ignore_eos,
        skip_special_tokens: _,
        logprobs,
        logprobs_of_text: _,
        prompt_logprobs,
        // In `reads_prefix_cache`.
        skip_reading_prefix_cache: _,
        ref logit_bias,
        ref allowed_token_ids,
        bad_words: ref words,
        ref structured,
        // In `thinking_budget`.
        thinking_budget: _,
        repetition,
    } = *sampling;
    let defaults = &model.generation;
    // An engine spins on a prompt that leaves no room for a token.
    let room = max_model_len.saturating_sub(prompt_tokens);
    if room == 0 {
        return Err(Cause::ContextFull { tokens: prompt_tokens, max_model_len }.into());
    }
    let room = u32::try_from(room).unwrap_or(u32::MAX);
    let max_tokens = max_tokens.or(defaults.max_new_tokens).unwrap_or(room).min(room).max(1);
    if min_tokens > max_tokens {
        return Err(RequestError::invalid(
            "min_tokens",
            format!("'min_tokens' must be at most {max_tokens}, got {min_tokens}"),
        ));
    }
    check_prompt_logprobs(sampling, prompt_tokens, MAX_PROMPT_LOGPROBS)?;
    // Any of them ends an engine.
    let biased: Vec<TokenId> = logit_bias.iter().map(|&(token, _)| token).collect();
    for (field, tokens) in [
        ("stop_token_ids", stop_token_ids),
        ("allowed_token_ids", allowed_token_ids),
        ("logit_bias", &biased),
    ] {
        if let Some(token) = tokens.iter().find(|&&token| token > model.last_token()) {
            return Err(RequestError::invalid(
                field,
                format!("token id {token} is outside the vocabulary"),
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
        temperature = temperature.max(LOWEST_TEMPERATURE);
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
        // -1 is "no seed".
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

/// Returns the optional parts that a request's sampling has; parts of the rest of the request are
/// left out.
pub(super) fn needs(sampling: &Sampling) -> Supports {
    let Sampling {
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
        // These are done here.
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

/// Returns the sampling of a stage that computes a prompt: one token that nobody sees, without
/// anything that makes it dear or could end the job another way.
pub(super) fn of_prompt(sampling: backend::Sampling) -> backend::Sampling {
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

/// Returns the maximum number of reasoning tokens. Only an engine with a reasoning parser knows
/// when a model thinks, and the parser needs a token that ends reasoning. vLLM refuses a budget
/// without the parser, too.
fn thinking_budget(model: &ServedModel, sampling: &Sampling) -> Result<Option<u32>, RequestError> {
    match sampling.thinking_budget {
        Some(ThinkingBudget { field, .. }) if model.answers.engine_parser().is_none() => {
            let lacks = if model.answers.may_think() {
                "a token that ends reasoning, and this model's tokenizer has none"
            } else {
                "a reasoning parser, and this model has none (--reasoning-parser)"
            };
            let message = format!("'{field}' needs {lacks}");
            Err(RequestError::invalid(field, message))
        }
        budget => Ok(budget.map(|budget| budget.tokens)),
    }
}

/// Refuses too many log probabilities of prompt tokens in one answer, to prompts that have so many
/// tokens together. Each prompt alone is looked at when its parameters are made.
pub fn check_prompt_logprobs_of_all(
    sampling: &Sampling,
    prompt_tokens: usize,
) -> Result<(), RequestError> {
    check_prompt_logprobs(sampling, prompt_tokens, MAX_PROMPT_LOGPROBS_OF_ALL)
}

/// Each candidate takes some hundred bytes of an answer.
fn check_prompt_logprobs(
    sampling: &Sampling,
    prompt_tokens: usize,
    most: usize,
) -> Result<(), RequestError> {
    let Some(top) = sampling.prompt_logprobs else { return Ok(()) };
    let candidates =
        prompt_tokens.saturating_mul(top as usize + 1).saturating_mul(sampling.n as usize);
    if candidates <= most {
        return Ok(());
    }
    let message = format!(
        "{prompt_tokens} prompt tokens with {top} alternatives in {} choices have {candidates} log probabilities, at most {most} are told",
        sampling.n
    );
    Err(RequestError::invalid("prompt_logprobs", message))
}

/// A word at the beginning of a text, and behind a space where that makes it another token
/// (`SamplingParams.update_from_tokenizer` in `vllm/sampling_params.py`).
fn bad_words(model: &ServedModel, words: &[String]) -> Result<Vec<Vec<TokenId>>, RequestError> {
    let mut tokens: Vec<Vec<TokenId>> = Vec::new();
    for (i, word) in words.iter().enumerate() {
        let (word, field) = (word.trim_start(), || format!("bad_words[{i}]"));
        let encode = |text: &str| {
            model
                .tokenizer
                .encode(text, false)
                .map_err(|error| RequestError::invalid(field(), error.to_string()))
        };
        let (first, behind_space) = (encode(word)?, encode(&format!(" {word}"))?);
        if first.is_empty() {
            return Err(RequestError::invalid(field(), "it has no tokens"));
        }
        let is_another = behind_space.len() == first.len() && behind_space.first() != first.first();
        tokens.push(first);
        tokens.extend(is_another.then_some(behind_space));
    }
    Ok(tokens)
}

fn distinct(mut tokens: Vec<TokenId>) -> Vec<TokenId> {
    tokens.sort_unstable();
    tokens.dedup();
    tokens
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
    fn what_a_request_leaves_open_the_model_decides() {
        let model = model(
            r#"{"temperature": 0.5, "top_p": 0.6, "top_k": 7, "min_p": 0.8, "presence_penalty": 0.9,
                "frequency_penalty": 1.1, "repetition_penalty": 1.2, "max_new_tokens": 13}"#,
        );
        let found = resolve(&model, &Sampling::default(), 10, 100).unwrap();
        assert_eq!((found.temperature, found.top_p, found.top_k, found.min_p), (0.5, 0.6, 7, 0.8));
        assert_eq!(
            (found.presence_penalty, found.frequency_penalty, found.repetition_penalty),
            (0.9, 1.1, 1.2)
        );
        assert_eq!(found.max_tokens, 13);
        let asked = Sampling {
            presence_penalty: Some(0.0),
            frequency_penalty: Some(-1.0),
            ..Sampling::default()
        };
        let found = resolve(&model, &asked, 10, 100).unwrap();
        assert_eq!((found.presence_penalty, found.frequency_penalty), (0.0, -1.0));
    }

    #[test]
    fn tokens_that_end_an_engine_are_refused_and_bad_words_become_tokens() {
        let model = model("{}");
        let beyond = TokenId(model.last_token().0 + 1);
        let fields =
            |sampling: Sampling| resolve(&model, &sampling, 10, 100).unwrap_err().field.unwrap();
        let biased =
            Sampling { logit_bias: vec![(TokenId(1), 1.0), (beyond, 1.0)], ..Sampling::default() };
        assert_eq!(fields(biased), "logit_bias");
        assert_eq!(
            fields(Sampling { allowed_token_ids: vec![beyond], ..Sampling::default() }),
            "allowed_token_ids"
        );
        assert_eq!(
            fields(Sampling { stop_token_ids: vec![beyond], ..Sampling::default() }),
            "stop_token_ids"
        );
        let sampling = Sampling {
            bad_words: vec!["  the".to_owned(), "ä".to_owned()],
            ..Sampling::default()
        };
        let found = resolve(&model, &sampling, 10, 100).unwrap().bad_words;
        let encode = |text: &str| model.tokenizer.encode(text, false).unwrap();
        let expected: Vec<_> = ["the", "ä"]
            .into_iter()
            .flat_map(|word| {
                let (first, spaced) = (encode(word), encode(&format!(" {word}")));
                let both = spaced.len() == first.len() && spaced[0] != first[0];
                [Some(first), both.then_some(spaced)].into_iter().flatten()
            })
            .collect();
        assert_eq!(found, expected);
        assert!(found.len() >= 2, "{found:?}");
    }

    #[test]
    fn so_it_does_with_special_tokens() {
        let text = |model: &Arc<ServedModel>, skip_special_tokens| {
            let sampling = Sampling { skip_special_tokens, ..Sampling::default() };
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
        let (silent, open) =
            (Arc::new(model("{}")), Arc::new(model(r#"{"skip_special_tokens": false}"#)));
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
