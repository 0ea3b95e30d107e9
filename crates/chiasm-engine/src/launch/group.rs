//! A process group: an engine's first process and all that it has started.

use std::time::Duration;

use chiasm_backend::Activity;
use rustix::io::Errno;
use rustix::process::{Pid, Signal, kill_process, kill_process_group, test_kill_process_group};

/// How often a group that is to end is looked at.
const POLL: Duration = Duration::from_millis(10);

/// The unit of the times in `/proc/<pid>/stat`: `USER_HZ`, which is 100 on every Linux.
const TICK: Duration = Duration::from_millis(10);

/// Rounds of killing members one by one: a member may start another while it is being killed.
const ROUNDS: usize = 3;

/// A group by the id of its first process. The id is not given to others while the group has
/// members.
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

    /// Kills all members but Python's resource tracker, which then removes the shared memory and
    /// semaphores that the others have left, and ends by itself. Where members can't be listed,
    /// kills all.
    pub(super) fn kill_but_janitor(self) {
        for _ in 0..ROUNDS {
            let Some(members) = members(self.0) else {
                return self.kill();
            };
            let members = members.into_iter().map(|(pid, _)| pid);
            let (janitors, others): (Vec<_>, Vec<_>) = members.partition(|&pid| is_janitor(pid));
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

    /// What the members do; `None` where they can't be looked at.
    pub(super) fn activity(self) -> Option<Activity> {
        let mut activity = Activity { stopped: false, cpu: Duration::ZERO };
        for (_, stat) in members(self.0)? {
            activity.stopped |= matches!(stat.state, 'T' | 't');
            activity.cpu += stat.cpu;
        }
        Some(activity)
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

    /// Whether it has members. Dead ones do not count: where nobody reaps orphans, as in containers
    /// without an init, they stay for ever.
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

/// What the system says about a process.
#[derive(Debug, PartialEq)]
struct Stat {
    state: char,
    group: i32,
    /// The time that it has had, its threads included.
    cpu: Duration,
}

/// Members of a group that have not ended. `None` where there is no `/proc` as Linux has it.
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
        // A process may end while it is looked at.
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
    /// Reads a line of `/proc/<pid>/stat`: `pid (name) state parent group …`, with the ticks in
    /// user and system mode as fields 14 and 15. The name may contain anything.
    fn parse(line: &str) -> Option<Self> {
        let (_, after_name) = line.rsplit_once(") ")?;
        let mut fields = after_name.split(' ');
        let state = fields.next()?.chars().next()?;
        let group = fields.nth(1)?.parse().ok()?;
        let (user, system): (u64, u64) =
            (fields.nth(8)?.parse().ok()?, fields.next()?.parse().ok()?);
        Some(Self {
            state,
            group,
            cpu: TICK * u32::try_from(user.saturating_add(system)).unwrap_or(u32::MAX),
        })
    }
}

/// Whether a process is `multiprocessing.resource_tracker`, which Python starts as `python -c "from
/// … import main…"`.
fn is_janitor(pid: Pid) -> bool {
    let path = format!("/proc/{}/cmdline", pid.as_raw_nonzero());
    let tracker = b"multiprocessing.resource_tracker";
    std::fs::read(path)
        .is_ok_and(|line| line.windows(tracker.len()).any(|window| window == tracker))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_with_parentheses_and_spaces_are_passed_over() {
        let stat = |state, group, ticks| Some(Stat { state, group, cpu: TICK * ticks });
        assert_eq!(Stat::parse("12 (python) S 1 7 7 0 -1 0 0 0 0 0 40 2 0 0 20"), stat('S', 7, 42));
        assert_eq!(Stat::parse("12 (a) b (c) Z 1 -1 7 0 -1 0 0 0 0 0 1 0 0"), stat('Z', -1, 1));
        assert_eq!(Stat::parse("12 (python) S 1 7"), None);
    }
}
