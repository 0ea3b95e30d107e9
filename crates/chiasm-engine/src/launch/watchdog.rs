//! Ends an engine when this process dies without a chance to, or some time after that.

use std::process::Stdio;
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process_group};
use tokio::process::{Child, Command};

use crate::state::ProcessId;

/// Waits for its standard input to end, which happens when this process does, whatever ended it.
/// Gives the process group `$1` another `$2` seconds, in which whoever takes it over dismisses this
/// script. Then asks the group to end, and after 10 s insists.
const SCRIPT: &str = r#"
read -r _
left=$2
while [ "$left" -gt 0 ]; do
  kill -s 0 -- "-$1" 2>/dev/null || exit 0
  sleep 1
  left=$((left - 1))
done
kill -s TERM -- "-$1" 2>/dev/null || exit 0
for _ in 1 2 3 4 5 6 7 8 9 10; do
  sleep 1
  kill -s 0 -- "-$1" 2>/dev/null || exit 0
done
kill -s KILL -- "-$1" 2>/dev/null
"#;

/// A shell that watches over one process group.
///
/// Linux could signal the child on its parent's death, but only by code between fork and exec,
/// which is unsafe; and it would not reach the child's children.
pub(super) struct Watchdog(Child);

impl Watchdog {
    /// A group that may outlive this process for `keep`. `None`, with a warning, where there is no
    /// shell: engines then outlive a frontend that is killed.
    pub(super) fn over(process_group: u32, keep: Duration) -> Option<Self> {
        let seconds = keep.as_secs_f64().ceil() as u64;
        let spawned = Command::new("/bin/sh")
            .args([
                "-c",
                SCRIPT,
                "chiasm-watchdog",
                &process_group.to_string(),
                &seconds.to_string(),
            ])
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            // A group of its own, so that Ctrl-C in the terminal does not end it first.
            .process_group(0)
            .spawn();
        match spawned {
            Ok(child) => Some(Self(child)),
            Err(error) => {
                tracing::warn!(%error, "no watchdog: engines will outlive this process if it is killed");
                None
            }
        }
    }

    /// Its process; `None` where the system does not tell.
    pub(super) fn process(&self) -> Option<ProcessId> {
        ProcessId::of(self.0.id()?)
    }

    /// Ends the watch without a signal to the group. Call it once the group has ended: its number
    /// may be given to others.
    pub(super) async fn dismiss(mut self) {
        if let Err(error) = self.0.kill().await {
            tracing::debug!(%error, "dismissing a watchdog failed");
        }
    }
}

/// Ends the watch of a process before this one, which may be counting down.
pub(super) fn dismiss(watchdog: ProcessId) {
    let group = i32::try_from(watchdog.pid).ok().and_then(Pid::from_raw);
    if let Some(group) = group.filter(|_| watchdog.is_alive())
        && let Err(error) = kill_process_group(group, Signal::KILL)
    {
        tracing::debug!(%error, "dismissing a former watchdog failed");
    }
}
