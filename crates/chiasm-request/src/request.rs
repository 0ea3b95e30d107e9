//! A request: what to continue, and how.

use chiasm_types::TokenId;

use crate::{Chat, Sampling, ToolUse};

/// One prompt and how to continue it.
#[derive(Clone, Debug)]
pub struct GenerateRequest {
    /// What to continue.
    pub prompt: Prompt,
    /// How tokens are chosen and when to stop.
    pub sampling: Sampling,
    /// Keeps prompts of different owners from sharing cached blocks.
    pub cache_salt: Option<String>,
    /// Lower is handled earlier, by engines with a priority scheduler.
    pub priority: i64,
    /// The functions that the model may call.
    pub tools: Option<ToolUse>,
    /// Reasoning is left out of the answer.
    pub without_reasoning: bool,
}

/// What to continue.
#[derive(Clone, Debug)]
pub enum Prompt {
    /// A conversation, to be rendered by the model's chat template.
    Chat(Chat),
    /// Plain text.
    Text(String),
    /// Token ids as they are.
    Tokens(Vec<TokenId>),
}

impl Prompt {
    /// The field of the request that holds it.
    pub fn field(&self) -> &'static str {
        match self {
            Self::Chat(_) => "messages",
            Self::Text(_) | Self::Tokens(_) => "prompt",
        }
    }
}

/// What becomes tokens.
pub enum Tokenizable {
    /// A conversation, to be rendered by the model's chat template; its media items stand as their
    /// placeholders.
    Chat(Chat),
    /// Plain text.
    Text {
        /// The text.
        text: String,
        /// With what the tokenizer adds to every text, such as a token that begins it.
        add_special_tokens: bool,
    },
}
