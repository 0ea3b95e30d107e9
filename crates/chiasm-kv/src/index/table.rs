//! A hash table of small slots that keeps what it takes in memory down, and shrinks.
//!
//! `std`'s table doubles, so that it may be less than half full, and gives nothing back by itself.
//! Here capacities grow by an eighth or a twelfth when four fifths are taken. Entries lie in the
//! order of their hashes, each at its home (the hash times the capacity, no power of two needed) or
//! as close behind as the order allows. So a search for what is not there ends where it would be,
//! what is put in or taken out moves its neighbours by one, and a new capacity is one pass over
//! both tables. Behind the last home there is room for those that are pushed beyond it.
//!
//! Slots as small as they can be, more of them free: nine tenths full, an insertion moves 50 others
//! on average (Knuth, volume 3, 6.4), four fifths full 13.

/// What is in a slot.
pub(super) trait Slot: Copy {
    const FREE: Self;

    fn is_free(&self) -> bool;

    /// A hash of what is in the slot, uniform in all bits from the highest down. `u64::MAX` for a
    /// free slot.
    fn hash(&self) -> u64;
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

    /// Bytes of the slots.
    pub(super) fn bytes(&self) -> usize {
        self.slots.capacity() * size_of::<S>()
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &S> {
        self.slots.iter().filter(|slot| !slot.is_free())
    }

    /// What has this hash or a higher one, in their order.
    pub(super) fn iter_from(&self, hash: u64) -> impl Iterator<Item = &S> {
        let slots = self.slots.get(self.home(hash)..).unwrap_or_default().iter();
        slots.filter(|slot| !slot.is_free()).skip_while(move |slot| slot.hash() < hash)
    }

    /// What has a hash and `is` what is looked for.
    pub(super) fn get(&self, hash: u64, is: impl Fn(&S) -> bool) -> Option<&S> {
        self.find(hash, is).ok().map(|at| &self.slots[at])
    }

    /// The first result for what has a hash.
    pub(super) fn find_map<T>(&self, hash: u64, look: impl FnMut(&S) -> Option<T>) -> Option<T> {
        let slots = self.slots.get(self.home(hash)..)?.iter().skip_while(|slot| slot.hash() < hash);
        slots.take_while(|slot| slot.hash() == hash && !slot.is_free()).find_map(look)
    }

    pub(super) fn get_mut(&mut self, hash: u64, is: impl Fn(&S) -> bool) -> Option<&mut S> {
        self.find(hash, is).ok().map(|at| &mut self.slots[at])
    }

    /// The slot of what has a hash and `is` what is looked for, and whether it is a new one, made
    /// by `new`, which must give it that hash.
    pub(super) fn entry(
        &mut self,
        hash: u64,
        is: impl Fn(&S) -> bool,
        new: impl FnOnce() -> S,
    ) -> (&mut S, bool) {
        let at = match self.find(hash, &is) {
            Ok(at) => return (&mut self.slots[at], false),
            Err(_) if self.len + 1 > self.capacity / 5 * 4 => {
                self.resize((self.capacity + self.capacity / self.steps()).max(self.capacity + 12));
                match self.find(hash, is) {
                    Ok(at) | Err(at) => at,
                }
            }
            Err(at) => at,
        };
        self.len += 1;
        // Everything up to the next free slot moves on by one.
        let mut carried = new();
        for slot in &mut self.slots[at..] {
            std::mem::swap(slot, &mut carried);
            if carried.is_free() {
                return (&mut self.slots[at], true);
            }
        }
        let end = self.slots.len();
        self.make_room(end + 16);
        self.slots[end] = carried;
        (&mut self.slots[at], true)
    }

    pub(super) fn remove(&mut self, hash: u64, is: impl Fn(&S) -> bool) -> Option<S> {
        self.remove_if(hash, is, |_| true)?.ok()
    }

    /// Takes it out if it `goes`, or else tells where it is.
    pub(super) fn remove_if(
        &mut self,
        hash: u64,
        is: impl Fn(&S) -> bool,
        goes: impl FnOnce(&S) -> bool,
    ) -> Option<Result<S, &mut S>> {
        let at = self.find(hash, is).ok()?;
        let removed = self.slots[at];
        if !goes(&removed) {
            return Some(Err(&mut self.slots[at]));
        }
        // Those behind move up by one, to the next that is free or at home.
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
            self.fit();
        }
        Some(Ok(removed))
    }

    /// Gives back what is free beyond some room to grow.
    pub(super) fn fit(&mut self) {
        let capacity = if self.len == 0 { 0 } else { self.len * 4 / 3 + 12 };
        if capacity < self.capacity {
            self.resize(capacity);
        }
    }

    /// One by this is what capacities grow by. Allocators move large pieces by mapping them
    /// elsewhere; small ones leave a hole each time.
    fn steps(&self) -> usize {
        if self.bytes() < 1 << 17 { 8 } else { 12 }
    }

    /// Brings the homes of some hashes near, all at a time: to wait for one after the other takes
    /// longer.
    pub(super) fn warm(&self, hashes: impl Iterator<Item = u64>) {
        let homes = hashes.map(|hash| self.slots.get(self.home(hash)).map_or(0, S::hash));
        std::hint::black_box(homes.fold(0, |all, hash| all ^ hash));
    }

    /// Moves everything to its place for another capacity, in place, so that memory is extended or
    /// cut where the allocator can do so, and never there twice.
    fn resize(&mut self, capacity: usize) {
        self.capacity = capacity;
        // Enough behind the last home for tables of all sizes, nearly always.
        let room = if capacity == 0 { 0 } else { capacity + 16 + capacity / 128 };
        let mut from = 0;
        if room > self.slots.len() {
            // To the end first: from there nothing is moved onto what still has to be moved.
            let filled = self.slots.len();
            self.make_room(room);
            from = room - filled;
            self.slots.copy_within(..filled, from);
            self.slots[..from.min(filled)].fill(S::FREE);
        }
        let mut next = 0;
        let mut at = from;
        // Free ones are put where they are: a branch for them would be guessed wrongly often.
        while let Some(slot) = self.slots.get(at).copied() {
            let is_free = slot.is_free();
            let to = if is_free { at } else { self.home(slot.hash()).max(next) };
            if to > at {
                // More were pushed beyond the last home than there is room for.
                let more = to - at + 16;
                self.make_room(self.slots.len() + more);
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

    fn make_room(&mut self, slots: usize) {
        if slots > self.slots.len() {
            self.slots.reserve_exact(slots - self.slots.len());
            self.slots.resize(slots, S::FREE);
        }
    }

    fn home(&self, hash: u64) -> usize {
        ((u128::from(hash) * self.capacity as u128) >> 64) as usize
    }

    /// `Ok` with the slot of what is looked for, `Err` with the one where it would go.
    fn find(&self, hash: u64, is: impl Fn(&S) -> bool) -> Result<usize, usize> {
        let mut at = self.home(hash);
        while let Some(slot) = self.slots.get(at) {
            let found = slot.hash();
            if found >= hash {
                if found > hash || slot.is_free() {
                    break;
                }
                if is(slot) {
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

    /// Bad on purpose: long runs, beyond the last home too, and the hash of free slots.
    fn hash(key: u64) -> u64 {
        (key % 8).saturating_mul(0x2a92_4924_9249_2492)
    }

    proptest! {
        #[test]
        fn does_what_a_map_does(steps in proptest::collection::vec((0..3_u32, 0..160_u64, any::<u32>()), 0..900)) {
            let (mut table, mut model) = (Table::<Pair>::new(), HashMap::new());
            for (kind, key, value) in steps {
                let is = |pair: &Pair| pair.0.is_some_and(|(found, _)| found == key);
                if kind > 0 {
                    table.entry(hash(key), is, || Pair(Some((key, 0)))).0.0 = Some((key, value));
                    model.insert(key, value);
                } else {
                    let removed = table.remove(hash(key), is).and_then(|pair| pair.0).map(|(_, value)| value);
                    prop_assert_eq!(removed, model.remove(&key));
                }
                prop_assert_eq!(table.len(), model.len());
                for key in 0..160 {
                    let found = table.get(hash(key), |pair| pair.0.is_some_and(|(found, _)| found == key));
                    prop_assert_eq!(found.and_then(|pair| pair.0).map(|(_, value)| value), model.get(&key).copied());
                }
                prop_assert!(table.bytes() <= (model.len() * 3 + 60) * size_of::<Pair>());
            }
        }
    }
}
