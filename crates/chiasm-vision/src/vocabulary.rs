//! What a family has to ask the model's tokenizer.

use chiasm_types::TokenId;

/// The tokens of a model. Families ask for the tokens around an image once, when the model is
/// loaded.
pub trait Vocabulary {
    /// The one token that is written so, special tokens included; `None` if there is none.
    fn id(&self, token: &str) -> Option<TokenId>;

    /// The tokens of a text, without those that a tokenizer puts around a whole prompt. Written
    /// special tokens are recognised.
    ///
    /// # Errors
    /// The tokenizer cannot tokenize the text, or there is none.
    fn encode(&self, text: &str) -> Result<Vec<TokenId>, VocabularyError>;
}

/// Why a text has no tokens.
#[derive(Debug, thiserror::Error)]
pub enum VocabularyError {
    /// The model came without one.
    #[error("there is no tokenizer")]
    NoTokenizer,
    /// It has no tokens for this text.
    #[error("no token stands for {0:?}")]
    NoToken(String),
    /// It failed.
    #[error(transparent)]
    Tokenizer(Box<dyn std::error::Error + Send + Sync>),
}

/// A vocabulary without any token, for families that name all of theirs in config.json (Qwen-VL,
/// LLaVA).
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
