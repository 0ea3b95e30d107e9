//! Conversion of sampling parameters to and from messages.

use chiasm_backend::{Constraint, Repetition, Sampling, Structured, Supports};
use chiasm_types::TokenId;

use super::MAX_CHOICES;
use crate::proto;

/// The optional parts of jobs that engines of agents support. Each engine is an EngineCore, and
/// every version of the protocol carries all of these. A part that older agents do not know is
/// supported only if [`proto::Ready`] says so.
pub(crate) const SUPPORTS: Supports = Supports {
    bad_words: true,
    prompt_logprobs: true,
    processor_kwargs: true,
    logit_bias: true,
    allowed_token_ids: true,
    thinking_budget: true,
    repetition: true,
    skip_reading_prefix_cache: true,
    media: true,
    cache_salt: true,
};

pub(super) fn to_message(sampling: &Sampling) -> proto::Sampling {
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
        ref all_stop_token_ids,
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
    let (logit_bias_tokens, logit_bias) =
        logit_bias.iter().map(|(token, bias)| (token.0, *bias)).unzip();
    proto::Sampling {
        n: n as u32,
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
        stop_token_ids: raw(stop_token_ids),
        eos_token: eos_token.map(|token| token.0),
        all_stop_token_ids: raw(all_stop_token_ids),
        ignore_eos,
        logprobs,
        prompt_logprobs,
        skip_reading_prefix_cache,
        logit_bias_tokens,
        logit_bias,
        allowed_token_ids: raw(allowed_token_ids),
        bad_words: bad_words.iter().map(|word| proto::TokenList { tokens: raw(word) }).collect(),
        constraint: structured
            .as_ref()
            .map(|structured| constraint_to_message(&structured.constraint)),
        thinking_budget,
        repetition: repetition.map(|Repetition { max_pattern, min_pattern, count }| {
            proto::Repetition { max_pattern, min_pattern, count }
        }),
    }
}

/// Parses sampling parameters; `None` if a part is malformed. The engine client checks ranges.
pub(super) fn from_message(message: proto::Sampling) -> Option<Sampling> {
    let proto::Sampling {
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
        stop_token_ids,
        eos_token,
        all_stop_token_ids,
        ignore_eos,
        logprobs,
        prompt_logprobs,
        skip_reading_prefix_cache,
        logit_bias_tokens,
        logit_bias,
        allowed_token_ids,
        bad_words,
        constraint,
        thinking_budget,
        repetition,
    } = message;
    if logit_bias_tokens.len() != logit_bias.len() || n as usize > MAX_CHOICES {
        return None;
    }
    let structured = match constraint {
        // The frontend knows the field that the constraint came from, and replaces this name.
        Some(constraint) => Some(Structured {
            constraint: constraint_from_message(constraint)?,
            field: "structured_outputs",
        }),
        None => None,
    };
    Some(Sampling {
        n: n as usize,
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
        stop_token_ids: tokens(stop_token_ids),
        eos_token: eos_token.map(TokenId),
        all_stop_token_ids: tokens(all_stop_token_ids),
        ignore_eos,
        logprobs,
        prompt_logprobs,
        skip_reading_prefix_cache,
        logit_bias: logit_bias_tokens.into_iter().map(TokenId).zip(logit_bias).collect(),
        allowed_token_ids: tokens(allowed_token_ids),
        bad_words: bad_words.into_iter().map(|word| tokens(word.tokens)).collect(),
        structured,
        thinking_budget,
        repetition: repetition.map(|proto::Repetition { max_pattern, min_pattern, count }| {
            Repetition { max_pattern, min_pattern, count }
        }),
    })
}

fn constraint_to_message(constraint: &Constraint) -> proto::Constraint {
    use proto::constraint::Kind;
    let kind = match constraint {
        Constraint::JsonSchema(schema) => Kind::JsonSchema(schema.to_string()),
        Constraint::JsonObject => Kind::JsonObject(true),
        Constraint::Regex(regex) => Kind::Regex(regex.to_string()),
        Constraint::Grammar(grammar) => Kind::Grammar(grammar.to_string()),
        Constraint::StructuralTag(tag) => Kind::StructuralTag(tag.to_string()),
    };
    proto::Constraint { kind: Some(kind) }
}

fn constraint_from_message(constraint: proto::Constraint) -> Option<Constraint> {
    use proto::constraint::Kind;
    Some(match constraint.kind? {
        Kind::JsonSchema(schema) => Constraint::JsonSchema(schema.into()),
        Kind::JsonObject(_) => Constraint::JsonObject,
        Kind::Regex(regex) => Constraint::Regex(regex.into()),
        Kind::Grammar(grammar) => Constraint::Grammar(grammar.into()),
        Kind::StructuralTag(tag) => Constraint::StructuralTag(tag.into()),
    })
}

fn raw(tokens: &[TokenId]) -> Vec<u32> {
    tokens.iter().map(|token| token.0).collect()
}

fn tokens(raw: Vec<u32>) -> Vec<TokenId> {
    raw.into_iter().map(TokenId).collect()
}
