//! Work that waits, and whose turn it is.

use std::collections::{BTreeMap, HashMap};
use std::time::{Duration, Instant};

use chiasm_limit::Owner;

/// The jobs that wait for a lane's threads. Owners take turns so that each is given the same time
/// while it has jobs here, by start-time fair queueing; of one owner's jobs the one that is due
/// first comes first. `J` is a job.
#[derive(Debug)]
pub(super) struct Waiting<J> {
    /// Only owners with jobs.
    queues: HashMap<Option<Owner>, Queue<J>>,
    /// Where the owner stood whose job was taken last, before it. Whoever comes starts there: turns
    /// can't be saved up.
    reached: Duration,
    len: usize,
    /// How many jobs there have been: of those due at the same time, the one that came first comes
    /// first.
    come: u64,
}

#[derive(Debug)]
struct Queue<J> {
    /// How far its owner has come: the price of what was done for it, counted from where it
    /// started.
    given: Duration,
    /// Each job stands beside its price.
    jobs: BTreeMap<Due, (Duration, J)>,
}

type Due = (Instant, u64);

/// A job's place among those that wait.
#[derive(Clone, Copy, Debug)]
pub(super) struct Key {
    owner: Option<Owner>,
    due: Due,
}

impl<J> Waiting<J> {
    pub(super) fn len(&self) -> usize {
        self.len
    }

    pub(super) fn push(
        &mut self,
        owner: Option<Owner>,
        price: Duration,
        due: Instant,
        job: J,
    ) -> Key {
        let due = (due, self.come);
        self.come += 1;
        self.len += 1;
        let started = || Queue { given: self.reached, jobs: BTreeMap::new() };
        self.queues.entry(owner).or_insert_with(started).jobs.insert(due, (price, job));
        Key { owner, due }
    }

    /// Takes the job whose turn it is. This looks at every owner that waits.
    pub(super) fn pop(&mut self) -> Option<J> {
        let turn = |queue: &Queue<J>| (queue.given, queue.jobs.keys().next().copied());
        let (&owner, queue) = self.queues.iter_mut().min_by_key(|(_, queue)| turn(queue))?;
        let (_, (price, job)) = queue.jobs.pop_first()?;
        self.reached = queue.given;
        queue.given = queue.given.saturating_add(price);
        self.took_one_of(owner);
        Some(job)
    }

    /// Takes this job out, if it still waits.
    pub(super) fn remove(&mut self, Key { owner, due }: Key) -> Option<J> {
        let (_, job) = self.queues.get_mut(&owner)?.jobs.remove(&due)?;
        self.took_one_of(owner);
        Some(job)
    }

    fn took_one_of(&mut self, owner: Option<Owner>) {
        self.len -= 1;
        if self.queues.get(&owner).is_some_and(|queue| queue.jobs.is_empty()) {
            self.queues.remove(&owner);
        }
    }
}

impl<J> Default for Waiting<J> {
    fn default() -> Self {
        Self { queues: HashMap::new(), reached: Duration::ZERO, len: 0, come: 0 }
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn owner(number: u8) -> Option<Owner> {
        Some(Owner::Address(Ipv4Addr::new(192, 0, 2, number)))
    }

    fn rest(waiting: &mut Waiting<&'static str>) -> Vec<&'static str> {
        std::iter::from_fn(|| waiting.pop()).collect()
    }

    #[test]
    fn owners_are_given_the_same_time() {
        let (mut waiting, now) = (Waiting::default(), Instant::now());
        for job in ["a1", "a2", "a3"] {
            waiting.push(owner(1), 2 * SECOND, now, job);
        }
        for job in ["b1", "b2", "b3", "b4"] {
            waiting.push(owner(2), SECOND, now + SECOND, job);
        }
        assert_eq!(rest(&mut waiting), ["a1", "b1", "b2", "a2", "b3", "b4", "a3"]);
        assert_eq!((waiting.len(), waiting.queues.len()), (0, 0));
    }

    #[test]
    fn of_one_owner_what_is_due_first_comes_first() {
        let (mut waiting, now) = (Waiting::default(), Instant::now());
        for (seconds, job) in [(2, "late"), (1, "early"), (2, "later"), (0, "at once")] {
            waiting.push(owner(1), SECOND, now + seconds * SECOND, job);
        }
        assert_eq!(rest(&mut waiting), ["at once", "early", "late", "later"]);
    }

    #[test]
    fn who_had_nothing_to_do_has_saved_up_nothing() {
        let (mut waiting, now) = (Waiting::default(), Instant::now());
        for job in ["a1", "a2", "a3", "a4", "a5"] {
            waiting.push(owner(1), SECOND, now, job);
        }
        assert_eq!(
            [waiting.pop(), waiting.pop(), waiting.pop()],
            [Some("a1"), Some("a2"), Some("a3")]
        );
        for job in ["b1", "b2", "b3"] {
            waiting.push(owner(2), SECOND, now, job);
        }
        assert_eq!(rest(&mut waiting), ["b1", "a4", "b2", "a5", "b3"]);
    }

    #[test]
    fn a_job_that_is_taken_out_is_gone_once() {
        let (mut waiting, now) = (Waiting::default(), Instant::now());
        let first = waiting.push(owner(1), SECOND, now, "first");
        let second = waiting.push(owner(1), SECOND, now, "second");
        assert_eq!(
            (waiting.remove(first), waiting.remove(first), waiting.len()),
            (Some("first"), None, 1)
        );
        assert_eq!(waiting.pop(), Some("second"));
        assert_eq!((waiting.remove(second), waiting.len()), (None, 0));
    }
}
