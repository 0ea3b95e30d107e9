//! The holders of a node's blocks.

/// The id of one cache of a worker in all trees, which is also its index in bit sets.
///
/// Holder ids are small and reused, unlike [`WorkerId`](chiasm_types::WorkerId)s.
/// [`Workers`](super::workers::Workers) allocates them.
pub(super) type HolderId = u32;

/// The blocks `from..to` of a node that one holder has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Piece {
    pub(super) holder: HolderId,
    pub(super) from: u32,
    pub(super) to: u32,
}

/// The holders of a node's blocks, each with its piece of the node.
///
/// Most nodes have one holder, which takes no memory on the heap. Some, such as a system prompt,
/// have nearly all workers. The methods take the length of the node, which is not stored here.
pub(super) enum Holders {
    /// The only holder, or no holder if the piece is empty.
    One(Piece),
    Several(Box<Several>),
}

/// At least two holders.
pub(super) struct Several {
    /// The holders of the whole node, as bits. Empty while they are few: then they are in `list`.
    pub(super) whole: Vec<u64>,
    /// The other holders, in the order of their ids.
    pub(super) list: Vec<Piece>,
}

const EMPTY: Holders = Holders::One(Piece { holder: 0, from: 0, to: 0 });

/// The maximum number of whole-node holders in the list; more become bits. A list of this length is
/// no larger than the bits of 1,500 workers.
const MAX_LISTED_WHOLE: usize = 16;

impl Default for Holders {
    fn default() -> Self {
        EMPTY
    }
}

impl Holders {
    /// Creates a single holder of the whole node.
    pub(super) fn single(holder: HolderId, len: u32) -> Self {
        Self::One(Piece { holder, from: 0, to: len })
    }

    /// Returns the piece `from..to` of a holder, or `None` if it holds nothing.
    pub(super) fn get(&self, holder: HolderId, len: u32) -> Option<(u32, u32)> {
        match self {
            Self::One(piece) => {
                (piece.holder == holder && piece.to > piece.from).then_some((piece.from, piece.to))
            }
            Self::Several(several) if has(&several.whole, holder) => Some((0, len)),
            Self::Several(several) => {
                several.find(holder).ok().map(|at| (several.list[at].from, several.list[at].to))
            }
        }
    }

    /// Sets the piece of a holder to `from..to`, or removes the holder if that range is empty.
    pub(super) fn set(&mut self, holder: HolderId, from: u32, to: u32, len: u32) {
        let piece = Piece { holder, from, to };
        match self {
            Self::One(one) if one.holder == holder || one.to <= one.from => *one = piece,
            Self::One(_) if to <= from => {}
            Self::One(one) => {
                let list = if one.holder < holder { vec![*one, piece] } else { vec![piece, *one] };
                *self = Self::Several(Box::new(Several { whole: Vec::new(), list }));
            }
            Self::Several(several) => {
                several.set(piece, len);
                if let Some(one) = several.single() {
                    *self = Self::One(one);
                }
            }
        }
    }

    #[cfg(test)]
    fn is_empty(&self) -> bool {
        matches!(self, Self::One(piece) if piece.to <= piece.from)
    }

    /// Reads the memory behind the pointers, so that it is loaded into the cache. The result only
    /// keeps the reads from being optimized away.
    pub(super) fn touch(&self) -> u64 {
        let Self::Several(several) = self else { return 0 };
        let holder = several.list.first().map_or(0, |piece| piece.holder);
        several.whole.first().copied().unwrap_or_default() ^ u64::from(holder)
    }

    /// Returns `true` if this is the only holder and it holds the last block.
    pub(super) fn ends_with_only(&self, holder: HolderId, len: u32) -> bool {
        matches!(
            self,
            Self::One(piece) if piece.holder == holder && piece.to == len && piece.from < len
        )
    }

    /// Returns the index after the last held block.
    pub(super) fn end(&self, len: u32) -> u32 {
        match self {
            Self::One(piece) if piece.to <= piece.from => 0,
            Self::One(piece) => piece.to,
            Self::Several(several) if !several.whole.is_empty() => len,
            Self::Several(several) => several.list.iter().map(|piece| piece.to).max().unwrap_or(0),
        }
    }

    /// Returns the number of blocks that have a holder.
    pub(super) fn covered(&self, len: u32) -> u32 {
        match self {
            Self::One(piece) => piece.to.saturating_sub(piece.from),
            Self::Several(several) if !several.whole.is_empty() => len,
            Self::Several(several) => {
                let prefix = several
                    .list
                    .iter()
                    .filter(|piece| piece.from == 0)
                    .map(|piece| piece.to)
                    .max()
                    .unwrap_or(0);
                if several.list.iter().all(|piece| piece.to <= prefix) {
                    return prefix;
                }
                let mut pieces: Vec<_> =
                    several.list.iter().map(|piece| (piece.from, piece.to)).collect();
                pieces.sort_unstable();
                let add = |(sum, end): (u32, u32), (from, to): (u32, u32)| {
                    (sum + to.saturating_sub(from.max(end)), end.max(to))
                };
                pieces.into_iter().fold((0, 0), add).0
            }
        }
    }

    /// Returns the number of pairs of a holder and a block.
    pub(super) fn entries(&self, len: u32) -> usize {
        match self {
            Self::One(piece) => piece.to.saturating_sub(piece.from) as usize,
            Self::Several(several) => {
                let whole: u32 = several.whole.iter().map(|word| word.count_ones()).sum();
                let pieces: usize =
                    several.list.iter().map(|piece| (piece.to - piece.from) as usize).sum();
                whole as usize * len as usize + pieces
            }
        }
    }

    /// Splits the node before block `at`: keeps the pieces of the first part and returns those of
    /// the second.
    pub(super) fn split(&mut self, at: u32, len: u32) -> Self {
        let cut = |piece: Piece| {
            let first = Piece { to: piece.to.min(at), ..piece };
            let rest = Piece { from: piece.from.max(at) - at, to: piece.to.max(at) - at, ..piece };
            (first, rest)
        };
        let mut rest = EMPTY;
        match self {
            Self::One(one) => {
                let (first, second) = cut(*one);
                rest.set(second.holder, second.from, second.to, len - at);
                *one = first;
            }
            Self::Several(several) => {
                let mut firsts = Vec::new();
                let mut seconds = Vec::new();
                for piece in std::mem::take(&mut several.list) {
                    let (first, second) = cut(piece);
                    firsts.extend((first.to > first.from).then_some(first));
                    seconds.extend((second.to > second.from).then_some(second));
                }
                several.list = firsts;
                let other = Several { whole: several.whole.clone(), list: seconds };
                rest = match other.single() {
                    Some(one) => Self::One(one),
                    None => Self::Several(Box::new(other)),
                };
                if let Some(one) = several.single() {
                    *self = Self::One(one);
                }
            }
        }
        rest
    }

    /// Returns the number of bytes on the heap.
    pub(super) fn bytes(&self) -> usize {
        match self {
            Self::One(_) => 0,
            Self::Several(several) => {
                size_of::<Several>()
                    + several.whole.capacity() * 8
                    + several.list.capacity() * size_of::<Piece>()
            }
        }
    }
}

impl Several {
    fn find(&self, holder: HolderId) -> Result<usize, usize> {
        self.list.binary_search_by_key(&holder, |piece| piece.holder)
    }

    fn set(&mut self, piece: Piece, len: u32) {
        let Piece { holder, from, to } = piece;
        let whole = from == 0 && to == len;
        if has(&self.whole, holder) {
            if whole {
                return;
            }
            self.whole[word(holder)] &= !bit(holder);
        }
        let to_bits = whole && !self.whole.is_empty();
        match self.find(holder) {
            Ok(at) if to <= from || to_bits => drop(self.list.remove(at)),
            Ok(at) => self.list[at] = piece,
            Err(at) if to > from && !to_bits => {
                let is_full = self.list.len() == self.list.capacity();
                self.list.reserve_exact(if is_full { 1 + self.list.len() / 4 } else { 1 });
                self.list.insert(at, piece);
            }
            Err(_) => {}
        }
        if to_bits {
            set(&mut self.whole, holder);
        } else if whole && self.list.len() > MAX_LISTED_WHOLE {
            let is_whole = |piece: &Piece| piece.from == 0 && piece.to == len;
            if self.list.iter().filter(|piece| is_whole(piece)).count() > MAX_LISTED_WHOLE {
                let bits = &mut self.whole;
                self.list
                    .iter()
                    .filter(|piece| is_whole(piece))
                    .for_each(|piece| set(bits, piece.holder));
                self.list.retain(|piece| !is_whole(piece));
                self.list.shrink_to_fit();
            }
        } else if !self.whole.is_empty() {
            // Half the limit gives hysteresis.
            let count: u32 = self.whole.iter().map(|word| word.count_ones()).sum();
            if count as usize <= MAX_LISTED_WHOLE / 2 {
                self.list.extend(holder_ids(&self.whole).map(|holder| Piece {
                    holder,
                    from: 0,
                    to: len,
                }));
                self.list.sort_unstable_by_key(|piece| piece.holder);
                self.whole = Vec::new();
            }
        }
    }

    /// Returns the piece of the only holder, or an empty piece if there is no holder. Returns
    /// `None` if there are more holders.
    fn single(&self) -> Option<Piece> {
        match &self.list[..] {
            _ if !self.whole.is_empty() => None,
            [] => Some(Piece { holder: 0, from: 0, to: 0 }),
            [one] => Some(*one),
            _ => None,
        }
    }
}

/// Returns `true` if the bit of a holder is set.
fn has(words: &[u64], holder: HolderId) -> bool {
    words.get(word(holder)).is_some_and(|word| word & bit(holder) != 0)
}

/// Sets the bit of a holder.
fn set(words: &mut Vec<u64>, holder: HolderId) {
    if words.len() <= word(holder) {
        words.resize(word(holder) + 1, 0);
    }
    words[word(holder)] |= bit(holder);
}

/// Returns the index of the word that contains a holder's bit.
pub(super) fn word(holder: HolderId) -> usize {
    holder as usize / 64
}

/// Returns a holder's bit in its word.
pub(super) fn bit(holder: HolderId) -> u64 {
    1 << (holder % 64)
}

/// Returns the holders whose bits are set, in ascending order.
pub(super) fn holder_ids(words: &[u64]) -> impl Iterator<Item = HolderId> {
    words.iter().zip(0..).flat_map(|(word, index): (&u64, u32)| {
        let mut rest = *word;
        std::iter::from_fn(move || {
            let at = (rest != 0).then(|| rest.trailing_zeros())?;
            rest &= rest - 1;
            Some(index * 64 + at)
        })
    })
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    fn check(
        holders: &Holders,
        model: &BTreeMap<HolderId, (u32, u32)>,
        len: u32,
    ) -> Result<(), TestCaseError> {
        for holder in 0..70 {
            prop_assert_eq!(holders.get(holder, len), model.get(&holder).copied());
        }
        prop_assert_eq!(holders.is_empty(), model.is_empty());
        prop_assert_eq!(holders.end(len), model.values().map(|(_, to)| *to).max().unwrap_or(0));
        let is_held = |block: &u32| model.values().any(|(from, to)| (from..to).contains(&block));
        prop_assert_eq!(holders.covered(len) as usize, (0..len).filter(is_held).count());
        prop_assert_eq!(
            holders.entries(len),
            model.values().map(|(from, to)| (to - from) as usize).sum::<usize>()
        );
        Ok(())
    }

    proptest! {
        #[test]
        fn holders_equal_map_model(
            steps in proptest::collection::vec(
                (0..70_u32, 0..10_u32, 0..10_u32, any::<bool>()),
                0..300,
            ),
            at in 1..9_u32,
        ) {
            let mut holders = Holders::default();
            let mut model = BTreeMap::new();
            let len = 9;
            for (holder, from, to, whole) in steps {
                let (from, to) = if whole { (0, len) } else { (from, to.min(len)) };
                holders.set(holder, from, to, len);
                if to > from {
                    model.insert(holder, (from, to));
                } else {
                    model.remove(&holder);
                }
                check(&holders, &model, len)?;
            }
            let rest = holders.split(at, len);
            let cut = |from: u32, to: u32| {
                let piece = |(holder, held): (&HolderId, &(u32, u32))| {
                    let begin = held.0.clamp(from, to) - from;
                    let end = held.1.clamp(from, to) - from;
                    (end > begin).then_some((*holder, (begin, end)))
                };
                model.iter().filter_map(piece).collect()
            };
            check(&holders, &cut(0, at), at)?;
            check(&rest, &cut(at, len), len - at)?;
        }
    }
}
