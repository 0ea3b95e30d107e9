//! Time without the wait for a core.

use std::fs;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use peers::clock::process_cpu;

/// Returns the CPU time of all threads of this process: the cost of `work`, whatever else the
/// machine does.
pub(crate) fn cpu(work: impl FnOnce()) -> Duration {
    let start = process_cpu();
    work();
    process_cpu().saturating_sub(start)
}

/// Returns the wall-clock time of `work` without the time in which this thread and `others` were
/// runnable without a core. It includes the wait for locks and other threads, which matters when
/// several threads work at once. Without `schedstat` (Linux) it is the wall-clock time.
pub(crate) fn wall(others: &[Thread], work: impl FnOnce()) -> Duration {
    let this = Thread::current();
    let waited = || this.waited() + others.iter().map(Thread::waited).sum::<Duration>();
    let start = Instant::now();
    let before = waited();
    work();
    start.elapsed().saturating_sub(waited() - before)
}

/// A thread of this process.
pub(crate) struct Thread {
    schedstat: PathBuf,
}

impl Thread {
    /// Returns the calling thread.
    pub(crate) fn current() -> Self {
        let id = rustix::thread::gettid().as_raw_nonzero();
        Self { schedstat: format!("/proc/self/task/{id}/schedstat").into() }
    }

    /// Returns the time since the thread's start in which it was runnable without a core.
    fn waited(&self) -> Duration {
        // The second number is the time in nanoseconds.
        let numbers = fs::read_to_string(&self.schedstat).unwrap_or_default();
        let waited = numbers.split_whitespace().nth(1).and_then(|number| number.parse().ok());
        Duration::from_nanos(waited.unwrap_or_default())
    }
}
