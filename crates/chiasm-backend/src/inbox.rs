//! A queue of the unread outputs of one request.
//!
//! It replaces a tokio channel, which allocates blocks of 32 messages. With one message per step
//! and some hundred streams, those blocks exceed a processor's cache. This queue stores only unread
//! items: usually none or one.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::task::{Context, Poll, Waker, ready};

use tokio::task::coop;

use crate::unread::{Cut, GRANULE_BYTES, UnreadShare};

/// The maximum number of unread items per inbox: minutes of an answer at reading speed. A sender
/// that exceeds it ends the request, so that a slow reader delays neither other requests nor the
/// engine.
pub const MAX_UNREAD_ITEMS: usize = 1 << 14;
/// The maximum number of unread bytes per job. Log probabilities are many times larger than the
/// tokens. A job with several inboxes divides this limit among them.
pub const MAX_UNREAD_BYTES_PER_JOB: usize = 64 << 20;

/// A value that owns heap memory.
pub trait HeapBytes {
    /// Returns the approximate number of bytes that the value owns on the heap.
    fn heap_bytes(&self) -> usize;
}

impl<T: HeapBytes, E> HeapBytes for Result<T, E> {
    fn heap_bytes(&self) -> usize {
        self.as_ref().map_or(0, T::heap_bytes)
    }
}

/// The sending half. Dropping it ends the stream.
#[derive(Debug)]
pub struct Sender<T: HeapBytes>(Arc<Inbox<T>>);

/// The receiving half.
#[derive(Debug)]
pub struct Receiver<T: HeapBytes>(Arc<Inbox<T>>);

#[derive(Debug)]
struct Inbox<T: HeapBytes> {
    state: Mutex<State<T>>,
    share: UnreadShare,
}

#[derive(Debug)]
struct State<T> {
    items: VecDeque<T>,
    /// The bytes of all items.
    bytes: usize,
    /// The part of `bytes` that is charged to the process's budget.
    charged: usize,
    max_bytes: usize,
    /// The waker of a reader that waits for the next item.
    reader: Option<Waker>,
    is_closed: bool,
    /// `true` once the answer was cut: all items were dropped, and no more are accepted.
    is_cut: bool,
}

/// Creates an inbox with a limit of `max_bytes` unread bytes, charged to a job's share.
pub fn inbox<T: HeapBytes + Send + 'static>(
    max_bytes: usize,
    share: &UnreadShare,
) -> (Sender<T>, Receiver<T>) {
    let state = State {
        items: VecDeque::new(),
        bytes: 0,
        charged: 0,
        max_bytes,
        reader: None,
        is_closed: false,
        is_cut: false,
    };
    let inbox = Arc::new(Inbox { state: Mutex::new(state), share: share.clone() });
    let weak: Weak<Inbox<T>> = Arc::downgrade(&inbox);
    share.add(weak);
    (Sender(inbox.clone()), Receiver(inbox))
}

/// Returns the bytes of an item, on the heap and in the queue.
fn bytes<T: HeapBytes>(item: &T) -> usize {
    size_of::<T>() + item.heap_bytes()
}

impl<T: HeapBytes> Inbox<T> {
    /// Locks the state. A panic never leaves it half-changed, so poisoning is ignored.
    fn state(&self) -> MutexGuard<'_, State<T>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Drops all items.
    fn clear(&self, mut state: MutexGuard<'_, State<T>>) {
        let items = std::mem::take(&mut state.items);
        let charged = std::mem::take(&mut state.charged);
        state.bytes = 0;
        drop(state);
        drop(items);
        self.share.release(charged);
    }
}

impl<T: HeapBytes + Send> Cut for Inbox<T> {
    fn cut(&self) {
        let mut state = self.state();
        state.is_cut = true;
        let reader = state.reader.take();
        self.clear(state);
        reader.into_iter().for_each(Waker::wake);
    }
}

impl<T: HeapBytes> Drop for Inbox<T> {
    fn drop(&mut self) {
        self.clear(self.state());
    }
}

impl<T> State<T> {
    /// Marks the uncharged bytes as charged, in whole granules, and returns their number.
    fn take_charge(&mut self) -> usize {
        let more = self.bytes.saturating_sub(self.charged) / GRANULE_BYTES * GRANULE_BYTES;
        self.charged += more;
        more
    }

    /// Marks the bytes that were read as released, in whole granules, and returns their number. One
    /// granule stays charged while the queue is not empty, so that it need not be charged again at
    /// once.
    fn take_release(&mut self) -> usize {
        let less = self.charged.saturating_sub(self.bytes) / GRANULE_BYTES;
        let less = less.saturating_sub(usize::from(self.bytes > 0)) * GRANULE_BYTES;
        self.charged -= less;
        less
    }
}

impl<T: HeapBytes> Sender<T> {
    /// Adds an item, regardless of the limits.
    pub fn send(&self, item: T) {
        self.add(self.0.state(), item);
    }

    /// Adds an item and returns `true`, unless the inbox is full or was cut. The item that exceeds
    /// the limit is still accepted, so that an item larger than the limit can pass.
    #[must_use]
    pub fn try_send(&self, item: T) -> bool {
        let state = self.0.state();
        let has_room =
            state.items.len() < MAX_UNREAD_ITEMS && state.bytes <= state.max_bytes && !state.is_cut;
        if has_room {
            self.add(state, item);
        }
        has_room
    }

    fn add(&self, mut state: MutexGuard<'_, State<T>>, item: T) {
        if state.is_cut {
            return;
        }
        state.bytes += bytes(&item);
        state.items.push_back(item);
        let reader = state.reader.take();
        let charged = state.take_charge();
        // Charged under the lock, because a reader that takes the item releases it.
        let is_over_budget = charged > 0 && self.0.share.charge(charged);
        drop(state);
        reader.into_iter().for_each(Waker::wake);
        if is_over_budget {
            self.0.share.enforce_limit();
        }
    }
}

impl<T: HeapBytes> Drop for Sender<T> {
    fn drop(&mut self) {
        let mut state = self.0.state();
        state.is_closed = true;
        let reader = state.reader.take();
        drop(state);
        reader.into_iter().for_each(Waker::wake);
    }
}

impl<T: HeapBytes> Receiver<T> {
    /// Polls for the next item; `None` at the end of the stream. Uses tokio's cooperative budget,
    /// so that the task's other streams are polled as well.
    pub fn poll_next(&mut self, context: &mut Context<'_>) -> Poll<Option<T>> {
        let budget = ready!(coop::poll_proceed(context));
        let mut state = self.0.state();
        let item = state.items.pop_front();
        state.bytes -= item.as_ref().map_or(0, bytes);
        let released = state.take_release();
        if released > 0 {
            self.0.share.release(released);
        }
        if item.is_none() && !state.is_closed && !state.is_cut {
            let waker = context.waker();
            if !state.reader.as_ref().is_some_and(|reader| reader.will_wake(waker)) {
                state.reader = Some(waker.clone());
            }
            return Poll::Pending;
        }
        budget.made_progress();
        Poll::Ready(item)
    }
}

impl<T: HeapBytes> Receiver<T> {
    /// Returns `true` if the answer was cut: its unread items were dropped because the process
    /// exceeded its budget. No more items follow.
    pub fn is_cut(&self) -> bool {
        self.0.state().is_cut
    }
}

impl<T: HeapBytes> Drop for Receiver<T> {
    fn drop(&mut self) {
        self.0.clear(self.0.state());
    }
}

#[cfg(test)]
mod tests {
    use std::future::poll_fn;
    use std::time::Duration;

    use super::*;
    use crate::unread::UnreadBudget;

    /// Creates an inbox with a budget of its own.
    fn inbox<T: HeapBytes + Send + 'static>(max_bytes: usize) -> (Sender<T>, Receiver<T>) {
        super::inbox(max_bytes, &Arc::new(UnreadBudget::new(usize::MAX)).new_share())
    }

    impl HeapBytes for u32 {
        fn heap_bytes(&self) -> usize {
            *self as usize
        }
    }

    async fn next(receiver: &mut Receiver<u32>) -> Option<u32> {
        poll_fn(|context| receiver.poll_next(context)).await
    }

    #[tokio::test]
    async fn items_are_read_in_order_before_the_end() {
        let (sender, mut receiver) = inbox(0);
        sender.send(1);
        sender.send(2);
        assert_eq!(next(&mut receiver).await, Some(1));
        drop(sender);
        assert_eq!(next(&mut receiver).await, Some(2));
        assert!(next(&mut receiver).await.is_none() && next(&mut receiver).await.is_none());
    }

    #[tokio::test]
    async fn full_inbox_refuses_items() {
        let (sender, mut receiver) = inbox(1000);
        assert!(sender.try_send(5000), "an empty inbox accepts an item of any size");
        assert!(!sender.try_send(1));
        assert_eq!(next(&mut receiver).await, Some(5000));
        assert_eq!((0..100).take_while(|_| sender.try_send(96)).count(), 11);
        for _ in 0..2 {
            assert!(
                next(&mut receiver).await.is_some() && sender.try_send(96) && !sender.try_send(96)
            );
        }
        let (sender, mut receiver) = inbox(usize::MAX);
        assert_eq!(
            (0..2 * MAX_UNREAD_ITEMS).take_while(|_| sender.try_send(0)).count(),
            MAX_UNREAD_ITEMS
        );
        assert!(next(&mut receiver).await.is_some() && sender.try_send(0) && !sender.try_send(0));
    }

    #[tokio::test]
    async fn reader_is_woken_by_item_or_end() {
        for ends in [false, true] {
            let (sender, mut receiver) = inbox(0);
            let reading = tokio::spawn(async move { next(&mut receiver).await.is_some() });
            tokio::time::sleep(Duration::from_millis(5)).await;
            if !ends {
                sender.send(1);
            }
            drop(sender);
            let has_item =
                tokio::time::timeout(Duration::from_secs(20), reading).await.unwrap().unwrap();
            assert_eq!(has_item, !ends);
        }
    }

    /// The approximate bytes of each item.
    const BYTES: u32 = 1 << 20;

    #[tokio::test]
    async fn largest_answer_is_cut_in_all_its_inboxes() {
        let budget = Arc::new(UnreadBudget::new(19 * BYTES as usize / 2));
        let slow = budget.new_share();
        let slower = budget.new_share();
        let no_limit = usize::MAX;
        let slow_inbox = super::inbox(no_limit, &slow);
        let mut slower_inboxes = [super::inbox(no_limit, &slower), super::inbox(no_limit, &slower)];
        for _ in 0..4 {
            assert!(slow_inbox.0.try_send(BYTES));
        }
        for _ in 0..3 {
            assert!(slower_inboxes.iter().all(|(sender, _)| sender.try_send(BYTES)));
        }
        assert_eq!((budget.cut_count(), slower_inboxes[0].1.is_cut()), (1, true));
        for (sender, receiver) in &mut slower_inboxes {
            assert!(!sender.try_send(1), "a cut inbox refuses items");
            sender.send(2);
            assert_eq!(
                (next(receiver).await, receiver.is_cut()),
                (None, true),
                "a cut answer does not look complete"
            );
        }
        assert!(!slow_inbox.1.is_cut() && slow_inbox.0.try_send(BYTES));
        assert!(budget.bytes() <= 6 * BYTES as usize, "{}", budget.bytes());
    }

    #[tokio::test]
    async fn bytes_are_charged_until_read_or_dropped() {
        let budget = Arc::new(UnreadBudget::new(usize::MAX));
        let share = budget.new_share();
        let (sender, mut receiver) = super::inbox(usize::MAX, &share);
        (0..3).for_each(|_| sender.send(BYTES));
        let charged = budget.bytes();
        assert!(charged >= 3 * BYTES as usize, "{charged}");
        while budget.bytes() > 0 {
            assert!(next(&mut receiver).await.is_some());
        }
        (0..3).for_each(|_| sender.send(BYTES));
        drop(receiver);
        assert_eq!(budget.bytes(), 0);
        let (sender, mut receiver) = super::inbox(usize::MAX, &share);
        for _ in 0..100 {
            sender.send(GRANULE_BYTES as u32 / 2);
            assert_eq!(
                (next(&mut receiver).await.is_some(), budget.bytes()),
                (true, 0),
                "a reader that keeps up is charged nothing"
            );
        }
    }
}
