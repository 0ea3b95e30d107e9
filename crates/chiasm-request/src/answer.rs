//! One continuation: the deltas of its text, and the whole.

use chiasm_backend::{Finish, Prefill, PromptLogprobs, TokenLogprob};
use chiasm_types::TokenId;

use crate::{AnswerEvent, AnswerEvents};

/// What one output of a backend adds to a continuation.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ChoiceDelta {
    /// The continuation's index, from 0.
    pub index: usize,
    /// Reasoning, text and calls in their order. Empty while a character, a stop string or a marker
    /// is incomplete.
    pub events: AnswerEvents,
    /// The number of new tokens that belong to reasoning.
    pub reasoning_tokens: usize,
    /// New tokens.
    pub tokens: Vec<TokenId>,
    /// Log probabilities of the new tokens, when asked for.
    pub logprobs: Option<Vec<TokenLogprob>>,
    /// The tokens of the new text, when their log probabilities are asked for.
    pub text_logprobs: Vec<TextLogprob>,
    /// Log probabilities of the prompt's tokens from the second one on, when asked for.
    pub prompt_logprobs: Option<PromptLogprobs>,
    /// Set with the last delta.
    pub finish: Option<Finish>,
    /// How the engine computed the prompt, where that becomes known after the first token.
    pub prefill: Option<Prefill>,
}

/// A whole continuation.
#[derive(Clone, Debug, PartialEq)]
pub struct FinishedChoice {
    /// Reasoning, text and calls in their order.
    pub events: AnswerEvents,
    /// The number of tokens that belong to reasoning.
    pub reasoning_tokens: usize,
    /// Its tokens.
    pub tokens: Vec<TokenId>,
    /// Their log probabilities, when asked for.
    pub logprobs: Option<Vec<TokenLogprob>>,
    /// The tokens of its text, when their log probabilities are asked for.
    pub text_logprobs: Vec<TextLogprob>,
    /// Log probabilities of the prompt's tokens from the second one on, when asked for.
    pub prompt_logprobs: Option<PromptLogprobs>,
    /// Why it ended.
    pub finish: Finish,
}

/// A token of the text.
#[derive(Clone, Debug, PartialEq)]
pub struct TextLogprob {
    /// The byte offset in the continuation's whole text at which the token begins.
    pub begin: usize,
    /// The token and its log probability.
    pub logprob: TokenLogprob,
}

impl ChoiceDelta {
    /// Whether there is nothing for a client in it.
    pub fn says_nothing(&self) -> bool {
        let Self { events, logprobs, finish, .. } = self;
        let is_silent = |event| matches!(event, &AnswerEvent::EndCall(_));
        events.iter().all(is_silent) && logprobs.is_none() && finish.is_none()
    }

    /// Returns `true` if a delta has nothing of the answer, not even a token, but only counts.
    pub fn is_for_counts(&self) -> bool {
        self.tokens.is_empty() && self.prompt_logprobs.is_none() && self.says_nothing()
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
            // A late delta has counts alone.
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

    /// Returns the whole answer; `None` if it has no end.
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
        // A later delta without them takes nothing away.
        joined.append(ChoiceDelta::default());
        assert_eq!(joined, expected);
    }
}
