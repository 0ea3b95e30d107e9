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
        /// New text; may be empty.
        text: String,
        /// Pieces of tool calls, in order.
        tool_calls: Vec<ToolCallDelta>,
    },
}

/// A piece of a tool call, in OpenAI's terms: the first piece of a call has its id and name, the others go on with its
/// arguments.
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
    /// How long the request waited in the backend before it was first scheduled, where the backend tells.
    pub queued: Option<Duration>,
}
