//! One event of an answer, and the part of a choice that it adds (`tokenizer_manager.py` of SGLang
//! 0.5.23).

use std::time::Duration;

use chiasm_backend::{Finish, Prefill, Sampling, TokenLogprob};
use chiasm_types::TokenId;
use serde::Deserialize;
use serde::de::IgnoredAny;

/// One event: the whole answer so far, or only the new part if the server was started with
/// `--incremental-streaming-output`.
#[derive(Debug, Default, Deserialize)]
pub(super) struct Event {
    #[serde(default)]
    output_ids: Vec<u32>,
    pub(super) meta_info: Option<MetaInfo>,
    /// The expanded prompt, if the request asked for it.
    pub(super) prompt_token_ids: Option<Vec<u32>>,
    /// The server's error, in place of all other fields.
    pub(super) error: Option<EventError>,
}

#[derive(Debug, Deserialize)]
pub(super) struct EventError {
    #[serde(default)]
    pub(super) message: String,
    /// An HTTP status. It is in the event because the head of the answer was sent long ago.
    pub(super) code: Option<u16>,
}

#[derive(Debug, Deserialize)]
pub(super) struct MetaInfo {
    pub(super) prompt_tokens: usize,
    completion_tokens: usize,
    cached_tokens: Option<usize>,
    /// The time in the queue, in seconds.
    queue_time: Option<f64>,
    finish_reason: Option<FinishReason>,
    output_token_logprobs: Option<Vec<Logprob>>,
    output_top_logprobs: Option<Vec<Option<Vec<Logprob>>>>,
}

/// A log probability, a token, and the token's text if the request asked for it.
type Logprob = (Option<f32>, u32, IgnoredAny);

#[derive(Debug, Deserialize)]
struct FinishReason {
    r#type: String,
    matched: Option<Matched>,
    #[serde(default)]
    message: Option<String>,
    status_code: Option<u16>,
}

#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum Matched {
    Token(u32),
    Text(String),
    Tokens(Vec<u32>),
}

/// The part of a choice that one event adds.
#[derive(Debug, PartialEq)]
pub(super) struct Delta {
    pub(super) tokens: Vec<TokenId>,
    pub(super) logprobs: Option<Vec<TokenLogprob>>,
    pub(super) finish: Option<Finish>,
}

/// The reason that an answer ends early.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum AnswerError {
    /// The server refuses the request, with an HTTP status and a message.
    Refused(u16, String),
    /// The server aborted the request by itself.
    Aborted,
    /// The event violates the protocol.
    Protocol(&'static str),
}

impl Event {
    /// Returns the part of the event that is new after the first `known_tokens` tokens.
    pub(super) fn delta(
        &self,
        known_tokens: usize,
        sampling: &Sampling,
    ) -> Result<Delta, AnswerError> {
        if let Some(EventError { message, code }) = &self.error {
            return Err(AnswerError::Refused(code.unwrap_or(500), message.clone()));
        }
        let meta =
            self.meta_info.as_ref().ok_or(AnswerError::Protocol("an event without meta_info"))?;
        let ended = meta.finish_reason.as_ref();
        if let Some(FinishReason { message, status_code, .. }) =
            ended.filter(|reason| reason.r#type == "abort")
        {
            let refused =
                |status| AnswerError::Refused(status, message.clone().unwrap_or_default());
            return Err(status_code.map_or(AnswerError::Aborted, refused));
        }
        let all = meta.completion_tokens;
        if all > sampling.max_tokens as usize {
            return Err(AnswerError::Protocol("more tokens than requested"));
        }
        let new = all
            .checked_sub(known_tokens)
            .ok_or(AnswerError::Protocol("fewer tokens than before"))?;
        if ![all, new].contains(&self.output_ids.len()) {
            return Err(AnswerError::Protocol("a token count that differs from the tokens"));
        }
        let tokens: Vec<TokenId> =
            tail(&self.output_ids, new).iter().copied().map(TokenId).collect();
        let logprobs = match sampling.logprobs {
            Some(top) => {
                let logprobs = meta.logprobs(new, top as usize);
                Some(logprobs.ok_or(AnswerError::Protocol("no log probabilities or too few"))?)
            }
            None => None,
        };
        let finish = ended.map(|reason| reason.finish(sampling)).transpose()?;
        let mut delta = Delta { tokens, logprobs, finish };
        delta.end_at_stop_token(known_tokens, sampling);
        Ok(delta)
    }

    /// Returns `true` if the server reports that the answer has not ended.
    pub(super) fn is_unfinished(&self) -> bool {
        self.meta_info.as_ref().is_some_and(|meta| meta.finish_reason.is_none())
    }
}

impl Delta {
    /// Ends the choice at a stop token if `ignore_eos` is set. A server that continues after the
    /// end-of-sequence token also continues after stop tokens, so the rest is cut here.
    fn end_at_stop_token(&mut self, known_tokens: usize, sampling: &Sampling) {
        if !sampling.ignore_eos || sampling.stop_token_ids.is_empty() {
            return;
        }
        let stop_at = |(at, token): (usize, &TokenId)| {
            let counts = known_tokens + at + 1 >= sampling.min_tokens as usize;
            (counts && sampling.stop_token_ids.contains(token)).then_some((at, *token))
        };
        let Some((at, token)) = self.tokens.iter().enumerate().find_map(stop_at) else { return };
        self.tokens.truncate(at + 1);
        if let Some(logprobs) = &mut self.logprobs {
            logprobs.truncate(at + 1);
        }
        self.finish = Some(Finish::StopToken(token));
    }
}

impl FinishReason {
    fn finish(&self, sampling: &Sampling) -> Result<Finish, AnswerError> {
        match (self.r#type.as_str(), &self.matched) {
            ("stop", None) => Ok(Finish::Eos),
            ("stop", Some(Matched::Text(text))) => Ok(Finish::StopString(text.clone())),
            ("stop", Some(Matched::Token(token))) => Ok(stop(*token, sampling)),
            ("stop", Some(Matched::Tokens(tokens))) => {
                Ok(tokens.last().map_or(Finish::Eos, |last| stop(*last, sampling)))
            }
            ("length", _) => Ok(Finish::Length),
            _ => Err(AnswerError::Aborted),
        }
    }
}

/// Returns the finish for an end at `token`. A token that the request does not list is one of the
/// model's own end-of-sequence tokens.
fn stop(token: u32, sampling: &Sampling) -> Finish {
    let token = TokenId(token);
    if sampling.stop_token_ids.contains(&token) && sampling.eos_token != Some(token) {
        Finish::StopToken(token)
    } else {
        Finish::Eos
    }
}

impl MetaInfo {
    /// Returns how the prompt was computed. Only servers with `--enable-metrics` report times.
    pub(super) fn prefill(&self) -> Option<Prefill> {
        let queued = self.queue_time.and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
        self.cached_tokens.map(|cached_tokens| Prefill {
            cached_tokens,
            created_tokens: None,
            queued,
        })
    }

    /// Returns the log probabilities of the last `new` tokens, with the likeliest `top` candidates.
    fn logprobs(&self, new: usize, top: usize) -> Option<Vec<TokenLogprob>> {
        let tokens = self.output_token_logprobs.as_deref()?;
        let tops = self.output_top_logprobs.as_deref().unwrap_or_default();
        if tokens.len() < new || (top > 0 && tops.len() < new) {
            return None;
        }
        let tops = tail(tops, new).iter().map(Some).chain(std::iter::repeat(None));
        let convert = |(token, tops): (&Logprob, Option<&Option<Vec<Logprob>>>)| TokenLogprob {
            token: TokenId(token.1),
            logprob: logprob_or_infinity(token.0),
            top: tops
                .iter()
                .copied()
                .flatten()
                .flatten()
                .take(top)
                .map(|top| (TokenId(top.1), logprob_or_infinity(top.0)))
                .collect(),
        };
        Some(tail(tokens, new).iter().zip(tops).map(convert).collect())
    }
}

/// Returns the log probability. JSON has no infinity: `null` stands for the logarithm of 0.
fn logprob_or_infinity(logprob: Option<f32>) -> f32 {
    logprob.unwrap_or(f32::NEG_INFINITY)
}

/// Returns the last `count` elements, or all if there are fewer.
fn tail<T>(list: &[T], count: usize) -> &[T] {
    list.get(list.len().saturating_sub(count)..).unwrap_or_default()
}
