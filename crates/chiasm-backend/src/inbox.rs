//! What has come of one request and nobody has read yet.
//!
//! A channel of tokio's has room for 32 messages in each piece of its memory, which at one message per step and some hundred
//! streams is more than a processor's cache; here it is a list of those that wait, mostly none or one.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker, ready};

use tokio::task::coop;

/// Arrivals that wait for one reader at most: minutes of an answer at reading speed. Who sends more ends the request instead: a slow
/// reader holds up neither others nor the engine.
pub const MOST_UNREAD: usize = 1 << 14;
/// Bytes of memory that wait for the reader of one job at most: log probabilities are many times the tokens. A job that has several
/// inboxes divides them.
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
pub struct Sender<T>(Arc<Inbox<T>>);

/// The end that is read.
#[derive(Debug)]
pub struct Receiver<T>(Arc<Inbox<T>>);

#[derive(Debug)]
struct Inbox<T>(Mutex<State<T>>);

#[derive(Debug)]
struct State<T> {
    arrivals: VecDeque<T>,
    /// What they hold.
    bytes: usize,
    most_bytes: usize,
    /// Waits for the next arrival.
    reader: Option<Waker>,
    is_closed: bool,
}

/// A new inbox, in which arrivals of so many bytes may wait.
pub fn inbox<T>(most_bytes: usize) -> (Sender<T>, Receiver<T>) {
    let state = State { arrivals: VecDeque::new(), bytes: 0, most_bytes, reader: None, is_closed: false };
    let inbox = Arc::new(Inbox(Mutex::new(state)));
    (Sender(inbox.clone()), Receiver(inbox))
}

/// Bytes of an arrival.
fn bytes<T: Held>(arrival: &T) -> usize {
    size_of::<T>() + arrival.held_bytes()
}

impl<T> Inbox<T> {
    /// The state is never left half-changed, so a panic elsewhere does not make it unusable.
    fn state(&self) -> MutexGuard<'_, State<T>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<T: Held> Sender<T> {
    /// Adds an arrival, however many wait.
    pub fn send(&self, arrival: T) {
        self.add(self.0.state(), arrival);
    }

    /// Adds an arrival if no more wait than may. One that is larger than all may be is taken when it is the only one.
    #[must_use]
    pub fn offer(&self, arrival: T) -> bool {
        let state = self.0.state();
        let has_room = state.arrivals.len() < MOST_UNREAD && state.bytes <= state.most_bytes;
        if has_room {
            self.add(state, arrival);
        }
        has_room
    }

    fn add(&self, mut state: MutexGuard<'_, State<T>>, arrival: T) {
        state.bytes += bytes(&arrival);
        state.arrivals.push_back(arrival);
        let reader = state.reader.take();
        drop(state);
        reader.into_iter().for_each(Waker::wake);
    }
}

impl<T> Drop for Sender<T> {
    fn drop(&mut self) {
        let mut state = self.0.state();
        state.is_closed = true;
        let reader = state.reader.take();
        drop(state);
        reader.into_iter().for_each(Waker::wake);
    }
}

impl<T: Held> Receiver<T> {
    /// The next arrival; `None` when no more come. Reads in turns with other streams of the task, by tokio's budget.
    pub fn poll_next(&mut self, context: &mut Context<'_>) -> Poll<Option<T>> {
        let budget = ready!(coop::poll_proceed(context));
        let mut state = self.0.state();
        let arrival = state.arrivals.pop_front();
        state.bytes -= arrival.as_ref().map_or(0, bytes);
        if arrival.is_none() && !state.is_closed {
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

#[cfg(test)]
mod tests {
    use std::future::poll_fn;
    use std::time::Duration;

    use super::*;

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
            let told = tokio::time::timeout(Duration::from_secs(20), reading).await.unwrap().unwrap();
            assert_eq!(told, !ends);
        }
    }
}
