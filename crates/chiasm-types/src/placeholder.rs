/// The run of prompt tokens that stands for one media item.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Placeholder {
    /// Index of its first token in the expanded prompt.
    pub offset: usize,
    /// Its number of tokens.
    pub length: usize,
    /// True for each of its `length` tokens that is replaced by an embedding; `None` when all are.
    pub is_embed: Option<Vec<bool>>,
}

impl Placeholder {
    /// How many of its tokens are replaced by embeddings.
    pub fn embeds(&self) -> usize {
        self.is_embed
            .as_ref()
            .map_or(self.length, |mask| mask.iter().filter(|embeds| **embeds).count())
    }
}
