//! What has come of one request and nobody has read yet.
//!
//! A channel of tokio's has room for 32 messages in each piece of its memory, which at one message
//! per step and some hundred streams is more than a processor's cache; here it is a list of those
//! that wait, mostly none or one.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::task::{Context, Poll, Waker, ready};

use tokio::task::coop;

use crate::unread::{Cut, GRANULE_BYTES, UnreadJob};

/// Arrivals that wait for one reader at most: minutes of an answer at reading speed. Who sends more
/// ends the request instead: a slow reader holds up neither others nor the engine.
pub const MOST_UNREAD: usize = 1 << 14;
/// Bytes of memory that wait for the reader of one job at most: log probabilities are many times
/// the tokens. A job that has several inboxes divides them.
pub const MOST_UNREAD_BYTES: usize = 64 << 20;

/// What takes memory beside what its type has.
pub trait Held {
    /// Bytes of it, nearly.
    fn held_bytes(&self) -> usize;
}

impl<T: Held, E> Held for Result<T, E> {
    fn held_bytes(&self) -> usize {
        self.as_ref().map_or(0, T::held_bytes)
    }
}

/// The end that arrivals are put into. When it is dropped, nothing more comes.
#[derive(Debug)]
pub struct Sender<T: Held>(Arc<Inbox<T>>);

/// The end that is read.
#[derive(Debug)]
pub struct Receiver<T: Held>(Arc<Inbox<T>>);

#[derive(Debug)]
struct Inbox<T: Held> {
    state: Mutex<State<T>>,
    job: UnreadJob,
}

#[derive(Debug)]
struct State<T> {
    arrivals: VecDeque<T>,
    /// What they hold.
    bytes: usize,
    /// The part of these that is counted for the whole process.
    counted: usize,
    most_bytes: usize,
    /// Waits for the next arrival.
    reader: Option<Waker>,
    is_closed: bool,
    /// Everything that waited was dropped, as too much waited in the process. Nothing more is
    /// taken.
    is_cut: bool,
}

/// Creates an inbox of a job, in which arrivals of `most_bytes` may wait.
pub fn inbox<T: Held + Send + 'static>(
    most_bytes: usize,
    job: &UnreadJob,
) -> (Sender<T>, Receiver<T>) {
    let state = State {
        arrivals: VecDeque::new(),
        bytes: 0,
        counted: 0,
        most_bytes,
        reader: None,
        is_closed: false,
        is_cut: false,
    };
    let inbox = Arc::new(Inbox { state: Mutex::new(state), job: job.clone() });
    let weak: Weak<Inbox<T>> = Arc::downgrade(&inbox);
    job.add(weak);
    (Sender(inbox.clone()), Receiver(inbox))
}

/// Bytes of an arrival.
fn bytes<T: Held>(arrival: &T) -> usize {
    size_of::<T>() + arrival.held_bytes()
}

impl<T: Held> Inbox<T> {
    /// The state is never left half-changed, so a panic elsewhere does not make it unusable.
    fn state(&self) -> MutexGuard<'_, State<T>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Drops everything that waits.
    fn clear(&self, mut state: MutexGuard<'_, State<T>>) {
        let arrivals = std::mem::take(&mut state.arrivals);
        let counted = std::mem::take(&mut state.counted);
        state.bytes = 0;
        drop(state);
        drop(arrivals);
        self.job.discount(counted);
    }
}

impl<T: Held + Send> Cut for Inbox<T> {
    fn cut(&self) {
        let mut state = self.state();
        state.is_cut = true;
        let reader = state.reader.take();
        self.clear(state);
        reader.into_iter().for_each(Waker::wake);
    }
}

impl<T: Held> Drop for Inbox<T> {
    fn drop(&mut self) {
        self.clear(self.state());
    }
}

impl<T> State<T> {
    /// Returns the bytes to count for the whole process from now on, in whole granules.
    fn count_more(&mut self) -> usize {
        let more = self.bytes.saturating_sub(self.counted) / GRANULE_BYTES * GRANULE_BYTES;
        self.counted += more;
        more
    }

    /// Returns the bytes to count no more. A granule stays counted while anything waits, so that it
    /// is not counted again at once.
    fn count_less(&mut self) -> usize {
        let less = self.counted.saturating_sub(self.bytes) / GRANULE_BYTES;
        let less = less.saturating_sub(usize::from(self.bytes > 0)) * GRANULE_BYTES;
        self.counted -= less;
        less
    }
}

impl<T: Held> Sender<T> {
    /// Adds an arrival, however many wait.
    pub fn send(&self, arrival: T) {
        self.add(self.0.state(), arrival);
    }

    /// Adds an arrival, unless the inbox is full or was cut. The arrival that goes over the limit
    /// is taken, so that a large one can come at all.
    #[must_use]
    pub fn offer(&self, arrival: T) -> bool {
        let state = self.0.state();
        let has_room =
            state.arrivals.len() < MOST_UNREAD && state.bytes <= state.most_bytes && !state.is_cut;
        if has_room {
            self.add(state, arrival);
        }
        has_room
    }

    fn add(&self, mut state: MutexGuard<'_, State<T>>, arrival: T) {
        if state.is_cut {
            return;
        }
        state.bytes += bytes(&arrival);
        state.arrivals.push_back(arrival);
        let reader = state.reader.take();
        let counted = state.count_more();
        // Counted under the lock: a reader that takes the arrival discounts it.
        let is_too_much = counted > 0 && self.0.job.count(counted);
        drop(state);
        reader.into_iter().for_each(Waker::wake);
        if is_too_much {
            self.0.job.keep_within();
        }
    }
}

impl<T: Held> Drop for Sender<T> {
    fn drop(&mut self) {
        let mut state = self.0.state();
        state.is_closed = true;
        let reader = state.reader.take();
        drop(state);
        reader.into_iter().for_each(Waker::wake);
    }
}

impl<T: Held> Receiver<T> {
    /// The next arrival; `None` when no more come. Reads in turns with other streams of the task,
    /// by tokio's budget.
    pub fn poll_next(&mut self, context: &mut Context<'_>) -> Poll<Option<T>> {
        let budget = ready!(coop::poll_proceed(context));
        let mut state = self.0.state();
        let arrival = state.arrivals.pop_front();
        state.bytes -= arrival.as_ref().map_or(0, bytes);
        let discounted = state.count_less();
        if discounted > 0 {
            self.0.job.discount(discounted);
        }
        if arrival.is_none() && !state.is_closed && !state.is_cut {
            let waker = context.waker();
            if !state.reader.as_ref().is_some_and(|reader| reader.will_wake(waker)) {
                state.reader = Some(waker.clone());
            }
            return Poll::Pending;
        }
        budget.made_progress();
        Poll::Ready(arrival)
    }
}

impl<T: Held> Receiver<T> {
    /// Returns `true` if everything that waited was dropped, as too much waited in the process.
    /// Nothing more comes then.
    pub fn is_cut(&self) -> bool {
        self.0.state().is_cut
    }
}

impl<T: Held> Drop for Receiver<T> {
    fn drop(&mut self) {
        self.0.clear(self.0.state());
    }
}

#[cfg(test)]
mod tests {
    use std::future::poll_fn;
    use std::time::Duration;

    use super::*;
    use crate::unread::Unread;

    /// An inbox of a job of its own.
    fn inbox<T: Held + Send + 'static>(most_bytes: usize) -> (Sender<T>, Receiver<T>) {
        super::inbox(most_bytes, &Arc::new(Unread::new(usize::MAX)).job())
    }

    impl Held for u32 {
        fn held_bytes(&self) -> usize {
            *self as usize
        }
    }

    async fn next(receiver: &mut Receiver<u32>) -> Option<u32> {
        poll_fn(|context| receiver.poll_next(context)).await
    }

    #[tokio::test]
    async fn what_arrives_is_read_in_order_and_then_its_end() {
        let (sender, mut receiver) = inbox(0);
        sender.send(1);
        sender.send(2);
        assert_eq!(next(&mut receiver).await, Some(1));
        drop(sender);
        assert_eq!(next(&mut receiver).await, Some(2));
        assert!(next(&mut receiver).await.is_none() && next(&mut receiver).await.is_none());
    }

    #[tokio::test]
    async fn no_more_waits_than_may() {
        let (sender, mut receiver) = inbox(1000);
        assert!(sender.offer(5000), "the only one");
        assert!(!sender.offer(1));
        assert_eq!(next(&mut receiver).await, Some(5000));
        assert_eq!((0..100).take_while(|_| sender.offer(96)).count(), 11);
        for _ in 0..2 {
            assert!(next(&mut receiver).await.is_some() && sender.offer(96) && !sender.offer(96));
        }
        let (sender, mut receiver) = inbox(usize::MAX);
        assert_eq!((0..2 * MOST_UNREAD).take_while(|_| sender.offer(0)).count(), MOST_UNREAD);
        assert!(next(&mut receiver).await.is_some() && sender.offer(0) && !sender.offer(0));
    }

    #[tokio::test]
    async fn a_reader_is_woken_by_an_arrival_and_by_the_end() {
        for ends in [false, true] {
            let (sender, mut receiver) = inbox(0);
            let reading = tokio::spawn(async move { next(&mut receiver).await.is_some() });
            tokio::time::sleep(Duration::from_millis(5)).await;
            if !ends {
                sender.send(1);
            }
            drop(sender);
            let told =
                tokio::time::timeout(Duration::from_secs(20), reading).await.unwrap().unwrap();
            assert_eq!(told, !ends);
        }
    }

    /// Arrivals that hold nearly this much each.
    const BYTES: u32 = 1 << 20;

    #[tokio::test]
    async fn answer_furthest_behind_is_cut_with_all_its_inboxes() {
        let unread = Arc::new(Unread::new(19 * BYTES as usize / 2));
        let [slow, slower] = [unread.job(), unread.job()];
        let most = usize::MAX;
        let slow_inbox = super::inbox(most, &slow);
        let mut slower_inboxes = [super::inbox(most, &slower), super::inbox(most, &slower)];
        for _ in 0..4 {
            assert!(slow_inbox.0.offer(BYTES));
        }
        for _ in 0..3 {
            assert!(slower_inboxes.iter().all(|(sender, _)| sender.offer(BYTES)));
        }
        assert_eq!((unread.cut(), slower_inboxes[0].1.is_cut()), (1, true));
        for (sender, receiver) in &mut slower_inboxes {
            assert!(!sender.offer(1), "its sender is told to stop");
            sender.send(2);
            assert_eq!(
                (next(receiver).await, receiver.is_cut()),
                (None, true),
                "nothing of it seems whole"
            );
        }
        assert!(!slow_inbox.1.is_cut() && slow_inbox.0.offer(BYTES));
        assert!(unread.bytes() <= 6 * BYTES as usize, "{}", unread.bytes());
    }

    #[tokio::test]
    async fn bytes_are_counted_until_they_are_read_or_left() {
        let unread = Arc::new(Unread::new(usize::MAX));
        let job = unread.job();
        let (sender, mut receiver) = super::inbox(usize::MAX, &job);
        (0..3).for_each(|_| sender.send(BYTES));
        let all = unread.bytes();
        assert!(all >= 3 * BYTES as usize, "{all}");
        while unread.bytes() > 0 {
            assert!(next(&mut receiver).await.is_some());
        }
        (0..3).for_each(|_| sender.send(BYTES));
        drop(receiver);
        assert_eq!(unread.bytes(), 0);
        let (sender, mut receiver) = super::inbox(usize::MAX, &job);
        for _ in 0..100 {
            sender.send(GRANULE_BYTES as u32 / 2);
            assert_eq!(
                (next(&mut receiver).await.is_some(), unread.bytes()),
                (true, 0),
                "a reader that keeps up"
            );
        }
    }
}
