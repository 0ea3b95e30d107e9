//! How long something takes.

use std::fs;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use rustix::time::{ClockId, clock_gettime};

/// CPU time of all threads of this process: what a call costs, whatever else the machine does.
pub(crate) fn cpu(work: impl FnOnce()) -> Duration {
    let start = now();
    work();
    now().saturating_sub(start)
}

/// Time on the wall, without what the calling thread and some `others` were ready to run in it but
/// had no core: with waiting for locks and for each other, as it matters where several threads work
/// at once, and without what the machine does besides. Where the system does not tell (`schedstat`,
/// Linux) it is the time on the wall.
pub(crate) fn wall(others: &[Thread], work: impl FnOnce()) -> Duration {
    let waited = || -> Duration { others.iter().map(|thread| thread.waited()).sum() };
    let this = Thread::this();
    let (start, before) = (Instant::now(), this.waited() + waited());
    work();
    start.elapsed().saturating_sub(this.waited() + waited() - before)
}

/// A thread of this process.
pub(crate) struct Thread {
    schedstat: PathBuf,
}

impl Thread {
    /// The calling one.
    pub(crate) fn this() -> Self {
        let id = rustix::thread::gettid();
        Self { schedstat: format!("/proc/self/task/{}/schedstat", id.as_raw_nonzero()).into() }
    }

    /// How long it was ready to run without a core, since it began.
    fn waited(&self) -> Duration {
        // Time on a core, time without one, and how often; in nanoseconds.
        let numbers = fs::read_to_string(&self.schedstat).unwrap_or_default();
        let waited = numbers.split_whitespace().nth(1).and_then(|number| number.parse().ok());
        Duration::from_nanos(waited.unwrap_or_default())
    }
}

fn now() -> Duration {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    // Neither is negative: it is time spent.
    Duration::new(time.tv_sec.unsigned_abs(), time.tv_nsec.unsigned_abs() as u32)
}
