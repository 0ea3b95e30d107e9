//! An open-addressing hash table that stays full and shrinks.
//!
//! `std`'s table doubles, so that it may be less than half full, and gives nothing back by itself. Here capacities grow by
//! a quarter; a place is the key's hash times the capacity (no power of two needed), and collisions go to the next free
//! slot. Removal moves later slots back, so that there are no marks of removed entries.

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
    len: usize,
}

impl<S: Slot> Table<S> {
    pub(super) const fn new() -> Self {
        Self { slots: Vec::new(), len: 0 }
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
        match self.find(key) {
            Ok(at) => (&mut self.slots[at], false),
            Err(free) => {
                let free = if self.len + 1 > self.slots.len() / 5 * 4 {
                    // Four fifths full at most: 3 slots are looked at on average to find one, 13 to miss one.
                    self.resize((self.slots.len() * 5 / 4).max(self.slots.len() + 10));
                    self.free_slot(key)
                } else {
                    free
                };
                self.slots[free] = new();
                self.len += 1;
                (&mut self.slots[free], true)
            }
        }
    }

    pub(super) fn remove(&mut self, key: S::Key) -> Option<S> {
        let mut hole = self.find(key).ok()?;
        let removed = std::mem::take(&mut self.slots[hole]);
        self.len -= 1;
        let capacity = self.slots.len();
        let mut at = hole;
        loop {
            at = if at + 1 == capacity { 0 } else { at + 1 };
            let Some(key) = self.slots[at].key() else { break };
            // Stays when its home lies after the hole, seen from where it is.
            let distance = |from: usize| if at >= from { at - from } else { at + capacity - from };
            if distance(self.home(key)) >= distance(hole) {
                self.slots.swap(hole, at);
                hole = at;
            }
        }
        if self.len < capacity / 5 * 2 {
            self.fit();
        }
        Some(removed)
    }

    /// Gives back what is free beyond some room to grow.
    pub(super) fn fit(&mut self) {
        let capacity = if self.len == 0 { 0 } else { self.len * 4 / 3 + 10 };
        if capacity < self.slots.len() {
            self.resize(capacity);
        }
    }

    fn resize(&mut self, capacity: usize) {
        let mut slots = Vec::new();
        slots.reserve_exact(capacity);
        slots.resize_with(capacity, S::default);
        for slot in std::mem::replace(&mut self.slots, slots) {
            if let Some(key) = slot.key() {
                let at = self.free_slot(key);
                self.slots[at] = slot;
            }
        }
    }

    fn home(&self, key: S::Key) -> usize {
        ((u128::from(S::hash(key)) * self.slots.len() as u128) >> 64) as usize
    }

    fn free_slot(&self, key: S::Key) -> usize {
        match self.find(key) {
            Ok(at) | Err(at) => at,
        }
    }

    /// Where it is, or where it would go; 0 when there is no slot at all.
    fn find(&self, key: S::Key) -> Result<usize, usize> {
        if self.slots.is_empty() {
            return Err(0);
        }
        let mut at = self.home(key);
        loop {
            match self.slots[at].key() {
                None => return Err(at),
                Some(found) if found == key => return Ok(at),
                Some(_) => at = if at + 1 == self.slots.len() { 0 } else { at + 1 },
            }
        }
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

        /// Bad on purpose: runs that wrap around.
        fn hash(key: u64) -> u64 {
            (key % 7).wrapping_mul(0x2492_4924_9249_2492)
        }
    }

    proptest! {
        #[test]
        fn does_what_a_map_does(steps in proptest::collection::vec((any::<bool>(), 0..60_u64, any::<u32>()), 0..400)) {
            let (mut table, mut model) = (Table::<Pair>::new(), HashMap::new());
            for (insert, key, value) in steps {
                if insert {
                    table.entry(key, || Pair(Some((key, 0)))).0.0 = Some((key, value));
                    model.insert(key, value);
                } else {
                    let removed = table.remove(key).and_then(|pair| pair.0).map(|(_, value)| value);
                    prop_assert_eq!(removed, model.remove(&key));
                }
                prop_assert_eq!(table.len(), model.len());
                for key in 0..60 {
                    prop_assert_eq!(table.get(key).and_then(|pair| pair.0).map(|(_, value)| value), model.get(&key).copied());
                }
                prop_assert!(table.bytes() <= (model.len() * 5 / 2 + 20) * size_of::<Pair>());
            }
        }
    }
}
