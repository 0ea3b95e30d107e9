//! How long something takes.

use std::time::{Duration, Instant};

use rustix::time::{ClockId, clock_gettime};

/// CPU time of all threads of this process: what a call costs, whatever else the machine does.
pub(crate) fn cpu(work: impl FnOnce()) -> Duration {
    let start = now();
    work();
    now().saturating_sub(start)
}

/// Time on the wall, for what several threads do at once.
pub(crate) fn wall(work: impl FnOnce()) -> Duration {
    let start = Instant::now();
    work();
    start.elapsed()
}

fn now() -> Duration {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    // Neither is negative: it is time spent.
    Duration::new(time.tv_sec.unsigned_abs(), time.tv_nsec.unsigned_abs() as u32)
}
