//! A block as TensorRT-LLM tells of it.

use chiasm_kv::event::ExternalHash;
use chiasm_types::TokenId;

/// Most bytes of a server's name of an item. It is 64 hex digits, or what a client of the server's
/// own library has chosen.
pub(super) const LONGEST_NAME: usize = 128;

/// vLLM's names of the tiers: a level of the cache is the GPU's memory, or what it was offloaded
/// to.
const TIERS: [&str; 2] = ["GPU", "CPU"];

/// A block that came to hold tokens, or the part of one that has some.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct StoredBlock {
    pub(super) hash: ExternalHash,
    /// `None` for what is no token: a server has other things in the place of an item's tokens.
    pub(super) tokens: Vec<Option<TokenId>>,
    /// The items in it, in the order of the prompt.
    pub(super) keys: Vec<ItemKey>,
    /// The level of the cache: 0 is the GPU's memory.
    pub(super) level: usize,
}

/// A run of an item's tokens in a block.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ItemKey {
    /// The server's own name of the item.
    pub(super) name: String,
    /// How many of the item's tokens are in front of the run's first one.
    pub(super) offset: u64,
}

impl StoredBlock {
    /// Its tokens, if it has nothing but text.
    pub(super) fn text(&self) -> Option<Vec<TokenId>> {
        self.keys.is_empty().then(|| self.tokens.iter().copied().collect()).flatten()
    }

    /// The first run of each item in it: an item whose tokens are apart, as rows are with some
    /// models, has several.
    pub(super) fn items(&self) -> Vec<&ItemKey> {
        let runs =
            self.keys.chunk_by(|last, next| last.name == next.name && last.offset < next.offset);
        runs.map(|runs| &runs[0]).collect()
    }
}

/// The name of the tier of this level.
pub(super) fn medium(level: usize) -> Option<String> {
    Some(TIERS[level.min(TIERS.len() - 1)].to_owned())
}
