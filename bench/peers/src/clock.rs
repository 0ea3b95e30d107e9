//! CPU time, user and system.

use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};

/// Returns the CPU time of all threads of this process.
pub fn process_cpu() -> Duration {
    now(ClockId::ProcessCPUTime)
}

/// Returns the CPU time of this thread.
pub fn thread_cpu() -> Duration {
    now(ClockId::ThreadCPUTime)
}

fn now(clock: ClockId) -> Duration {
    let time = clock_gettime(clock);
    // A CPU clock is never negative.
    Duration::new(time.tv_sec.unsigned_abs(), time.tv_nsec.unsigned_abs() as u32)
}
