//! A cache for the tokens of recent words: two hash tables of fixed size.

/// The maximum length of a cached word.
const MAX_BYTES: usize = 24;
/// The maximum number of tokens of a cached word.
const MAX_TOKENS: usize = 8;
/// The maximum length of a word in the table of short words. Nearly all words of languages with
/// spaces fit.
const SHORT_BYTES: usize = 16;
/// The maximum number of tokens of a word in the table of short words.
const SHORT_TOKENS: usize = 3;
/// The size of the table of short words: 4 MiB, enough for the words of most prompts in one
/// language. With half of it, a third more words are merged again.
const SHORT_BUCKETS_LOG2: u32 = 16;
/// The size of the table of long words: 512 KiB.
const LONG_BUCKETS_LOG2: u32 = 12;

/// A word and its tokens.
#[derive(Clone, Copy)]
struct Entry<const PARTS: usize, const IDS: usize> {
    word: [u64; PARTS],
    ids: [u32; IDS],
    /// The length of the word in bytes; 0 in an empty entry.
    len: u8,
    count: u8,
}

/// The two entries of a hash. A bucket of short words is one cache line. A new word takes the first
/// entry and moves that entry's word to the second.
#[derive(Clone, Copy)]
#[repr(align(64))]
struct Bucket<const PARTS: usize, const IDS: usize>([Entry<PARTS, IDS>; 2]);

struct Table<const PARTS: usize, const IDS: usize> {
    buckets: Vec<Bucket<PARTS, IDS>>,
}

/// The cache of words and their tokens.
pub(super) struct WordCache {
    short: Table<{ SHORT_BYTES / 8 }, SHORT_TOKENS>,
    /// The words that are too long for `short`, or have too many tokens.
    long: Table<{ MAX_BYTES / 8 }, MAX_TOKENS>,
}

/// The lookup key of a word.
#[derive(Clone, Copy)]
pub(super) struct Key {
    word: [u64; MAX_BYTES / 8],
    len: u8,
    hash: u64,
}

impl<const PARTS: usize, const IDS: usize> Table<PARTS, IDS> {
    fn new(buckets_log2: u32) -> Self {
        let empty = Entry { word: [0; PARTS], ids: [0; IDS], len: 0, count: 0 };
        Self { buckets: vec![Bucket([empty; 2]); 1 << buckets_log2] }
    }

    #[inline]
    fn bucket_index(&self, key: &Key) -> usize {
        (key.hash >> 32) as usize & (self.buckets.len() - 1)
    }

    #[inline]
    fn get(&self, key: &Key) -> Option<&[u32]> {
        let Bucket(entries) = &self.buckets[self.bucket_index(key)];
        let found = entries.iter().find(|entry| {
            // The operands are in registers, and this compares them there. For `==` on the arrays
            // compilers would write them to memory first.
            let differs = entry
                .word
                .iter()
                .zip(key.word)
                .fold(0, |differs, (stored, wanted)| differs | (stored ^ wanted));
            differs | u64::from(entry.len ^ key.len) == 0
        });
        found.map(|entry| &entry.ids[..usize::from(entry.count)])
    }

    fn insert(&mut self, key: &Key, ids: &[u32]) {
        let Ok(count) = u8::try_from(ids.len()) else { return };
        let mut entry = Entry { word: [0; PARTS], ids: [0; IDS], len: key.len, count };
        entry.word.copy_from_slice(&key.word[..PARTS]);
        entry.ids[..ids.len()].copy_from_slice(ids);
        let index = self.bucket_index(key);
        let Bucket(entries) = &mut self.buckets[index];
        *entries = [entry, entries[0]];
    }
}

impl Default for WordCache {
    fn default() -> Self {
        Self { short: Table::new(SHORT_BUCKETS_LOG2), long: Table::new(LONG_BUCKETS_LOG2) }
    }
}

impl WordCache {
    /// Returns the key of a word; `None` if the word is empty or too long to be cached.
    #[inline]
    pub(super) fn key(word: &[u8]) -> Option<Key> {
        let len = u8::try_from(word.len()).ok()?;
        let word = parts(word)?;
        // Odd constants with well mixed bits, from SplitMix64 and Murmur3. A client that makes
        // words collide only makes them slower, as words are compared in full.
        let mut hash = (word[0] ^ u64::from(len)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        hash = (hash ^ hash >> 32 ^ word[1]).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        hash = (hash ^ hash >> 32 ^ word[2]).wrapping_mul(0x94d0_49bb_1331_11eb);
        Some(Key { word, len, hash })
    }

    /// Returns the tokens of a word, if they are cached.
    #[inline]
    pub(super) fn get(&self, key: &Key) -> Option<&[u32]> {
        let short = if usize::from(key.len) <= SHORT_BYTES { self.short.get(key) } else { None };
        short.or_else(|| self.long.get(key))
    }

    /// Caches the tokens of a word, unless there are more than [`MAX_TOKENS`].
    pub(super) fn insert(&mut self, key: &Key, ids: &[u32]) {
        match ids.len() {
            0..=SHORT_TOKENS if usize::from(key.len) <= SHORT_BYTES => self.short.insert(key, ids),
            0..=MAX_TOKENS => self.long.insert(key, ids),
            _ => {}
        }
    }
}

/// Returns the bytes of a word, eight in each part, padded with zeros. Returns `None` for an empty
/// word and for more than [`MAX_BYTES`] bytes.
///
/// The bytes are read in place. Copying them first would cost more than the rest of a lookup: the
/// processor stalls on wide reads of narrow writes that are still in its write buffer.
#[inline]
fn parts(word: &[u8]) -> Option<[u64; MAX_BYTES / 8]> {
    let part = |at: usize| word.get(at..)?.first_chunk().copied().map(u64::from_le_bytes);
    // The bytes after the last whole part: the word's last eight bytes, without those of that part.
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
    fn distinct_words_keep_their_tokens_in_fixed_tables() {
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
            (cache.short.buckets.len(), cache.long.buckets.len()),
            (1 << SHORT_BUCKETS_LOG2, 1 << LONG_BUCKETS_LOG2)
        );
        assert_eq!(size_of_val(&cache.short.buckets[0]), 64);
        assert_eq!(size_of_val(&cache.long.buckets[0]), 128);
    }

    #[test]
    fn word_parts_are_its_bytes() {
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
    fn words_that_differ_in_trailing_zeros_are_distinct() {
        let mut cache = WordCache::default();
        cache.insert(&WordCache::key(b"a").unwrap(), &[1]);
        assert_eq!(cache.get(&WordCache::key(b"a\0").unwrap()), None);
    }

    #[test]
    fn words_up_to_the_limits_are_cached() {
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
    fn words_over_the_limits_are_not_cached() {
        assert!(WordCache::key(&[b'a'; MAX_BYTES + 1]).is_none());
        assert!(WordCache::key(b"").is_none());
        let mut cache = WordCache::default();
        let key = WordCache::key(&[b'a'; MAX_BYTES]).unwrap();
        cache.insert(&key, &[0; MAX_TOKENS + 1]);
        assert_eq!(cache.get(&key), None);
    }
}
