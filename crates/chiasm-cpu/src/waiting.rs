//! A fair queue of waiting jobs.

use std::collections::{BTreeMap, HashMap};
use std::time::{Duration, Instant};

use chiasm_limit::Owner;

/// The jobs that wait for a lane's threads, in start-time fair queueing over their owners.
///
/// Owners with waiting jobs get equal shares of the time. An owner's jobs run in the order in which
/// they are due.
#[derive(Debug)]
pub(crate) struct FairQueue<J> {
    /// The queues of owners with jobs.
    queues: HashMap<Option<Owner>, OwnerQueue<J>>,
    /// The start tag of the last job taken. A new owner starts there, so shares can't be saved up.
    virtual_time: Duration,
    len: usize,
    /// The number of jobs pushed so far. It orders jobs that are due at the same time.
    pushed: u64,
}

#[derive(Debug)]
struct OwnerQueue<J> {
    /// The virtual time at which the owner's next job starts: where the owner started, and the
    /// prices of its jobs since.
    start_tag: Duration,
    /// The owner's jobs, each with its price.
    jobs: BTreeMap<Due, (Duration, J)>,
}

type Due = (Instant, u64);

/// The key of a job in the queue.
#[derive(Clone, Copy, Debug)]
pub(crate) struct JobKey {
    owner: Option<Owner>,
    due: Due,
}

impl<J> FairQueue<J> {
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    pub(crate) fn push(
        &mut self,
        owner: Option<Owner>,
        price: Duration,
        due: Instant,
        job: J,
    ) -> JobKey {
        let due = (due, self.pushed);
        self.pushed += 1;
        self.len += 1;
        let new = || OwnerQueue { start_tag: self.virtual_time, jobs: BTreeMap::new() };
        self.queues.entry(owner).or_insert_with(new).jobs.insert(due, (price, job));
        JobKey { owner, due }
    }

    /// Takes the next job. The time is linear in the number of waiting owners.
    pub(crate) fn pop(&mut self) -> Option<J> {
        let order = |queue: &OwnerQueue<J>| (queue.start_tag, queue.jobs.keys().next().copied());
        let (&owner, queue) = self.queues.iter_mut().min_by_key(|(_, queue)| order(queue))?;
        let (_, (price, job)) = queue.jobs.pop_first()?;
        self.virtual_time = queue.start_tag;
        queue.start_tag = queue.start_tag.saturating_add(price);
        self.after_removal(owner);
        Some(job)
    }

    /// Removes a job if it still waits.
    pub(crate) fn remove(&mut self, JobKey { owner, due }: JobKey) -> Option<J> {
        let (_, job) = self.queues.get_mut(&owner)?.jobs.remove(&due)?;
        self.after_removal(owner);
        Some(job)
    }

    fn after_removal(&mut self, owner: Option<Owner>) {
        self.len -= 1;
        if self.queues.get(&owner).is_some_and(|queue| queue.jobs.is_empty()) {
            self.queues.remove(&owner);
        }
    }
}

impl<J> Default for FairQueue<J> {
    fn default() -> Self {
        Self { queues: HashMap::new(), virtual_time: Duration::ZERO, len: 0, pushed: 0 }
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

    fn drain(queue: &mut FairQueue<&'static str>) -> Vec<&'static str> {
        std::iter::from_fn(|| queue.pop()).collect()
    }

    #[test]
    fn owners_get_equal_time() {
        let mut queue = FairQueue::default();
        let now = Instant::now();
        for job in ["a1", "a2", "a3"] {
            queue.push(owner(1), 2 * SECOND, now, job);
        }
        for job in ["b1", "b2", "b3", "b4"] {
            queue.push(owner(2), SECOND, now + SECOND, job);
        }
        assert_eq!(drain(&mut queue), ["a1", "b1", "b2", "a2", "b3", "b4", "a3"]);
        assert_eq!((queue.len(), queue.queues.len()), (0, 0));
    }

    #[test]
    fn owner_jobs_run_in_due_order() {
        let mut queue = FairQueue::default();
        let now = Instant::now();
        for (seconds, job) in [(2, "late"), (1, "early"), (2, "later"), (0, "at once")] {
            queue.push(owner(1), SECOND, now + seconds * SECOND, job);
        }
        assert_eq!(drain(&mut queue), ["at once", "early", "late", "later"]);
    }

    #[test]
    fn idle_owner_saves_up_no_share() {
        let mut queue = FairQueue::default();
        let now = Instant::now();
        for job in ["a1", "a2", "a3", "a4", "a5"] {
            queue.push(owner(1), SECOND, now, job);
        }
        assert_eq!([queue.pop(), queue.pop(), queue.pop()], [Some("a1"), Some("a2"), Some("a3")]);
        for job in ["b1", "b2", "b3"] {
            queue.push(owner(2), SECOND, now, job);
        }
        assert_eq!(drain(&mut queue), ["b1", "a4", "b2", "a5", "b3"]);
    }

    #[test]
    fn job_is_removed_once() {
        let mut queue = FairQueue::default();
        let now = Instant::now();
        let first = queue.push(owner(1), SECOND, now, "first");
        let second = queue.push(owner(1), SECOND, now, "second");
        assert_eq!(
            (queue.remove(first), queue.remove(first), queue.len()),
            (Some("first"), None, 1)
        );
        assert_eq!(queue.pop(), Some("second"));
        assert_eq!((queue.remove(second), queue.len()), (None, 0));
    }
}
