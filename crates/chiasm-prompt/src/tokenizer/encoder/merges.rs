//! Byte pair encoding: repeatedly merges the neighbouring pair of the lowest rank, the leftmost
//! first.
//!
//! `tokenizers` does the same with a queue of possible merges. It recognizes a stale queue entry by
//! the token that the merge would make; this module by the merge's rank. The results are equal if
//! token ids are unique, which `pipeline` checks: a token at one position only grows, so two
//! different pairs at one position never make the same token.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};
use std::hash::{BuildHasherDefault, Hasher};

/// The maximum number of symbols for which a linear search for the lowest rank is fastest. Longer
/// words use a queue.
const MAX_SEARCHED_SYMBOLS: usize = 32;

/// The merge of a pair that does not merge.
const NO_MERGE: Merge = Merge { rank: u32::MAX, id: 0 };

/// The pairs of tokens that merge.
pub(super) struct Merges {
    by_pair: HashMap<u64, Merge, BuildHasherDefault<PairHasher>>,
    /// A filter with one bit for each hash of a pair that merges. Most neighbours never merge, and
    /// unlike the table the filter fits the processor's cache.
    filter: Vec<u64>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Merge {
    /// The position in the list of merges; lower ranks merge first.
    rank: u32,
    /// The merged token.
    id: u32,
}

/// Buffers for merging, reused for all words.
#[derive(Default)]
pub(super) struct MergeBuffers {
    merges: Vec<Merge>,
    links: Vec<Link>,
    /// The rank and the position of possible merges.
    queue: BinaryHeap<Reverse<(u32, u32)>>,
}

/// The positions of a symbol's neighbours.
#[derive(Clone, Copy)]
struct Link {
    previous: usize,
    /// The symbol's own position if it was merged away.
    next: usize,
}

/// A hasher of one multiplication and a fold. Pairs come from the model's file, not from requests,
/// so nobody can provoke collisions.
#[derive(Default)]
pub(super) struct PairHasher(u64);

impl Hasher for PairHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.write_u64(u64::from(*byte));
        }
    }

    fn write_u64(&mut self, pair: u64) {
        let product =
            u128::from(pair ^ self.0 ^ 0x9e37_79b9_7f4a_7c15) * 0xd6e8_feb8_6659_fd93_u128;
        self.0 = (product as u64) ^ ((product >> 64) as u64);
    }
}

impl Merges {
    /// Builds the table from the left, the right and the merged token of each merge, in the order
    /// of the file. The last occurrence of a pair determines its rank.
    pub(super) fn new(merges: impl IntoIterator<Item = (u32, u32, u32)>) -> Self {
        let merges = (0..)
            .zip(merges)
            .map(|(rank, (left, right, id))| (pair(left, right), Merge { rank, id }));
        let by_pair: HashMap<_, _, _> = merges.collect();
        // Sixteen bits for each pair: one in sixteen of all other pairs passes the filter.
        let mut filter = vec![0; (by_pair.len() / 4).next_power_of_two()];
        for pair in by_pair.keys() {
            let (word, bit) = filter_position(*pair, filter.len());
            filter[word] |= bit;
        }
        Self { by_pair, filter }
    }

    /// Returns the merge of a pair, or [`NO_MERGE`].
    fn get(&self, left: u32, right: u32) -> Merge {
        let pair = pair(left, right);
        let (word, bit) = filter_position(pair, self.filter.len());
        let merge = if self.filter[word] & bit == 0 { None } else { self.by_pair.get(&pair) };
        merge.copied().unwrap_or(NO_MERGE)
    }

    /// Merges the symbols of a word to its tokens.
    pub(super) fn merge(&self, symbols: &mut Vec<u32>, buffers: &mut MergeBuffers) {
        if symbols.len() <= MAX_SEARCHED_SYMBOLS {
            self.merge_by_search(symbols, buffers)
        } else {
            self.merge_by_queue(symbols, buffers)
        }
    }

    fn merge_by_search(&self, symbols: &mut Vec<u32>, buffers: &mut MergeBuffers) {
        // The merge of each symbol with the next symbol.
        let merges = &mut buffers.merges;
        merges.clear();
        merges.extend(symbols.windows(2).map(|pair| self.get(pair[0], pair[1])));
        while let Some((at, merge)) = lowest(merges) {
            symbols[at] = merge.id;
            symbols.remove(at + 1);
            merges.remove(at);
            if let Some(next) = merges.get_mut(at) {
                *next = self.get(merge.id, symbols[at + 1]);
            }
            if at > 0 {
                merges[at - 1] = self.get(symbols[at - 1], merge.id);
            }
        }
    }

    fn merge_by_queue(&self, symbols: &mut Vec<u32>, buffers: &mut MergeBuffers) {
        let MergeBuffers { merges, links, queue } = buffers;
        let end = symbols.len();
        merges.clear();
        merges.extend(symbols.windows(2).map(|pair| self.get(pair[0], pair[1])));
        merges.push(NO_MERGE);
        links.clear();
        links.extend((0..end).map(|at| Link { previous: at.wrapping_sub(1), next: at + 1 }));
        queue.clear();
        queue.extend(
            (0u32..)
                .zip(merges.iter())
                .filter(|(_, m)| m.rank != NO_MERGE.rank)
                .map(|(at, m)| Reverse((m.rank, at))),
        );
        while let Some(Reverse((rank, position))) = queue.pop() {
            let at = position as usize;
            // The queue entry is stale: the symbol was merged away or has another merge now.
            if merges[at].rank != rank {
                continue;
            }
            let id = merges[at].id;
            let removed = links[at].next;
            let next = links[removed].next;
            symbols[at] = id;
            merges[removed].rank = NO_MERGE.rank;
            links[removed].next = removed;
            links[at].next = next;
            merges[at] = NO_MERGE;
            if next < end {
                links[next].previous = at;
                merges[at] = self.get(id, symbols[next]);
                if merges[at].rank != NO_MERGE.rank {
                    queue.push(Reverse((merges[at].rank, position)));
                }
            }
            let previous = links[at].previous;
            if previous < end {
                merges[previous] = self.get(symbols[previous], id);
                if merges[previous].rank != NO_MERGE.rank {
                    // No truncation: all positions came from a `u32` range.
                    queue.push(Reverse((merges[previous].rank, previous as u32)));
                }
            }
        }
        let mut position = 0;
        symbols.retain(|_| {
            position += 1;
            links[position - 1].next != position - 1
        });
    }
}

/// Packs the two tokens of a pair.
fn pair(left: u32, right: u32) -> u64 {
    u64::from(left) << 32 | u64::from(right)
}

/// Returns the word and the bit of a pair in a filter. `words` is a power of two.
fn filter_position(pair: u64, words: usize) -> (usize, u64) {
    let mut hasher = PairHasher::default();
    hasher.write_u64(pair);
    let hash = hasher.finish();
    ((hash >> 16) as usize & (words - 1), 1 << (hash & 63))
}

/// Returns the first merge of the lowest rank, with its position.
fn lowest(merges: &[Merge]) -> Option<(usize, Merge)> {
    let mut best = (0, NO_MERGE);
    for (at, merge) in merges.iter().enumerate() {
        if merge.rank < best.1.rank {
            best = (at, *merge);
        }
    }
    (best.1.rank != NO_MERGE.rank).then_some(best)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// Tokens are strings over three letters, written as numbers to the base four. Merges join
        /// some of them.
        #[test]
        fn search_and_queue_agree(
            ranks in prop::collection::vec((1u32..256, 1u32..256), 0..60),
            word in prop::collection::vec(1u32..4, 0..100),
        ) {
            let concat = |a: u32, b: u32| {
                let digits = 16 - b.leading_zeros() / 2;
                a << (2 * digits) | b
            };
            // Digits of strings are never 0.
            let is_string = |n: u32| {
                (0..4).all(|digit| n >> (2 * digit) == 0 || n >> (2 * digit) & 3 != 0)
            };
            let pairs = ranks
                .into_iter()
                .chain((1..4).flat_map(|a| (1..4).map(move |b| (a, b))))
                .filter(|(a, b)| is_string(*a) && is_string(*b));
            let merges = Merges::new(pairs.map(|(a, b)| (a, b, concat(a, b))));
            let mut by_search = word.clone();
            let mut by_queue = word;
            let mut buffers = MergeBuffers::default();
            merges.merge_by_search(&mut by_search, &mut buffers);
            merges.merge_by_queue(&mut by_queue, &mut buffers);
            prop_assert_eq!(by_search, by_queue);
        }
    }
}
