//! A request: the prompt and how to continue it.

use chiasm_types::TokenId;

use crate::{Chat, ClientSampling, ToolUse};

/// A prompt and how to continue it.
#[derive(Clone, Debug)]
pub struct GenerateRequest {
    /// The prompt to continue.
    pub prompt: Prompt,
    /// The sampling settings and stop conditions.
    pub sampling: ClientSampling,
    /// A salt of the block keys: prompts with different salts share no cached blocks.
    pub cache_salt: Option<String>,
    /// The priority in engines with a priority scheduler; lower values run earlier.
    pub priority: i64,
    /// The functions that the model may call.
    pub tools: Option<ToolUse>,
    /// Leaves reasoning out of the answer.
    pub without_reasoning: bool,
}

/// The prompt of a request.
#[derive(Clone, Debug)]
pub enum Prompt {
    /// A conversation, which the model's chat template renders.
    Chat(Chat),
    /// Plain text.
    Text(String),
    /// Token ids.
    Tokens(Vec<TokenId>),
}

impl Prompt {
    /// Returns the name of the request field that holds the prompt.
    pub fn field(&self) -> &'static str {
        match self {
            Self::Chat(_) => "messages",
            Self::Text(_) | Self::Tokens(_) => "prompt",
        }
    }
}

/// The input of the tokenization endpoint.
pub enum Tokenizable {
    /// A conversation, which the model's chat template renders, with placeholders for its media
    /// items.
    Chat(Chat),
    /// Plain text.
    Text {
        /// The text.
        text: String,
        /// Adds the tokenizer's special tokens, such as a beginning-of-sequence token.
        add_special_tokens: bool,
    },
}
