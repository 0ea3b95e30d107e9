//! Tokens of words seen lately: a table of fixed size.

/// Longest word that is kept, in bytes.
const MAX_BYTES: usize = 24;
/// Most tokens that are kept for a word.
const MAX_TOKENS: usize = 8;
/// Two MiB, enough for the words of most prompts in one language.
const SLOTS_LOG2: u32 = 15;

/// A word and its tokens, in one cache line.
#[derive(Clone, Copy)]
struct Slot {
    word: [u64; MAX_BYTES / 8],
    ids: [u32; MAX_TOKENS],
    /// Length of the word in bytes; 0 in an empty slot.
    len: u8,
    count: u8,
}

const EMPTY: Slot = Slot { word: [0; MAX_BYTES / 8], ids: [0; MAX_TOKENS], len: 0, count: 0 };

/// Words and their tokens. A word has two places; a new word takes the first, and what was there moves to the second.
pub(super) struct WordCache {
    slots: Vec<Slot>,
}

/// A word as the cache looks for it.
#[derive(Clone, Copy)]
pub(super) struct Key {
    word: [u64; MAX_BYTES / 8],
    len: u8,
    slot: usize,
}

impl Default for WordCache {
    fn default() -> Self {
        Self { slots: vec![EMPTY; 1 << SLOTS_LOG2] }
    }
}

impl WordCache {
    /// `None` for a word that is too long to be kept, or empty.
    #[inline]
    pub(super) fn key(word: &[u8]) -> Option<Key> {
        let len = u8::try_from(word.len()).ok().filter(|len| (1..=MAX_BYTES).contains(&usize::from(*len)))?;
        let mut bytes = [0; MAX_BYTES];
        bytes[..word.len()].copy_from_slice(word);
        let (parts, _) = bytes.as_chunks::<8>();
        let word = [0, 1, 2].map(|part| u64::from_le_bytes(parts[part]));
        // Odd constants with well mixed bits, from SplitMix64 and Murmur3. Whoever makes words collide makes them slow
        // to find, no more: they are compared in full.
        let mut hash = (word[0] ^ u64::from(len)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        hash = (hash ^ hash >> 32 ^ word[1]).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        hash = (hash ^ hash >> 32 ^ word[2]).wrapping_mul(0x94d0_49bb_1331_11eb);
        Some(Key { word, len, slot: (hash >> (64 - SLOTS_LOG2)) as usize })
    }

    #[inline]
    pub(super) fn get(&self, key: Key) -> Option<&[u32]> {
        [key.slot, key.slot ^ 1].into_iter().find_map(|slot| {
            let slot = &self.slots[slot];
            (slot.word == key.word && slot.len == key.len).then(|| &slot.ids[..usize::from(slot.count)])
        })
    }

    pub(super) fn insert(&mut self, key: Key, ids: &[u32]) {
        let Some(count) = u8::try_from(ids.len()).ok().filter(|count| usize::from(*count) <= MAX_TOKENS) else {
            return;
        };
        let mut slot = Slot { word: key.word, len: key.len, count, ..EMPTY };
        slot.ids[..ids.len()].copy_from_slice(ids);
        self.slots[key.slot ^ 1] = self.slots[key.slot];
        self.slots[key.slot] = slot;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_told_apart_and_the_table_does_not_grow() {
        let mut cache = WordCache::default();
        for round in 0..3u32 {
            for number in 0..100_000u32 {
                let word = format!("w{number}");
                let key = WordCache::key(word.as_bytes()).unwrap();
                if let Some(ids) = cache.get(key) {
                    assert_eq!(ids, [number, 7], "{round}");
                }
                cache.insert(key, &[number, 7]);
                assert_eq!(cache.get(key), Some(&[number, 7][..]));
            }
        }
        assert_eq!(cache.slots.len(), 1 << SLOTS_LOG2);
        assert_eq!(size_of::<Slot>(), 64);
    }

    #[test]
    fn words_that_differ_in_trailing_zeros_are_different() {
        let mut cache = WordCache::default();
        cache.insert(WordCache::key(b"a").unwrap(), &[1]);
        assert_eq!(cache.get(WordCache::key(b"a\0").unwrap()), None);
    }

    #[test]
    fn long_words_and_long_answers_are_not_kept() {
        assert!(WordCache::key(&[b'a'; MAX_BYTES + 1]).is_none());
        assert!(WordCache::key(b"").is_none());
        let mut cache = WordCache::default();
        let key = WordCache::key(&[b'a'; MAX_BYTES]).unwrap();
        cache.insert(key, &[0; MAX_TOKENS + 1]);
        assert_eq!(cache.get(key), None);
    }
}
