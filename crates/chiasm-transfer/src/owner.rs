//! Who an arena belongs to: a process, told from later ones with the same id by when it started.

use std::fs;

/// A process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Owner {
    pub(crate) pid: u32,
    /// The process's start in clock ticks since boot, field 22 of `/proc/<pid>/stat`.
    pub(crate) start: u64,
}

impl Owner {
    /// This process.
    pub(crate) fn this() -> Self {
        let pid = std::process::id();
        Self { pid, start: start_time(pid).unwrap_or(0) }
    }

    /// Whether it still runs. A process of another PID namespace looks dead: see `sweep`.
    pub(crate) fn is_alive(&self) -> bool {
        start_time(self.pid) == Some(self.start)
    }
}

fn start_time(pid: u32) -> Option<u64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // "pid (command) state …": the command may have spaces and parentheses. The state is field 3.
    stat.rsplit_once(") ")?.1.split(' ').nth(22 - 3)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_is_told_from_its_successor() {
        let this = Owner::this();
        assert!(this.start > 0 && this.is_alive());
        assert!(!Owner { start: this.start + 1, ..this }.is_alive());
        assert!(!Owner { pid: u32::MAX, start: 1 }.is_alive());
    }
}
