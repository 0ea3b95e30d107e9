//! A watchdog that ends an engine when this process dies, or some time later.

use std::process::Stdio;
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process_group};
use tokio::process::{Child, Command};

use crate::state::ProcessId;

/// The watchdog's script. Its standard input ends with this process, even if that is killed. The
/// script then gives the process group `$1` another `$2` seconds, in which a process that takes it
/// over dismisses the script. After that it sends SIGTERM, and SIGKILL 10 s later.
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

/// A shell that watches one process group.
///
/// Linux can signal a child on its parent's death. But that takes unsafe code between fork and
/// exec, and does not reach the child's children.
pub(super) struct Watchdog(Child);

impl Watchdog {
    /// Starts a watchdog of a group that may outlive this process for `keep`. Returns `None`, with
    /// a warning, if there is no shell: engines then outlive a frontend that is killed.
    pub(super) fn spawn(process_group: u32, keep: Duration) -> Option<Self> {
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
            // In its own group, so that Ctrl-C in the terminal does not end it first.
            .process_group(0)
            .spawn();
        match spawned {
            Ok(child) => Some(Self(child)),
            Err(error) => {
                tracing::warn!(
                    %error,
                    "no watchdog: engines will outlive this process if it is killed"
                );
                None
            }
        }
    }

    /// Returns the watchdog's process; `None` if the system does not report it.
    pub(super) fn process(&self) -> Option<ProcessId> {
        ProcessId::from_pid(self.0.id()?)
    }

    /// Ends the watchdog without a signal to the group. Call it once the group has ended, because
    /// the system may reuse its id.
    pub(super) async fn dismiss(mut self) {
        if let Err(error) = self.0.kill().await {
            tracing::debug!(%error, "dismissing a watchdog failed");
        }
    }
}

/// Ends the watchdog of an earlier process, which may be counting down.
pub(super) fn dismiss(watchdog: ProcessId) {
    let group = i32::try_from(watchdog.pid).ok().and_then(Pid::from_raw);
    if let Some(group) = group.filter(|_| watchdog.is_alive())
        && let Err(error) = kill_process_group(group, Signal::KILL)
    {
        tracing::debug!(%error, "dismissing a former watchdog failed");
    }
}
