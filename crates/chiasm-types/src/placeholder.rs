/// The run of prompt tokens that stands for one media item.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Placeholder {
    /// Index of its first token in the expanded prompt.
    pub offset: usize,
    /// Its number of tokens.
    pub length: usize,
    /// Which of its tokens are replaced by embeddings; `None` when all are. Has `length` entries otherwise.
    pub is_embed: Option<Vec<bool>>,
}
