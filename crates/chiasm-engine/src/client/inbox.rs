//! What an engine has said about one request and nobody has read yet.
//!
//! A channel of tokio's has room for 32 messages in each piece of its memory, which at one message per step and some hundred
//! streams is more than a processor's cache; here it is a list of those that wait, mostly none or one.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker, ready};

use tokio::task::coop;

use super::registry::Arrival;

/// The end that the engine's outputs are put into. When it is dropped, nothing more comes.
#[derive(Debug)]
pub(super) struct Sender(Arc<Inbox>);

/// The end that is read.
#[derive(Debug)]
pub(super) struct Receiver(Arc<Inbox>);

#[derive(Debug, Default)]
struct Inbox(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    arrivals: VecDeque<Arrival>,
    /// Waits for the next arrival.
    reader: Option<Waker>,
    is_closed: bool,
}

/// A new inbox.
pub(super) fn inbox() -> (Sender, Receiver) {
    let inbox = Arc::<Inbox>::default();
    (Sender(inbox.clone()), Receiver(inbox))
}

impl Inbox {
    /// The state is never left half-changed, so a panic elsewhere does not make it unusable.
    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Sender {
    /// Adds an arrival.
    pub(super) fn send(&self, arrival: Arrival) {
        let mut state = self.0.state();
        state.arrivals.push_back(arrival);
        let reader = state.reader.take();
        drop(state);
        reader.into_iter().for_each(Waker::wake);
    }

    /// How many wait to be read.
    pub(super) fn unread(&self) -> usize {
        self.0.state().arrivals.len()
    }
}

impl Drop for Sender {
    fn drop(&mut self) {
        let mut state = self.0.state();
        state.is_closed = true;
        let reader = state.reader.take();
        drop(state);
        reader.into_iter().for_each(Waker::wake);
    }
}

impl Receiver {
    /// The next arrival; `None` when no more come. Reads in turns with other streams of the task, by tokio's budget.
    pub(super) fn poll_next(&mut self, context: &mut Context<'_>) -> Poll<Option<Arrival>> {
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
    use crate::error::EngineError;
    use crate::wire::output::Brought;

    async fn next(receiver: &mut Receiver) -> Option<Arrival> {
        poll_fn(|context| receiver.poll_next(context)).await
    }

    #[tokio::test]
    async fn what_arrives_is_read_in_order_and_then_its_end() {
        let (sender, mut receiver) = inbox();
        sender.send(Ok(Brought::default()));
        sender.send(Err(EngineError::Ended));
        assert_eq!(sender.unread(), 2);
        assert!(matches!(next(&mut receiver).await, Some(Ok(_))));
        drop(sender);
        assert!(matches!(next(&mut receiver).await, Some(Err(EngineError::Ended))));
        assert!(next(&mut receiver).await.is_none() && next(&mut receiver).await.is_none());
    }

    #[tokio::test]
    async fn a_reader_is_woken_by_an_arrival_and_by_the_end() {
        for ends in [false, true] {
            let (sender, mut receiver) = inbox();
            let reading = tokio::spawn(async move { next(&mut receiver).await.is_some() });
            tokio::time::sleep(Duration::from_millis(5)).await;
            if !ends {
                sender.send(Ok(Brought::default()));
            }
            drop(sender);
            let told = tokio::time::timeout(Duration::from_secs(20), reading).await.unwrap().unwrap();
            assert_eq!(told, !ends);
        }
    }
}
