//! The digest of a computed prompt.

use crate::block_chain::BlockHash;

/// Stands for the keys and values of a prompt: the number of its tokens, and a digest of its blocks
/// and the tokens after them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct PromptDigest(pub(crate) String);

impl PromptDigest {
    /// Computes the digest of a prompt with these full blocks, and the tokens after the last one.
    pub(crate) fn new(blocks: &[BlockHash], rest: &[u32]) -> Self {
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
