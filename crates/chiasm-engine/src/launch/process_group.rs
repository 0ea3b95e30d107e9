//! A process group: an engine's first process and its descendants.

use std::time::Duration;

use chiasm_backend::Activity;
use rustix::io::Errno;
use rustix::process::{Pid, Signal, kill_process, kill_process_group, test_kill_process_group};

/// The interval at which a group is checked for members.
const POLL_INTERVAL: Duration = Duration::from_millis(10);

/// The unit of the times in `/proc/<pid>/stat`: `USER_HZ`, which is 100 on every Linux.
const TICK: Duration = Duration::from_millis(10);

/// The number of rounds of killing members one by one. A member may start another one in between.
const MAX_KILL_ROUNDS: usize = 3;

/// A process group, identified by the id of its first process. The system does not reuse the id
/// while the group has members.
#[derive(Clone, Copy, Debug)]
pub(super) struct ProcessGroup(pub(super) Pid);

impl ProcessGroup {
    /// Sends SIGTERM to all members.
    pub(super) fn terminate(self) {
        warn_if_failed(self, kill_process_group(self.0, Signal::TERM));
    }

    /// Kills all members.
    pub(super) fn kill(self) {
        warn_if_failed(self, kill_process_group(self.0, Signal::KILL));
    }

    /// Kills all members except Python's resource tracker, which then removes the shared memory and
    /// semaphores of the others and ends. Kills all members if they can't be listed.
    pub(super) fn kill_except_tracker(self) {
        for _ in 0..MAX_KILL_ROUNDS {
            let Some(members) = members(self.0) else {
                return self.kill();
            };
            let members = members.into_iter().map(|(pid, _)| pid);
            let (trackers, others): (Vec<_>, Vec<_>) =
                members.partition(|&pid| is_resource_tracker(pid));
            if trackers.is_empty() {
                return self.kill();
            }
            if others.is_empty() {
                return;
            }
            for pid in others {
                warn_if_failed(self, kill_process(pid, Signal::KILL));
            }
        }
    }

    /// Returns the activity of the members; `None` if they can't be listed.
    pub(super) fn activity(self) -> Option<Activity> {
        let mut activity = Activity { stopped: false, cpu: Duration::ZERO };
        for (_, stat) in members(self.0)? {
            activity.stopped |= matches!(stat.state, 'T' | 't');
            activity.cpu += stat.cpu;
        }
        Some(activity)
    }

    /// Waits until the group has no members. Returns `false` after `timeout`.
    pub(super) async fn wait_until_empty(self, timeout: Duration) -> bool {
        let empty = async {
            while self.has_members().await {
                tokio::time::sleep(POLL_INTERVAL).await;
            }
        };
        tokio::time::timeout(timeout, empty).await.is_ok()
    }

    /// Returns `true` if the group has members. Zombies do not count: in containers without an init
    /// process, orphans are never reaped.
    async fn has_members(self) -> bool {
        if test_kill_process_group(self.0).is_err() {
            return false;
        }
        let listed = tokio::task::spawn_blocking(move || members(self.0)).await;
        listed.ok().flatten().is_none_or(|members| !members.is_empty())
    }
}

fn warn_if_failed(group: ProcessGroup, result: Result<(), Errno>) {
    match result {
        Ok(()) | Err(Errno::SRCH) => {}
        Err(error) => tracing::warn!(%error, ?group, "signalling an engine failed"),
    }
}

/// The status of a process.
#[derive(Debug, PartialEq)]
struct Stat {
    state: char,
    group: i32,
    /// The CPU time of all threads.
    cpu: Duration,
}

/// Lists the members of a group that have not ended. Returns `None` without Linux's `/proc`.
fn members(group: Pid) -> Option<Vec<(Pid, Stat)>> {
    std::fs::read_to_string("/proc/self/stat").ok()?;
    let entries = std::fs::read_dir("/proc").ok()?;
    let mut members = Vec::new();
    for entry in entries.flatten() {
        let Some(pid) =
            entry.file_name().to_str().and_then(|name| name.parse().ok()).and_then(Pid::from_raw)
        else {
            continue;
        };
        // The process may have ended since it was listed.
        let Ok(stat) = std::fs::read_to_string(entry.path().join("stat")) else {
            continue;
        };
        if let Some(stat) = Stat::parse(&stat)
            && stat.group == group.as_raw_nonzero().get()
            && !matches!(stat.state, 'Z' | 'X')
        {
            members.push((pid, stat));
        }
    }
    Some(members)
}

impl Stat {
    /// Parses a line of `/proc/<pid>/stat`: `pid (name) state parent group …`, with the ticks in
    /// user and system mode as fields 14 and 15. The name may contain any characters.
    fn parse(line: &str) -> Option<Self> {
        let (_, after_name) = line.rsplit_once(") ")?;
        let mut fields = after_name.split(' ');
        let state = fields.next()?.chars().next()?;
        let group = fields.nth(1)?.parse().ok()?;
        let user: u64 = fields.nth(8)?.parse().ok()?;
        let system: u64 = fields.next()?.parse().ok()?;
        let ticks = u32::try_from(user.saturating_add(system)).unwrap_or(u32::MAX);
        Some(Self { state, group, cpu: TICK * ticks })
    }
}

/// Returns `true` if a process is `multiprocessing.resource_tracker`, which Python starts as
/// `python -c "from … import main…"`.
fn is_resource_tracker(pid: Pid) -> bool {
    let path = format!("/proc/{}/cmdline", pid.as_raw_nonzero());
    let tracker = b"multiprocessing.resource_tracker";
    std::fs::read(path)
        .is_ok_and(|line| line.windows(tracker.len()).any(|window| window == tracker))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn process_name_with_parentheses_is_skipped() {
        let stat = |state, group, ticks| Some(Stat { state, group, cpu: TICK * ticks });
        assert_eq!(Stat::parse("12 (python) S 1 7 7 0 -1 0 0 0 0 0 40 2 0 0 20"), stat('S', 7, 42));
        assert_eq!(Stat::parse("12 (a) b (c) Z 1 -1 7 0 -1 0 0 0 0 0 1 0 0"), stat('Z', -1, 1));
        assert_eq!(Stat::parse("12 (python) S 1 7"), None);
    }
}
