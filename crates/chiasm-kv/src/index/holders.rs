//! The workers that hold blocks of a node, each a piece of it.

/// Stands for one cache of a worker in all trees, as the number of a bit: small numbers that are
/// used again, unlike [`WorkerId`](chiasm_types::WorkerId)s. Who hands them out is
/// [`Workers`](super::workers::Workers).
pub(super) type HolderId = u32;

/// The blocks `from..to` of a node, which one worker holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Piece {
    pub(super) holder: HolderId,
    pub(super) from: u32,
    pub(super) to: u32,
}

/// The workers that hold blocks of a node of a known length, and which blocks. Most nodes have one
/// holder, which takes no memory of its own; some, such as a system prompt, have nearly all
/// workers.
pub(super) enum Holders {
    /// The only holder. There is none if its piece is empty.
    One(Piece),
    Several(Box<Several>),
}

/// Two holders or more.
pub(super) struct Several {
    /// Holders of the whole node, as bits; empty while they are few, and all are in `list`.
    pub(super) whole: Vec<u64>,
    /// The other holders, ascending by their ids.
    pub(super) list: Vec<Piece>,
}

const NOBODY: Holders = Holders::One(Piece { holder: 0, from: 0, to: 0 });

/// Holders of whole nodes from which on they become bits: a list of so many is no larger than the
/// bits of 1,500 workers.
const FEW: usize = 16;

impl Default for Holders {
    fn default() -> Self {
        NOBODY
    }
}

impl Holders {
    /// One worker that holds the whole node.
    pub(super) fn one(holder: HolderId, len: u32) -> Self {
        Self::One(Piece { holder, from: 0, to: len })
    }

    pub(super) fn get(&self, holder: HolderId, len: u32) -> Option<(u32, u32)> {
        match self {
            Self::One(held) => {
                (held.holder == holder && held.to > held.from).then_some((held.from, held.to))
            }
            Self::Several(several) if has(&several.whole, holder) => Some((0, len)),
            Self::Several(several) => {
                several.find(holder).ok().map(|at| (several.list[at].from, several.list[at].to))
            }
        }
    }

    /// Makes `from..to` what a worker holds of the node; nothing if `to` is not beyond `from`.
    pub(super) fn set(&mut self, holder: HolderId, from: u32, to: u32, len: u32) {
        let held = Piece { holder, from, to };
        match self {
            Self::One(one) if one.holder == holder || one.to <= one.from => *one = held,
            Self::One(_) if to <= from => {}
            Self::One(one) => {
                let list = if one.holder < holder { vec![*one, held] } else { vec![held, *one] };
                *self = Self::Several(Box::new(Several { whole: Vec::new(), list }));
            }
            Self::Several(several) => {
                several.set(held, len);
                if let Some(one) = several.only() {
                    *self = Self::One(one);
                }
            }
        }
    }

    #[cfg(test)]
    fn is_empty(&self) -> bool {
        matches!(self, Self::One(held) if held.to <= held.from)
    }

    /// Looks at what is further away.
    pub(super) fn touch(&self) -> u64 {
        let Self::Several(several) = self else { return 0 };
        let holder = several.list.first().map_or(0, |held| held.holder);
        several.whole.first().copied().unwrap_or_default() ^ u64::from(holder)
    }

    /// Whether this worker is the only one, and holds the last block.
    pub(super) fn ends_with_only(&self, holder: HolderId, len: u32) -> bool {
        matches!(self, Self::One(held) if held.holder == holder && held.to == len && held.from < len)
    }

    /// One more than the last block that somebody holds.
    pub(super) fn end(&self, len: u32) -> u32 {
        match self {
            Self::One(held) if held.to <= held.from => 0,
            Self::One(held) => held.to,
            Self::Several(several) if !several.whole.is_empty() => len,
            Self::Several(several) => several.list.iter().map(|held| held.to).max().unwrap_or(0),
        }
    }

    /// How many of the blocks somebody holds.
    pub(super) fn covered(&self, len: u32) -> u32 {
        match self {
            Self::One(held) => held.to.saturating_sub(held.from),
            Self::Several(several) if !several.whole.is_empty() => len,
            Self::Several(several) => {
                let prefix = several
                    .list
                    .iter()
                    .filter(|held| held.from == 0)
                    .map(|held| held.to)
                    .max()
                    .unwrap_or(0);
                if several.list.iter().all(|held| held.to <= prefix) {
                    return prefix;
                }
                let mut pieces: Vec<_> =
                    several.list.iter().map(|held| (held.from, held.to)).collect();
                pieces.sort_unstable();
                let add = |(sum, end): (u32, u32), (from, to): (u32, u32)| {
                    (sum + to.saturating_sub(from.max(end)), end.max(to))
                };
                pieces.into_iter().fold((0, 0), add).0
            }
        }
    }

    /// Pairs of a worker and a block.
    pub(super) fn entries(&self, len: u32) -> usize {
        match self {
            Self::One(held) => held.to.saturating_sub(held.from) as usize,
            Self::Several(several) => {
                let whole: u32 = several.whole.iter().map(|word| word.count_ones()).sum();
                let pieces: usize =
                    several.list.iter().map(|held| (held.to - held.from) as usize).sum();
                whole as usize * len as usize + pieces
            }
        }
    }

    /// Keeps what is held of the first `at` blocks and returns what is held of the rest.
    pub(super) fn split(&mut self, at: u32, len: u32) -> Self {
        let cut = |held: Piece| {
            let first = Piece { to: held.to.min(at), ..held };
            let rest = Piece { from: held.from.max(at) - at, to: held.to.max(at) - at, ..held };
            (first, rest)
        };
        let mut rest = NOBODY;
        match self {
            Self::One(one) => {
                let (first, second) = cut(*one);
                rest.set(second.holder, second.from, second.to, len - at);
                *one = first;
            }
            Self::Several(several) => {
                let (list, mut firsts) = (std::mem::take(&mut several.list), Vec::new());
                let mut seconds = Vec::new();
                for held in list {
                    let (first, second) = cut(held);
                    firsts.extend((first.to > first.from).then_some(first));
                    seconds.extend((second.to > second.from).then_some(second));
                }
                several.list = firsts;
                let other = Several { whole: several.whole.clone(), list: seconds };
                rest = match other.only() {
                    Some(one) => Self::One(one),
                    None => Self::Several(Box::new(other)),
                };
                if let Some(one) = several.only() {
                    *self = Self::One(one);
                }
            }
        }
        rest
    }

    /// Bytes on the heap.
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
        self.list.binary_search_by_key(&holder, |held| held.holder)
    }

    fn set(&mut self, held: Piece, len: u32) {
        let Piece { holder, from, to } = held;
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
            Ok(at) => self.list[at] = held,
            Err(at) if to > from && !to_bits => {
                self.list.reserve_exact(if self.list.len() == self.list.capacity() {
                    1 + self.list.len() / 4
                } else {
                    1
                });
                self.list.insert(at, held);
            }
            Err(_) => {}
        }
        if to_bits {
            set(&mut self.whole, holder);
        } else if whole && self.list.len() > FEW {
            let is_whole = |held: &Piece| held.from == 0 && held.to == len;
            if self.list.iter().filter(|held| is_whole(held)).count() > FEW {
                let bits = &mut self.whole;
                self.list
                    .iter()
                    .filter(|held| is_whole(held))
                    .for_each(|held| set(bits, held.holder));
                self.list.retain(|held| !is_whole(held));
                self.list.shrink_to_fit();
            }
        } else if !self.whole.is_empty() {
            // Half of what made it bits, lest it go back and forth.
            let count: u32 = self.whole.iter().map(|word| word.count_ones()).sum();
            if count as usize <= FEW / 2 {
                self.list.extend(holder_ids(&self.whole).map(|holder| Piece {
                    holder,
                    from: 0,
                    to: len,
                }));
                self.list.sort_unstable_by_key(|held| held.holder);
                self.whole = Vec::new();
            }
        }
    }

    /// The one that is left; one that holds nothing if there is none.
    fn only(&self) -> Option<Piece> {
        match &self.list[..] {
            _ if !self.whole.is_empty() => None,
            [] => Some(Piece { holder: 0, from: 0, to: 0 }),
            [one] => Some(*one),
            _ => None,
        }
    }
}

fn has(words: &[u64], holder: HolderId) -> bool {
    words.get(word(holder)).is_some_and(|word| word & bit(holder) != 0)
}

fn set(words: &mut Vec<u64>, holder: HolderId) {
    if words.len() <= word(holder) {
        words.resize(word(holder) + 1, 0);
    }
    words[word(holder)] |= bit(holder);
}

pub(super) fn word(holder: HolderId) -> usize {
    holder as usize / 64
}

pub(super) fn bit(holder: HolderId) -> u64 {
    1 << (holder % 64)
}

/// The holders whose bits are set, ascending.
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
        let held = |block: &u32| model.values().any(|(from, to)| (from..to).contains(&block));
        prop_assert_eq!(holders.covered(len) as usize, (0..len).filter(held).count());
        prop_assert_eq!(
            holders.entries(len),
            model.values().map(|(from, to)| (to - from) as usize).sum::<usize>()
        );
        Ok(())
    }

    proptest! {
        #[test]
        fn does_what_a_map_does(
            steps in proptest::collection::vec((0..70_u32, 0..10_u32, 0..10_u32, any::<bool>()), 0..300),
            at in 1..9_u32,
        ) {
            let (mut holders, mut model, len) = (Holders::default(), BTreeMap::new(), 9);
            for (holder, from, to, whole) in steps {
                let (from, to) = if whole { (0, len) } else { (from, to.min(len)) };
                holders.set(holder, from, to, len);
                if to > from { model.insert(holder, (from, to)); } else { model.remove(&holder); }
                check(&holders, &model, len)?;
            }
            let rest = holders.split(at, len);
            let cut = |from: u32, to: u32| {
                let piece = |(holder, (f, t)): (&HolderId, &(u32, u32))| {
                    let (f, t) = ((*f).clamp(from, to) - from, (*t).clamp(from, to) - from);
                    (t > f).then_some((*holder, (f, t)))
                };
                model.iter().filter_map(piece).collect()
            };
            check(&holders, &cut(0, at), at)?;
            check(&rest, &cut(at, len), len - at)?;
        }
    }
}
