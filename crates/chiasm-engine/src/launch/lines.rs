//! What an engine prints: passed on to the log, and its end kept for the report.

use std::collections::VecDeque;
use std::fs::{File, OpenOptions};
use std::io::{self, SeekFrom};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::advice::advice;
use super::complaints::{Complaint, Complaints};
use super::stage::Stage;
use tokio::io::{AsyncBufReadExt, AsyncRead, AsyncReadExt, AsyncSeekExt, BufReader};

/// Lines that are kept: enough for a Python traceback.
const KEPT: usize = 40;

/// Longest line that is passed on in one piece, in bytes.
const MAX_LINE: u64 = 16 * 1024;

/// How often a file is looked at for more: part of the time in which an engine's last words are
/// told.
const LOOK: Duration = Duration::from_millis(50);

/// The time to wait for the log line about a failure. A log file is read every [`LOOK`].
const COMPLAINT_PATIENCE: Duration = Duration::from_millis(300);

/// The interval between two searches of the log.
const COMPLAINT_POLL: Duration = Duration::from_millis(10);

/// A file that has grown beyond it is emptied once it has been read, in bytes.
const MAX_FILE: u64 = 16 << 20;

/// The last lines of both streams of one engine.
#[derive(Clone, Debug, Default)]
pub struct LastLines(Arc<Mutex<Kept>>);

#[derive(Debug, Default)]
struct Kept {
    lines: VecDeque<String>,
    /// What helps against the first known error that it told of: what comes after may be tracebacks
    /// of whatever waited for it.
    advice: Option<&'static str>,
    stage: Stage,
    /// How the lines begin of a traceback that is expected.
    expected: Option<String>,
    complaints: Complaints,
}

/// What is to be made of a line.
#[derive(Debug, Default, PartialEq, Eq)]
struct Heard {
    /// What the engine is doing, if that is to be told.
    doing: Option<String>,
    /// It belongs to a traceback that is expected: whoever caused it tells what it means.
    is_expected: bool,
}

/// What an engine without the plugin says to the question whether it has it, and then why, in many
/// lines.
const WITHOUT_PLUGIN: &str = "Invocation of chiasm_attach method failed";

impl LastLines {
    /// Keeps a line.
    fn push(&self, line: String) -> Heard {
        let advice = advice(&line);
        let mut kept = self.kept();
        let mut is_expected =
            kept.expected.as_ref().is_some_and(|begin| line.starts_with(begin.as_str()));
        if let Some((begin, _)) = line.split_once(WITHOUT_PLUGIN) {
            (kept.expected, is_expected) = (Some(begin.to_owned()), true);
        } else if !is_expected {
            kept.expected = None;
        }
        kept.advice = kept.advice.or(advice);
        kept.complaints.read(&line);
        let doing = kept.stage.told_by(&line, Instant::now());
        if kept.lines.len() == KEPT {
            kept.lines.pop_front();
        }
        kept.lines.push_back(line);
        Heard { doing, is_expected }
    }

    /// Adds a line. For hosts that read the logs of their engines themselves.
    pub fn add(&self, line: &str) {
        self.push(line.to_owned());
    }

    pub(super) fn get(&self) -> Vec<String> {
        self.kept().lines.iter().cloned().collect()
    }

    pub(super) fn advice(&self) -> Option<&'static str> {
        self.kept().advice
    }

    /// Waits for the reason that the engine logs for failing a request, which may come after the
    /// answer on the wire. Returns `None` if none comes within [`COMPLAINT_PATIENCE`].
    pub(crate) async fn complaint(&self, request_id: &str) -> Option<Complaint> {
        let deadline = tokio::time::Instant::now() + COMPLAINT_PATIENCE;
        loop {
            let complaint = self.kept().complaints.about(request_id);
            if complaint.is_some() || tokio::time::Instant::now() >= deadline {
                return complaint;
            }
            tokio::time::sleep(COMPLAINT_POLL).await;
        }
    }

    fn kept(&self) -> MutexGuard<'_, Kept> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Passes on lines until the stream ends. Log target `vllm`, so that it can be filtered on its own.
pub(super) async fn pass_on(name: String, stream: impl AsyncRead + Unpin, last: LastLines) {
    let mut reader = BufReader::new(stream);
    let mut line = Vec::new();
    loop {
        line.clear();
        match (&mut reader).take(MAX_LINE).read_until(b'\n', &mut line).await {
            Ok(0) => return,
            Ok(_) => tell(&name, &line, &last),
            Err(error) => {
                tracing::debug!(engine = name, %error, "reading an engine's output failed");
                return;
            }
        }
    }
}

fn tell(name: &str, line: &[u8], last: &LastLines) {
    let text = String::from_utf8_lossy(line);
    let text = text.trim_end();
    if !text.is_empty() {
        let Heard { doing, is_expected } = last.push(text.to_owned());
        log(name, text, is_expected);
        if let Some(doing) = doing {
            tracing::info!(engine = name, "starting: {doing}");
        }
    }
}

/// A file for what an engine prints that outlives its frontend: a pipe would end with that, and the
/// engine by its next word.
pub(super) fn file(path: &Path) -> io::Result<File> {
    // Appended to, so that it can be emptied under the engine's hands.
    OpenOptions::new().create(true).read(true).append(true).mode(0o600).open(path)
}

/// Passes on the lines of a file as it grows, from where it has been read to. Does not return while
/// it can be read.
pub(super) async fn follow(name: String, file: File, last: LastLines) {
    if let Err(error) = follow_file(&name, file, &last).await {
        tracing::debug!(engine = name, %error, "reading an engine's output failed");
    }
}

async fn follow_file(name: &str, file: File, last: &LastLines) -> io::Result<()> {
    let (mut reader, mut line) = (BufReader::new(tokio::fs::File::from_std(file)), Vec::new());
    loop {
        // A part of a line stays there for the rest of it.
        let room = MAX_LINE.saturating_sub(line.len() as u64);
        let read = (&mut reader).take(room).read_until(b'\n', &mut line).await?;
        if line.ends_with(b"\n") || line.len() as u64 >= MAX_LINE {
            tell(name, &line, last);
            line.clear();
        } else if read == 0 {
            if reader.get_ref().metadata().await?.len() > MAX_FILE {
                reader.get_ref().set_len(0).await?;
                reader.seek(SeekFrom::Start(0)).await?;
            }
            tokio::time::sleep(LOOK).await;
        }
    }
}

fn log(name: &str, text: &str, is_expected: bool) {
    let level = if is_expected { tracing::Level::DEBUG } else { level(text) };
    match level {
        tracing::Level::ERROR => tracing::error!(target: "vllm", engine = name, "{text}"),
        tracing::Level::WARN => tracing::warn!(target: "vllm", engine = name, "{text}"),
        tracing::Level::DEBUG => tracing::debug!(target: "vllm", engine = name, "{text}"),
        _ => tracing::info!(target: "vllm", engine = name, "{text}"),
    }
}

/// The level of a line of vLLM's: `(EngineCore pid=12) WARNING 11-21 …`, the part in parentheses
/// being optional.
fn level(text: &str) -> tracing::Level {
    let message = match text.split_once(") ") {
        Some((process, message)) if process.starts_with('(') => message,
        _ => text,
    };
    match message.split_whitespace().next() {
        Some("ERROR" | "CRITICAL") => tracing::Level::ERROR,
        Some("WARNING") => tracing::Level::WARN,
        Some("DEBUG") => tracing::Level::DEBUG,
        _ => tracing::Level::INFO,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn levels_are_read_behind_the_process() {
        assert_eq!(
            level("(EngineCore pid=7) ERROR 11-21 04:00:00 [core.py:1] x"),
            tracing::Level::ERROR
        );
        assert_eq!(level("WARNING 11-21 x"), tracing::Level::WARN);
        assert_eq!(level("(no process"), tracing::Level::INFO);
        assert_eq!(level("loading ERROR codes"), tracing::Level::INFO);
    }

    #[test]
    fn only_the_traceback_that_is_expected_is_hushed() {
        let last = LastLines::default();
        let is_expected = |line: &str| last.push(line.to_owned()).is_expected;
        let begin = "(EngineCore pid=7) ERROR 11-25 10:17:35 [core.py:1849] ";
        assert!(!is_expected(&format!("{begin}something else")));
        assert!(is_expected(&format!("{begin}{WITHOUT_PLUGIN}")));
        assert!(is_expected(&format!(
            "{begin}AttributeError: 'EngineCoreProc' object has no attribute 'chiasm_attach'"
        )));
        assert!(!is_expected("(EngineCore pid=7) ERROR 11-25 10:17:36 [core.py:1849] later"));
        assert!(!is_expected(&format!("{begin}the same second, behind another line")));
    }

    #[tokio::test]
    async fn a_file_is_followed_as_it_grows_and_emptied_when_it_is_long() {
        use std::io::Write;
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("log");
        let (mut engine, last) = (file(&path).unwrap(), LastLines::default());
        write!(engine, "one\ntw").unwrap();
        let follower = tokio::spawn(follow("engine_0".into(), file(&path).unwrap(), last.clone()));
        let said = async |lines: &[&str]| {
            while last.get() != lines {
                tokio::task::yield_now().await;
            }
        };
        said(&["one"]).await;
        writeln!(engine, "o").unwrap();
        said(&["one", "two"]).await;
        engine.write_all(&vec![b'\n'; MAX_FILE as usize + 1]).unwrap();
        while engine.metadata().unwrap().len() > 0 {
            tokio::task::yield_now().await;
        }
        writeln!(engine, "three").unwrap();
        said(&["one", "two", "three"]).await;
        follower.abort();
    }

    #[tokio::test(start_paused = true)]
    async fn complaint_that_comes_after_the_answer_is_waited_for() {
        let last = LastLines::default();
        let later = last.clone();
        tokio::spawn(async move {
            tokio::time::sleep(COMPLAINT_PATIENCE / 2).await;
            later.push("Failed to advance FSM for request r for tokens [1]".to_owned());
        });
        let complaint = last.complaint("r").await.unwrap();
        assert_eq!(complaint.words, "Failed to advance FSM for request r for tokens [1]");
        assert_eq!(last.complaint("other").await, None);
    }

    #[tokio::test]
    async fn the_last_lines_are_kept_whatever_they_are() {
        let last = LastLines::default();
        let mut text: Vec<u8> = (0..50).flat_map(|i| format!("line {i}\n").into_bytes()).collect();
        text.extend([0xff, b'\n']);
        text.extend(vec![b'x'; 20_000]);
        pass_on("engine_0".into(), &text[..], last.clone()).await;
        let lines = last.get();
        assert_eq!(lines.len(), KEPT);
        assert_eq!(lines[KEPT - 3], "\u{fffd}");
        assert_eq!(lines[KEPT - 2].len() + lines[KEPT - 1].len(), 20_000);
    }
}
