//! Byte pair encoding: of all neighbours that may merge, the pair of the lowest rank does, the
//! leftmost first.
//!
//! `tokenizers` does the same with a queue of possible merges. It tells a queued merge that has
//! gone stale by the token it would make; we by its rank. Both come to the same where tokens have
//! ids of their own, which `pipeline` checks: a token at one place only grows, so two different
//! pairs at one place never make the same token.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};
use std::hash::{BuildHasherDefault, Hasher};

/// Words up to this many symbols are searched for the lowest rank, which is quickest for them;
/// longer ones have a queue.
const SEARCH_UP_TO: usize = 32;

/// No merge.
const NEVER: u32 = u32::MAX;

/// The pairs of tokens that merge.
pub(super) struct Merges {
    by_pair: HashMap<u64, Merge, BuildHasherDefault<PairHasher>>,
    /// One bit for each hash of a pair that merges. Most neighbours never do, and this is small
    /// enough to stay in the processor's cache, as the table is not.
    any: Vec<u64>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Merge {
    /// The place in the list of merges: lower ones go first.
    rank: u32,
    id: u32,
}

/// Room for merging, used again from word to word.
#[derive(Default)]
pub(super) struct MergeRoom {
    merges: Vec<Merge>,
    links: Vec<Link>,
    /// Rank and position of possible merges.
    queue: BinaryHeap<Reverse<(u32, u32)>>,
}

/// A symbol's neighbours by position; its own position in a symbol that was merged away.
#[derive(Clone, Copy)]
struct Link {
    before: usize,
    behind: usize,
}

/// One multiplication and a fold: pairs of ids come from the model's file, not from requests.
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
    /// Takes the two tokens of each merge and the token they make, in the order of the file. A pair
    /// that comes twice counts where it comes last.
    pub(super) fn new(merges: impl IntoIterator<Item = (u32, u32, u32)>) -> Self {
        let merges = (0..)
            .zip(merges)
            .map(|(rank, (left, right, id))| (pair(left, right), Merge { rank, id }));
        let by_pair: HashMap<_, _, _> = merges.collect();
        // Sixteen bits for each pair, so that one in sixteen of the others looks like one.
        let mut any = vec![0; (by_pair.len() / 4).next_power_of_two()];
        for pair in by_pair.keys() {
            let (word, bit) = place(*pair, any.len());
            any[word] |= bit;
        }
        Self { by_pair, any }
    }

    fn get(&self, left: u32, right: u32) -> Merge {
        let pair = pair(left, right);
        let (word, bit) = place(pair, self.any.len());
        let merge = if self.any[word] & bit == 0 { None } else { self.by_pair.get(&pair) };
        merge.copied().unwrap_or(Merge { rank: NEVER, id: 0 })
    }

    /// Merges the symbols of a word to its tokens.
    pub(super) fn merge(&self, symbols: &mut Vec<u32>, room: &mut MergeRoom) {
        if symbols.len() <= SEARCH_UP_TO {
            self.merge_by_search(symbols, room)
        } else {
            self.merge_by_queue(symbols, room)
        }
    }

    fn merge_by_search(&self, symbols: &mut Vec<u32>, room: &mut MergeRoom) {
        // The merge of each symbol with the next.
        let merges = &mut room.merges;
        merges.clear();
        merges.extend(symbols.windows(2).map(|pair| self.get(pair[0], pair[1])));
        while let Some((at, merge)) = lowest(merges) {
            symbols[at] = merge.id;
            symbols.remove(at + 1);
            merges.remove(at);
            if let Some(behind) = merges.get_mut(at) {
                *behind = self.get(merge.id, symbols[at + 1]);
            }
            if at > 0 {
                merges[at - 1] = self.get(symbols[at - 1], merge.id);
            }
        }
    }

    fn merge_by_queue(&self, symbols: &mut Vec<u32>, room: &mut MergeRoom) {
        let MergeRoom { merges, links, queue } = room;
        let end = symbols.len();
        merges.clear();
        merges.extend(symbols.windows(2).map(|pair| self.get(pair[0], pair[1])));
        merges.push(Merge { rank: NEVER, id: 0 });
        links.clear();
        links.extend((0..end).map(|at| Link { before: at.wrapping_sub(1), behind: at + 1 }));
        queue.clear();
        queue.extend(
            (0u32..)
                .zip(merges.iter())
                .filter(|(_, m)| m.rank != NEVER)
                .map(|(at, m)| Reverse((m.rank, at))),
        );
        while let Some(Reverse((rank, position))) = queue.pop() {
            let at = position as usize;
            // A symbol that was merged away has no rank, and one that has changed another.
            if merges[at].rank != rank {
                continue;
            }
            let id = merges[at].id;
            let gone = links[at].behind;
            let behind = links[gone].behind;
            symbols[at] = id;
            merges[gone].rank = NEVER;
            links[gone].behind = gone;
            links[at].behind = behind;
            merges[at] = Merge { rank: NEVER, id: 0 };
            if behind < end {
                links[behind].before = at;
                merges[at] = self.get(id, symbols[behind]);
                if merges[at].rank != NEVER {
                    queue.push(Reverse((merges[at].rank, position)));
                }
            }
            let before = links[at].before;
            if before < end {
                merges[before] = self.get(symbols[before], id);
                if merges[before].rank != NEVER {
                    // A position fits, as it came from one.
                    queue.push(Reverse((merges[before].rank, before as u32)));
                }
            }
        }
        let mut position = 0;
        symbols.retain(|_| {
            position += 1;
            links[position - 1].behind != position - 1
        });
    }
}

fn pair(left: u32, right: u32) -> u64 {
    u64::from(left) << 32 | u64::from(right)
}

/// The place of a pair's bit among a power of two of words.
fn place(pair: u64, words: usize) -> (usize, u64) {
    let mut hasher = PairHasher::default();
    hasher.write_u64(pair);
    let hash = hasher.finish();
    ((hash >> 16) as usize & (words - 1), 1 << (hash & 63))
}

/// The first of the lowest ranks.
fn lowest(merges: &[Merge]) -> Option<(usize, Merge)> {
    let mut best = (0, Merge { rank: NEVER, id: 0 });
    for (at, merge) in merges.iter().enumerate() {
        if merge.rank < best.1.rank {
            best = (at, *merge);
        }
    }
    (best.1.rank != NEVER).then_some(best)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// Tokens are strings over three letters, as numbers to the base four; merges join some of
        /// them.
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
            let proper = |n: u32| (0..4).all(|digit| n >> (2 * digit) == 0 || n >> (2 * digit) & 3 != 0);
            let pairs = ranks.into_iter().chain((1..4).flat_map(|a| (1..4).map(move |b| (a, b)))).filter(|(a, b)| proper(*a) && proper(*b));
            let merges = Merges::new(pairs.map(|(a, b)| (a, b, concat(a, b))));
            let (mut by_search, mut by_queue) = (word.clone(), word);
            let mut room = MergeRoom::default();
            merges.merge_by_search(&mut by_search, &mut room);
            merges.merge_by_queue(&mut by_queue, &mut room);
            prop_assert_eq!(by_search, by_queue);
        }
    }
}
