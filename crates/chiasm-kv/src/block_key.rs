//! Our identity of a KV-cache block.

use std::fmt;

use chiasm_types::{BlockSize, MmHash, TokenId};

/// Identity of a block: its tokens, the media items that touch it and where they start, LoRA, cache salt, and the block
/// before it.
///
/// The first 128 bits of a keyed BLAKE3 over
///
/// ```text
/// flags:u8  parent:16 bytes?  tokens:u32 token:u32…  items:u32 (mm_hash:32 bytes, offset:i64)…
/// (lora:u32 bytes…)?  (salt:u32 bytes…)?
/// ```
///
/// in little-endian order. The flags say which of the optional parts are there and everything of variable length has its
/// length before it, so that no two different blocks have the same encoding. `offset` is the start of the item's
/// placeholder minus the start of the block, in tokens, as in vLLM's `extra_keys`. The salt is part of the first block of
/// a prompt only and reaches the others through the chain. The number of tokens is the block size: blocks of engines
/// with other block sizes never match.
///
/// Keys are for use inside one process: the encoding may change with any version.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BlockKey(u128);

impl BlockKey {
    /// The key as a number.
    pub const fn get(self) -> u128 {
        self.0
    }
}

impl fmt::Display for BlockKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}

impl fmt::Debug for BlockKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "BlockKey({self})")
    }
}

/// Where a media item's placeholder lies in a prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MediaSpan {
    /// The item.
    pub hash: MmHash,
    /// Index of the placeholder's first token in the expanded prompt.
    pub offset: usize,
    /// Number of placeholder tokens.
    pub length: usize,
}

/// Everything that decides the block keys of a prompt.
#[derive(Clone, Copy, Debug, Default)]
pub struct PromptBlocks<'a> {
    /// The expanded prompt.
    pub tokens: &'a [TokenId],
    /// The media items; their order does not matter. Placeholders share no token that embeds.
    pub media: &'a [MediaSpan],
    /// Name of the LoRA adapter. Two adapters of one name are one to us.
    pub lora: Option<&'a str>,
    /// Separates caches of different tenants. The empty salt is no salt, as in vLLM.
    pub salt: Option<&'a str>,
}

/// The keys of a prompt's full blocks, first block first. The tokens after the last full block have no key: engines
/// don't share them either.
///
/// ```
/// use chiasm_kv::{PromptBlocks, block_keys};
/// use chiasm_types::{BlockSize, TokenId};
///
/// let tokens: Vec<TokenId> = (0..70).map(TokenId).collect();
/// let prompt = PromptBlocks { tokens: &tokens, ..Default::default() };
/// let keys = block_keys(&prompt, BlockSize::new(32).unwrap());
/// assert_eq!(keys.len(), 2);
/// ```
pub fn block_keys(prompt: &PromptBlocks<'_>, block_size: BlockSize) -> Vec<BlockKey> {
    let mut media = prompt.media.to_vec();
    media.sort_by_key(|span| span.offset);

    let mut hasher = BlockHasher::default();
    let mut touching = Vec::new();
    let mut passed = 0;
    let mut parent = None;
    let mut keys = Vec::with_capacity(prompt.tokens.len() / block_size.get());
    for (block, tokens) in prompt.tokens.chunks_exact(block_size.get()).enumerate() {
        let start = block * block_size.get();
        let end = start + block_size.get();
        while media.get(passed).is_some_and(|span| span.offset + span.length <= start) {
            passed += 1;
        }
        touching.clear();
        touching.extend(
            media[passed..]
                .iter()
                .take_while(|span| span.offset < end)
                .map(|span| (span.hash, span.offset as i64 - start as i64)),
        );
        let key = hasher.key(&BlockContent {
            parent,
            tokens,
            media: &touching,
            lora: prompt.lora,
            salt: prompt.salt.filter(|_| block == 0),
        });
        keys.push(key);
        parent = Some(key);
    }
    keys
}

/// What one block is made of.
pub(crate) struct BlockContent<'a> {
    pub(crate) parent: Option<BlockKey>,
    pub(crate) tokens: &'a [TokenId],
    /// Items that touch the block, in prompt order, with placeholder start − block start.
    pub(crate) media: &'a [(MmHash, i64)],
    pub(crate) lora: Option<&'a str>,
    pub(crate) salt: Option<&'a str>,
}

/// Makes keys; keeps the buffer that blocks are encoded in.
#[derive(Default)]
pub(crate) struct BlockHasher {
    encoded: Vec<u8>,
}

/// Keeps block keys apart from every other use of BLAKE3.
const DOMAIN: &[u8; 32] = b"chiasm block key, first encoding";

const HAS_PARENT: u8 = 1;
const HAS_LORA: u8 = 2;
const HAS_SALT: u8 = 4;

impl BlockHasher {
    pub(crate) fn key(&mut self, block: &BlockContent<'_>) -> BlockKey {
        let salt = block.salt.filter(|salt| !salt.is_empty());
        let mut flags = 0;
        self.encoded.clear();
        self.encoded.push(0);
        if let Some(parent) = block.parent {
            flags |= HAS_PARENT;
            self.encoded.extend_from_slice(&parent.0.to_le_bytes());
        }
        self.length(block.tokens.len());
        self.encoded.extend(block.tokens.iter().flat_map(|token| token.0.to_le_bytes()));
        self.length(block.media.len());
        for (hash, offset) in block.media {
            self.encoded.extend_from_slice(hash.as_bytes());
            self.encoded.extend_from_slice(&offset.to_le_bytes());
        }
        for (text, flag) in [(block.lora, HAS_LORA), (salt, HAS_SALT)] {
            if let Some(text) = text {
                flags |= flag;
                self.length(text.len());
                self.encoded.extend_from_slice(text.as_bytes());
            }
        }
        self.encoded[0] = flags;
        let digest = blake3::keyed_hash(DOMAIN, &self.encoded);
        let (head, _) = digest.as_bytes().split_at(16);
        BlockKey(head.iter().rev().fold(0, |key, byte| key << 8 | u128::from(*byte)))
    }

    /// Lengths above u32 don't occur: tokens of a block, items of a prompt, bytes of a name.
    fn length(&mut self, length: usize) {
        self.encoded.extend_from_slice(&(length as u32).to_le_bytes());
    }
}

#[cfg(test)]
mod tests;
