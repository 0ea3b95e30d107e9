//! Runs other programs: where their output goes, what is said when they fail, and how they are
//! stopped early.

use std::fs::{self, File};
use std::io;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use crate::error::Error;

/// How often a child is looked at; only programs that take seconds are run this way.
const POLL: Duration = Duration::from_millis(50);
/// Lines of a log that go into an error message.
const TAIL_LINES: usize = 20;

/// The destination of progress and of children's output.
#[derive(Clone, Debug)]
pub(crate) enum Output {
    /// All to standard error, so that standard output carries nothing but the command's result.
    Terminal,
    /// Each to the same one of our own outputs.
    Inherited,
    /// Appended to a file, by work that runs beside something else on the terminal.
    Log(PathBuf),
}

impl Output {
    /// Says in a line what happens now.
    pub(crate) fn say(&self, line: &str) -> Result<(), Error> {
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

    fn stdio(&self) -> Result<(Stdio, Stdio), Error> {
        Ok(match self {
            Self::Terminal => (io::stderr().into(), io::stderr().into()),
            Self::Inherited => (Stdio::inherit(), Stdio::inherit()),
            Self::Log(path) => (open_log(path)?.into(), open_log(path)?.into()),
        })
    }

    fn tail(&self) -> String {
        let Self::Log(path) = self else {
            return String::new();
        };
        let text = fs::read(path).unwrap_or_default();
        let text = String::from_utf8_lossy(&text);
        let lines: Vec<&str> = text.lines().collect();
        let last = &lines[lines.len().saturating_sub(TAIL_LINES)..];
        format!("; the end of {}:\n{}", path.display(), last.join("\n"))
    }
}

fn open_log(path: &PathBuf) -> Result<File, Error> {
    File::options().create(true).append(true).open(path).map_err(Error::io("open", path))
}

/// Asks work on another thread to stop; children that it waits for are killed.
#[derive(Clone, Debug, Default)]
pub(crate) struct Cancel(Arc<AtomicBool>);

impl Cancel {
    pub(crate) fn cancel(&self) {
        self.0.store(true, Ordering::Relaxed);
    }

    pub(crate) fn check(&self) -> Result<(), Error> {
        if self.0.load(Ordering::Relaxed) { Err(Error::Cancelled) } else { Ok(()) }
    }
}

/// Runs `command` to its end; `what` names it in the error when that is not success. Its input is
/// the caller's business.
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

fn wait(child: &mut Child, cancel: &Cancel) -> Result<io::Result<std::process::ExitStatus>, Error> {
    loop {
        match child.try_wait() {
            Ok(None) => {}
            Ok(Some(status)) => return Ok(Ok(status)),
            Err(error) => return Ok(Err(error)),
        }
        if let Err(cancelled) = cancel.check() {
            // Fails only when the child has just ended by itself; wait() then collects it all the
            // same.
            let _ = child.kill();
            let _ = child.wait();
            return Err(cancelled);
        }
        thread::sleep(POLL);
    }
}

/// Runs `command` and returns what it printed, without the line break at the end.
pub(crate) fn read(command: &mut Command, what: &str) -> Result<String, Error> {
    let output = command.stdin(Stdio::null()).output().map_err(|source| Error::Spawn {
        program: command.get_program().display().to_string(),
        source,
    })?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr);
        return Err(Error::Failed {
            what: what.to_owned(),
            status: output.status,
            log: format!(": {}", said.trim_end()),
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
    fn a_failure_names_the_work_and_ends_with_the_end_of_the_log() {
        let dir = tempfile::tempdir().unwrap();
        let output = Output::Log(dir.path().join("log"));
        output.say("before").unwrap();
        let script = "seq 1 100; echo last words >&2; exit 3";
        let error = run(&mut shell(script), "counting", &output, &Cancel::default()).unwrap_err();
        let text = error.to_string();
        assert!(text.starts_with("counting failed with exit status: 3"), "{text}");
        assert!(text.ends_with("100\nlast words"), "{text}");
        assert!(!text.contains("before"), "{text}");
    }

    #[test]
    fn a_cancelled_child_is_killed_at_once() {
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
    fn a_program_that_is_not_there_is_named() {
        let mut command = Command::new("no-such-program-anywhere");
        let error = run(&mut command, "x", &Output::Terminal, &Cancel::default()).unwrap_err();
        assert!(error.to_string().contains("no-such-program-anywhere"), "{error}");
    }

    #[test]
    fn read_returns_the_output_or_what_the_program_said() {
        assert_eq!(read(&mut shell("echo 3.11"), "asking").unwrap(), "3.11");
        let error = read(&mut shell("echo reason >&2; false"), "asking").unwrap_err();
        assert!(error.to_string().ends_with(": reason"), "{error}");
    }
}
