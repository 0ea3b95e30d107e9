//! Tokens of words seen lately: two tables of fixed size.

/// Longest word that is kept, in bytes.
const MAX_BYTES: usize = 24;
/// Most tokens that are kept for a word.
const MAX_TOKENS: usize = 8;
/// Longest word that is kept among the short ones, and most tokens of such a one: nearly all words
/// of languages with spaces.
const SHORT_BYTES: usize = 16;
const SHORT_TOKENS: usize = 3;
/// Four MiB, enough for the words of most prompts in one language: with half of that a third more
/// of them are merged again.
const SHORT_PAIRS_LOG2: u32 = 16;
/// Half a MiB.
const LONG_PAIRS_LOG2: u32 = 12;

/// A word and its tokens.
#[derive(Clone, Copy)]
struct Slot<const PARTS: usize, const IDS: usize> {
    word: [u64; PARTS],
    ids: [u32; IDS],
    /// Length of the word in bytes; 0 in an empty slot.
    len: u8,
    count: u8,
}

/// The two places of a word, which for short ones are one cache line. A new word takes the first,
/// and what was there moves to the second.
#[derive(Clone, Copy)]
#[repr(align(64))]
struct Pair<const PARTS: usize, const IDS: usize>([Slot<PARTS, IDS>; 2]);

struct Table<const PARTS: usize, const IDS: usize> {
    pairs: Vec<Pair<PARTS, IDS>>,
}

/// Words and their tokens.
pub(super) struct WordCache {
    short: Table<{ SHORT_BYTES / 8 }, SHORT_TOKENS>,
    /// Words that are too long for that, or of too many tokens.
    long: Table<{ MAX_BYTES / 8 }, MAX_TOKENS>,
}

/// A word as the cache looks for it.
#[derive(Clone, Copy)]
pub(super) struct Key {
    word: [u64; MAX_BYTES / 8],
    len: u8,
    hash: u64,
}

impl<const PARTS: usize, const IDS: usize> Table<PARTS, IDS> {
    fn new(pairs_log2: u32) -> Self {
        let empty = Slot { word: [0; PARTS], ids: [0; IDS], len: 0, count: 0 };
        Self { pairs: vec![Pair([empty; 2]); 1 << pairs_log2] }
    }

    #[inline]
    fn place(&self, key: &Key) -> usize {
        (key.hash >> 32) as usize & (self.pairs.len() - 1)
    }

    #[inline]
    fn get(&self, key: &Key) -> Option<&[u32]> {
        let Pair(slots) = &self.pairs[self.place(key)];
        let found = slots.iter().find(|slot| {
            // Bit by bit, as what is compared is in registers: compilers would write it to memory
            // to compare it at once.
            let differs = slot
                .word
                .iter()
                .zip(key.word)
                .fold(0, |differs, (ours, theirs)| differs | (ours ^ theirs));
            differs | u64::from(slot.len ^ key.len) == 0
        });
        found.map(|slot| &slot.ids[..usize::from(slot.count)])
    }

    fn insert(&mut self, key: &Key, ids: &[u32]) {
        let Ok(count) = u8::try_from(ids.len()) else { return };
        let mut slot = Slot { word: [0; PARTS], ids: [0; IDS], len: key.len, count };
        slot.word.copy_from_slice(&key.word[..PARTS]);
        slot.ids[..ids.len()].copy_from_slice(ids);
        let place = self.place(key);
        let Pair(slots) = &mut self.pairs[place];
        *slots = [slot, slots[0]];
    }
}

impl Default for WordCache {
    fn default() -> Self {
        Self { short: Table::new(SHORT_PAIRS_LOG2), long: Table::new(LONG_PAIRS_LOG2) }
    }
}

impl WordCache {
    /// `None` for a word that is too long to be kept, or empty.
    #[inline]
    pub(super) fn key(word: &[u8]) -> Option<Key> {
        let len = u8::try_from(word.len()).ok()?;
        let word = parts(word)?;
        // Odd constants with well mixed bits, from SplitMix64 and Murmur3. Whoever makes words
        // collide makes them slow to find, no more: they are compared in full.
        let mut hash = (word[0] ^ u64::from(len)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        hash = (hash ^ hash >> 32 ^ word[1]).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        hash = (hash ^ hash >> 32 ^ word[2]).wrapping_mul(0x94d0_49bb_1331_11eb);
        Some(Key { word, len, hash })
    }

    #[inline]
    pub(super) fn get(&self, key: &Key) -> Option<&[u32]> {
        let short = if usize::from(key.len) <= SHORT_BYTES { self.short.get(key) } else { None };
        short.or_else(|| self.long.get(key))
    }

    pub(super) fn insert(&mut self, key: &Key, ids: &[u32]) {
        match ids.len() {
            0..=SHORT_TOKENS if usize::from(key.len) <= SHORT_BYTES => self.short.insert(key, ids),
            0..=MAX_TOKENS => self.long.insert(key, ids),
            _ => {}
        }
    }
}

/// The bytes of a word, eight in each part, with zeros behind them. `None` for none, and for too
/// many.
///
/// They are read where they are: to copy them would cost more than all the rest, as what was
/// written in small pieces can't be read in large ones until it has left the processor's write
/// buffer.
#[inline]
fn parts(word: &[u8]) -> Option<[u64; MAX_BYTES / 8]> {
    let part = |at: usize| word.get(at..)?.first_chunk().copied().map(u64::from_le_bytes);
    // What is behind the whole parts: the last eight bytes without those that are in a part before.
    let rest = || {
        word.last_chunk()
            .copied()
            .map(|last| u64::from_le_bytes(last) >> (8 * (8 - word.len() % 8)))
    };
    Some(match word.len() {
        0 => return None,
        1..4 => {
            let [first, middle, last] = [0, word.len() / 2, word.len() - 1];
            let byte = |at: usize| u64::from(word[at]) << (8 * at);
            [byte(first) | byte(middle) | byte(last), 0, 0]
        }
        len @ 4..8 => {
            let four = |at: usize| {
                Some(u64::from(u32::from_le_bytes(*word[at..].first_chunk()?)) << (8 * at))
            };
            [four(0)? | four(len - 4)?, 0, 0]
        }
        8 => [part(0)?, 0, 0],
        9..16 => [part(0)?, rest()?, 0],
        16 => [part(0)?, part(8)?, 0],
        17..24 => [part(0)?, part(8)?, rest()?],
        24 => [part(0)?, part(8)?, part(16)?],
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_told_apart_and_the_tables_do_not_grow() {
        let mut cache = WordCache::default();
        for round in 0..3u32 {
            for number in 0..100_000u32 {
                let word = format!("w{number}");
                let key = WordCache::key(word.as_bytes()).unwrap();
                if let Some(ids) = cache.get(&key) {
                    assert_eq!(ids, [number, 7], "{round}");
                }
                cache.insert(&key, &[number, 7]);
                assert_eq!(cache.get(&key), Some(&[number, 7][..]));
            }
        }
        assert_eq!(
            (cache.short.pairs.len(), cache.long.pairs.len()),
            (1 << SHORT_PAIRS_LOG2, 1 << LONG_PAIRS_LOG2)
        );
        assert_eq!(size_of_val(&cache.short.pairs[0]), 64);
        assert_eq!(size_of_val(&cache.long.pairs[0]), 128);
    }

    #[test]
    fn a_words_parts_are_its_bytes() {
        let bytes: [u8; MAX_BYTES] = std::array::from_fn(|at| at as u8 + 1);
        for len in 1..=MAX_BYTES {
            let mut expected = [0; MAX_BYTES];
            expected[..len].copy_from_slice(&bytes[..len]);
            let (expected, _) = expected.as_chunks();
            let expected = [0, 1, 2].map(|part| u64::from_le_bytes(expected[part]));
            assert_eq!(parts(&bytes[..len]), Some(expected), "{len}");
        }
    }

    #[test]
    fn words_that_differ_in_trailing_zeros_are_different() {
        let mut cache = WordCache::default();
        cache.insert(&WordCache::key(b"a").unwrap(), &[1]);
        assert_eq!(cache.get(&WordCache::key(b"a\0").unwrap()), None);
    }

    #[test]
    fn words_of_any_length_and_number_of_tokens_are_kept() {
        let mut cache = WordCache::default();
        for len in 1..=MAX_BYTES {
            for count in 1..=MAX_TOKENS {
                let ids: Vec<u32> = (0..count as u32).collect();
                let key = WordCache::key(&vec![count as u8; len]).unwrap();
                cache.insert(&key, &ids);
                assert_eq!(cache.get(&key), Some(&ids[..]), "{len} {count}");
            }
        }
    }

    #[test]
    fn long_words_and_long_answers_are_not_kept() {
        assert!(WordCache::key(&[b'a'; MAX_BYTES + 1]).is_none());
        assert!(WordCache::key(b"").is_none());
        let mut cache = WordCache::default();
        let key = WordCache::key(&[b'a'; MAX_BYTES]).unwrap();
        cache.insert(&key, &[0; MAX_TOKENS + 1]);
        assert_eq!(cache.get(&key), None);
    }
}
