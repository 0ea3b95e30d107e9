//! Which process it was.

use std::fs;

use serde::{Deserialize, Serialize};

/// A process, told by its start from later ones that get the same number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProcessId {
    /// Its number.
    pub pid: u32,
    /// Its start in clock ticks since boot, field 22 of `/proc/<pid>/stat`; 0 where the system does
    /// not tell.
    pub start: u64,
}

impl ProcessId {
    /// This process.
    pub fn this() -> Self {
        let pid = std::process::id();
        Self::of(pid).unwrap_or(Self { pid, start: 0 })
    }

    /// The process that has this number now; `None` if there is none, or it has ended and nobody
    /// has noticed.
    pub fn of(pid: u32) -> Option<Self> {
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

    /// Whether it still runs.
    pub fn is_alive(self) -> bool {
        Self::of(self.pid) == Some(self)
    }
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    #[test]
    fn a_process_is_told_from_others_with_its_number_and_from_its_remains() {
        let this = ProcessId::this();
        assert!(this.start > 0 && this.is_alive());
        assert!(!ProcessId { start: this.start + 1, ..this }.is_alive());
        let mut child = Command::new("/bin/sh")
            .args(["-c", "read _"])
            .stdin(std::process::Stdio::piped())
            .spawn()
            .unwrap();
        let process = ProcessId::of(child.id()).unwrap();
        assert!(process.start >= this.start && process.is_alive());
        drop(child.stdin.take());
        // Not reaped, it stays in the table for as long as this process lives.
        while process.is_alive() {
            std::thread::yield_now();
        }
        child.wait().unwrap();
    }
}
