//! A process group: an engine's first process and all that it has started.

use std::time::Duration;

use rustix::io::Errno;
use rustix::process::{Pid, Signal, kill_process, kill_process_group, test_kill_process_group};

/// How often a group that is to end is looked at.
const POLL: Duration = Duration::from_millis(10);

/// Rounds of killing members one by one: a member may start another while it is being killed.
const ROUNDS: usize = 3;

/// A group by the id of its first process. The id is not given to others while the group has members.
#[derive(Clone, Copy, Debug)]
pub(super) struct Group(pub(super) Pid);

impl Group {
    /// Asks all members to end.
    pub(super) fn terminate(self) {
        report(self, kill_process_group(self.0, Signal::TERM));
    }

    /// Kills all members at once.
    pub(super) fn kill(self) {
        report(self, kill_process_group(self.0, Signal::KILL));
    }

    /// Kills all members but Python's resource tracker, which then removes the shared memory and semaphores that the
    /// others have left, and ends by itself. Where members can't be listed, kills all.
    pub(super) fn kill_but_janitor(self) {
        for _ in 0..ROUNDS {
            let Some(members) = members(self.0) else {
                return self.kill();
            };
            let (janitors, others): (Vec<_>, Vec<_>) = members.into_iter().partition(|&pid| is_janitor(pid));
            if janitors.is_empty() {
                return self.kill();
            }
            if others.is_empty() {
                return;
            }
            for pid in others {
                report(self, kill_process(pid, Signal::KILL));
            }
        }
    }

    /// Whether the last member goes within some time.
    pub(super) async fn vanishes(self, within: Duration) -> bool {
        let gone = async {
            while self.lives().await {
                tokio::time::sleep(POLL).await;
            }
        };
        tokio::time::timeout(within, gone).await.is_ok()
    }

    /// Whether it has members. Dead ones do not count: where nobody reaps orphans, as in containers without an init,
    /// they stay for ever.
    async fn lives(self) -> bool {
        if test_kill_process_group(self.0).is_err() {
            return false;
        }
        let listed = tokio::task::spawn_blocking(move || members(self.0)).await;
        listed.ok().flatten().is_none_or(|members| !members.is_empty())
    }
}

fn report(group: Group, signalled: Result<(), Errno>) {
    match signalled {
        Ok(()) | Err(Errno::SRCH) => {}
        Err(error) => tracing::warn!(%error, ?group, "signalling an engine failed"),
    }
}

/// Members of a group that have not ended. `None` where there is no `/proc` as Linux has it.
fn members(group: Pid) -> Option<Vec<Pid>> {
    std::fs::read_to_string("/proc/self/stat").ok()?;
    let entries = std::fs::read_dir("/proc").ok()?;
    let mut members = Vec::new();
    for entry in entries.flatten() {
        let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse().ok()).and_then(Pid::from_raw) else {
            continue;
        };
        // A process may end while it is looked at.
        let Ok(stat) = std::fs::read_to_string(entry.path().join("stat")) else {
            continue;
        };
        if let Some((state, of)) = state_and_group(&stat)
            && of == group.as_raw_nonzero().get()
            && !matches!(state, "Z" | "X")
        {
            members.push(pid);
        }
    }
    Some(members)
}

/// State and process group from a line of `/proc/<pid>/stat`: `pid (name) state parent group …`. The name may
/// contain anything.
fn state_and_group(stat: &str) -> Option<(&str, i32)> {
    let (_, after_name) = stat.rsplit_once(") ")?;
    let mut fields = after_name.split(' ');
    let state = fields.next()?;
    Some((state, fields.nth(1)?.parse().ok()?))
}

/// Whether a process is `multiprocessing.resource_tracker`, which Python starts as `python -c "from … import main…"`.
fn is_janitor(pid: Pid) -> bool {
    let path = format!("/proc/{}/cmdline", pid.as_raw_nonzero());
    let tracker = b"multiprocessing.resource_tracker";
    std::fs::read(path).is_ok_and(|line| line.windows(tracker.len()).any(|window| window == tracker))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_with_parentheses_and_spaces_are_passed_over() {
        assert_eq!(state_and_group("12 (python) S 1 7 7 0"), Some(("S", 7)));
        assert_eq!(state_and_group("12 (a) b (c) Z 1 -1 7"), Some(("Z", -1)));
        assert_eq!(state_and_group("12 python"), None);
    }
}
