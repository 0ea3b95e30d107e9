//! Request slots: the limit on requests in flight, and its fair shares among owners.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use chiasm_limit::Owner;
use tokio::time::Instant;

/// The time for which an owner counts towards the fair share after its last request.
const ACTIVE_WINDOW: Duration = Duration::from_secs(10);
/// The interval at which owners without recent requests are forgotten.
const PRUNE_INTERVAL: Duration = Duration::from_secs(1);
/// The maximum number of remembered owners without a slot.
const MAX_IDLE_OWNERS: usize = 16_384;

/// The request slots of a frontend.
///
/// A single owner may take all slots. While there are other active owners, the last eighth is
/// reserved for those below their fair share: the slots divided by the owners that sent requests
/// within [`ACTIVE_WINDOW`].
pub(crate) struct Slots {
    limit: Box<dyn Fn() -> usize + Send + Sync>,
    state: Mutex<State>,
}

struct State {
    taken: usize,
    owners: HashMap<Owner, OwnerState>,
    pruned_at: Instant,
}

struct OwnerState {
    slots: usize,
    last_active: Instant,
}

/// The reason for which a request gets no slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SlotError {
    /// All slots are taken; holds their number.
    Full(usize),
    /// The rest is reserved for other owners; holds the number of slots that this owner has.
    OverShare(usize),
}

impl Slots {
    /// Creates slots. `limit` is called for each request and returns their current number, which
    /// counts as at least one.
    pub(crate) fn new(limit: impl Fn() -> usize + Send + Sync + 'static) -> Arc<Self> {
        let state = State { taken: 0, owners: HashMap::new(), pruned_at: Instant::now() };
        Arc::new(Self { limit: Box::new(limit), state: Mutex::new(state) })
    }

    /// Returns the current number of slots.
    pub(crate) fn limit(&self) -> usize {
        (self.limit)().max(1)
    }

    /// Takes a slot, which is freed on drop.
    pub(crate) fn take(self: &Arc<Self>, owner: Owner) -> Result<Slot, SlotError> {
        let limit = self.limit();
        let mut state = self.state();
        state.check(owner, limit)?;
        state.taken += 1;
        if let Some(owner) = state.owners.get_mut(&owner) {
            owner.slots += 1;
        }
        Ok(Slot { slots: self.clone(), owner })
    }

    /// Fails if [`Slots::take`] would fail now.
    pub(crate) fn check(&self, owner: Owner) -> Result<(), SlotError> {
        let limit = self.limit();
        self.state().check(owner, limit)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    /// Checks the limits and records the owner as active even if it gets no slot: from now on a
    /// share is left for it.
    fn check(&mut self, owner: Owner, limit: usize) -> Result<(), SlotError> {
        let now = Instant::now();
        self.prune(now);
        let state = self.owners.entry(owner).or_insert(OwnerState { slots: 0, last_active: now });
        state.last_active = now;
        let held = state.slots;
        if self.taken >= limit {
            return Err(SlotError::Full(limit));
        }
        let fair_share = (limit / self.owners.len()).max(1);
        let reserved = limit.div_ceil(8);
        if self.owners.len() > 1 && held >= fair_share && self.taken >= limit - reserved {
            return Err(SlotError::OverShare(held));
        }
        Ok(())
    }

    fn prune(&mut self, now: Instant) {
        // There are at most `taken` owners with slots.
        if self.owners.len() >= self.taken + MAX_IDLE_OWNERS {
            self.owners.retain(|_, state| state.slots > 0);
        } else if now.duration_since(self.pruned_at) >= PRUNE_INTERVAL {
            self.pruned_at = now;
            self.owners.retain(|_, state| {
                state.slots > 0 || now.duration_since(state.last_active) < ACTIVE_WINDOW
            });
        }
    }
}

/// A request slot, freed on drop.
pub(crate) struct Slot {
    slots: Arc<Slots>,
    owner: Owner,
}

impl Drop for Slot {
    fn drop(&mut self) {
        let mut state = self.slots.state();
        state.taken -= 1;
        if let Some(owner) = state.owners.get_mut(&self.owner) {
            owner.slots -= 1;
            owner.last_active = Instant::now();
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

    /// Takes all slots that an owner can get.
    fn take_all(slots: &Arc<Slots>, number: u32) -> Vec<Slot> {
        std::iter::from_fn(|| slots.take(owner(number)).ok()).collect()
    }

    #[tokio::test(start_paused = true)]
    async fn single_owner_may_take_all_slots() {
        let slots = Slots::new(|| 16);
        let held = take_all(&slots, A);
        assert_eq!(held.len(), 16);
        assert_eq!(slots.take(owner(A)).err(), Some(SlotError::Full(16)));
        drop(held);
        assert_eq!(take_all(&slots, A).len(), 16);
    }

    #[tokio::test(start_paused = true)]
    async fn newcomer_gets_freed_slots() {
        let slots = Slots::new(|| 16);
        let mut first = take_all(&slots, A);
        assert_eq!(slots.take(owner(B)).err(), Some(SlotError::Full(16)));
        // From now on freed slots are reserved for the owner with fewer.
        first.truncate(15);
        assert_eq!(slots.take(owner(A)).err(), Some(SlotError::OverShare(15)));
        let mut second = vec![slots.take(owner(B)).unwrap()];
        while second.len() < 8 {
            first.pop();
            assert!(slots.take(owner(A)).is_err());
            second.push(slots.take(owner(B)).unwrap());
        }
        // Both have their fair share, and the rest is reserved for a third owner.
        first.truncate(6);
        assert_eq!(slots.take(owner(B)).err(), Some(SlotError::OverShare(8)));
        assert!(slots.take(owner(3)).is_ok());
        assert!(slots.take(owner(A)).is_err(), "three share now, and six are more than a third");
    }

    #[tokio::test(start_paused = true)]
    async fn reserve_is_free_once_other_owners_are_inactive() {
        let slots = Slots::new(|| 16);
        drop(slots.take(owner(B)));
        let mut held = take_all(&slots, A);
        assert_eq!(held.len(), 14);
        tokio::time::advance(ACTIVE_WINDOW).await;
        held.extend(take_all(&slots, A));
        assert_eq!(held.len(), 16);
    }

    #[tokio::test(start_paused = true)]
    async fn changed_limit_takes_effect_at_once() {
        let limit = Arc::new(AtomicUsize::new(2));
        let slots = Slots::new({
            let limit = limit.clone();
            move || limit.load(Ordering::Relaxed)
        });
        let mut held = take_all(&slots, A);
        assert_eq!(held.len(), 2);
        limit.store(5, Ordering::Relaxed);
        held.extend(take_all(&slots, A));
        assert_eq!(held.len(), 5);
        limit.store(0, Ordering::Relaxed);
        assert_eq!(slots.take(owner(A)).err(), Some(SlotError::Full(1)));
    }

    #[tokio::test(start_paused = true)]
    async fn remembered_owners_are_bounded() {
        let slots = Slots::new(|| 16);
        let held = slots.take(owner(A)).unwrap();
        for number in 0..3 * MAX_IDLE_OWNERS as u32 {
            drop(slots.take(owner(10 + number)));
        }
        assert!(slots.state().owners.len() <= MAX_IDLE_OWNERS + 2);
        drop(held);
        tokio::time::advance(ACTIVE_WINDOW).await;
        assert_eq!(take_all(&slots, A).len(), 16);
        assert_eq!(slots.state().owners.len(), 1);
    }
}
