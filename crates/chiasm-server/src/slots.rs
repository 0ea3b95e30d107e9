//! Request slots: how many requests may be in flight, and how they are shared by those who ask.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use chiasm_limit::Owner;
use tokio::time::Instant;

/// Whoever asked within this time counts as one who shares.
const LATELY: Duration = Duration::from_secs(10);
/// The pause between two times that owners are forgotten who have asked for nothing lately.
const TIDY: Duration = Duration::from_secs(1);
/// Most owners without a slot that are remembered.
const MAX_WAITING: usize = 16_384;

/// The slots of a frontend. One owner alone may take all of them. While others ask too, the last
/// eighth is for those who have less than their fair share: the slots divided by the owners that
/// asked lately.
pub(crate) struct Slots {
    limit: Box<dyn Fn() -> usize + Send + Sync>,
    state: Mutex<State>,
}

struct State {
    taken: usize,
    owners: HashMap<Owner, Share>,
    tidied: Instant,
}

struct Share {
    slots: usize,
    asked: Instant,
}

/// Why there is no slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NoSlot {
    /// All slots are taken: so many.
    AllTaken(usize),
    /// What is left is for others: this owner holds so many.
    ForOthers(usize),
}

impl Slots {
    /// Makes as many slots as `limit` says whenever it is asked, but at least one.
    pub(crate) fn new(limit: impl Fn() -> usize + Send + Sync + 'static) -> Arc<Self> {
        let state = State { taken: 0, owners: HashMap::new(), tidied: Instant::now() };
        Arc::new(Self { limit: Box::new(limit), state: Mutex::new(state) })
    }

    /// How many requests may be in flight now.
    pub(crate) fn limit(&self) -> usize {
        (self.limit)().max(1)
    }

    /// Takes a slot until it is dropped.
    pub(crate) fn take(self: &Arc<Self>, owner: Owner) -> Result<Slot, NoSlot> {
        let limit = self.limit();
        let mut state = self.state();
        state.check(owner, limit)?;
        state.taken += 1;
        if let Some(share) = state.owners.get_mut(&owner) {
            share.slots += 1;
        }
        Ok(Slot { slots: self.clone(), owner })
    }

    /// Tells whether [`Slots::take`] would give one now.
    pub(crate) fn check(&self, owner: Owner) -> Result<(), NoSlot> {
        let limit = self.limit();
        self.state().check(owner, limit)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    /// Remembers that this owner asked, also where it gets nothing: from now on others leave
    /// something for it.
    fn check(&mut self, owner: Owner, limit: usize) -> Result<(), NoSlot> {
        let now = Instant::now();
        self.tidy(now);
        let share = self.owners.entry(owner).or_insert(Share { slots: 0, asked: now });
        share.asked = now;
        let held = share.slots;
        if self.taken >= limit {
            return Err(NoSlot::AllTaken(limit));
        }
        let fair = (limit / self.owners.len()).max(1);
        let for_others = limit.div_ceil(8);
        if self.owners.len() > 1 && held >= fair && self.taken >= limit - for_others {
            return Err(NoSlot::ForOthers(held));
        }
        Ok(())
    }

    fn tidy(&mut self, now: Instant) {
        // Owners with slots are no more than slots.
        if self.owners.len() >= self.taken + MAX_WAITING {
            self.owners.retain(|_, share| share.slots > 0);
        } else if now.duration_since(self.tidied) >= TIDY {
            self.tidied = now;
            self.owners
                .retain(|_, share| share.slots > 0 || now.duration_since(share.asked) < LATELY);
        }
    }
}

/// One request's place among those in flight.
pub(crate) struct Slot {
    slots: Arc<Slots>,
    owner: Owner,
}

impl Drop for Slot {
    fn drop(&mut self) {
        let mut state = self.slots.state();
        state.taken -= 1;
        if let Some(share) = state.owners.get_mut(&self.owner) {
            share.slots -= 1;
            share.asked = Instant::now();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    fn owner(number: u32) -> Owner {
        Owner::Address(Ipv4Addr::from(number))
    }

    const A: u32 = 1;
    const B: u32 = 2;

    /// Takes as many slots as there are to be had for an owner.
    fn all_of(slots: &Arc<Slots>, number: u32) -> Vec<Slot> {
        std::iter::from_fn(|| slots.take(owner(number)).ok()).collect()
    }

    #[tokio::test(start_paused = true)]
    async fn one_owner_alone_may_take_everything() {
        let slots = Slots::new(|| 16);
        let held = all_of(&slots, A);
        assert_eq!(held.len(), 16);
        assert_eq!(slots.take(owner(A)).err(), Some(NoSlot::AllTaken(16)));
        drop(held);
        assert_eq!(all_of(&slots, A).len(), 16);
    }

    #[tokio::test(start_paused = true)]
    async fn who_comes_later_gets_in() {
        let slots = Slots::new(|| 16);
        let mut first = all_of(&slots, A);
        assert_eq!(slots.take(owner(B)).err(), Some(NoSlot::AllTaken(16)));
        // From now on what becomes free is for the one who has less.
        first.truncate(15);
        assert_eq!(slots.take(owner(A)).err(), Some(NoSlot::ForOthers(15)));
        let mut second = vec![slots.take(owner(B)).unwrap()];
        while second.len() < 8 {
            first.pop();
            assert!(slots.take(owner(A)).is_err());
            second.push(slots.take(owner(B)).unwrap());
        }
        // Both have their fair share, and what is left over is for neither but a third.
        first.truncate(6);
        assert_eq!(slots.take(owner(B)).err(), Some(NoSlot::ForOthers(8)));
        assert!(slots.take(owner(3)).is_ok());
        assert!(slots.take(owner(A)).is_err(), "three share now, and six are more than a third");
    }

    #[tokio::test(start_paused = true)]
    async fn the_last_eighth_is_free_again_when_the_others_have_left() {
        let slots = Slots::new(|| 16);
        drop(slots.take(owner(B)));
        let mut held = all_of(&slots, A);
        assert_eq!(held.len(), 14);
        tokio::time::advance(LATELY).await;
        held.extend(all_of(&slots, A));
        assert_eq!(held.len(), 16);
    }

    #[tokio::test(start_paused = true)]
    async fn the_limit_is_asked_each_time() {
        let limit = Arc::new(AtomicUsize::new(2));
        let slots = Slots::new({
            let limit = limit.clone();
            move || limit.load(Ordering::Relaxed)
        });
        let mut held = all_of(&slots, A);
        assert_eq!(held.len(), 2);
        limit.store(5, Ordering::Relaxed);
        held.extend(all_of(&slots, A));
        assert_eq!(held.len(), 5);
        limit.store(0, Ordering::Relaxed);
        assert_eq!(slots.take(owner(A)).err(), Some(NoSlot::AllTaken(1)));
    }

    #[tokio::test(start_paused = true)]
    async fn strangers_without_number_are_not_all_remembered() {
        let slots = Slots::new(|| 16);
        let held = slots.take(owner(A)).unwrap();
        for number in 0..3 * MAX_WAITING as u32 {
            drop(slots.take(owner(10 + number)));
        }
        assert!(slots.state().owners.len() <= MAX_WAITING + 2);
        drop(held);
        tokio::time::advance(LATELY).await;
        assert_eq!(all_of(&slots, A).len(), 16);
        assert_eq!(slots.state().owners.len(), 1);
    }
}
