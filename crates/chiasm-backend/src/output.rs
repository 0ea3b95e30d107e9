use std::time::Duration;

use chiasm_types::TokenId;

/// What one step of a backend adds to one continuation.
#[derive(Clone, Debug, PartialEq)]
pub struct Output {
    /// The continuation's index, from 0.
    pub choice: usize,
    /// What is new.
    pub content: Content,
    /// Why the continuation ended; set in its last output.
    pub finish: Option<Finish>,
    /// How the prompt was computed; set in a continuation's first output where the backend tells.
    pub prefill: Option<Prefill>,
    /// Log probabilities of the prompt's next tokens, from its second one on, if they were asked
    /// for.
    pub prompt_logprobs: Option<PromptLogprobs>,
}

/// Log probabilities at some positions of a prompt, with `width` candidates at each: the token that
/// stands there, then the likeliest ones, that token among them if it is one of those.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PromptLogprobs {
    /// Candidates of a position, at least 1 unless there are no positions.
    pub width: usize,
    /// Candidates of all positions: `positions × width`.
    pub tokens: Vec<TokenId>,
    /// Natural logarithms of their probabilities: `positions × width`.
    pub logprobs: Vec<f32>,
    /// How many tokens are as likely as the one that stands at a position, itself included, or
    /// likelier: one per position.
    pub ranks: Vec<u32>,
}

impl PromptLogprobs {
    /// The candidates of a position, with their log probabilities. `None` behind the last one.
    pub fn at(&self, position: usize) -> Option<(&[TokenId], &[f32])> {
        let range = position * self.width..(position + 1) * self.width;
        Some((self.tokens.get(range.clone())?, self.logprobs.get(range)?))
            .filter(|(tokens, _)| !tokens.is_empty())
    }

    /// Adds the positions that come after.
    pub fn append(&mut self, next: Self) {
        let Self { width, tokens, logprobs, ranks } = next;
        self.width = self.width.max(width);
        self.tokens.extend(tokens);
        self.logprobs.extend(logprobs);
        self.ranks.extend(ranks);
    }
}

/// What is new in a continuation.
#[derive(Clone, Debug, PartialEq)]
pub enum Content {
    /// Tokens, still to be turned into text.
    Tokens {
        /// Zero or more tokens, the one that ended the continuation included.
        tokens: Vec<TokenId>,
        /// One entry per token, if log probabilities were asked for.
        logprobs: Option<Vec<TokenLogprob>>,
    },
    /// Text and tool calls as the backend made them.
    Text {
        /// New text; may be empty. It stands before the calls.
        text: String,
        /// Pieces of tool calls. A call's pieces follow each other, without text between them.
        tool_calls: Vec<ToolCallDelta>,
    },
}

/// A piece of a tool call, in OpenAI's terms: the first piece of a call has its id and name, the
/// others go on with its arguments.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ToolCallDelta {
    /// The call's index in its continuation, from 0.
    pub index: usize,
    /// The call's id.
    pub id: Option<String>,
    /// The function's name.
    pub name: Option<String>,
    /// What is new of the arguments, JSON in pieces.
    pub arguments: String,
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
    /// One of the job's stop tokens.
    StopToken(TokenId),
    /// One of the job's stop strings.
    StopString(String),
    /// The largest number of new tokens was reached, or the context is full.
    Length,
    /// The engine found that the continuation goes in circles.
    Repetition,
    /// The model calls tools.
    ToolCalls,
}

/// How a prompt was computed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Prefill {
    /// Prompt tokens that the backend found in its KV cache, by its own count.
    pub cached_tokens: usize,
    /// Prompt tokens that it has computed and keeps there for others, where it tells.
    pub created_tokens: Option<usize>,
    /// How long the request waited in the backend before it was first scheduled, where the backend
    /// tells.
    pub queued: Option<Duration>,
}
