/// The run of prompt tokens that stands for one media item.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Placeholder {
    /// The index of the first token in the expanded prompt.
    pub offset: usize,
    /// The number of tokens.
    pub length: usize,
    /// A mask of `length` entries: `true` for each token that is replaced by an embedding. `None`
    /// means that all tokens are replaced.
    pub is_embed: Option<Vec<bool>>,
}

impl Placeholder {
    /// Returns the number of tokens that are replaced by embeddings.
    pub fn embed_count(&self) -> usize {
        self.is_embed
            .as_ref()
            .map_or(self.length, |mask| mask.iter().filter(|embeds| **embeds).count())
    }
}
