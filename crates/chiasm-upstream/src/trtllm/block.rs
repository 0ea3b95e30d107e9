//! A block as TensorRT-LLM reports it.

use chiasm_kv::event::ExternalHash;
use chiasm_types::TokenId;

/// The maximum length of a server's name of an item. A name is 64 hex digits, or a text that a
/// client of the server's own library has chosen.
pub(super) const MAX_NAME_BYTES: usize = 128;

/// vLLM's names of the cache tiers, by TensorRT-LLM's cache level: the GPU's memory, or the memory
/// that blocks are offloaded to.
const TIERS: [&str; 2] = ["GPU", "CPU"];

/// A stored block, or the filled part of one.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct StoredBlock {
    pub(super) hash: ExternalHash,
    /// The tokens; `None` for a number that is not a token. Within an item a server reports other
    /// numbers.
    pub(super) tokens: Vec<Option<TokenId>>,
    /// The runs of items in the block, in the order of the prompt.
    pub(super) keys: Vec<ItemKey>,
    /// The level of the cache; 0 is the GPU's memory.
    pub(super) level: usize,
}

/// A run of an item's tokens in a block.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ItemKey {
    /// The server's name of the item.
    pub(super) name: String,
    /// The number of the item's tokens before the first one of the run.
    pub(super) offset: u64,
}

impl StoredBlock {
    /// Returns the tokens, if the block has only text.
    pub(super) fn text(&self) -> Option<Vec<TokenId>> {
        self.keys.is_empty().then(|| self.tokens.iter().copied().collect()).flatten()
    }

    /// Returns the first run of each item. An item has several runs if its tokens are not
    /// contiguous, as with the rows of some models.
    pub(super) fn items(&self) -> Vec<&ItemKey> {
        let runs =
            self.keys.chunk_by(|last, next| last.name == next.name && last.offset < next.offset);
        runs.map(|runs| &runs[0]).collect()
    }
}

/// Returns vLLM's name of the tier of this level.
pub(super) fn medium(level: usize) -> Option<String> {
    Some(TIERS[level.min(TIERS.len() - 1)].to_owned())
}
