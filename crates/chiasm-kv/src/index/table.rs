//! A compact hash table of small slots that also shrinks.
//!
//! `std`'s table doubles its capacity, so it may be less than half full, and it never shrinks by
//! itself. This table grows by an eighth or a twelfth when four fifths of its capacity are used.
//!
//! Entries are sorted by their hashes. Each is at its home (the hash scaled to the capacity, which
//! need not be a power of two) or as close after it as the order allows. So a search for a missing
//! hash ends where the entry would be, an insertion or removal shifts the neighbours by one, and a
//! change of capacity is one pass over the slots. After the last home there is room for entries
//! that were pushed past it.
//!
//! The load limit trades memory for speed: at nine tenths an insertion moves 50 other entries on
//! average (Knuth, volume 3, 6.4), at four fifths it moves 13.

/// The content of a slot.
pub(super) trait Slot: Copy {
    /// A free slot.
    const FREE: Self;

    fn is_free(&self) -> bool;

    /// Returns the entry's hash, which must be uniform from the highest bit down. Returns
    /// `u64::MAX` for a free slot.
    fn hash(&self) -> u64;
}

/// A hash table of slots. The `matches` arguments select one of several entries with equal hashes.
pub(super) struct Table<S> {
    slots: Vec<S>,
    /// The number of homes. There may be more slots.
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

    /// Returns the number of bytes that the slots take.
    pub(super) fn bytes(&self) -> usize {
        self.slots.capacity() * size_of::<S>()
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &S> {
        self.slots.iter().filter(|slot| !slot.is_free())
    }

    /// Returns the entries with this hash or a higher one, in the order of their hashes.
    pub(super) fn iter_from(&self, hash: u64) -> impl Iterator<Item = &S> {
        let slots = self.slots.get(self.home(hash)..).unwrap_or_default().iter();
        slots.filter(|slot| !slot.is_free()).skip_while(move |slot| slot.hash() < hash)
    }

    /// Returns the entry that has this hash and `matches`.
    pub(super) fn get(&self, hash: u64, matches: impl Fn(&S) -> bool) -> Option<&S> {
        self.find(hash, matches).ok().map(|at| &self.slots[at])
    }

    /// Applies `visit` to the entries with this hash and returns the first result.
    pub(super) fn find_map<T>(&self, hash: u64, visit: impl FnMut(&S) -> Option<T>) -> Option<T> {
        let slots = self.slots.get(self.home(hash)..)?.iter().skip_while(|slot| slot.hash() < hash);
        slots.take_while(|slot| slot.hash() == hash && !slot.is_free()).find_map(visit)
    }

    pub(super) fn get_mut(&mut self, hash: u64, matches: impl Fn(&S) -> bool) -> Option<&mut S> {
        self.find(hash, matches).ok().map(|at| &mut self.slots[at])
    }

    /// Returns the entry that has this hash and `matches`, and `true` if it was just inserted.
    ///
    /// If there is no such entry, inserts the result of `new`, which must have this hash.
    pub(super) fn entry(
        &mut self,
        hash: u64,
        matches: impl Fn(&S) -> bool,
        new: impl FnOnce() -> S,
    ) -> (&mut S, bool) {
        let at = match self.find(hash, &matches) {
            Ok(at) => return (&mut self.slots[at], false),
            Err(_) if self.len + 1 > self.capacity / 5 * 4 => {
                let growth = (self.capacity / self.growth_divisor()).max(12);
                self.resize(self.capacity + growth);
                match self.find(hash, matches) {
                    Ok(at) | Err(at) => at,
                }
            }
            Err(at) => at,
        };
        self.len += 1;
        // All entries up to the next free slot are shifted by one.
        let mut carried = new();
        for slot in &mut self.slots[at..] {
            std::mem::swap(slot, &mut carried);
            if carried.is_free() {
                return (&mut self.slots[at], true);
            }
        }
        let end = self.slots.len();
        self.extend_to(end + 16);
        self.slots[end] = carried;
        (&mut self.slots[at], true)
    }

    /// Removes the entry that has this hash and `matches`.
    pub(super) fn remove(&mut self, hash: u64, matches: impl Fn(&S) -> bool) -> Option<S> {
        self.remove_if(hash, matches, |_| true)?.ok()
    }

    /// Removes the entry that has this hash and `matches`, if `should_remove` returns `true` for
    /// it.
    ///
    /// Returns `Ok` with the removed entry, or `Err` with the remaining one.
    pub(super) fn remove_if(
        &mut self,
        hash: u64,
        matches: impl Fn(&S) -> bool,
        should_remove: impl FnOnce(&S) -> bool,
    ) -> Option<Result<S, &mut S>> {
        let at = self.find(hash, matches).ok()?;
        let removed = self.slots[at];
        if !should_remove(&removed) {
            return Some(Err(&mut self.slots[at]));
        }
        // The following entries are shifted back by one, up to a free slot or an entry at its home.
        let mut to = at;
        while let Some(next) = self.slots.get(to + 1).copied() {
            if next.is_free() || self.home(next.hash()) == to + 1 {
                break;
            }
            self.slots[to] = next;
            to += 1;
        }
        self.slots[to] = S::FREE;
        self.len -= 1;
        if self.len < self.capacity / 3 {
            self.shrink();
        }
        Some(Ok(removed))
    }

    /// Frees unused capacity, but for some room to grow.
    pub(super) fn shrink(&mut self) {
        let capacity = if self.len == 0 { 0 } else { self.len * 4 / 3 + 12 };
        if capacity < self.capacity {
            self.resize(capacity);
        }
    }

    /// Returns the divisor of the capacity that gives its growth. Allocators move large allocations
    /// by remapping them, whereas each move of a small one leaves a hole, so small tables grow
    /// more.
    fn growth_divisor(&self) -> usize {
        if self.bytes() < 1 << 17 { 8 } else { 12 }
    }

    /// Loads the homes of some hashes into the CPU's cache. The loads overlap, so the time is about
    /// that of one cache miss.
    pub(super) fn prefetch(&self, hashes: impl Iterator<Item = u64>) {
        let homes = hashes.map(|hash| self.slots.get(self.home(hash)).map_or(0, S::hash));
        std::hint::black_box(homes.fold(0, |touched, hash| touched ^ hash));
    }

    /// Moves all entries to their places for another capacity. Works in place, so that the
    /// allocator can extend or cut the memory and never holds both versions.
    fn resize(&mut self, capacity: usize) {
        self.capacity = capacity;
        // The room after the last home nearly always suffices, for tables of all sizes.
        let room = if capacity == 0 { 0 } else { capacity + 16 + capacity / 128 };
        let mut from = 0;
        if room > self.slots.len() {
            // Moved to the end first, so that no entry is overwritten before it is moved.
            let filled = self.slots.len();
            self.extend_to(room);
            from = room - filled;
            self.slots.copy_within(..filled, from);
            self.slots[..from.min(filled)].fill(S::FREE);
        }
        let mut next = 0;
        let mut at = from;
        // Free slots are written to where they are: a branch for them would often be mispredicted.
        while let Some(slot) = self.slots.get(at).copied() {
            let is_free = slot.is_free();
            let to = if is_free { at } else { self.home(slot.hash()).max(next) };
            if to > at {
                // More entries were pushed past the last home than there is room for.
                let more = to - at + 16;
                self.extend_to(self.slots.len() + more);
                self.slots[at..].rotate_right(more);
                at += more;
            }
            self.slots[at] = S::FREE;
            self.slots[to] = slot;
            next = if is_free { next } else { to + 1 };
            at += 1;
        }
        self.slots.truncate(room.max(next));
        self.slots.shrink_to_fit();
    }

    /// Adds free slots until there are at least `slots`.
    fn extend_to(&mut self, slots: usize) {
        if slots > self.slots.len() {
            self.slots.reserve_exact(slots - self.slots.len());
            self.slots.resize(slots, S::FREE);
        }
    }

    /// Returns the index of a hash's home.
    fn home(&self, hash: u64) -> usize {
        ((u128::from(hash) * self.capacity as u128) >> 64) as usize
    }

    /// Returns `Ok` with the index of the entry that has this hash and `matches`, or `Err` with the
    /// index where it would be inserted.
    fn find(&self, hash: u64, matches: impl Fn(&S) -> bool) -> Result<usize, usize> {
        let mut at = self.home(hash);
        while let Some(slot) = self.slots.get(at) {
            let found = slot.hash();
            if found >= hash {
                if found > hash || slot.is_free() {
                    break;
                }
                if matches(slot) {
                    return Ok(at);
                }
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

    #[derive(Clone, Copy)]
    struct Pair(Option<(u64, u32)>);

    impl Slot for Pair {
        const FREE: Self = Self(None);

        fn is_free(&self) -> bool {
            self.0.is_none()
        }

        fn hash(&self) -> u64 {
            self.0.map_or(u64::MAX, |(key, _)| hash(key))
        }
    }

    /// A bad hash on purpose: it causes long runs, also past the last home, and includes the hash
    /// of free slots.
    fn hash(key: u64) -> u64 {
        (key % 8).saturating_mul(0x2a92_4924_9249_2492)
    }

    proptest! {
        #[test]
        fn table_equals_map_model(
            steps in proptest::collection::vec((0..3_u32, 0..160_u64, any::<u32>()), 0..900),
        ) {
            let mut table = Table::<Pair>::new();
            let mut model = HashMap::new();
            let value_of = |pair: Pair| pair.0.map(|(_, value)| value);
            for (kind, key, value) in steps {
                let matches = |pair: &Pair| pair.0.is_some_and(|(found, _)| found == key);
                if kind > 0 {
                    let (slot, _) = table.entry(hash(key), matches, || Pair(Some((key, 0))));
                    slot.0 = Some((key, value));
                    model.insert(key, value);
                } else {
                    let removed = table.remove(hash(key), matches).and_then(value_of);
                    prop_assert_eq!(removed, model.remove(&key));
                }
                prop_assert_eq!(table.len(), model.len());
                for key in 0..160 {
                    let matches = |pair: &Pair| pair.0.is_some_and(|(found, _)| found == key);
                    let found = table.get(hash(key), matches).copied().and_then(value_of);
                    prop_assert_eq!(found, model.get(&key).copied());
                }
                prop_assert!(table.bytes() <= (model.len() * 3 + 60) * size_of::<Pair>());
            }
        }
    }
}
