//! Turns of a connection's task: whether something is asked again before its task could have been woken.
//!
//! hyper asks a body twice more behind each piece of it. What was pending a moment ago, in the same turn of the task, is pending still, or
//! has woken the task for another turn; to ask it would go through all layers down to the engine's outputs.

use std::cell::Cell;
use std::future::{Future, poll_fn};
use std::num::NonZeroU64;
use std::pin::pin;
use std::sync::atomic::{AtomicU64, Ordering};

/// Numbers that a thread has for its turns before it comes to those of the next: years of them, and nothing that was pending is asked
/// again after so long.
const TURNS_OF_THREAD: u64 = 1 << 48;

thread_local! {
    static CURRENT: Cell<Option<Turn>> = const { Cell::new(None) };
    static LAST: Cell<u64> = Cell::new(first_of_thread());
}

/// One call of a task's `poll`. No two are equal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Turn(NonZeroU64);

fn first_of_thread() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    NEXT.fetch_add(TURNS_OF_THREAD, Ordering::Relaxed)
}

impl Turn {
    /// The turn that this thread is in; `None` in tasks whose turns are not told apart.
    pub(crate) fn current() -> Option<Self> {
        CURRENT.get()
    }

    fn begin() -> Running {
        let number = LAST.get() + 1;
        LAST.set(number);
        CURRENT.set(NonZeroU64::new(number).map(Self));
        Running
    }
}

/// Ends the turn when it is dropped.
struct Running;

impl Drop for Running {
    fn drop(&mut self) {
        CURRENT.set(None);
    }
}

/// Runs a future whose turns are told apart. It has to hand the waker that it is polled with to all that asks for the
/// [current](Turn::current) one.
pub(crate) async fn in_turns<F: Future>(future: F) -> F::Output {
    let mut future = pin!(future);
    poll_fn(|context| {
        let _running = Turn::begin();
        future.as_mut().poll(context)
    })
    .await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn turns_are_told_apart_and_end() {
        let mut seen = Vec::new();
        let three = poll_fn(|context| {
            assert_eq!(Turn::current(), Turn::current());
            seen.push(Turn::current().expect("a turn"));
            if seen.len() == 3 {
                return std::task::Poll::Ready(());
            }
            context.waker().wake_by_ref();
            std::task::Poll::Pending
        });
        in_turns(three).await;
        assert!(seen[0] != seen[1] && seen[1] != seen[2] && seen[0] != seen[2]);
        assert_eq!(Turn::current(), None);
        let elsewhere = std::thread::spawn(|| {
            let _running = Turn::begin();
            Turn::current()
        });
        assert!(!seen.contains(&elsewhere.join().unwrap().unwrap()));
    }
}
