//! Epochs of a connection's task, one for each call of its `poll`.
//!
//! After each frame of a body, hyper polls the body and then its connection twice more within the
//! same call of the task's `poll`. A stream that was pending in this call is still pending: had it
//! become ready, it would have woken the task, which would then be in its next call. So a stream
//! remembers the epoch in which it was last pending, and returns `Pending` at once while that epoch
//! is current. Otherwise the extra polls would pass through every layer down to the engine's
//! outputs, for each token.
//!
//! A socket counts the bytes it reads per epoch, and lets other tasks run once it has read enough
//! in one.
//!
//! Tasks that do not run in [`with_epochs`] have no epoch, and their streams are always polled.

use std::cell::Cell;
use std::future::{Future, poll_fn};
use std::num::NonZeroU64;
use std::pin::pin;
use std::sync::atomic::{AtomicU64, Ordering};

/// The number of epoch numbers reserved for each thread, so that two threads never use the same
/// one. They last for years at any rate of polls.
const EPOCHS_PER_THREAD: u64 = 1 << 48;

thread_local! {
    static CURRENT: Cell<Option<PollEpoch>> = const { Cell::new(None) };
    static LAST: Cell<u64> = Cell::new(first_of_thread());
}

/// One call of a task's `poll`. No two epochs are equal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PollEpoch(NonZeroU64);

fn first_of_thread() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    NEXT.fetch_add(EPOCHS_PER_THREAD, Ordering::Relaxed)
}

impl PollEpoch {
    /// Returns the current epoch of this thread; `None` in tasks without epochs.
    pub(crate) fn current() -> Option<Self> {
        CURRENT.get()
    }

    fn begin() -> EpochGuard {
        let number = LAST.get() + 1;
        LAST.set(number);
        CURRENT.set(NonZeroU64::new(number).map(Self));
        EpochGuard
    }
}

/// Ends the current epoch when it is dropped.
struct EpochGuard;

impl Drop for EpochGuard {
    fn drop(&mut self) {
        CURRENT.set(None);
    }
}

/// Runs a future with an epoch for each poll.
///
/// The future must pass the waker that it is polled with to everything that uses the
/// [current](PollEpoch::current) epoch.
pub(crate) async fn with_epochs<F: Future>(future: F) -> F::Output {
    let mut future = pin!(future);
    poll_fn(|context| {
        let _guard = PollEpoch::begin();
        future.as_mut().poll(context)
    })
    .await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn every_poll_has_its_own_epoch() {
        let mut seen = Vec::new();
        let three = poll_fn(|context| {
            assert_eq!(PollEpoch::current(), PollEpoch::current());
            seen.push(PollEpoch::current().expect("an epoch"));
            if seen.len() == 3 {
                return std::task::Poll::Ready(());
            }
            context.waker().wake_by_ref();
            std::task::Poll::Pending
        });
        with_epochs(three).await;
        assert!(seen[0] != seen[1] && seen[1] != seen[2] && seen[0] != seen[2]);
        assert_eq!(PollEpoch::current(), None);
        let elsewhere = std::thread::spawn(|| {
            let _guard = PollEpoch::begin();
            PollEpoch::current()
        });
        assert!(!seen.contains(&elsewhere.join().unwrap().unwrap()));
    }
}
