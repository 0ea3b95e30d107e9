//! A hash table that is nearly full, and shrinks.
//!
//! `std`'s table doubles, so that it may be less than half full, and gives nothing back by itself. Here capacities grow by
//! an eighth or a sixteenth when nine tenths are taken. Entries lie in the order of their hashes, each at its home (the hash times the
//! capacity, no power of two needed) or as close behind as the order allows. So a search for what is not there ends where it
//! would be, what is put in or taken out moves its neighbours by one, and a new capacity is one pass over both tables. Behind
//! the last home there is room for those that are pushed beyond it.

/// What is in a slot; the default is a free slot.
pub(super) trait Slot: Default {
    type Key: Copy + Eq;
    /// `None` for a free slot.
    fn key(&self) -> Option<Self::Key>;
    /// Uniform in all bits from the highest down.
    fn hash(key: Self::Key) -> u64;
}

pub(super) struct Table<S> {
    slots: Vec<S>,
    /// Homes; there may be more slots.
    capacity: usize,
    len: usize,
}

impl<S: Slot> Table<S> {
    pub(super) const fn new() -> Self {
        Self { slots: Vec::new(), capacity: 0, len: 0 }
    }

    pub(super) fn len(&self) -> usize {
        self.len
    }

    /// Of the slots.
    pub(super) fn bytes(&self) -> usize {
        self.slots.capacity() * size_of::<S>()
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &S> {
        self.slots.iter().filter(|slot| slot.key().is_some())
    }

    pub(super) fn get(&self, key: S::Key) -> Option<&S> {
        self.find(key).ok().map(|at| &self.slots[at])
    }

    pub(super) fn get_mut(&mut self, key: S::Key) -> Option<&mut S> {
        self.find(key).ok().map(|at| &mut self.slots[at])
    }

    /// The slot of a key, and whether it is a new one, made by `new`, which must give it that key.
    pub(super) fn entry(&mut self, key: S::Key, new: impl FnOnce() -> S) -> (&mut S, bool) {
        let at = match self.find(key) {
            Ok(at) => return (&mut self.slots[at], false),
            Err(_) if self.len + 1 > self.capacity / 10 * 9 => {
                self.resize((self.capacity + self.capacity / self.steps()).max(self.capacity + 10));
                match self.find(key) {
                    Ok(at) | Err(at) => at,
                }
            }
            Err(at) => at,
        };
        let taken = self.slots[at..].iter().position(|slot| slot.key().is_none());
        let free = at + taken.unwrap_or(self.slots.len() - at);
        if free == self.slots.len() {
            self.make_room(free + 16);
        }
        self.slots[at..=free].rotate_right(1);
        self.slots[at] = new();
        self.len += 1;
        (&mut self.slots[at], true)
    }

    pub(super) fn remove(&mut self, key: S::Key) -> Option<S> {
        let at = self.find(key).ok()?;
        let at_home = |(slot, at): (&S, usize)| slot.key().is_none_or(|key| self.home(S::hash(key)) == at);
        let behind = self.slots[at + 1..].iter().zip(at + 1..).position(at_home);
        let end = behind.map_or(self.slots.len(), |behind| at + 1 + behind);
        self.slots[at..end].rotate_left(1);
        self.len -= 1;
        let removed = std::mem::take(&mut self.slots[end - 1]);
        if self.len < self.capacity / 5 * 2 {
            self.fit();
        }
        Some(removed)
    }

    /// Gives back what is free beyond some room to grow.
    pub(super) fn fit(&mut self) {
        let capacity = if self.len == 0 { 0 } else { self.len * 5 / 4 + 10 };
        if capacity < self.capacity {
            self.resize(capacity);
        }
    }

    /// One by this is what capacities grow by. Allocators move large pieces by mapping them elsewhere; small ones leave a hole
    /// each time.
    fn steps(&self) -> usize {
        if self.bytes() < 1 << 17 { 8 } else { 16 }
    }

    /// Brings the homes of some keys near, all at a time: to wait for one after the other takes longer.
    pub(super) fn warm(&self, keys: impl Iterator<Item = S::Key>) {
        for key in keys {
            let slot = self.slots.get(self.home(S::hash(key)));
            std::hint::black_box(slot.and_then(S::key));
        }
    }

    /// In place, so that memory is extended or cut where the allocator can do so, and never there twice.
    fn resize(&mut self, capacity: usize) {
        self.capacity = capacity;
        // Enough behind the last home for tables of all sizes, nearly always.
        let room = if capacity == 0 { 0 } else { capacity + 16 + capacity / 128 };
        let mut from = 0;
        if room > self.slots.len() {
            let filled = self.slots.len();
            self.make_room(room);
            // To the end first: from there nothing is moved onto what still has to be moved.
            from = self.slots.len();
            for at in (0..filled).rev() {
                if self.slots[at].key().is_some() {
                    from -= 1;
                    self.slots.swap(at, from);
                }
            }
        }
        let mut next = 0;
        let mut at = from;
        while let Some(slot) = self.slots.get(at) {
            if let Some(key) = slot.key() {
                let to = self.home(S::hash(key)).max(next);
                if to > at {
                    // More were pushed beyond the last home than there is room for.
                    let more = to - at + 16;
                    self.make_room(self.slots.len() + more);
                    self.slots[at..].rotate_right(more);
                    at += more;
                }
                self.slots.swap(at, to);
                next = to + 1;
            }
            at += 1;
        }
        self.slots.truncate(room.max(next));
        self.slots.shrink_to_fit();
    }

    fn make_room(&mut self, slots: usize) {
        if slots > self.slots.len() {
            self.slots.reserve_exact(slots - self.slots.len());
            self.slots.resize_with(slots, S::default);
        }
    }

    fn home(&self, hash: u64) -> usize {
        ((u128::from(hash) * self.capacity as u128) >> 64) as usize
    }

    /// Where it is, or where it would go.
    fn find(&self, key: S::Key) -> Result<usize, usize> {
        let hash = S::hash(key);
        let mut at = self.home(hash);
        while let Some(found) = self.slots.get(at).and_then(S::key) {
            if found == key {
                return Ok(at);
            }
            if S::hash(found) > hash {
                break;
            }
            at += 1;
        }
        Err(at)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use proptest::prelude::*;

    use super::*;

    #[derive(Default)]
    struct Pair(Option<(u64, u32)>);

    impl Slot for Pair {
        type Key = u64;

        fn key(&self) -> Option<u64> {
            self.0.map(|(key, _)| key)
        }

        /// Bad on purpose: long runs, beyond the last home too.
        fn hash(key: u64) -> u64 {
            (key % 7).wrapping_mul(0x2a92_4924_9249_2492)
        }
    }

    proptest! {
        #[test]
        fn does_what_a_map_does(steps in proptest::collection::vec((0..3_u32, 0..160_u64, any::<u32>()), 0..900)) {
            let (mut table, mut model) = (Table::<Pair>::new(), HashMap::new());
            for (kind, key, value) in steps {
                if kind > 0 {
                    table.entry(key, || Pair(Some((key, 0)))).0.0 = Some((key, value));
                    model.insert(key, value);
                } else {
                    let removed = table.remove(key).and_then(|pair| pair.0).map(|(_, value)| value);
                    prop_assert_eq!(removed, model.remove(&key));
                }
                prop_assert_eq!(table.len(), model.len());
                for key in 0..160 {
                    prop_assert_eq!(table.get(key).and_then(|pair| pair.0).map(|(_, value)| value), model.get(&key).copied());
                }
                prop_assert!(table.bytes() <= (model.len() * 5 / 2 + 60) * size_of::<Pair>());
            }
        }
    }
}
