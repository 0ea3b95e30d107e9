//! Deadlines for programs and file systems that may hang.

use std::process::Stdio;
use std::sync::mpsc;
use std::time::Duration;

use tokio::io::AsyncReadExt;
use tokio::process::Command;
use tokio::time::timeout;

/// The maximum number of bytes that are read from a program's output.
const MAX_OUTPUT_BYTES: u64 = 1 << 20;
/// The deadline for small files. A slower file system is unfit to serve from.
pub(super) const FILE_SYSTEM_TIMEOUT: Duration = Duration::from_secs(5);

/// The failure of a command.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum CommandError {
    /// There is no such program.
    NotFound,
    /// The command could not be started, failed, or took too long; the reason as text.
    Failed(String),
}

/// Runs `command` and returns its standard output. Kills the command if it does not end within
/// `time`.
pub(super) async fn run_command(
    mut command: Command,
    time: Duration,
) -> Result<String, CommandError> {
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).kill_on_drop(true);
    let mut child = command.spawn().map_err(|error| match error.kind() {
        std::io::ErrorKind::NotFound => CommandError::NotFound,
        _ => CommandError::Failed(error.to_string()),
    })?;
    let stdout = child.stdout.take();
    let stderr = child.stderr.take();
    let end = async { tokio::join!(read(stdout), read(stderr), child.wait()) };
    let Ok((stdout, stderr, status)) = timeout(time, end).await else {
        return Err(CommandError::Failed(format!("no answer within {} s", time.as_secs())));
    };
    match status {
        Ok(status) if status.success() => Ok(stdout),
        Ok(status) => {
            let last = stderr.lines().last().unwrap_or_default();
            Err(CommandError::Failed(format!("{status} {last}").trim_end().to_owned()))
        }
        Err(error) => Err(CommandError::Failed(error.to_string())),
    }
}

/// Reads the pipe up to the limit. Dropping the pipe then ends a program that prints endlessly.
async fn read(pipe: Option<impl AsyncReadExt + Unpin>) -> String {
    let mut bytes = Vec::new();
    if let Some(pipe) = pipe {
        // After an error, the bytes read so far are returned.
        let _ = pipe.take(MAX_OUTPUT_BYTES).read_to_end(&mut bytes).await;
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

/// Runs `function` on a thread and returns its result, or `None` after `time`.
///
/// The thread is not joined, because a dead network file system would block it for ever.
pub(super) fn with_deadline<T: Send + 'static>(
    time: Duration,
    function: impl FnOnce() -> T + Send + 'static,
) -> Option<T> {
    let (sender, receiver) = mpsc::channel();
    std::thread::spawn(move || {
        // The receiver is gone after `time`.
        let _ = sender.send(function());
    });
    receiver.recv_timeout(time).ok()
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;

    fn shell(script: &str) -> Command {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        command
    }

    #[tokio::test]
    async fn hanging_program_is_killed() {
        let start = Instant::now();
        let result = run_command(shell("exec sleep 600"), Duration::from_secs(1)).await;
        assert_eq!(result, Err(CommandError::Failed("no answer within 1 s".to_owned())));
        assert!(start.elapsed() < Duration::from_secs(60));
    }

    #[tokio::test]
    async fn endlessly_printing_program_fails() {
        let result = run_command(shell("exec yes"), Duration::from_secs(30)).await;
        assert!(matches!(result, Err(CommandError::Failed(_))), "{result:?}");
    }

    #[tokio::test]
    async fn failure_has_status_with_last_stderr_line() {
        let time = Duration::from_secs(30);
        let failed = run_command(shell("echo first >&2; echo no driver >&2; exit 9"), time).await;
        assert_eq!(failed, Err(CommandError::Failed("exit status: 9 no driver".to_owned())));
        assert_eq!(run_command(shell("echo yes"), time).await, Ok("yes\n".to_owned()));
        let missing = run_command(Command::new("no-such-program-anywhere"), time).await;
        assert_eq!(missing, Err(CommandError::NotFound));
    }

    #[test]
    fn hanging_function_is_abandoned() {
        let (_sender, never) = mpsc::channel::<()>();
        assert!(with_deadline(Duration::from_millis(10), move || never.recv()).is_none());
        assert_eq!(with_deadline(Duration::from_secs(60), || 7), Some(7));
    }
}
