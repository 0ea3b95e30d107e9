//! Looks that end in time: at programs that may hang, and at file systems that may.

use std::process::Stdio;
use std::sync::mpsc;
use std::time::Duration;

use tokio::io::AsyncReadExt;
use tokio::process::Command;
use tokio::time::timeout;

/// Most bytes that are read of what a program prints.
const PRINTED_BYTES: u64 = 1 << 20;
/// A file system that takes longer for a small file is not one to serve from.
pub(super) const DISK_TIME: Duration = Duration::from_secs(5);

/// Why there is no answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum NoAnswer {
    /// There is no such program.
    Missing,
    /// It could not be started, failed, or took too long; in words.
    Failed(String),
}

/// What `command` prints to its standard output, if it succeeds within `time`. Else it is killed.
pub(super) async fn printed(mut command: Command, time: Duration) -> Result<String, NoAnswer> {
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).kill_on_drop(true);
    let mut child = command.spawn().map_err(|error| match error.kind() {
        std::io::ErrorKind::NotFound => NoAnswer::Missing,
        _ => NoAnswer::Failed(error.to_string()),
    })?;
    let (stdout, stderr) = (child.stdout.take(), child.stderr.take());
    let end = async {
        let (printed, said, status) = tokio::join!(read(stdout), read(stderr), child.wait());
        (printed, said, status)
    };
    let Ok((printed, said, status)) = timeout(time, end).await else {
        return Err(NoAnswer::Failed(format!("no answer within {} seconds", time.as_secs())));
    };
    match status {
        Ok(status) if status.success() => Ok(printed),
        Ok(status) => {
            let last = said.lines().last().unwrap_or_default();
            Err(NoAnswer::Failed(format!("{status} {last}").trim_end().to_owned()))
        }
        Err(error) => Err(NoAnswer::Failed(error.to_string())),
    }
}

/// What the pipe has up to the bound. Dropping it then ends a program that prints on and on.
async fn read(pipe: Option<impl AsyncReadExt + Unpin>) -> String {
    let mut bytes = Vec::new();
    if let Some(pipe) = pipe {
        // What came before an error is all there is.
        let _ = pipe.take(PRINTED_BYTES).read_to_end(&mut bytes).await;
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

/// What `look` returns, if it does within `time`. It runs on a thread of its own, which this
/// process does not wait for: a file system of a machine that is gone holds a thread for ever.
pub(super) fn looked<T: Send + 'static>(
    time: Duration,
    look: impl FnOnce() -> T + Send + 'static,
) -> Option<T> {
    let (sender, receiver) = mpsc::channel();
    std::thread::spawn(move || {
        // Nobody listens any more after `time`.
        let _ = sender.send(look());
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
    async fn a_program_that_hangs_is_given_up() {
        let start = Instant::now();
        let told = printed(shell("exec sleep 600"), Duration::from_secs(1)).await;
        assert_eq!(told, Err(NoAnswer::Failed("no answer within 1 seconds".to_owned())));
        assert!(start.elapsed() < Duration::from_secs(60));
    }

    #[tokio::test]
    async fn a_program_that_prints_for_ever_is_given_up() {
        let told = printed(shell("exec yes"), Duration::from_secs(30)).await;
        assert!(matches!(told, Err(NoAnswer::Failed(_))), "{told:?}");
    }

    #[tokio::test]
    async fn what_a_program_says_last_tells_why_it_failed() {
        let told =
            printed(shell("echo first >&2; echo no driver >&2; exit 9"), Duration::from_secs(30))
                .await;
        assert_eq!(told, Err(NoAnswer::Failed("exit status: 9 no driver".to_owned())));
        assert_eq!(
            printed(shell("echo yes"), Duration::from_secs(30)).await,
            Ok("yes\n".to_owned())
        );
        let missing =
            printed(Command::new("no-such-program-anywhere"), Duration::from_secs(30)).await;
        assert_eq!(missing, Err(NoAnswer::Missing));
    }

    #[test]
    fn a_look_that_hangs_is_given_up() {
        let (_held, never) = mpsc::channel::<()>();
        assert!(looked(Duration::from_millis(10), move || never.recv()).is_none());
        assert_eq!(looked(Duration::from_secs(60), || 7), Some(7));
    }
}
