//! The identity of a process.

use std::fs;

use serde::{Deserialize, Serialize};

/// A process id and its start time, which distinguishes later processes with the same id.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProcessId {
    /// The process id.
    pub pid: u32,
    /// The start in clock ticks since boot, field 22 of `/proc/<pid>/stat`; 0 if unknown.
    pub start: u64,
}

impl ProcessId {
    /// Returns the identity of this process.
    pub fn current() -> Self {
        let pid = std::process::id();
        Self::from_pid(pid).unwrap_or(Self { pid, start: 0 })
    }

    /// Returns the identity of the running process with this id; `None` if there is none. A zombie
    /// does not count.
    pub fn from_pid(pid: u32) -> Option<Self> {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        // "pid (command) state …": the command may have spaces and parentheses. The state is field
        // 3.
        let (_, after_command) = stat.rsplit_once(") ")?;
        let mut fields = after_command.split(' ');
        if matches!(fields.next()?, "Z" | "X") {
            return None;
        }
        Some(Self { pid, start: fields.nth(22 - 4)?.parse().ok()? })
    }

    /// Returns `true` if the process still runs.
    pub fn is_alive(self) -> bool {
        Self::from_pid(self.pid) == Some(self)
    }
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    #[test]
    fn other_start_or_zombie_is_not_alive() {
        let current = ProcessId::current();
        assert!(current.start > 0 && current.is_alive());
        assert!(!ProcessId { start: current.start + 1, ..current }.is_alive());
        let mut child = Command::new("/bin/sh")
            .args(["-c", "read _"])
            .stdin(std::process::Stdio::piped())
            .spawn()
            .unwrap();
        let process = ProcessId::from_pid(child.id()).unwrap();
        assert!(process.start >= current.start && process.is_alive());
        drop(child.stdin.take());
        // The child is not reaped, so it stays in the process table as a zombie.
        while process.is_alive() {
            std::thread::yield_now();
        }
        child.wait().unwrap();
    }
}
