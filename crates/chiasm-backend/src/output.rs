use std::time::Duration;

use chiasm_types::TokenId;

/// The new part of one continuation that a step of a backend has generated.
#[derive(Clone, Debug, PartialEq)]
pub struct Output {
    /// The continuation's index, from 0.
    pub choice: usize,
    /// The new content.
    pub content: Content,
    /// The reason why the continuation ended; set in its last output.
    pub finish: Option<Finish>,
    /// Statistics of the prefill; set in a continuation's first output if the backend reports them.
    pub prefill: Option<Prefill>,
    /// Log probabilities of the prompt's next tokens, from the second token on, if requested.
    pub prompt_logprobs: Option<PromptLogprobs>,
}

/// Log probabilities at some positions of a prompt, with `width` candidates per position.
///
/// The first candidate is the prompt's token, followed by the most likely tokens. The prompt's
/// token is repeated if it is one of the most likely tokens.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PromptLogprobs {
    /// The number of candidates per position, at least 1 unless there are no positions.
    pub width: usize,
    /// The candidates of all positions: `positions × width`.
    pub tokens: Vec<TokenId>,
    /// The natural logarithms of their probabilities: `positions × width`.
    pub logprobs: Vec<f32>,
    /// The rank of the prompt's token at each position: the number of tokens that are at least as
    /// likely, itself included.
    pub ranks: Vec<u32>,
}

impl PromptLogprobs {
    /// Returns the candidates of a position with their log probabilities; `None` after the last
    /// position.
    pub fn at(&self, position: usize) -> Option<(&[TokenId], &[f32])> {
        let range = position * self.width..(position + 1) * self.width;
        Some((self.tokens.get(range.clone())?, self.logprobs.get(range)?))
            .filter(|(tokens, _)| !tokens.is_empty())
    }

    /// Appends the positions of `next`.
    pub fn append(&mut self, next: Self) {
        let Self { width, tokens, logprobs, ranks } = next;
        self.width = self.width.max(width);
        self.tokens.extend(tokens);
        self.logprobs.extend(logprobs);
        self.ranks.extend(ranks);
    }
}

/// The new content of a continuation.
#[derive(Clone, Debug, PartialEq)]
pub enum Content {
    /// Tokens that are not yet detokenized.
    Tokens {
        /// Zero or more tokens, including the one that ended the continuation.
        tokens: Vec<TokenId>,
        /// One entry per token, if log probabilities were requested.
        logprobs: Option<Vec<TokenLogprob>>,
    },
    /// Text and tool calls that the backend has parsed itself.
    Text {
        /// The new text, which precedes the calls; may be empty.
        text: String,
        /// Pieces of tool calls. The pieces of a call are consecutive, without text between them.
        tool_calls: Vec<ToolCallDelta>,
    },
}

/// A piece of a tool call, in OpenAI's terms. The first piece of a call has the id and the name;
/// the others continue the arguments.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ToolCallDelta {
    /// The call's index in the continuation, from 0.
    pub index: usize,
    /// The call's id.
    pub id: Option<String>,
    /// The function's name.
    pub name: Option<String>,
    /// The next piece of the arguments, which are JSON.
    pub arguments: String,
}

/// A sampled token, its log probability, and the most likely alternatives in the engine's order.
#[derive(Clone, Debug, PartialEq)]
pub struct TokenLogprob {
    /// The sampled token.
    pub token: TokenId,
    /// The natural logarithm of its probability.
    pub logprob: f32,
    /// The alternatives, at most as many as were requested.
    pub top: Vec<(TokenId, f32)>,
}

/// The reason why a continuation ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Finish {
    /// The end-of-sequence token.
    Eos,
    /// One of the job's stop tokens.
    StopToken(TokenId),
    /// One of the job's stop strings.
    StopString(String),
    /// The maximum number of new tokens was reached, or the context is full.
    Length,
    /// The engine detected a repetition.
    Repetition,
    /// The model calls tools.
    ToolCalls,
}

/// Statistics of a prefill.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Prefill {
    /// The number of prompt tokens that the backend found in its KV cache, by its own count.
    pub cached_tokens: usize,
    /// The number of prompt tokens that the backend has computed and keeps in its cache, if it
    /// reports that.
    pub created_tokens: Option<usize>,
    /// The time that the request waited in the backend before it was first scheduled, if the
    /// backend reports that.
    pub queued: Option<Duration>,
}
