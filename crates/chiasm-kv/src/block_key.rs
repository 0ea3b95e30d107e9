//! Our identity of a KV-cache block.

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
use universal::{Secret, Summed};

pub use hasher::BuildBlockKeyHasher;
pub use hashing::EngineHashing;
pub(crate) use scheme::mixed;
pub use scheme::{EngineHashKeys, KeyScheme};
pub use secret::{KeySecret, KeySecretInUse};

/// Identity of a block: its tokens, the media items that touch it and where they start, LoRA, cache
/// salt, and the block before it.
///
/// 127 bits: the state of a keyed hash (`universal`) after the blocks of the prompt up to this one,
/// each as words of 64 bits:
///
/// ```text
/// flags | items << 8 | tokens << 32   two tokens…   (mm_hash: 4 words, offset)…   (lora: 4 words)?   (salt: 4 words)?
/// ```
///
/// The flags say which of the optional parts are there and whether there is a parent; LoRA name and
/// salt enter as their BLAKE3 hashes. The first word tells the length of the rest, so that no two
/// different blocks have the same words. `offset` is the start of the item's placeholder minus the
/// start of the block, in tokens, as in vLLM's `extra_keys`. The salt is part of the first block of
/// a prompt only and reaches the others through the chain. The number of tokens is the block size:
/// blocks of engines with other block sizes never match.
///
/// Two different prompts of up to n blocks collide with a chance of at most (n + 1) / 2^127 over
/// the [`KeySecret`] that each process draws: below 2^-60 for any collision at all among 100
/// million blocks of prompts of 4,096 blocks. Keys of processes with other secrets don't compare;
/// whoever sends prompts must not see them.
///
/// Blocks of workers with another [`KeyScheme`] have keys of the same form, made of something else.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(transparent)]
pub struct BlockKey(u128);

impl BlockKey {
    /// The key as a number below 2^127.
    pub const fn get(self) -> u128 {
        self.0
    }

    /// The key that is this number; `None` unless it is below 2^127.
    pub fn from_number(number: u128) -> Option<Self> {
        (number >> 127 == 0).then_some(Self(number))
    }

    /// 64 of its bits as the engine's name of a block, for engines that name none. Not those that
    /// tables go by.
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
    /// The media items; the order of those that begin at the same token matters, as it does in
    /// vLLM.
    pub media: &'a [MediaSpan],
    /// Name of the LoRA adapter. Two adapters of one name are one to us.
    pub lora: Option<&'a str>,
    /// Separates caches of different tenants. The empty salt is no salt, as in vLLM.
    pub salt: Option<&'a str>,
}

/// The keys of a prompt's full blocks, first block first. The tokens after the last full block have
/// no key: engines don't share them either.
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
        // An item that goes on behind the block hides those after it, as in vLLM
        // (`_gen_mm_extra_hash_keys`): of two that share a range, the second is seen in the last
        // block only.
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
        // The next blocks are alike up to one in which something begins, or that what touches these
        // touches no more.
        let seen_from = hides_from.map_or(0, |end| end.div_ceil(size) - 1);
        let next = media
            .get(passed + touching.len())
            .map_or(blocks, |span| seen_from.max(span.offset / size));
        let over = match media.get(passed) {
            Some(span) if !touching.is_empty() => (span.offset + span.length).div_ceil(size),
            _ => blocks,
        };
        let alike = blocks.min(next).min(over) - keys.len();
        content.tokens = &prompt.tokens[start..][..alike * size];
        if alike > 1
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

/// What one block is made of.
pub(crate) struct BlockContent<'a> {
    pub(crate) parent: Option<BlockKey>,
    pub(crate) tokens: &'a [TokenId],
    /// Items that touch the block, in prompt order, with placeholder start − block start.
    pub(crate) media: &'a [(MmHash, i64)],
    pub(crate) lora: Option<&'a str>,
    pub(crate) salt: Option<&'a str>,
}

/// Makes keys; keeps the buffer for what is not tokens.
pub(crate) struct BlockHasher {
    secret: &'static Secret,
    kernel: Option<Kernel>,
    marks: Vec<u64>,
    /// The last LoRA name and its words: the same for all blocks of a prompt.
    lora: Option<(String, [u64; DIGEST])>,
    /// The last item that a block started with, in blocks of so many tokens: an item has many
    /// blocks.
    item: Option<(MmHash, usize, Summed)>,
}

/// Words of a 256-bit hash.
const DIGEST: usize = 4;

const HAS_PARENT: u64 = 1;
const HAS_LORA: u64 = 2;
const HAS_SALT: u64 = 4;

impl Default for BlockHasher {
    fn default() -> Self {
        Self {
            secret: Secret::of_process(),
            kernel: Kernel::fastest(),
            marks: Vec::new(),
            lora: None,
            item: None,
        }
    }
}

impl BlockHasher {
    /// The key of a block that holds nothing but text and comes after another.
    #[inline]
    fn text_key(&self, parent: BlockKey, tokens: &[TokenId]) -> BlockKey {
        BlockKey(self.secret.extend(
            parent.0,
            HAS_PARENT | (tokens.len() as u64) << 32,
            tokens,
            &[],
        ))
    }

    pub(crate) fn key(&mut self, block: &BlockContent<'_>) -> BlockKey {
        if let BlockContent { parent: Some(parent), tokens, media: [], lora: None, salt: None } =
            block
        {
            return self.text_key(*parent, tokens);
        }
        let head = self.mark(block, block.tokens.len());
        let before = block.parent.map_or(self.secret.start(), |parent| parent.0);
        if let Some((hash, _)) = block.media.first() {
            let tokens = block.tokens.len();
            let known =
                self.item.take().filter(|(known, length, _)| known == hash && *length == tokens);
            let (item, rest) = self.marks.split_at(DIGEST);
            let sum_up = || self.secret.sum_up(tokens, item).map(|summed| (*hash, tokens, summed));
            self.item = known.or_else(sum_up);
            let summed = self.item.as_ref().map(|(_, _, summed)| summed);
            let extend =
                |summed| self.secret.extend_summed(before, head, block.tokens, summed, rest);
            if let Some(state) = summed.and_then(extend) {
                return BlockKey(state);
            }
        }
        BlockKey(self.secret.extend(before, head, block.tokens, &self.marks))
    }

    /// Appends the keys of the full blocks of nothing but text after another.
    pub(crate) fn text_keys(
        &self,
        parent: BlockKey,
        tokens: &[TokenId],
        block_size: usize,
        keys: &mut Vec<BlockKey>,
    ) {
        let tokens = &tokens[..tokens.len() / block_size * block_size];
        match self.secret.sum_around(HAS_PARENT | (block_size as u64) << 32, block_size, &[]) {
            Some(first) => self.extend_series(
                Series { state: parent.0, first, step: 0, tokens, block_size },
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

    /// Blocks that follow each other and are all as `content`, but that each has a part of its
    /// tokens, and a lower offset of its item. `None` if they are not of that kind: salted, without
    /// a parent, with several items or one that begins in the first; or if what is around the
    /// tokens is too long.
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
        let head = self.mark(content, block_size);
        let first = self.secret.sum_around(head, block_size, &self.marks)?;
        let step = if content.media.is_empty() {
            0
        } else {
            self.secret.growth(block_size, DIGEST, block_size)?
        };
        Some(Series { state, first, step, tokens, block_size })
    }

    fn extend_series(&self, series: Series<'_>, keys: &mut Vec<BlockKey>) {
        self.secret.extend_series(self.kernel, series, keys);
    }

    /// The words of a block that are not tokens: returns the first and leaves the others in
    /// `marks`.
    fn mark(&mut self, block: &BlockContent<'_>, block_size: usize) -> u64 {
        // Counts above 2^24 don't occur: tokens of a block, items that touch it.
        let mut head = (block.media.len() as u64) << 8 | (block_size as u64) << 32;
        self.marks.clear();
        for (hash, offset) in block.media {
            self.marks.extend(words(hash.as_bytes()));
            self.marks.push(*offset as u64);
        }
        if let Some(lora) = block.lora {
            head |= HAS_LORA;
            let known = self.lora.take().filter(|(name, _)| name == lora);
            let (_, digest) =
                self.lora.insert(known.unwrap_or_else(|| (lora.to_owned(), digest(lora))));
            self.marks.extend(*digest);
        }
        if let Some(salt) = block.salt.filter(|salt| !salt.is_empty()) {
            head |= HAS_SALT;
            self.marks.extend(digest(salt));
        }
        head | if block.parent.is_some() { HAS_PARENT } else { 0 }
    }
}

fn digest(text: &str) -> [u64; DIGEST] {
    words(blake3::hash(text.as_bytes()).as_bytes())
}

fn words(bytes: &[u8; 32]) -> [u64; DIGEST] {
    let mut words = [0; DIGEST];
    for (word, bytes) in words.iter_mut().zip(bytes.as_chunks().0) {
        *word = u64::from_le_bytes(*bytes);
    }
    words
}

#[cfg(test)]
mod tests;
