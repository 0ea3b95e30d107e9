//! Runs other programs: the destination of their output, the errors when they fail, and
//! cancellation.

use std::fs::{self, File};
use std::io;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use crate::error::Error;

/// The interval between checks whether a child has exited. Children here run for seconds.
const POLL: Duration = Duration::from_millis(50);
/// The number of log lines in an error message.
const TAIL_LINES: usize = 20;
/// The maximum number of panics in an error, and the number of lines of each.
const MAX_PANICS: usize = 4;
const PANIC_LINES: usize = 5;

/// The destination of progress lines and of the output of child processes.
#[derive(Clone, Debug)]
pub(crate) enum Output {
    /// Everything goes to standard error, so standard output has only the command's result.
    Terminal,
    /// Standard output and standard error are inherited.
    Inherited,
    /// Everything is appended to a file. For work that runs while other work uses the terminal.
    Log(PathBuf),
}

impl Output {
    /// Prints a line about progress.
    pub(crate) fn print_line(&self, line: &str) -> Result<(), Error> {
        match self {
            Self::Terminal => eprintln!("{line}"),
            Self::Inherited => println!("{line}"),
            Self::Log(path) => {
                use io::Write;
                let mut log = open_log(path)?;
                writeln!(log, "{line}").map_err(Error::io("write", path))?;
            }
        }
        Ok(())
    }

    /// Returns a child's standard output and standard error.
    fn stdio(&self) -> Result<(Stdio, Stdio), Error> {
        Ok(match self {
            Self::Terminal => (io::stderr().into(), io::stderr().into()),
            Self::Inherited => (Stdio::inherit(), Stdio::inherit()),
            Self::Log(path) => (open_log(path)?.into(), open_log(path)?.into()),
        })
    }

    /// Returns the end of the log, for an error message; empty without a log.
    fn tail(&self) -> String {
        let Self::Log(path) = self else {
            return String::new();
        };
        let text = fs::read(path).unwrap_or_default();
        let text = String::from_utf8_lossy(&text);
        let lines: Vec<&str> = text.lines().collect();
        let (before, last) = lines.split_at(lines.len().saturating_sub(TAIL_LINES));
        let panics = panic_messages(before).concat();
        let panics = if panics.is_empty() { panics } else { format!("{panics}…\n") };
        format!("; the end of {}:\n{panics}{}", path.display(), last.join("\n"))
    }
}

/// Returns the messages of the last panics, which backtraces push out of the end of a log.
fn panic_messages(lines: &[&str]) -> Vec<String> {
    let panics = (0..lines.len()).rev().filter(|&at| lines[at].contains(" panicked at "));
    let panics = panics.take(MAX_PANICS).map(|at| {
        let end = lines.len().min(at + PANIC_LINES);
        lines[at..end].iter().map(|line| format!("{line}\n")).collect()
    });
    let mut panics: Vec<String> = panics.collect();
    panics.reverse();
    panics
}

fn open_log(path: &PathBuf) -> Result<File, Error> {
    File::options().create(true).append(true).open(path).map_err(Error::io("open", path))
}

/// A flag that stops work on another thread and kills the child that the work waits for.
#[derive(Clone, Debug, Default)]
pub(crate) struct Cancel(Arc<AtomicBool>);

impl Cancel {
    pub(crate) fn cancel(&self) {
        self.0.store(true, Ordering::Relaxed);
    }

    /// Returns `Cancelled` if [`Self::cancel`] was called.
    pub(crate) fn check(&self) -> Result<(), Error> {
        if self.0.load(Ordering::Relaxed) { Err(Error::Cancelled) } else { Ok(()) }
    }
}

/// Runs `command` to its end. `what` names the command in errors. The caller sets the standard
/// input.
pub(crate) fn run(
    command: &mut Command,
    what: &str,
    output: &Output,
    cancel: &Cancel,
) -> Result<(), Error> {
    let (out, err) = output.stdio()?;
    let mut child = command.stdout(out).stderr(err).spawn().map_err(|source| Error::Spawn {
        program: command.get_program().display().to_string(),
        source,
    })?;
    let status = wait(&mut child, cancel)?.map_err(Error::io("wait for", what))?;
    if status.success() {
        return Ok(());
    }
    Err(Error::Failed { what: what.to_owned(), status, log: output.tail() })
}

/// Waits for the child to exit; kills it when cancelled.
fn wait(child: &mut Child, cancel: &Cancel) -> Result<io::Result<std::process::ExitStatus>, Error> {
    loop {
        match child.try_wait() {
            Ok(None) => {}
            Ok(Some(status)) => return Ok(Ok(status)),
            Err(error) => return Ok(Err(error)),
        }
        if let Err(cancelled) = cancel.check() {
            // `kill` fails only if the child has just exited; `wait` reaps it in both cases.
            let _ = child.kill();
            let _ = child.wait();
            return Err(cancelled);
        }
        thread::sleep(POLL);
    }
}

/// Runs `command` and returns its standard output, without the line break at the end.
pub(crate) fn read(command: &mut Command, what: &str) -> Result<String, Error> {
    let output = command.stdin(Stdio::null()).output().map_err(|source| Error::Spawn {
        program: command.get_program().display().to_string(),
        source,
    })?;
    if !output.status.success() {
        let stderr = String::from_utf8_lossy(&output.stderr);
        return Err(Error::Failed {
            what: what.to_owned(),
            status: output.status,
            log: format!(": {}", stderr.trim_end()),
        });
    }
    Ok(String::from_utf8_lossy(&output.stdout).trim_end().to_owned())
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

    #[test]
    fn failure_names_command_with_tail_of_log() {
        let dir = tempfile::tempdir().unwrap();
        let output = Output::Log(dir.path().join("log"));
        output.print_line("before").unwrap();
        let script = "seq 1 100; echo last words >&2; exit 3";
        let error = run(&mut shell(script), "counting", &output, &Cancel::default()).unwrap_err();
        let text = error.to_string();
        assert!(text.starts_with("counting failed with exit status: 3"), "{text}");
        assert!(text.ends_with("100\nlast words"), "{text}");
        assert!(!text.contains("before"), "{text}");
    }

    #[test]
    fn panic_before_backtrace_is_in_tail() {
        let dir = tempfile::tempdir().unwrap();
        let output = Output::Log(dir.path().join("log"));
        let script =
            "echo \"thread 'main' (7) panicked at a.rs:1:\"; echo reason; seq 1 100; exit 1";
        let error = run(&mut shell(script), "test", &output, &Cancel::default()).unwrap_err();
        let text = error.to_string();
        assert!(text.contains("panicked at a.rs:1:\nreason\n1\n2\n3\n…\n81\n"), "{text}");
        assert!(text.ends_with("\n100"), "{text}");
    }

    #[test]
    fn cancelled_child_is_killed() {
        let dir = tempfile::tempdir().unwrap();
        let output = Output::Log(dir.path().join("log"));
        let cancel = Cancel::default();
        cancel.cancel();
        let start = Instant::now();
        let error = run(&mut shell("exec sleep 600"), "sleeping", &output, &cancel).unwrap_err();
        assert!(matches!(error, Error::Cancelled));
        assert!(start.elapsed() < Duration::from_secs(60));
    }

    #[test]
    fn missing_program_is_named() {
        let mut command = Command::new("no-such-program-anywhere");
        let error = run(&mut command, "x", &Output::Terminal, &Cancel::default()).unwrap_err();
        assert!(error.to_string().contains("no-such-program-anywhere"), "{error}");
    }

    #[test]
    fn read_returns_stdout_or_fails_with_stderr() {
        assert_eq!(read(&mut shell("echo 3.11"), "asking").unwrap(), "3.11");
        let error = read(&mut shell("echo reason >&2; false"), "asking").unwrap_err();
        assert!(error.to_string().ends_with(": reason"), "{error}");
    }
}
