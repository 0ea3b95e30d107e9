//! A continuation: its deltas, and the finished choice.

use chiasm_backend::{Finish, Prefill, PromptLogprobs, TokenLogprob};
use chiasm_types::TokenId;

use crate::{AnswerEvent, AnswerEvents};

/// The new part of a continuation from one output of a backend.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ChoiceDelta {
    /// The continuation's index, from 0.
    pub index: usize,
    /// The new reasoning, text and calls, in order. Empty while a character, a stop string or a
    /// marker is incomplete.
    pub events: AnswerEvents,
    /// The number of new reasoning tokens.
    pub reasoning_tokens: usize,
    /// The new tokens.
    pub tokens: Vec<TokenId>,
    /// The log probabilities of the new tokens, if requested.
    pub logprobs: Option<Vec<TokenLogprob>>,
    /// The tokens of the new text with their log probabilities, if requested.
    pub text_logprobs: Vec<TextLogprob>,
    /// The log probabilities of the prompt's tokens, from the second token on, if requested.
    pub prompt_logprobs: Option<PromptLogprobs>,
    /// The reason why the continuation ended; set in the last delta.
    pub finish: Option<Finish>,
    /// Statistics of the prefill, if they become known after the first token.
    pub prefill: Option<Prefill>,
}

/// A finished continuation.
#[derive(Clone, Debug, PartialEq)]
pub struct FinishedChoice {
    /// The reasoning, text and calls, in order.
    pub events: AnswerEvents,
    /// The number of reasoning tokens.
    pub reasoning_tokens: usize,
    /// The tokens.
    pub tokens: Vec<TokenId>,
    /// The log probabilities of the tokens, if requested.
    pub logprobs: Option<Vec<TokenLogprob>>,
    /// The tokens of the text with their log probabilities, if requested.
    pub text_logprobs: Vec<TextLogprob>,
    /// The log probabilities of the prompt's tokens, from the second token on, if requested.
    pub prompt_logprobs: Option<PromptLogprobs>,
    /// The reason why the continuation ended.
    pub finish: Finish,
}

/// A token of the text, with its log probability.
#[derive(Clone, Debug, PartialEq)]
pub struct TextLogprob {
    /// The byte offset of the token in the continuation's text.
    pub begin: usize,
    /// The token and its log probability.
    pub logprob: TokenLogprob,
}

impl ChoiceDelta {
    /// Returns `true` if the delta has nothing that a client is sent.
    pub fn is_empty_for_client(&self) -> bool {
        let Self { events, logprobs, finish, .. } = self;
        let is_internal = |event| matches!(event, &AnswerEvent::EndCall(_));
        events.iter().all(is_internal) && logprobs.is_none() && finish.is_none()
    }

    /// Returns `true` if the delta has no part of the answer, not even a token, but only counts.
    pub fn has_only_counts(&self) -> bool {
        self.tokens.is_empty() && self.prompt_logprobs.is_none() && self.is_empty_for_client()
    }

    /// Appends a later delta.
    pub fn append(&mut self, next: Self) {
        let Self {
            index: _,
            events,
            reasoning_tokens,
            tokens,
            logprobs,
            text_logprobs,
            prompt_logprobs,
            finish,
            prefill,
        } = next;
        self.events.append(events);
        self.reasoning_tokens += reasoning_tokens;
        self.tokens.extend(tokens);
        self.text_logprobs.extend(text_logprobs);
        match (&mut self.logprobs, logprobs) {
            (Some(logprobs), Some(more)) => logprobs.extend(more),
            // A late delta only has counts.
            (Some(_), None) => {}
            (none, more) => *none = more,
        }
        match (&mut self.prompt_logprobs, prompt_logprobs) {
            (Some(logprobs), Some(more)) => logprobs.append(more),
            (Some(_), None) => {}
            (none, more) => *none = more,
        }
        self.finish = self.finish.take().or(finish);
        self.prefill = self.prefill.take().or(prefill);
    }

    /// Returns the finished continuation; `None` if it has no finish reason.
    pub fn into_finished(self) -> Option<FinishedChoice> {
        let Self {
            events,
            reasoning_tokens,
            tokens,
            logprobs,
            text_logprobs,
            prompt_logprobs,
            finish,
            ..
        } = self;
        let finish = finish?;
        Some(FinishedChoice {
            events,
            reasoning_tokens,
            tokens,
            logprobs,
            text_logprobs,
            prompt_logprobs,
            finish,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn appended_delta_adds_each_field() {
        let one = PromptLogprobs {
            width: 1,
            tokens: vec![TokenId(7)],
            logprobs: vec![-0.5],
            ranks: vec![1],
        };
        let prefill = Prefill { cached_tokens: 16, ..Prefill::default() };
        let first =
            ChoiceDelta { reasoning_tokens: 1, tokens: vec![TokenId(1)], ..ChoiceDelta::default() };
        let late = ChoiceDelta {
            reasoning_tokens: 2,
            tokens: vec![TokenId(2)],
            logprobs: Some(Vec::new()),
            prompt_logprobs: Some(one.clone()),
            finish: Some(Finish::Eos),
            prefill: Some(prefill),
            ..ChoiceDelta::default()
        };
        let mut joined = first;
        joined.append(late.clone());
        let expected =
            ChoiceDelta { reasoning_tokens: 3, tokens: vec![TokenId(1), TokenId(2)], ..late };
        assert_eq!(joined, expected);
        // A later delta without values removes nothing.
        joined.append(ChoiceDelta::default());
        assert_eq!(joined, expected);
    }
}
