//! Ends an engine when this process dies without a chance to.

use std::process::Stdio;

use tokio::process::{Child, Command};

/// Waits for its standard input to end, which happens when this process does, whatever ended it. Then asks the
/// process group `$1` to end, and after 10 s insists.
const SCRIPT: &str = r#"
read -r _
kill -s TERM -- "-$1" 2>/dev/null || exit 0
for _ in 1 2 3 4 5 6 7 8 9 10; do
  sleep 1
  kill -s 0 -- "-$1" 2>/dev/null || exit 0
done
kill -s KILL -- "-$1" 2>/dev/null
"#;

/// A shell that watches over one process group.
///
/// Linux could signal the child on its parent's death, but only by code between fork and exec, which is unsafe; and
/// it would not reach the child's children.
pub(super) struct Watchdog(Child);

impl Watchdog {
    /// `None`, with a warning, where there is no shell: engines then outlive a frontend that is killed.
    pub(super) fn over(process_group: u32) -> Option<Self> {
        let spawned = Command::new("/bin/sh")
            .args(["-c", SCRIPT, "chiasm-watchdog", &process_group.to_string()])
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

    /// Ends the watch without a signal to the group. Call it once the group has ended: its number may be given to others.
    pub(super) async fn dismiss(mut self) {
        if let Err(error) = self.0.kill().await {
            tracing::debug!(%error, "dismissing a watchdog failed");
        }
    }
}
