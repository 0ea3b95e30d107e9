//! The hashes of a request's blocks. As in vLLM, a hash covers the parent block, the tokens and the
//! extra keys.

use chiasm_kv::event::ExtraKey;
use chiasm_types::TokenId;

/// The hash of one full block. Each engine hashes in its own way, so no other process can reproduce
/// the hash.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct BlockHash(u128);

impl BlockHash {
    /// Returns the hash for KV events: the low 64 bits, as vLLM's `maybe_convert_block_hash` does
    /// by default.
    pub(crate) fn external(self) -> u64 {
        self.0 as u64
    }

    pub(crate) fn bytes(self) -> [u8; 16] {
        self.0.to_le_bytes()
    }
}

/// The position of a media item's placeholder in the prompt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct MediaRange {
    pub(crate) identifier: String,
    pub(crate) offset: usize,
    pub(crate) length: usize,
}

/// The full blocks of one growing token sequence.
///
/// A block's hash covers its parent's hash, its tokens and its extra keys, in vLLM's order
/// (`generate_block_hash_extra_keys`):
///
/// - the LoRA name in every block,
/// - `(identifier, placeholder start − block start)` of each item that touches the block, up to the
///   first item that extends beyond the block,
/// - the cache salt in the first block.
#[derive(Clone, Debug)]
pub(crate) struct BlockChain {
    block_size: usize,
    media: Vec<MediaRange>,
    lora: Option<String>,
    salt: Option<String>,
    hashes: Vec<BlockHash>,
    extra_keys: Vec<Option<Vec<ExtraKey>>>,
}

impl BlockChain {
    /// Creates an empty chain; `media` is in the order of the prompt.
    pub(crate) fn new(
        block_size: usize,
        media: Vec<MediaRange>,
        lora: Option<String>,
        salt: Option<String>,
    ) -> Self {
        let salt = salt.filter(|salt| !salt.is_empty());
        Self { block_size, media, lora, salt, hashes: Vec::new(), extra_keys: Vec::new() }
    }

    pub(crate) fn block_size(&self) -> usize {
        self.block_size
    }

    pub(crate) fn hashes(&self) -> &[BlockHash] {
        &self.hashes
    }

    pub(crate) fn extra_keys(&self) -> &[Option<Vec<ExtraKey>>] {
        &self.extra_keys
    }

    pub(crate) fn lora(&self) -> Option<&str> {
        self.lora.as_deref()
    }

    /// Hashes the blocks that became full. `tokens` is the whole sequence, including the tokens of
    /// earlier calls.
    pub(crate) fn extend(&mut self, tokens: &[TokenId]) {
        while let Some(block) = tokens
            .get(self.hashes.len() * self.block_size..(self.hashes.len() + 1) * self.block_size)
        {
            let keys: Vec<Key<'_>> = self.block_keys(self.hashes.len()).collect();
            let hash = hash_block(self.hashes.last().copied(), block, &keys);
            let published: Vec<ExtraKey> = keys.iter().map(Key::published).collect();
            self.hashes.push(hash);
            self.extra_keys.push((!published.is_empty()).then_some(published));
        }
    }

    fn block_keys(&self, block: usize) -> impl Iterator<Item = Key<'_>> {
        let start = block * self.block_size;
        let end = start + self.block_size;
        let lora = self.lora.as_deref().map(Key::Lora);
        let end_of = |item: &MediaRange| item.offset + item.length;
        let remaining = self.media.iter().skip_while(move |item| end_of(item) <= start);
        let mut extends_beyond = false;
        let touching = remaining.take_while(move |item| {
            item.offset < end && !std::mem::replace(&mut extends_beyond, end < end_of(item))
        });
        let media = touching
            .map(move |item| Key::Media(&item.identifier, item.offset as i64 - start as i64));
        let salt = self.salt.as_deref().filter(|_| block == 0).map(Key::Salt);
        lora.into_iter().chain(media).chain(salt)
    }
}

/// An extra key of a block. In events, a LoRA name and a salt look the same.
enum Key<'a> {
    Lora(&'a str),
    Media(&'a str, i64),
    Salt(&'a str),
}

impl Key<'_> {
    fn published(&self) -> ExtraKey {
        match *self {
            Self::Media(identifier, offset) => {
                ExtraKey::Media { identifier: identifier.to_owned(), offset }
            }
            Self::Lora(text) | Self::Salt(text) => ExtraKey::Text(text.to_owned()),
        }
    }
}

fn hash_block(parent: Option<BlockHash>, tokens: &[TokenId], keys: &[Key<'_>]) -> BlockHash {
    let mut hasher = blake3::Hasher::new();
    hasher.update(&parent.map_or(0, |parent| parent.0).to_le_bytes());
    for token in tokens {
        hasher.update(&token.0.to_le_bytes());
    }
    for key in keys {
        let (tag, text, offset) = match *key {
            Key::Lora(name) => (1, name, 0),
            Key::Media(identifier, offset) => (2, identifier, offset),
            Key::Salt(salt) => (3, salt, 0),
        };
        hasher.update(&[tag]);
        hasher.update(&(text.len() as u64).to_le_bytes());
        hasher.update(text.as_bytes());
        hasher.update(&offset.to_le_bytes());
    }
    let mut first = [0; 16];
    first.copy_from_slice(&hasher.finalize().as_bytes()[..16]);
    BlockHash(u128::from_le_bytes(first))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn tokens(count: u32) -> Vec<TokenId> {
        (0..count).map(TokenId).collect()
    }

    fn image(identifier: &str, offset: usize, length: usize) -> MediaRange {
        MediaRange { identifier: identifier.into(), offset, length }
    }

    fn chain(media: Vec<MediaRange>, lora: Option<&str>, salt: Option<&str>) -> BlockChain {
        let mut chain =
            BlockChain::new(32, media, lora.map(str::to_owned), salt.map(str::to_owned));
        chain.extend(&tokens(100));
        chain
    }

    fn media_key(identifier: &str, offset: i64) -> ExtraKey {
        ExtraKey::Media { identifier: identifier.into(), offset }
    }

    #[test]
    fn extra_keys_equal_captured_events() {
        // Captured from vLLM 0.32 (chiasm-kv/tests/fixtures/kv_events, stored_image_0): an image at
        // 41, blocks of 32.
        let media = vec![image("abab", 41, 80)];
        let expected = [None, Some(vec![media_key("abab", 9)]), Some(vec![media_key("abab", -23)])];
        assert_eq!(chain(media, None, None).extra_keys(), expected);
        // stored_salt_2: only the first block has the salt.
        let salted = chain(vec![], None, Some("salty"));
        assert_eq!(salted.extra_keys(), [Some(vec![ExtraKey::Text("salty".into())]), None, None]);
    }

    #[test]
    fn block_has_keys_of_each_touching_item() {
        let media = vec![image("a", 0, 33), image("b", 33, 10), image("c", 64, 1)];
        let both =
            Some(vec![ExtraKey::Text("lora".into()), media_key("a", -32), media_key("b", 1)]);
        assert_eq!(chain(media, Some("lora"), None).extra_keys()[1], both);
    }

    #[test]
    fn each_extra_key_changes_the_hashes_of_all_blocks() {
        let variants = [
            chain(vec![], None, None),
            chain(vec![], None, Some("x")),
            chain(vec![], Some("x"), None),
            chain(vec![image("x", 0, 20)], None, None),
            chain(vec![image("y", 0, 20)], None, None),
            chain(vec![image("x", 1, 20)], None, None),
        ];
        for (i, one) in variants.iter().enumerate() {
            for other in &variants[i + 1..] {
                assert!(one.hashes().iter().zip(other.hashes()).all(|(a, b)| a != b));
            }
        }
        assert_eq!(chain(vec![], None, Some("")).hashes(), variants[0].hashes());
    }

    #[test]
    fn second_item_at_an_offset_is_only_in_the_last_block() {
        let chain = chain(vec![image("video", 20, 50), image("audio", 20, 50)], None, None);
        let key =
            |identifier: &str, offset| ExtraKey::Media { identifier: identifier.into(), offset };
        let expected = [
            Some(vec![key("video", 20)]),
            Some(vec![key("video", -12)]),
            Some(vec![key("video", -44), key("audio", -44)]),
        ];
        assert_eq!(chain.extra_keys(), expected);
    }

    proptest! {
        #[test]
        fn chain_grown_in_steps_is_equal(cuts in prop::collection::vec(0usize..100, 0..6)) {
            let all = tokens(100);
            let mut cuts = cuts;
            cuts.sort_unstable();
            let mut grown = BlockChain::new(32, vec![image("a", 40, 30)], None, Some("s".into()));
            cuts.iter().for_each(|&cut| grown.extend(&all[..cut]));
            grown.extend(&all);
            let whole = chain(vec![image("a", 40, 30)], None, Some("s"));
            prop_assert_eq!(grown.hashes(), whole.hashes());
            prop_assert_eq!(grown.extra_keys(), whole.extra_keys());
        }
    }
}
