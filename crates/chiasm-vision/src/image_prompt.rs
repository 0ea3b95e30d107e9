//! The text and tokens that represent an image in a prompt.

use chiasm_types::TokenId;

/// The representation of an image in a prompt, before it is replaced by the placeholder.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ImagePrompt {
    /// The text of one image in a chat template whose message content is a string
    /// (`get_placeholder_str` of the model class in vLLM).
    pub text: &'static str,
    /// The tokens that the placeholder replaces. They occur once per image in the tokenized prompt
    /// and are never empty.
    pub marker: Vec<TokenId>,
    /// A text and its replacement, applied to the rendered prompt before it is tokenized.
    ///
    /// Needed by families whose `text` is not a single token: the tokenizer would merge it with the
    /// surrounding text.
    pub rewrite: Option<(&'static str, &'static str)>,
    /// Pairs of adjacent tokens and the token that replaces each of them.
    ///
    /// Applied pair by pair, in this order, once the prompt has all its placeholders.
    pub joins: Vec<([TokenId; 2], TokenId)>,
}

impl ImagePrompt {
    /// Creates a prompt in which one token represents an image and is written `text`.
    pub(crate) fn token(text: &'static str, marker: TokenId) -> Self {
        Self { text, marker: vec![marker], rewrite: None, joins: Vec::new() }
    }
}
