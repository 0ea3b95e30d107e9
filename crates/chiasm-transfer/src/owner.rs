//! The owner of an arena: a process, distinguished by its start time from later processes with the
//! same id.

use std::fs;

/// A process, identified by id and start time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Owner {
    pub(crate) pid: u32,
    /// The start time in clock ticks since boot, field 22 of `/proc/<pid>/stat`.
    pub(crate) start: u64,
}

impl Owner {
    /// Returns this process.
    pub(crate) fn this() -> Self {
        let pid = std::process::id();
        Self { pid, start: start_time(pid).unwrap_or(0) }
    }

    /// Returns `true` if the process is running. A process in another PID namespace looks dead: see
    /// `sweep`.
    pub(crate) fn is_alive(&self) -> bool {
        start_time(self.pid) == Some(self.start)
    }
}

/// Returns the start time of a process; `None` if it does not exist.
fn start_time(pid: u32) -> Option<u64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // "pid (command) state …": the command may have spaces and parentheses. The state is field 3.
    stat.rsplit_once(") ")?.1.split(' ').nth(22 - 3)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn process_differs_from_one_with_reused_id() {
        let this = Owner::this();
        assert!(this.start > 0 && this.is_alive());
        assert!(!Owner { start: this.start + 1, ..this }.is_alive());
        assert!(!Owner { pid: u32::MAX, start: 1 }.is_alive());
    }
}
