//! The digest of what was computed of a prompt.

use crate::block_chain::BlockHash;

/// What stands for the keys and values of a prompt: the number of its tokens, and a digest of its
/// blocks with the tokens behind them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Computed(pub(crate) String);

impl Computed {
    /// Of a prompt with these full blocks, and the raw tokens behind the last of them.
    pub(crate) fn of(blocks: &[BlockHash], rest: &[u32]) -> Self {
        let mut hasher = blake3::Hasher::new();
        if let Some(last) = blocks.last() {
            hasher.update(&last.bytes());
        }
        for token in rest {
            hasher.update(&token.to_le_bytes());
        }
        Self(format!("{}+{}:{}", blocks.len(), rest.len(), hasher.finalize().to_hex()))
    }
}
