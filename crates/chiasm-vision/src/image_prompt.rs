//! The words and tokens that stand for an image in a prompt.

use chiasm_types::TokenId;

/// How an image is written in a prompt, before its placeholder takes the place.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ImagePrompt {
    /// What stands for one image in a chat template whose message content is a string
    /// (vLLM's `get_placeholder_str` of the model class).
    pub text: &'static str,
    /// The tokens that the placeholder replaces: once per image in the tokenized prompt, at least
    /// one token.
    pub marker: Vec<TokenId>,
    /// A text that is replaced by another in the rendered prompt before it is tokenized: for
    /// families whose `text` is no token of its own, and would be tokenized together with what
    /// stands around it.
    pub rewrite: Option<(&'static str, &'static str)>,
    /// Pairs of tokens that are joined into one wherever they stand side by side once all
    /// placeholders are in the prompt, pair by pair in this order.
    pub joins: Vec<([TokenId; 2], TokenId)>,
}

impl ImagePrompt {
    /// A prompt in which one token stands for an image and is written `text`.
    pub(crate) fn token(text: &'static str, marker: TokenId) -> Self {
        Self { text, marker: vec![marker], rewrite: None, joins: Vec::new() }
    }
}
