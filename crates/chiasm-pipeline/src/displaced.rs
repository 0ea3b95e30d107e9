//! The queue of requests on suspect workers, which wait for free capacity elsewhere, oldest first.

use std::collections::BTreeSet;
use std::sync::{Mutex, MutexGuard, PoisonError};

use tokio::time::Instant;

/// The requests on suspect workers that wait for free capacity elsewhere.
#[derive(Debug, Default)]
pub(crate) struct Displaced(Mutex<Queue>);

#[derive(Debug, Default)]
struct Queue {
    /// The positions of the waiting requests: their arrival, and a number for a total order.
    waiting: BTreeSet<(Instant, u64)>,
    last_number: u64,
    /// The number of requests that may move, but have not begun elsewhere yet.
    moving: usize,
}

impl Displaced {
    /// Adds a request to the queue.
    pub(super) fn join(&self, arrived: Instant) -> Ticket<'_> {
        let mut queue = self.queue();
        queue.last_number += 1;
        let position = (arrived, queue.last_number);
        queue.waiting.insert(position);
        Ticket { displaced: self, position }
    }

    fn queue(&self) -> MutexGuard<'_, Queue> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The number of requests that workers can begin at once.
#[derive(Clone, Copy)]
pub(super) struct FreeCapacity {
    /// The free capacity of workers that the request has not tried.
    pub(super) untried: usize,
    /// The free capacity of all workers.
    pub(super) total: usize,
}

/// A waiting request's position in the queue. Dropping it leaves the queue.
pub(super) struct Ticket<'a> {
    displaced: &'a Displaced,
    position: (Instant, u64),
}

impl<'a> Ticket<'a> {
    /// Returns the right to begin elsewhere, if there is capacity for this request and all older
    /// ones.
    pub(super) fn try_move(&self, capacity: FreeCapacity) -> Option<MoveGuard<'a>> {
        let mut queue = self.displaced.queue();
        if capacity.untried == 0 && capacity.total > 0 {
            // The request has tried every worker with free capacity, so younger requests go first.
            queue.waiting.remove(&self.position);
            return None;
        }
        queue.waiting.insert(self.position);
        let free = capacity.untried.saturating_sub(queue.moving);
        let is_next = queue.waiting.iter().take(free).any(|position| *position == self.position);
        is_next.then(|| {
            queue.moving += 1;
            queue.waiting.remove(&self.position);
            MoveGuard(self.displaced)
        })
    }
}

impl Drop for Ticket<'_> {
    fn drop(&mut self) {
        self.displaced.queue().waiting.remove(&self.position);
    }
}

/// A request that is beginning elsewhere. It occupies free capacity until it is dropped.
pub(super) struct MoveGuard<'a>(&'a Displaced);

impl Drop for MoveGuard<'_> {
    fn drop(&mut self) {
        self.0.queue().moving -= 1;
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn free(untried: usize) -> FreeCapacity {
        FreeCapacity { untried, total: untried }
    }

    #[test]
    fn oldest_request_moves_first() {
        let displaced = Displaced::default();
        let old = Instant::now();
        let young = displaced.join(old + Duration::from_secs(1));
        let first = displaced.join(old);
        let second = displaced.join(old);
        assert!(young.try_move(free(2)).is_none() && first.try_move(free(0)).is_none());
        let moving = first.try_move(free(1)).unwrap();
        assert!(
            second.try_move(free(1)).is_none(),
            "the first request occupies it until it has begun"
        );
        drop(moving);
        assert!(young.try_move(free(1)).is_none() && second.try_move(free(1)).is_some());
        drop(second);
        assert!(young.try_move(free(1)).is_some());
    }

    #[test]
    fn request_without_usable_capacity_is_overtaken() {
        let displaced = Displaced::default();
        let old = Instant::now();
        let first = displaced.join(old);
        let young = displaced.join(old + Duration::from_secs(1));
        assert!(young.try_move(free(1)).is_none());
        assert!(first.try_move(FreeCapacity { untried: 0, total: 1 }).is_none());
        let moving = young.try_move(free(1)).unwrap();
        drop(moving);
        assert!(first.try_move(free(1)).is_some(), "it moves once it can use free capacity");
    }
}
