//! What has come of one request and nobody has read yet.
//!
//! A channel of tokio's has room for 32 messages in each piece of its memory, which at one message per step and some hundred
//! streams is more than a processor's cache; here it is a list of those that wait, mostly none or one.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker, ready};

use tokio::task::coop;

/// Arrivals that should wait for one reader at most: minutes of an answer at reading speed, some megabytes. Who sends more ends the
/// request instead: a slow reader holds up neither others nor the engine.
pub const MOST_UNREAD: usize = 1 << 14;

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
    /// Waits for the next arrival.
    reader: Option<Waker>,
    is_closed: bool,
}

/// A new inbox.
pub fn inbox<T>() -> (Sender<T>, Receiver<T>) {
    let inbox = Arc::new(Inbox(Mutex::new(State { arrivals: VecDeque::new(), reader: None, is_closed: false })));
    (Sender(inbox.clone()), Receiver(inbox))
}

impl<T> Inbox<T> {
    /// The state is never left half-changed, so a panic elsewhere does not make it unusable.
    fn state(&self) -> MutexGuard<'_, State<T>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<T> Sender<T> {
    /// Adds an arrival.
    pub fn send(&self, arrival: T) {
        let mut state = self.0.state();
        state.arrivals.push_back(arrival);
        let reader = state.reader.take();
        drop(state);
        reader.into_iter().for_each(Waker::wake);
    }

    /// How many wait to be read.
    pub fn unread(&self) -> usize {
        self.0.state().arrivals.len()
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

impl<T> Receiver<T> {
    /// The next arrival; `None` when no more come. Reads in turns with other streams of the task, by tokio's budget.
    pub fn poll_next(&mut self, context: &mut Context<'_>) -> Poll<Option<T>> {
        let budget = ready!(coop::poll_proceed(context));
        let mut state = self.0.state();
        let arrival = state.arrivals.pop_front();
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

    async fn next(receiver: &mut Receiver<u32>) -> Option<u32> {
        poll_fn(|context| receiver.poll_next(context)).await
    }

    #[tokio::test]
    async fn what_arrives_is_read_in_order_and_then_its_end() {
        let (sender, mut receiver) = inbox();
        sender.send(1);
        sender.send(2);
        assert_eq!(sender.unread(), 2);
        assert_eq!(next(&mut receiver).await, Some(1));
        drop(sender);
        assert_eq!(next(&mut receiver).await, Some(2));
        assert!(next(&mut receiver).await.is_none() && next(&mut receiver).await.is_none());
    }

    #[tokio::test]
    async fn a_reader_is_woken_by_an_arrival_and_by_the_end() {
        for ends in [false, true] {
            let (sender, mut receiver) = inbox();
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
