//! The interface of the model's tokenizer that image families use.

use chiasm_types::TokenId;

/// The tokens of a model. Families look up the tokens around an image once, when the model is
/// loaded.
pub trait Vocabulary {
    /// Returns the token with exactly this text, special tokens included; `None` if there is none.
    fn id(&self, token: &str) -> Option<TokenId>;

    /// Encodes a text, without the tokens that a tokenizer adds around a whole prompt.
    ///
    /// Special tokens in the text are recognised.
    ///
    /// # Errors
    /// Fails if there is no tokenizer or if it cannot encode the text.
    fn encode(&self, text: &str) -> Result<Vec<TokenId>, VocabularyError>;
}

/// An error from encoding a text.
#[derive(Debug, thiserror::Error)]
pub enum VocabularyError {
    /// The model has no tokenizer.
    #[error("the model has no tokenizer")]
    NoTokenizer,
    /// The tokenizer has no tokens for this text.
    #[error("the tokenizer has no token for {0:?}")]
    NoToken(String),
    /// The tokenizer failed.
    #[error(transparent)]
    Tokenizer(Box<dyn std::error::Error + Send + Sync>),
}

/// An empty vocabulary, for families whose config.json has all their token ids (Qwen-VL, LLaVA).
#[derive(Clone, Copy, Debug)]
pub struct NoVocabulary;

impl Vocabulary for NoVocabulary {
    fn id(&self, _token: &str) -> Option<TokenId> {
        None
    }

    fn encode(&self, _text: &str) -> Result<Vec<TokenId>, VocabularyError> {
        Err(VocabularyError::NoTokenizer)
    }
}
