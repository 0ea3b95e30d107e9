use std::fmt;

/// An entry of the model's vocabulary.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(transparent)]
pub struct TokenId(pub u32);

impl fmt::Display for TokenId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl From<u32> for TokenId {
    fn from(id: u32) -> Self {
        Self(id)
    }
}

/// A token that is repeated `count` times.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TokenRun {
    /// The token.
    pub token: TokenId,
    /// The number of repetitions.
    pub count: usize,
    /// `true` if the model replaces these tokens with the item's embeddings.
    pub embeds: bool,
}
