//! Block keys: our own identity of a KV-cache block, independent of the engine's hash.

mod field;
mod hasher;
mod hashing;
#[allow(unsafe_code, reason = "vector code")]
mod kernels;
mod scheme;
mod secret;
mod universal;

use std::fmt;

use chiasm_types::{BlockSize, MmHash, TokenId};
use kernels::{Kernel, Series};
use universal::{PartialSum, Secret};

pub use hasher::BuildBlockKeyHasher;
pub use hashing::EngineHashing;
pub(crate) use scheme::mixed;
pub use scheme::{EngineHashKeys, KeyScheme};
pub use secret::{KeySecret, KeySecretInUse};

/// The identity of a block: its tokens, the media items that touch it and where they start, the
/// LoRA adapter, the cache salt, and the block before it.
///
/// A key has 127 bits. It is the state of a keyed hash (`universal`) after all blocks of the prompt
/// up to this one. Each block is hashed as these words of 64 bits:
///
/// ```text
/// flags | items << 8 | tokens << 32
/// two tokens…
/// (mm_hash: 4 words, offset)…
/// (lora: 4 words)?
/// (salt: 4 words)?
/// ```
///
/// - The flags mark the optional parts that are present, and whether the block has a parent.
/// - The first word determines the number of words that follow, so different blocks have different
///   words.
/// - `offset` is the start of the item's placeholder minus the start of the block, in tokens, as in
///   vLLM's `extra_keys`.
/// - The LoRA name and the salt enter as their BLAKE3 hashes. The salt is part of the first block
///   of a prompt only and reaches the other blocks through the chain.
/// - The number of tokens is the block size, so blocks of engines with different block sizes never
///   match.
///
/// Two different prompts of up to n blocks collide with a probability of at most (n + 1) / 2^127,
/// over the [`KeySecret`] that each process draws. Among 100 million blocks of prompts of 4,096
/// blocks, the probability of any collision is below 2^-60. Keys of processes with different
/// secrets are not comparable. Clients that send prompts must not see keys.
///
/// This is [`KeyScheme::Content`]. Under another scheme keys have the same form but are derived
/// from the engine's hashes.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(transparent)]
pub struct BlockKey(u128);

impl BlockKey {
    /// Returns the key as a number below 2^127.
    pub const fn get(self) -> u128 {
        self.0
    }

    /// Creates a key from a number; `None` if the number is not below 2^127.
    pub fn from_number(number: u128) -> Option<Self> {
        (number >> 127 == 0).then_some(Self(number))
    }

    /// Returns 64 bits of the key as a substitute for an engine's hash, for engines that publish no
    /// hashes. Tables are ordered by other bits of the key.
    pub(crate) const fn as_engine_hash(self) -> u64 {
        self.0 as u64
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

/// A media item and the position of its placeholder in a prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MediaSpan {
    /// The item's identity.
    pub hash: MmHash,
    /// The index of the placeholder's first token in the expanded prompt.
    pub offset: usize,
    /// The number of placeholder tokens.
    pub length: usize,
}

/// The parts of a prompt that determine its block keys.
#[derive(Clone, Copy, Debug, Default)]
pub struct PromptBlocks<'a> {
    /// The expanded prompt.
    pub tokens: &'a [TokenId],
    /// The media items. The order of items that begin at the same token matters, as in vLLM.
    pub media: &'a [MediaSpan],
    /// The name of the LoRA adapter. Adapters with the same name are not distinguished.
    pub lora: Option<&'a str>,
    /// The cache salt, which separates tenants. An empty salt counts as none, as in vLLM.
    pub salt: Option<&'a str>,
}

/// Returns the keys of a prompt's full blocks, in prompt order.
///
/// The tokens after the last full block have no key, because engines don't share them either.
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
    let size = block_size.get();
    let blocks = prompt.tokens.len() / size;
    let mut keys = Vec::with_capacity(blocks);
    while keys.len() < blocks {
        let start = keys.len() * size;
        let end = start + size;
        while media.get(passed).is_some_and(|span| span.offset + span.length <= start) {
            passed += 1;
        }
        touching.clear();
        // An item that continues past the block hides the items after it, as in vLLM
        // (`_gen_mm_extra_hash_keys`). Of two items with one range, the second one therefore
        // appears only in the last block of that range.
        let mut hides_from = None;
        for span in media[passed..].iter().take_while(|span| span.offset < end) {
            touching.push((span.hash, span.offset as i64 - start as i64));
            if span.offset + span.length > end {
                hides_from = Some(span.offset + span.length);
                break;
            }
        }
        let parent = keys.last().copied();
        let salt = prompt.salt.filter(|_| start == 0);
        let mut content =
            BlockContent { parent, tokens: &[], media: &touching, lora: prompt.lora, salt };
        // A run of blocks has one form. It ends where another item begins or the current one ends.
        let seen_from = hides_from.map_or(0, |end| end.div_ceil(size) - 1);
        let next_item = media
            .get(passed + touching.len())
            .map_or(blocks, |span| seen_from.max(span.offset / size));
        let item_end = match media.get(passed) {
            Some(span) if !touching.is_empty() => (span.offset + span.length).div_ceil(size),
            _ => blocks,
        };
        let series_len = blocks.min(next_item).min(item_end) - keys.len();
        content.tokens = &prompt.tokens[start..][..series_len * size];
        if series_len > 1
            && let Some(series) = hasher.series(&content, size)
        {
            hasher.extend_series(series, &mut keys);
        } else {
            content.tokens = &prompt.tokens[start..end];
            keys.push(hasher.key(&content));
        }
    }
    keys
}

/// The content of one block, as it enters the hash.
pub(crate) struct BlockContent<'a> {
    pub(crate) parent: Option<BlockKey>,
    pub(crate) tokens: &'a [TokenId],
    /// The items that touch the block, in prompt order, each with placeholder start − block start.
    pub(crate) media: &'a [(MmHash, i64)],
    pub(crate) lora: Option<&'a str>,
    pub(crate) salt: Option<&'a str>,
}

/// Computes block keys. Reuses its buffers, and caches what consecutive blocks have in common.
pub(crate) struct BlockHasher {
    secret: &'static Secret,
    kernel: Option<Kernel>,
    /// The words of the last block that are not tokens, without the head.
    extra_words: Vec<u64>,
    /// The last LoRA name and its words, which all blocks of a prompt share.
    lora: Option<(String, [u64; DIGEST_WORDS])>,
    /// The partial sum of the last block's first item, which recurs in all blocks of the item.
    item: Option<ItemSum>,
}

/// The partial sum of an item's hash in blocks of `block_tokens` tokens.
struct ItemSum {
    hash: MmHash,
    block_tokens: usize,
    sum: PartialSum,
}

/// The number of 64-bit words in a 256-bit hash.
const DIGEST_WORDS: usize = 4;

const HAS_PARENT: u64 = 1;
const HAS_LORA: u64 = 2;
const HAS_SALT: u64 = 4;

impl Default for BlockHasher {
    fn default() -> Self {
        Self {
            secret: Secret::for_process(),
            kernel: Kernel::fastest(),
            extra_words: Vec::new(),
            lora: None,
            item: None,
        }
    }
}

impl BlockHasher {
    /// Returns the key of a block that follows `parent` and has tokens only: no media, adapter or
    /// salt.
    #[inline]
    fn text_key(&self, parent: BlockKey, tokens: &[TokenId]) -> BlockKey {
        BlockKey(self.secret.extend(
            parent.0,
            HAS_PARENT | (tokens.len() as u64) << 32,
            tokens,
            &[],
        ))
    }

    /// Returns the key of a block.
    pub(crate) fn key(&mut self, block: &BlockContent<'_>) -> BlockKey {
        if let BlockContent { parent: Some(parent), tokens, media: [], lora: None, salt: None } =
            block
        {
            return self.text_key(*parent, tokens);
        }
        let head = self.encode_extras(block, block.tokens.len());
        let before = block.parent.map_or(self.secret.start(), |parent| parent.0);
        if let Some((hash, _)) = block.media.first() {
            let block_tokens = block.tokens.len();
            let known = self
                .item
                .take()
                .filter(|known| known.hash == *hash && known.block_tokens == block_tokens);
            let (item, rest) = self.extra_words.split_at(DIGEST_WORDS);
            let compute = || {
                let sum = self.secret.partial_sum(block_tokens, item)?;
                Some(ItemSum { hash: *hash, block_tokens, sum })
            };
            self.item = known.or_else(compute);
            let extend = |item: &ItemSum| {
                self.secret.extend_with_sum(before, head, block.tokens, &item.sum, rest)
            };
            if let Some(state) = self.item.as_ref().and_then(extend) {
                return BlockKey(state);
            }
        }
        BlockKey(self.secret.extend(before, head, block.tokens, &self.extra_words))
    }

    /// Appends the keys of the full blocks of `tokens`. They follow `parent` and have no media,
    /// adapter or salt.
    pub(crate) fn text_keys(
        &self,
        parent: BlockKey,
        tokens: &[TokenId],
        block_size: usize,
        keys: &mut Vec<BlockKey>,
    ) {
        let tokens = &tokens[..tokens.len() / block_size * block_size];
        match self.secret.sum_around(HAS_PARENT | (block_size as u64) << 32, block_size, &[]) {
            Some(extra_sum) => self.extend_series(
                Series { state: parent.0, extra_sum, extra_step: 0, tokens, block_size },
                keys,
            ),
            None => {
                let mut parent = parent;
                for tokens in tokens.chunks_exact(block_size) {
                    parent = self.text_key(parent, tokens);
                    keys.push(parent);
                }
            }
        }
    }

    /// Returns consecutive blocks as a series, or `None` if they have to be hashed one by one.
    ///
    /// `content` describes all of them: each block takes its part of the tokens, and the offset of
    /// the item falls from block to block. A series has a parent, no salt, and at most one item,
    /// which began before its first block. The words of a block, tokens included, must fit into one
    /// group of the hash (512 words; see `universal`).
    fn series<'a>(&mut self, content: &BlockContent<'a>, block_size: usize) -> Option<Series<'a>> {
        let &BlockContent {
            parent: Some(BlockKey(state)),
            tokens,
            media: [] | [(_, ..0)],
            salt: None,
            ..
        } = content
        else {
            return None;
        };
        let head = self.encode_extras(content, block_size);
        let extra_sum = self.secret.sum_around(head, block_size, &self.extra_words)?;
        let extra_step = if content.media.is_empty() {
            0
        } else {
            self.secret.growth(block_size, DIGEST_WORDS, block_size)?
        };
        Some(Series { state, extra_sum, extra_step, tokens, block_size })
    }

    fn extend_series(&self, series: Series<'_>, keys: &mut Vec<BlockKey>) {
        self.secret.extend_series(self.kernel, series, keys);
    }

    /// Encodes the parts of a block other than its tokens: returns the block's first word and
    /// writes the words after the tokens to `extra_words`.
    fn encode_extras(&mut self, block: &BlockContent<'_>, block_size: usize) -> u64 {
        // Both counts are below 2^24, so the fields of the word don't overlap.
        let mut head = (block.media.len() as u64) << 8 | (block_size as u64) << 32;
        self.extra_words.clear();
        for (hash, offset) in block.media {
            self.extra_words.extend(words(hash.as_bytes()));
            self.extra_words.push(*offset as u64);
        }
        if let Some(lora) = block.lora {
            head |= HAS_LORA;
            let known = self.lora.take().filter(|(name, _)| name == lora);
            let (_, digest) =
                self.lora.insert(known.unwrap_or_else(|| (lora.to_owned(), digest(lora))));
            self.extra_words.extend(*digest);
        }
        if let Some(salt) = block.salt.filter(|salt| !salt.is_empty()) {
            head |= HAS_SALT;
            self.extra_words.extend(digest(salt));
        }
        head | if block.parent.is_some() { HAS_PARENT } else { 0 }
    }
}

fn digest(text: &str) -> [u64; DIGEST_WORDS] {
    words(blake3::hash(text.as_bytes()).as_bytes())
}

fn words(bytes: &[u8; 32]) -> [u64; DIGEST_WORDS] {
    let mut words = [0; DIGEST_WORDS];
    for (word, bytes) in words.iter_mut().zip(bytes.as_chunks().0) {
        *word = u64::from_le_bytes(*bytes);
    }
    words
}

#[cfg(test)]
mod tests;
