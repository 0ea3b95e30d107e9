//! The queue of requests on suspect workers, oldest first, for a free seat elsewhere.

use std::collections::BTreeSet;
use std::sync::{Mutex, MutexGuard, PoisonError};

use tokio::time::Instant;

/// The requests on suspect workers that wait for a free seat elsewhere.
#[derive(Debug, Default)]
pub(crate) struct Displaced(Mutex<Queue>);

#[derive(Debug, Default)]
struct Queue {
    /// Ordered by arrival. The number tells requests of one instant apart.
    waiting: BTreeSet<(Instant, u64)>,
    last: u64,
    /// The number of requests that had their turn and have not begun elsewhere yet.
    moving: usize,
}

impl Displaced {
    /// Adds a request that waits.
    pub(super) fn join(&self, arrived: Instant) -> Ticket<'_> {
        let mut queue = self.queue();
        queue.last += 1;
        let place = (arrived, queue.last);
        queue.waiting.insert(place);
        Ticket { displaced: self, place }
    }

    fn queue(&self) -> MutexGuard<'_, Queue> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The free seats: requests that workers could begin at once.
#[derive(Clone, Copy)]
pub(super) struct Seats {
    /// Free seats of workers that the request has not tried.
    pub(super) untried: usize,
    /// Free seats of all workers.
    pub(super) total: usize,
}

/// The place of one request among those that wait.
pub(super) struct Ticket<'a> {
    displaced: &'a Displaced,
    place: (Instant, u64),
}

impl<'a> Ticket<'a> {
    /// Returns the right to begin elsewhere if it is the request's turn.
    pub(super) fn turn(&self, seats: Seats) -> Option<Moving<'a>> {
        let mut queue = self.displaced.queue();
        if seats.untried == 0 && seats.total > 0 {
            // It has tried all workers with free seats, so younger requests go first.
            queue.waiting.remove(&self.place);
            return None;
        }
        queue.waiting.insert(self.place);
        let free = seats.untried.saturating_sub(queue.moving);
        let is_next = queue.waiting.iter().take(free).any(|place| *place == self.place);
        is_next.then(|| {
            queue.moving += 1;
            queue.waiting.remove(&self.place);
            Moving(self.displaced)
        })
    }
}

impl Drop for Ticket<'_> {
    fn drop(&mut self) {
        self.displaced.queue().waiting.remove(&self.place);
    }
}

/// A request that is beginning elsewhere.
pub(super) struct Moving<'a>(&'a Displaced);

impl Drop for Moving<'_> {
    fn drop(&mut self) {
        self.0.queue().moving -= 1;
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn seats(untried: usize) -> Seats {
        Seats { untried, total: untried }
    }

    #[test]
    fn oldest_request_has_the_first_turn() {
        let displaced = Displaced::default();
        let old = Instant::now();
        let young = displaced.join(old + Duration::from_secs(1));
        let first = displaced.join(old);
        let second = displaced.join(old);
        assert!(young.turn(seats(2)).is_none() && first.turn(seats(0)).is_none());
        let moving = first.turn(seats(1)).unwrap();
        assert!(second.turn(seats(1)).is_none(), "the seat is taken until it has begun");
        drop(moving);
        assert!(young.turn(seats(1)).is_none() && second.turn(seats(1)).is_some());
        drop(second);
        assert!(young.turn(seats(1)).is_some());
    }

    #[test]
    fn request_that_can_use_no_seat_lets_younger_ones_by() {
        let displaced = Displaced::default();
        let old = Instant::now();
        let first = displaced.join(old);
        let young = displaced.join(old + Duration::from_secs(1));
        assert!(young.turn(seats(1)).is_none());
        assert!(first.turn(Seats { untried: 0, total: 1 }).is_none());
        let moving = young.turn(seats(1)).unwrap();
        drop(moving);
        assert!(first.turn(seats(1)).is_some(), "its turn comes with a seat that it can use");
    }
}
