//! An engine's output: it is logged, and its last lines are kept for the exit report.

use std::collections::VecDeque;
use std::fs::{File, OpenOptions};
use std::io::{self, SeekFrom};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::advice::advice;
use super::failure_log::{FailureLog, LoggedFailure};
use super::stage::StartupProgress;
use tokio::io::{AsyncBufReadExt, AsyncRead, AsyncReadExt, AsyncSeekExt, BufReader};

/// The number of last lines that are kept: enough for a Python traceback.
const MAX_KEPT_LINES: usize = 40;

/// The maximum length of a logged line in bytes. Longer lines are split.
const MAX_LINE_BYTES: u64 = 16 * 1024;

/// The interval at which an output file is read. It adds to the time until an engine's last lines
/// are reported.
const FILE_POLL_INTERVAL: Duration = Duration::from_millis(50);

/// The time to wait for the log line about a failure. A log file is read every
/// [`FILE_POLL_INTERVAL`].
const FAILURE_TIMEOUT: Duration = Duration::from_millis(300);

/// The interval between two searches of the log.
const FAILURE_POLL_INTERVAL: Duration = Duration::from_millis(10);

/// The size of an output file in bytes from which it is emptied once it has been read.
const MAX_FILE_BYTES: u64 = 16 << 20;

/// The last lines of an engine's output, from both streams.
#[derive(Clone, Debug, Default)]
pub struct LastLines(Arc<Mutex<State>>);

#[derive(Debug, Default)]
struct State {
    lines: VecDeque<String>,
    /// The advice on the first known error. Later errors may only be its consequences.
    advice: Option<&'static str>,
    progress: StartupProgress,
    /// The prefix of the lines of an expected traceback.
    expected_prefix: Option<String>,
    failures: FailureLog,
}

/// The treatment of a line.
#[derive(Debug, Default, PartialEq, Eq)]
struct LineReport {
    /// The progress to log, if any.
    progress: Option<String>,
    /// `true` for a line of an expected traceback, whose meaning is logged elsewhere.
    is_expected: bool,
}

/// The message of an engine without the plugin when an arena is attached. A traceback follows.
const MISSING_PLUGIN: &str = "Invocation of chiasm_attach method failed";

impl LastLines {
    /// Stores a line and returns its treatment.
    fn push(&self, line: String) -> LineReport {
        let advice = advice(&line);
        let mut state = self.lock();
        let mut is_expected =
            state.expected_prefix.as_ref().is_some_and(|prefix| line.starts_with(prefix.as_str()));
        if let Some((prefix, _)) = line.split_once(MISSING_PLUGIN) {
            state.expected_prefix = Some(prefix.to_owned());
            is_expected = true;
        } else if !is_expected {
            state.expected_prefix = None;
        }
        state.advice = state.advice.or(advice);
        state.failures.read_line(&line);
        let progress = state.progress.read_line(&line, Instant::now());
        if state.lines.len() == MAX_KEPT_LINES {
            state.lines.pop_front();
        }
        state.lines.push_back(line);
        LineReport { progress, is_expected }
    }

    /// Adds a line. For hosts that read the logs of their engines themselves.
    pub fn add(&self, line: &str) {
        self.push(line.to_owned());
    }

    pub(super) fn get(&self) -> Vec<String> {
        self.lock().lines.iter().cloned().collect()
    }

    pub(super) fn advice(&self) -> Option<&'static str> {
        self.lock().advice
    }

    /// Waits for the reason that the engine logs for failing a request. The log line may come after
    /// the output on the wire. Returns `None` after [`FAILURE_TIMEOUT`].
    pub(crate) async fn failure(&self, request_id: &str) -> Option<LoggedFailure> {
        let deadline = tokio::time::Instant::now() + FAILURE_TIMEOUT;
        loop {
            let failure = self.lock().failures.find(request_id);
            if failure.is_some() || tokio::time::Instant::now() >= deadline {
                return failure;
            }
            tokio::time::sleep(FAILURE_POLL_INTERVAL).await;
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Logs the lines of a stream until it ends. The log target is `vllm`, for separate filtering.
pub(super) async fn follow_stream(name: String, stream: impl AsyncRead + Unpin, last: LastLines) {
    let mut reader = BufReader::new(stream);
    let mut line = Vec::new();
    loop {
        line.clear();
        match (&mut reader).take(MAX_LINE_BYTES).read_until(b'\n', &mut line).await {
            Ok(0) => return,
            Ok(_) => handle_line(&name, &line, &last),
            Err(error) => {
                tracing::debug!(engine = name, %error, "reading an engine's output failed");
                return;
            }
        }
    }
}

fn handle_line(name: &str, line: &[u8], last: &LastLines) {
    let text = String::from_utf8_lossy(line);
    let text = text.trim_end();
    if text.is_empty() {
        return;
    }
    let LineReport { progress, is_expected } = last.push(text.to_owned());
    log(name, text, is_expected);
    if let Some(progress) = progress {
        tracing::info!(engine = name, "starting: {progress}");
    }
}

/// Opens a file for the output of an engine that outlives its frontend. A pipe would close with the
/// frontend, and the engine would die of its next line.
pub(super) fn open_output(path: &Path) -> io::Result<File> {
    // The engine appends, so that the file can be emptied at any time.
    OpenOptions::new().create(true).read(true).append(true).mode(0o600).open(path)
}

/// Logs the lines of a file as it grows, from its current position. Returns only if the file can't
/// be read.
pub(super) async fn follow_file(name: String, file: File, last: LastLines) {
    if let Err(error) = read_forever(&name, file, &last).await {
        tracing::debug!(engine = name, %error, "reading an engine's output failed");
    }
}

async fn read_forever(name: &str, file: File, last: &LastLines) -> io::Result<()> {
    let mut reader = BufReader::new(tokio::fs::File::from_std(file));
    let mut line = Vec::new();
    loop {
        // An incomplete line stays in the buffer until its rest is written.
        let room = MAX_LINE_BYTES.saturating_sub(line.len() as u64);
        let read = (&mut reader).take(room).read_until(b'\n', &mut line).await?;
        if line.ends_with(b"\n") || line.len() as u64 >= MAX_LINE_BYTES {
            handle_line(name, &line, last);
            line.clear();
        } else if read == 0 {
            if reader.get_ref().metadata().await?.len() > MAX_FILE_BYTES {
                reader.get_ref().set_len(0).await?;
                reader.seek(SeekFrom::Start(0)).await?;
            }
            tokio::time::sleep(FILE_POLL_INTERVAL).await;
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

/// Parses the level of a line of vLLM: `(EngineCore pid=12) WARNING 11-21 …`, where the part in
/// parentheses is optional.
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
    fn level_follows_process() {
        assert_eq!(
            level("(EngineCore pid=7) ERROR 11-21 04:00:00 [core.py:1] x"),
            tracing::Level::ERROR
        );
        assert_eq!(level("WARNING 11-21 x"), tracing::Level::WARN);
        assert_eq!(level("(no process"), tracing::Level::INFO);
        assert_eq!(level("loading ERROR codes"), tracing::Level::INFO);
    }

    #[test]
    fn only_expected_traceback_is_silenced() {
        let last = LastLines::default();
        let is_expected = |line: &str| last.push(line.to_owned()).is_expected;
        let prefix = "(EngineCore pid=7) ERROR 11-25 10:17:35 [core.py:1849] ";
        assert!(!is_expected(&format!("{prefix}something else")));
        assert!(is_expected(&format!("{prefix}{MISSING_PLUGIN}")));
        assert!(is_expected(&format!(
            "{prefix}AttributeError: 'EngineCoreProc' object has no attribute 'chiasm_attach'"
        )));
        assert!(!is_expected("(EngineCore pid=7) ERROR 11-25 10:17:36 [core.py:1849] later"));
        assert!(!is_expected(&format!("{prefix}the same second, after another line")));
    }

    #[tokio::test]
    async fn growing_file_is_followed_until_emptied() {
        use std::io::Write;
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("log");
        let mut engine = open_output(&path).unwrap();
        let last = LastLines::default();
        write!(engine, "one\ntw").unwrap();
        let output = open_output(&path).unwrap();
        let follower = tokio::spawn(follow_file("engine_0".into(), output, last.clone()));
        let wait_for = async |lines: &[&str]| {
            while last.get() != lines {
                tokio::task::yield_now().await;
            }
        };
        wait_for(&["one"]).await;
        writeln!(engine, "o").unwrap();
        wait_for(&["one", "two"]).await;
        engine.write_all(&vec![b'\n'; MAX_FILE_BYTES as usize + 1]).unwrap();
        while engine.metadata().unwrap().len() > 0 {
            tokio::task::yield_now().await;
        }
        writeln!(engine, "three").unwrap();
        wait_for(&["one", "two", "three"]).await;
        follower.abort();
    }

    #[tokio::test(start_paused = true)]
    async fn failure_waits_for_late_log_line() {
        let last = LastLines::default();
        let later = last.clone();
        tokio::spawn(async move {
            tokio::time::sleep(FAILURE_TIMEOUT / 2).await;
            later.push("Failed to advance FSM for request r for tokens [1]".to_owned());
        });
        let failure = last.failure("r").await.unwrap();
        assert_eq!(failure.reason, "Failed to advance FSM for request r for tokens [1]");
        assert_eq!(last.failure("other").await, None);
    }

    #[tokio::test]
    async fn last_lines_keep_invalid_or_long_lines() {
        let last = LastLines::default();
        let mut text: Vec<u8> = (0..50).flat_map(|i| format!("line {i}\n").into_bytes()).collect();
        text.extend([0xff, b'\n']);
        text.extend(vec![b'x'; 20_000]);
        follow_stream("engine_0".into(), &text[..], last.clone()).await;
        let lines = last.get();
        assert_eq!(lines.len(), MAX_KEPT_LINES);
        assert_eq!(lines[MAX_KEPT_LINES - 3], "\u{fffd}");
        let last_two = &lines[MAX_KEPT_LINES - 2..];
        assert_eq!(last_two[0].len() + last_two[1].len(), 20_000);
    }
}
