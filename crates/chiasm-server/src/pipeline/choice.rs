//! One continuation on its way from token ids to text: detokenizing, stop strings, log probabilities, the end.

use chiasm_engine::wire::{EngineCoreOutput, FinishReason, Logprobs, StopReason};
use chiasm_prompt::{Detokenizer, StopStrings, Tokenizer};
use chiasm_types::TokenId;
use serde_json::Value;

use super::request::Sampling;
use crate::error::ApiError;

/// What one engine output adds to a continuation.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ChoiceDelta {
    /// Which continuation, from 0.
    pub index: usize,
    /// New text; may be empty while a character or a stop string is incomplete.
    pub text: String,
    /// New tokens.
    pub tokens: Vec<TokenId>,
    /// Log probabilities of the new tokens, when asked for.
    pub logprobs: Option<Vec<TokenLogprob>>,
    /// Set with the last delta.
    pub finish: Option<Finish>,
}

/// A chosen token, its log probability, and the likeliest alternatives in the engine's order.
#[derive(Clone, Debug, PartialEq)]
pub struct TokenLogprob {
    /// The chosen token.
    pub token: TokenId,
    /// Natural logarithm of its probability.
    pub logprob: f32,
    /// At most as many as were asked for.
    pub top: Vec<(TokenId, f32)>,
}

/// Why a continuation ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Finish {
    /// The end-of-sequence token.
    Eos,
    /// One of `stop_token_ids`.
    StopToken(TokenId),
    /// One of `stop`.
    StopString(String),
    /// `max_tokens` or the context is full.
    Length,
    /// The engine's repetition detection.
    Repetition,
}

impl Finish {
    /// OpenAI's `finish_reason`, with vLLM's additions.
    pub fn reason(&self) -> &'static str {
        match self {
            Self::Eos | Self::StopToken(_) | Self::StopString(_) => "stop",
            Self::Length => "length",
            Self::Repetition => "repetition",
        }
    }

    /// vLLM's `stop_reason`: the stop string or token id, else null.
    pub fn stop_reason(&self) -> Value {
        match self {
            Self::StopToken(token) => token.0.into(),
            Self::StopString(stop) => stop.as_str().into(),
            _ => Value::Null,
        }
    }
}

/// A whole continuation.
#[derive(Clone, Debug, PartialEq)]
pub struct FinishedChoice {
    /// Its text.
    pub text: String,
    /// Its tokens.
    pub tokens: Vec<TokenId>,
    /// Their log probabilities, when asked for.
    pub logprobs: Option<Vec<TokenLogprob>>,
    /// Why it ended.
    pub finish: Finish,
}

/// The state of one continuation.
pub(super) struct Choice {
    index: usize,
    detokenizer: Detokenizer,
    stops: StopStrings,
    min_tokens: usize,
    include_stop: bool,
    logprobs: Option<usize>,
    seen_tokens: usize,
}

impl Choice {
    pub(super) fn new(index: usize, tokenizer: &Tokenizer, prompt: &[TokenId], sampling: &Sampling) -> Self {
        Self {
            index,
            detokenizer: Detokenizer::new(tokenizer.clone(), prompt, sampling.skip_special_tokens),
            stops: StopStrings::new(sampling.stop.clone(), sampling.include_stop),
            min_tokens: sampling.min_tokens as usize,
            include_stop: sampling.include_stop,
            logprobs: sampling.logprobs.map(|top| top as usize),
            seen_tokens: 0,
        }
    }

    /// Takes one engine output. `finish` is set when the continuation ended, be it by the engine or by a stop string
    /// (then the engine does not know yet, and its stream is to be dropped).
    pub(super) fn push(&mut self, output: EngineCoreOutput) -> Result<ChoiceDelta, ApiError> {
        let mut finish = finish_of(&output)?;
        let mut delta = ChoiceDelta { index: self.index, ..ChoiceDelta::default() };
        // The token that ended the text is no part of it, unless asked for.
        let silent_tail = usize::from(!self.include_stop && matches!(finish, Some(Finish::Eos | Finish::StopToken(_))));
        let spoken = output.new_token_ids.len().saturating_sub(silent_tail);
        for (i, &token) in output.new_token_ids.iter().enumerate() {
            self.seen_tokens += 1;
            delta.tokens.push(token);
            if i >= spoken {
                continue;
            }
            let text = self.detokenizer.push(token);
            if self.add_text(&text, &mut delta, &mut finish) {
                break;
            }
        }
        if finish.is_some() && !matches!(finish, Some(Finish::StopString(_))) {
            let rest = self.detokenizer.finish();
            if !self.add_text(&rest, &mut delta, &mut finish) {
                delta.text.push_str(&self.stops.finish());
            }
        }
        if let Some(top) = self.logprobs {
            let all = output.new_logprobs.as_ref().map(|logprobs| top_logprobs(logprobs, top));
            let mut all = all.unwrap_or_default();
            all.truncate(delta.tokens.len());
            delta.logprobs = Some(all);
        }
        delta.finish = finish;
        Ok(delta)
    }

    /// Adds text to the delta; true when a stop string ended the continuation in it.
    fn add_text(&mut self, text: &str, delta: &mut ChoiceDelta, finish: &mut Option<Finish>) -> bool {
        // vLLM too looks for stop strings only in what comes after the first `min_tokens` tokens.
        if self.seen_tokens <= self.min_tokens {
            delta.text.push_str(&self.stops.push_unwatched(text));
            return false;
        }
        let step = self.stops.push(text);
        delta.text.push_str(&step.text);
        match step.stopped_by {
            Some(stop) => {
                *finish = Some(Finish::StopString(stop));
                true
            }
            None => false,
        }
    }
}

impl ChoiceDelta {
    /// Adds what came after.
    pub(super) fn append(&mut self, next: Self) {
        self.text.push_str(&next.text);
        self.tokens.extend(next.tokens);
        match (&mut self.logprobs, next.logprobs) {
            (Some(logprobs), Some(more)) => logprobs.extend(more),
            (none, more) => *none = more,
        }
        self.finish = next.finish;
    }

    pub(super) fn into_finished(self) -> Result<FinishedChoice, ApiError> {
        let finish = self.finish.ok_or_else(|| ApiError::internal("the engine ended without a reason"))?;
        Ok(FinishedChoice { text: self.text, tokens: self.tokens, logprobs: self.logprobs, finish })
    }
}

/// Why the engine ended the request, if it did.
fn finish_of(output: &EngineCoreOutput) -> Result<Option<Finish>, ApiError> {
    Ok(match output.finish_reason {
        None => None,
        Some(FinishReason::Stop) => Some(match &output.stop_reason {
            Some(StopReason::Token(token)) => Finish::StopToken(*token),
            Some(StopReason::Text(text)) => Finish::StopString(text.clone()),
            None => Finish::Eos,
        }),
        Some(FinishReason::Length) => Some(Finish::Length),
        Some(FinishReason::Repetition) => Some(Finish::Repetition),
        Some(FinishReason::Abort | FinishReason::Error | FinishReason::Other(_)) => {
            return Err(ApiError::internal("the engine could not process the request; its log says why"));
        }
    })
}

/// Per new token: its own log probability and the first `top` distinct candidates, the token itself among them.
fn top_logprobs(logprobs: &Logprobs, top: usize) -> Vec<TokenLogprob> {
    logprobs
        .positions()
        .filter_map(|position| {
            let mut candidates: Vec<(TokenId, f32)> = Vec::with_capacity(position.token_ids.len());
            for (&token, &logprob) in position.token_ids.iter().zip(position.logprobs) {
                if !candidates.iter().any(|&(seen, _)| seen == token) {
                    candidates.push((token, logprob));
                }
            }
            let &(token, logprob) = candidates.first()?;
            candidates.truncate(top);
            Some(TokenLogprob { token, logprob, top: candidates })
        })
        .collect()
}
