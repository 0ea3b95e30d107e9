//! The log: lines on standard error, written by a background thread.
//!
//! The reader of standard error may be slow, blocked or gone, which must not delay requests. Lines
//! therefore go through a bounded queue; lines that don't fit or can't be written are dropped and
//! counted. Warnings are rate-limited per call site, as an engine or a client can cause thousands.

use std::backtrace::{Backtrace, BacktraceStatus};
use std::collections::HashMap;
use std::fs::File;
use std::io::{self, IsTerminal, Write};
use std::os::fd::AsFd;
use std::panic::PanicHookInfo;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use chiasm_server::LogCounts;
use tracing::callsite::Identifier;
use tracing::{Level, Metadata};
use tracing_subscriber::EnvFilter;
use tracing_subscriber::fmt::MakeWriter;

/// The environment variable with the log filter.
const FILTER_VARIABLE: &str = "CHIASM_LOG";
/// The maximum number of bytes in the queue. The batch being written may have as many again.
const MAX_QUEUED_BYTES: usize = 4 << 20;
/// The maximum number of bytes of one line; the rest is cut off.
const MAX_LINE_BYTES: usize = 16 << 10;
/// The time that the first line of a batch waits for more lines, because each write costs about as
/// much as a line.
const BATCH_DELAY: Duration = Duration::from_millis(5);
/// The time that dropping the log waits for the last lines.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(1);
/// The warnings and errors that one call site may write at once. All output of engines comes from
/// one call site, and a whole traceback must fit.
const BURST_LINES: u32 = 100;
/// The interval at which a call site may write another line after its burst.
const REFILL_INTERVAL: Duration = Duration::from_millis(100);

/// The log of this process. Dropping it writes the queued lines, within [`FLUSH_TIMEOUT`].
pub(crate) struct Log {
    queue: Arc<Queue>,
    /// Disconnected when the writing thread ends; carries no messages.
    writer_ended: mpsc::Receiver<()>,
}

impl Log {
    /// Starts logging to standard error, panics included. Filters by `CHIASM_LOG`, or by
    /// `default_filter` if the variable is not set.
    ///
    /// # Errors
    /// Standard error can't be duplicated, or the thread can't be started.
    pub(crate) fn to_stderr(default_filter: &str) -> io::Result<Self> {
        // A descriptor of its own: a blocked write would hold the lock of `io::stderr`.
        let stderr = File::from(io::stderr().as_fd().try_clone_to_owned()?);
        let log = Self::with_sink(stderr)?;
        let from_env = EnvFilter::try_from_env(FILTER_VARIABLE);
        let filter_error = from_env
            .as_ref()
            .err()
            .filter(|_| std::env::var_os(FILTER_VARIABLE).is_some())
            .map(ToString::to_string);
        let filter = from_env.unwrap_or_else(|_| EnvFilter::new(default_filter));
        tracing_subscriber::fmt()
            .with_env_filter(filter)
            .with_target(false)
            .with_ansi(io::stderr().is_terminal())
            .with_writer(LineWriters { queue: log.queue.clone(), call_sites: Mutex::default() })
            .init();
        let queue = log.queue.clone();
        std::panic::set_hook(Box::new(move |panic| {
            queue.panics.fetch_add(1, Ordering::Relaxed);
            log_panic(panic);
        }));
        if let Some(reason) = filter_error {
            tracing::warn!(
                reason,
                default = default_filter,
                "{FILTER_VARIABLE} is not a valid filter; the default is used"
            );
        }
        Ok(log)
    }

    fn with_sink(mut sink: impl Write + Send + 'static) -> io::Result<Self> {
        let queue = Arc::new(Queue::default());
        let (ending, writer_ended) = mpsc::channel::<()>();
        let writer_queue = queue.clone();
        thread::Builder::new().name("log".to_owned()).spawn(move || {
            let _ending = ending;
            let mut batch = Vec::new();
            while let Some(lines) = writer_queue.take_batch(&mut batch) {
                // The metrics are the only place to report a write error.
                if sink.write_all(&batch).is_err() {
                    writer_queue.unwritten.fetch_add(lines, Ordering::Relaxed);
                }
            }
        })?;
        Ok(Self { queue, writer_ended })
    }

    /// Writes a line of the command itself, after the lines that were logged before.
    pub(crate) fn print(&self, text: &str) {
        self.queue.push(format!("{text}\n").as_bytes());
    }

    /// Returns a function that reads the current counts.
    pub(crate) fn counts(&self) -> impl Fn() -> LogCounts + Send + Sync + 'static {
        let queue = self.queue.clone();
        move || LogCounts {
            full: queue.full.load(Ordering::Relaxed),
            unwritten: queue.unwritten.load(Ordering::Relaxed),
            repeated: queue.repeated.load(Ordering::Relaxed),
            panics: queue.panics.load(Ordering::Relaxed),
        }
    }
}

/// Logs a panic. The default hook would write to standard error itself, which may block.
fn log_panic(panic: &PanicHookInfo<'_>) {
    let thread = thread::current();
    let backtrace = Backtrace::capture();
    let backtrace =
        (backtrace.status() == BacktraceStatus::Captured).then(|| backtrace.to_string());
    tracing::error!(thread = thread.name(), backtrace, "{panic}");
}

impl Drop for Log {
    fn drop(&mut self) {
        self.queue.lock_pending().closed = true;
        self.queue.changed.notify_one();
        let _ = self.writer_ended.recv_timeout(FLUSH_TIMEOUT);
    }
}

/// The queue of lines for the writing thread, and the counts.
#[derive(Default)]
struct Queue {
    pending: Mutex<PendingLines>,
    changed: Condvar,
    /// The number of lines dropped because the queue was full or closed.
    full: AtomicU64,
    /// The number of lines dropped because writing them failed.
    unwritten: AtomicU64,
    /// The number of lines dropped by the rate limits of call sites.
    repeated: AtomicU64,
    /// The number of panics.
    panics: AtomicU64,
}

#[derive(Default)]
struct PendingLines {
    bytes: Vec<u8>,
    lines: u64,
    /// `true` while the writing thread waits for a first line and has to be woken.
    writer_idle: bool,
    /// `true` once the log is dropped: no more lines are accepted.
    closed: bool,
}

impl Queue {
    fn lock_pending(&self) -> MutexGuard<'_, PendingLines> {
        self.pending.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn push(&self, line: &[u8]) {
        let mut pending = self.lock_pending();
        if pending.closed || pending.bytes.len() + line.len() > MAX_QUEUED_BYTES {
            self.full.fetch_add(1, Ordering::Relaxed);
            return;
        }
        pending.bytes.extend_from_slice(line);
        pending.lines += 1;
        if std::mem::take(&mut pending.writer_idle) {
            self.changed.notify_one();
        }
    }

    /// Waits for lines, replaces the contents of `batch` with them and returns their number.
    /// Returns `None` after the last line of a closed queue.
    fn take_batch(&self, batch: &mut Vec<u8>) -> Option<u64> {
        let mut pending = self.lock_pending();
        while pending.lines == 0 {
            if pending.closed {
                return None;
            }
            pending.writer_idle = true;
            pending = self.changed.wait(pending).unwrap_or_else(PoisonError::into_inner);
        }
        pending.writer_idle = false;
        let waited =
            self.changed.wait_timeout_while(pending, BATCH_DELAY, |pending| !pending.closed);
        let (mut pending, _) = waited.unwrap_or_else(PoisonError::into_inner);
        batch.clear();
        std::mem::swap(batch, &mut pending.bytes);
        Some(std::mem::take(&mut pending.lines))
    }
}

/// Creates a [`LineWriter`] for each log event.
struct LineWriters {
    queue: Arc<Queue>,
    call_sites: Mutex<HashMap<Identifier, TokenBucket>>,
}

/// The rate limit of one call site.
struct TokenBucket {
    tokens: u32,
    refilled_at: Instant,
    /// The number of lines dropped since the last one that was written.
    dropped: u64,
}

impl TokenBucket {
    fn new(now: Instant) -> Self {
        Self { tokens: BURST_LINES, refilled_at: now, dropped: 0 }
    }

    /// Takes the token for one line and returns the number of lines dropped before it. Returns
    /// `None` if the line has to be dropped, too.
    fn try_take(&mut self, now: Instant) -> Option<u64> {
        let elapsed = now.saturating_duration_since(self.refilled_at);
        let intervals = elapsed.as_nanos() / REFILL_INTERVAL.as_nanos();
        let intervals = u32::try_from(intervals).unwrap_or(u32::MAX);
        if intervals >= BURST_LINES - self.tokens {
            self.tokens = BURST_LINES;
            self.refilled_at = now;
        } else {
            self.tokens += intervals;
            self.refilled_at += REFILL_INTERVAL * intervals;
        }
        if self.tokens == 0 {
            self.dropped += 1;
            return None;
        }
        self.tokens -= 1;
        Some(std::mem::take(&mut self.dropped))
    }
}

impl<'a> MakeWriter<'a> for LineWriters {
    type Writer = LineWriter<'a>;

    fn make_writer(&'a self) -> LineWriter<'a> {
        LineWriter { queue: &self.queue, dropped_before: Some(0) }
    }

    fn make_writer_for(&'a self, meta: &Metadata<'_>) -> LineWriter<'a> {
        if *meta.level() > Level::WARN {
            return self.make_writer();
        }
        let now = Instant::now();
        let mut call_sites = self.call_sites.lock().unwrap_or_else(PoisonError::into_inner);
        let bucket = call_sites.entry(meta.callsite()).or_insert_with(|| TokenBucket::new(now));
        let dropped_before = bucket.try_take(now);
        if dropped_before.is_none() {
            self.queue.repeated.fetch_add(1, Ordering::Relaxed);
        }
        LineWriter { queue: &self.queue, dropped_before }
    }
}

/// A writer for one line.
struct LineWriter<'a> {
    queue: &'a Queue,
    /// The number of lines of this call site dropped before this one; `None` if this one is
    /// dropped.
    dropped_before: Option<u64>,
}

impl Write for LineWriter<'_> {
    /// Queues a whole line, which the formatter passes in one call.
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        if let Some(dropped) = self.dropped_before {
            let mut output = one_line(line);
            if dropped > 0 {
                output.extend_from_slice(
                    format!("    {dropped} similar lines were dropped\n").as_bytes(),
                );
            }
            self.queue.push(&output);
        }
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Escapes line breaks, which text of a client or an engine may have, and cuts a long line off. The
/// formatter escapes other control characters.
fn one_line(line: &[u8]) -> Vec<u8> {
    let text = line.strip_suffix(b"\n").unwrap_or(line);
    let is_inside_character = |at: usize| text.get(at).is_some_and(|byte| byte & 0xC0 == 0x80);
    let end = (0..=text.len().min(MAX_LINE_BYTES)).rev().find(|end| !is_inside_character(*end));
    let mut escaped = Vec::with_capacity(text.len().min(MAX_LINE_BYTES) + 32);
    for &byte in text.iter().take(end.unwrap_or(0)) {
        match byte {
            b'\n' => escaped.extend_from_slice(b"\\n"),
            b'\r' => escaped.extend_from_slice(b"\\r"),
            byte => escaped.push(byte),
        }
    }
    if text.len() > MAX_LINE_BYTES {
        escaped.extend_from_slice("…".as_bytes());
    }
    escaped.push(b'\n');
    escaped
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn call_site_over_burst_is_limited() {
        let start = Instant::now();
        let mut bucket = TokenBucket::new(start);
        let written = (0..5 * BURST_LINES).filter(|_| bucket.try_take(start).is_some()).count();
        assert_eq!(written, BURST_LINES as usize);
        assert_eq!(bucket.try_take(start + REFILL_INTERVAL), Some(4 * u64::from(BURST_LINES)));
        assert_eq!(bucket.try_take(start + REFILL_INTERVAL), None);
        assert_eq!(bucket.try_take(start + REFILL_INTERVAL * 2), Some(1));
        // After a long silence the bucket is full again.
        let later = start + REFILL_INTERVAL * 10 * BURST_LINES;
        let written = (0..5 * BURST_LINES).filter(|_| bucket.try_take(later).is_some()).count();
        assert_eq!(written, BURST_LINES as usize);
    }

    #[test]
    fn line_breaks_are_escaped_within_length_limit() {
        assert_eq!(one_line(b"a\nINFO b\r\n"), b"a\\nINFO b\\r\n");
        assert_eq!(one_line(b"plain\n"), b"plain\n");
        let umlauts = one_line(format!("x{}", "ä".repeat(MAX_LINE_BYTES)).as_bytes());
        assert!(String::from_utf8(umlauts).unwrap().ends_with("ä…\n"));
        let long = one_line(&[b'x'; 2 * MAX_LINE_BYTES]);
        assert!(
            long.len() < MAX_LINE_BYTES + 8 && long.ends_with("…\n".as_bytes()),
            "{}",
            long.len()
        );
    }

    /// A sink that records bytes and fails after some writes.
    struct Sink {
        writes_left: usize,
        written: Arc<Mutex<Vec<u8>>>,
    }

    impl Write for Sink {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.writes_left = self.writes_left.checked_sub(1).ok_or(io::ErrorKind::BrokenPipe)?;
            self.written.lock().unwrap().extend_from_slice(bytes);
            Ok(bytes.len())
        }
        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn queued_lines_are_written_together_on_drop() {
        let written = Arc::default();
        let log = Log::with_sink(Sink { writes_left: 1, written: Arc::clone(&written) }).unwrap();
        (0..1000).for_each(|_| log.queue.push(b"line\n"));
        let counts = log.counts();
        drop(log);
        assert_eq!(*written.lock().unwrap(), b"line\n".repeat(1000));
        assert_eq!(counts(), LogCounts::default());
    }

    #[test]
    fn failed_writes_are_counted() {
        let log = Log::with_sink(Sink { writes_left: 0, written: Arc::default() }).unwrap();
        let counts = log.counts();
        (0..3).for_each(|_| log.queue.push(b"line\n"));
        drop(log);
        assert_eq!(counts(), LogCounts { unwritten: 3, ..LogCounts::default() });
    }

    #[test]
    fn lines_beyond_full_queue_are_counted() {
        let queue = Queue::default();
        let line = vec![b'x'; MAX_QUEUED_BYTES / 4];
        (0..6).for_each(|_| queue.push(&line));
        assert_eq!((queue.full.load(Ordering::Relaxed), queue.lock_pending().lines), (2, 4));
    }
}
