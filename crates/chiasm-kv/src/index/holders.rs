//! The workers that hold a block.

use std::sync::atomic::AtomicU32;

/// A worker's bit: small numbers that are used again, unlike [`WorkerId`](chiasm_types::WorkerId)s.
pub(super) type Place = u32;

/// A set of workers. Most blocks have one holder, which takes no memory of its own; some, such as those of a system
/// prompt, have nearly all workers.
pub(super) struct Holders {
    /// [`NOBODY`] when there is none or there are several.
    one: Place,
    /// When the block was last used, as [`Blocks::now`](super::blocks::Blocks) counts. Here because there is room.
    pub(super) used: AtomicU32,
    several: Option<Box<Several>>,
}

const NOBODY: Place = Place::MAX;

enum Several {
    /// Ascending, at least 2.
    Few(Box<[Place]>),
    /// One bit per worker; the last word is not zero.
    Many(Box<[u64]>),
}

impl Default for Holders {
    fn default() -> Self {
        Self { one: NOBODY, used: AtomicU32::new(0), several: None }
    }
}

/// At most as many as make a list no larger than the bits of 1,024 workers.
const FEW: usize = 32;

impl Holders {
    /// Whether it was not among them.
    pub(super) fn insert(&mut self, place: Place) -> bool {
        if self.contains(place) {
            return false;
        }
        match &mut self.several {
            Some(several) => several.insert(place),
            None if self.one == NOBODY => self.one = place,
            None => {
                self.several = Some(Box::new(Several::Few([self.one.min(place), self.one.max(place)].into())));
                self.one = NOBODY;
            }
        }
        true
    }

    /// Whether it was among them.
    pub(super) fn remove(&mut self, place: Place) -> bool {
        if !self.contains(place) {
            return false;
        }
        self.one = self.several.as_mut().map_or(NOBODY, |several| several.remove(place));
        if self.one != NOBODY {
            self.several = None;
        }
        true
    }

    pub(super) fn contains(&self, place: Place) -> bool {
        match self.several.as_deref() {
            None => self.one == place,
            Some(Several::Few(few)) => few.binary_search(&place).is_ok(),
            Some(Several::Many(words)) => words.get(word(place)).is_some_and(|word| word & bit(place) != 0),
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.one == NOBODY && self.several.is_none()
    }

    /// Writes those among `from` that are here into `into`, as bits. Both have the same length.
    pub(super) fn intersect(&self, from: &[u64], into: &mut [u64]) {
        into.fill(0);
        let mut keep = |place: Place| {
            if let Some(others) = from.get(word(place)) {
                into[word(place)] |= others & bit(place);
            }
        };
        match self.several.as_deref() {
            None if self.one == NOBODY => {}
            None => keep(self.one),
            Some(Several::Few(few)) => few.iter().copied().for_each(keep),
            Some(Several::Many(words)) => {
                into.iter_mut().zip(from).zip(words).for_each(|((into, from), here)| *into = from & here);
            }
        }
    }

    /// On the heap.
    pub(super) fn bytes(&self) -> usize {
        self.several.as_deref().map_or(0, |several| {
            size_of::<Several>()
                + match several {
                    Several::Few(few) => size_of_val(&**few),
                    Several::Many(words) => size_of_val(&**words),
                }
        })
    }
}

impl Several {
    /// Of one that is not among them.
    fn insert(&mut self, place: Place) {
        match self {
            Self::Few(few) if few.len() < FEW => {
                let at = few.partition_point(|other| *other < place);
                *few = [&few[..at], &[place], &few[at..]].concat().into();
            }
            Self::Few(few) => *self = Self::Many(bits(few.iter().copied().chain([place]))),
            Self::Many(words) if word(place) < words.len() => words[word(place)] |= bit(place),
            Self::Many(words) => *words = bits(places(words).chain([place])),
        }
    }

    /// Of one that is among them. The last one, or [`NOBODY`] while there are several.
    fn remove(&mut self, place: Place) -> Place {
        match self {
            Self::Few(few) => {
                *few = few.iter().copied().filter(|other| *other != place).collect();
                if let [last] = **few { last } else { NOBODY }
            }
            Self::Many(words) => {
                words[word(place)] &= !bit(place);
                let count: u32 = words.iter().map(|word| word.count_ones()).sum();
                // Half of what made it bits, lest it go back and forth.
                if count as usize <= FEW / 2 {
                    *self = Self::Few(places(words).collect());
                } else if words.last() == Some(&0) {
                    *words = bits(places(words));
                }
                NOBODY
            }
        }
    }
}

pub(super) fn word(place: Place) -> usize {
    place as usize / 64
}

pub(super) fn bit(place: Place) -> u64 {
    1 << (place % 64)
}

/// The places whose bits are set, ascending.
pub(super) fn places(words: &[u64]) -> impl Iterator<Item = Place> {
    words.iter().zip(0..).flat_map(|(word, index): (&u64, u32)| {
        let mut rest = *word;
        std::iter::from_fn(move || {
            let at = (rest != 0).then(|| rest.trailing_zeros())?;
            rest &= rest - 1;
            Some(index * 64 + at)
        })
    })
}

fn bits(places: impl Iterator<Item = Place>) -> Box<[u64]> {
    let mut words = Vec::new();
    for place in places {
        if words.len() <= word(place) {
            words.resize(word(place) + 1, 0);
        }
        words[word(place)] |= bit(place);
    }
    words.into()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn does_what_a_set_does(steps in proptest::collection::vec((0..5_u32, 0..200_u32), 0..500)) {
            let (mut holders, mut model) = (Holders::default(), BTreeSet::new());
            for (kind, place) in steps {
                if kind < 3 {
                    prop_assert_eq!(holders.insert(place), model.insert(place));
                } else {
                    prop_assert_eq!(holders.remove(place), model.remove(&place));
                }
                prop_assert_eq!(holders.is_empty(), model.is_empty());
                let (from, mut into) = ([u64::MAX; 4], [7; 4]);
                holders.intersect(&from, &mut into);
                prop_assert_eq!(places(&into).collect::<Vec<_>>(), model.iter().copied().collect::<Vec<_>>());
            }
        }
    }
}
