//! One continuation on its way from token ids to text: detokenizing, stop strings, log probabilities, the end.

use std::time::Duration;

use chiasm_backend::{Content, Finish, Output, TokenLogprob, ToolCallDelta};
use chiasm_prompt::{Detokenizer, StopStrings};
use chiasm_types::TokenId;
use tokio::time::Instant;

use super::error::RequestError;
use super::request::Sampling;
use crate::model::ServedModel;

/// What one output of a backend adds to a continuation.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct ChoiceDelta {
    /// The continuation's index, from 0.
    pub index: usize,
    /// New text; may be empty while a character or a stop string is incomplete.
    pub text: String,
    /// New tokens.
    pub tokens: Vec<TokenId>,
    /// Log probabilities of the new tokens, when asked for.
    pub logprobs: Option<Vec<TokenLogprob>>,
    /// Pieces of tool calls, where the backend makes text by itself.
    pub tool_calls: Vec<ToolCallDelta>,
    /// Set with the last delta.
    pub finish: Option<Finish>,
}

/// A whole continuation.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct FinishedChoice {
    /// Its text.
    pub text: String,
    /// Its tokens.
    pub tokens: Vec<TokenId>,
    /// Their log probabilities, when asked for.
    pub logprobs: Option<Vec<TokenLogprob>>,
    /// Its tool calls, where the backend makes text by itself.
    pub tool_calls: Vec<ToolCallDelta>,
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
    wants_logprobs: bool,
    seen_tokens: usize,
    /// When the last tokens came.
    last: Option<Instant>,
}

impl Choice {
    pub(super) fn new(index: usize, model: &ServedModel, prompt: &[TokenId], sampling: &Sampling) -> Self {
        let skip_special = sampling.skip_special_tokens.or(model.generation.skip_special_tokens).unwrap_or(true);
        Self {
            index,
            detokenizer: Detokenizer::new(model.tokenizer.clone(), prompt, skip_special),
            stops: StopStrings::new(sampling.stop.clone(), sampling.include_stop),
            min_tokens: sampling.min_tokens as usize,
            include_stop: sampling.include_stop,
            wants_logprobs: sampling.logprobs.is_some(),
            seen_tokens: 0,
            last: None,
        }
    }

    /// The time per token since the tokens before those of this delta. `None` for the first ones, and without new ones.
    pub(super) fn gap(&mut self, delta: &ChoiceDelta) -> Option<Duration> {
        if delta.tokens.is_empty() {
            return None;
        }
        let now = Instant::now();
        let before = self.last.replace(now)?;
        Some((now - before) / u32::try_from(delta.tokens.len()).unwrap_or(u32::MAX))
    }

    /// Takes one output. `finish` is set when the continuation ended, be it by the backend or by a stop string (then the
    /// backend does not know yet, and the continuation is to be stopped).
    pub(super) fn push(&mut self, output: Output) -> ChoiceDelta {
        let (tokens, logprobs) = match output.content {
            Content::Tokens { tokens, logprobs } => (tokens, logprobs),
            Content::Text { text, tool_calls } => {
                let index = self.index;
                return ChoiceDelta { index, text, tool_calls, finish: output.finish, ..ChoiceDelta::default() };
            }
        };
        let mut finish = output.finish;
        let mut delta = ChoiceDelta { index: self.index, ..ChoiceDelta::default() };
        // The token that ended the text is no part of it, unless asked for.
        let silent_tail = usize::from(!self.include_stop && matches!(finish, Some(Finish::Eos | Finish::StopToken(_))));
        let spoken = tokens.len().saturating_sub(silent_tail);
        for (i, &token) in tokens.iter().enumerate() {
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
        if self.wants_logprobs {
            let mut all = logprobs.unwrap_or_default();
            all.truncate(delta.tokens.len());
            delta.logprobs = Some(all);
        }
        delta.finish = finish;
        delta
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
        for piece in next.tool_calls {
            match self.tool_calls.iter_mut().find(|call| call.index == piece.index) {
                Some(call) => call.arguments.push_str(&piece.arguments),
                None => self.tool_calls.push(piece),
            }
        }
        match (&mut self.logprobs, next.logprobs) {
            (Some(logprobs), Some(more)) => logprobs.extend(more),
            (none, more) => *none = more,
        }
        self.finish = next.finish;
    }

    pub(super) fn into_finished(self) -> Result<FinishedChoice, RequestError> {
        let Self { text, tokens, logprobs, tool_calls, finish, .. } = self;
        let finish = finish.ok_or_else(|| RequestError::internal("the engine ended without a reason"))?;
        Ok(FinishedChoice { text, tokens, logprobs, tool_calls, finish })
    }
}
