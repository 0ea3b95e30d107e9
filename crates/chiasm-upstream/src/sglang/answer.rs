//! What one event of an answer says, and what it adds to a continuation (`tokenizer_manager.py` of
//! SGLang 0.5.23).

use std::time::Duration;

use chiasm_backend::{Finish, Prefill, Sampling, TokenLogprob};
use chiasm_types::TokenId;
use serde::Deserialize;
use serde::de::IgnoredAny;

/// One event: all of the answer so far, or what is new of it if the server was started with
/// `--incremental-streaming-output`.
#[derive(Debug, Default, Deserialize)]
pub(super) struct Event {
    #[serde(default)]
    output_ids: Vec<u32>,
    pub(super) meta_info: Option<MetaInfo>,
    /// What the prompt has become, if it was asked for.
    pub(super) prompt_token_ids: Option<Vec<u32>>,
    /// What went wrong; it stands in place of all else.
    pub(super) error: Option<EventError>,
}

#[derive(Debug, Deserialize)]
pub(super) struct EventError {
    #[serde(default)]
    pub(super) message: String,
    /// An HTTP status, as the head of the answer was sent long before.
    pub(super) code: Option<u16>,
}

#[derive(Debug, Deserialize)]
pub(super) struct MetaInfo {
    pub(super) prompt_tokens: usize,
    completion_tokens: usize,
    cached_tokens: Option<usize>,
    /// Seconds.
    queue_time: Option<f64>,
    finish_reason: Option<FinishReason>,
    output_token_logprobs: Option<Vec<Logprob>>,
    output_top_logprobs: Option<Vec<Option<Vec<Logprob>>>>,
}

/// Log probability, token, and its text if that was asked for.
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

/// What is new of a continuation.
#[derive(Debug, PartialEq)]
pub(super) struct News {
    pub(super) tokens: Vec<TokenId>,
    pub(super) logprobs: Option<Vec<TokenLogprob>>,
    pub(super) finish: Option<Finish>,
}

/// Why an answer goes on no further.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Stopped {
    /// The server says no, with an HTTP status and words.
    Refused(u16, String),
    /// It was aborted, and not by us.
    Aborted,
    /// It says what no server says.
    Nonsense(&'static str),
}

impl Event {
    /// What the event adds to a continuation of which `told` tokens are known.
    pub(super) fn news(&self, told: usize, sampling: &Sampling) -> Result<News, Stopped> {
        if let Some(EventError { message, code }) = &self.error {
            return Err(Stopped::Refused(code.unwrap_or(500), message.clone()));
        }
        let meta =
            self.meta_info.as_ref().ok_or(Stopped::Nonsense("an event that says nothing"))?;
        let ended = meta.finish_reason.as_ref();
        if let Some(FinishReason { message, status_code, .. }) =
            ended.filter(|reason| reason.r#type == "abort")
        {
            let refused = |status| Stopped::Refused(status, message.clone().unwrap_or_default());
            return Err(status_code.map_or(Stopped::Aborted, refused));
        }
        let all = meta.completion_tokens;
        if all > sampling.max_tokens as usize {
            return Err(Stopped::Nonsense("more tokens than were asked for"));
        }
        let new = all.checked_sub(told).ok_or(Stopped::Nonsense("fewer tokens than before"))?;
        if ![all, new].contains(&self.output_ids.len()) {
            return Err(Stopped::Nonsense("another number of tokens than it counts"));
        }
        let tokens: Vec<TokenId> =
            last(&self.output_ids, new).iter().copied().map(TokenId).collect();
        let logprobs = match sampling.logprobs {
            Some(top) => {
                let told = meta.logprobs(new, top as usize);
                Some(told.ok_or(Stopped::Nonsense("no log probabilities, or too few"))?)
            }
            None => None,
        };
        let finish = ended.map(|reason| reason.finish(sampling)).transpose()?;
        let mut news = News { tokens, logprobs, finish };
        news.end_at_stop_token(told, sampling);
        Ok(news)
    }
}

impl Event {
    /// Whether there is more to come, by the server's account.
    pub(super) fn goes_on(&self) -> bool {
        self.meta_info.as_ref().is_some_and(|meta| meta.finish_reason.is_none())
    }
}

impl News {
    /// A server that goes on after the end-of-sequence token goes on after stop tokens too, so what
    /// is behind one is left out here.
    fn end_at_stop_token(&mut self, told: usize, sampling: &Sampling) {
        if !sampling.ignore_eos || sampling.stop_token_ids.is_empty() {
            return;
        }
        let ends = |(at, token): (usize, &TokenId)| {
            let counts = told + at + 1 >= sampling.min_tokens as usize;
            (counts && sampling.stop_token_ids.contains(token)).then_some((at, *token))
        };
        let Some((at, token)) = self.tokens.iter().enumerate().find_map(ends) else { return };
        self.tokens.truncate(at + 1);
        if let Some(logprobs) = &mut self.logprobs {
            logprobs.truncate(at + 1);
        }
        self.finish = Some(Finish::StopToken(token));
    }
}

impl FinishReason {
    fn finish(&self, sampling: &Sampling) -> Result<Finish, Stopped> {
        match (self.r#type.as_str(), &self.matched) {
            ("stop", None) => Ok(Finish::Eos),
            ("stop", Some(Matched::Text(text))) => Ok(Finish::StopString(text.clone())),
            ("stop", Some(Matched::Token(token))) => Ok(stop(*token, sampling)),
            ("stop", Some(Matched::Tokens(tokens))) => {
                Ok(tokens.last().map_or(Finish::Eos, |last| stop(*last, sampling)))
            }
            ("length", _) => Ok(Finish::Length),
            _ => Err(Stopped::Aborted),
        }
    }
}

/// The end by a token. Any that was not asked for is one of the model's own ends of a sequence.
fn stop(token: u32, sampling: &Sampling) -> Finish {
    let token = TokenId(token);
    match sampling.stop_token_ids.contains(&token) && sampling.eos_token != Some(token) {
        true => Finish::StopToken(token),
        false => Finish::Eos,
    }
}

impl MetaInfo {
    /// How the prompt was computed. The times are those of servers with `--enable-metrics`.
    pub(super) fn prefill(&self) -> Option<Prefill> {
        let queued = self.queue_time.and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
        self.cached_tokens.map(|cached_tokens| Prefill {
            cached_tokens,
            created_tokens: None,
            queued,
        })
    }

    /// The log probabilities of the last `new` tokens, with the likeliest `top` candidates.
    fn logprobs(&self, new: usize, top: usize) -> Option<Vec<TokenLogprob>> {
        let tokens = self.output_token_logprobs.as_deref()?;
        let tops = self.output_top_logprobs.as_deref().unwrap_or_default();
        if tokens.len() < new || (top > 0 && tops.len() < new) {
            return None;
        }
        let tops = last(tops, new).iter().map(Some).chain(std::iter::repeat(None));
        let one = |(token, tops): (&Logprob, Option<&Option<Vec<Logprob>>>)| TokenLogprob {
            token: TokenId(token.1),
            logprob: value(token.0),
            top: tops
                .iter()
                .copied()
                .flatten()
                .flatten()
                .take(top)
                .map(|top| (TokenId(top.1), value(top.0)))
                .collect(),
        };
        Some(last(tokens, new).iter().zip(tops).map(one).collect())
    }
}

/// JSON has no infinity: nothing stands for the logarithm of 0.
fn value(logprob: Option<f32>) -> f32 {
    logprob.unwrap_or(f32::NEG_INFINITY)
}

/// The last so many of a list, or all if there are fewer.
fn last<T>(list: &[T], count: usize) -> &[T] {
    list.get(list.len().saturating_sub(count)..).unwrap_or_default()
}
