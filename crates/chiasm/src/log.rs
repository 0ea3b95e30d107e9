//! The log: lines on standard error, written by a thread that nobody waits for.
//!
//! Whoever reads them may be slow, stuck or gone, and a request must not notice. So a line goes
//! into a queue, which takes no more when it is full; what is not written is counted. Warnings come
//! in a few at a time for each place that makes them, as an engine or a client can cause thousands.

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

/// The variable that says what is logged.
const FILTER: &str = "CHIASM_LOG";
/// Bytes of lines that wait to be written; as many again are being written.
const QUEUE: usize = 4 << 20;
/// Bytes of one line.
const LONGEST: usize = 16 << 10;
/// How long the first line waits for others, to be written with them: a write costs about as much
/// as a line.
const GATHERING: Duration = Duration::from_millis(5);
/// How long the end of the process waits for the last lines.
const LAST_LINES: Duration = Duration::from_secs(1);
/// Warnings and errors of one place in the code that are written at once, and how soon there may be
/// another. All that engines say comes from one place, and a traceback has to pass.
const BURST: u32 = 100;
const PAUSE: Duration = Duration::from_millis(100);

/// The log of this process. Dropping it writes what waits, for a second at most.
pub(crate) struct Log {
    queue: Arc<Queue>,
    /// Nothing is sent: it ends with the thread that writes.
    written: mpsc::Receiver<()>,
}

impl Log {
    /// Logs what `CHIASM_LOG` says, or else `default_filter`, to standard error from now on; panics
    /// too.
    ///
    /// # Errors
    /// Standard error can't be had, or there can be no thread.
    pub(crate) fn to_stderr(default_filter: &str) -> io::Result<Self> {
        // A descriptor of its own: the lock of `io::stderr` would be held for as long as its reader
        // is stuck.
        let stderr = File::from(io::stderr().as_fd().try_clone_to_owned()?);
        let log = Self::to(stderr)?;
        let asked = EnvFilter::try_from_env(FILTER);
        let wrong = asked
            .as_ref()
            .err()
            .filter(|_| std::env::var_os(FILTER).is_some())
            .map(ToString::to_string);
        let filter = asked.unwrap_or_else(|_| EnvFilter::new(default_filter));
        tracing_subscriber::fmt()
            .with_env_filter(filter)
            .with_target(false)
            .with_ansi(io::stderr().is_terminal())
            .with_writer(Lines { queue: log.queue.clone(), places: Mutex::default() })
            .init();
        let queue = log.queue.clone();
        std::panic::set_hook(Box::new(move |panic| {
            queue.panics.fetch_add(1, Ordering::Relaxed);
            tell(panic);
        }));
        if let Some(reason) = wrong {
            tracing::warn!(
                reason,
                default = default_filter,
                "{FILTER} is no filter, the default is taken"
            );
        }
        Ok(log)
    }

    fn to(mut sink: impl Write + Send + 'static) -> io::Result<Self> {
        let queue = Arc::new(Queue::default());
        let (ended, written) = mpsc::channel::<()>();
        let writes = queue.clone();
        thread::Builder::new().name("log".to_owned()).spawn(move || {
            let _ended = ended;
            let mut batch = Vec::new();
            while let Some(lines) = writes.take(&mut batch) {
                // There is nobody to tell of an error but the metrics.
                if sink.write_all(&batch).is_err() {
                    writes.unwritten.fetch_add(lines, Ordering::Relaxed);
                }
            }
        })?;
        Ok(Self { queue, written })
    }

    /// Writes what the process itself has to say, after all that was logged before.
    pub(crate) fn say(&self, text: &str) {
        self.queue.push(format!("{text}\n").as_bytes());
    }

    /// What was counted so far.
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

/// Logs a panic: the usual hook writes to standard error itself, and waits for its reader.
fn tell(panic: &PanicHookInfo<'_>) {
    let thread = thread::current();
    let backtrace = Backtrace::capture();
    let backtrace =
        (backtrace.status() == BacktraceStatus::Captured).then(|| backtrace.to_string());
    tracing::error!(thread = thread.name(), backtrace, "{panic}");
}

impl Drop for Log {
    fn drop(&mut self) {
        self.queue.waiting().closed = true;
        self.queue.changed.notify_one();
        let _ = self.written.recv_timeout(LAST_LINES);
    }
}

/// Lines on their way to the thread that writes them, and the counts.
#[derive(Default)]
struct Queue {
    waiting: Mutex<Waiting>,
    changed: Condvar,
    full: AtomicU64,
    unwritten: AtomicU64,
    repeated: AtomicU64,
    panics: AtomicU64,
}

#[derive(Default)]
struct Waiting {
    bytes: Vec<u8>,
    lines: u64,
    /// The thread waits for a first line, and has to be woken.
    idle: bool,
    /// There will be no more.
    closed: bool,
}

impl Queue {
    fn waiting(&self) -> MutexGuard<'_, Waiting> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn push(&self, line: &[u8]) {
        let mut waiting = self.waiting();
        if waiting.closed || waiting.bytes.len() + line.len() > QUEUE {
            self.full.fetch_add(1, Ordering::Relaxed);
            return;
        }
        waiting.bytes.extend_from_slice(line);
        waiting.lines += 1;
        if std::mem::take(&mut waiting.idle) {
            self.changed.notify_one();
        }
    }

    /// Waits for lines and puts them in the place of what is in `batch`; their number. `None` after
    /// the last.
    fn take(&self, batch: &mut Vec<u8>) -> Option<u64> {
        let mut waiting = self.waiting();
        while waiting.lines == 0 {
            if waiting.closed {
                return None;
            }
            waiting.idle = true;
            waiting = self.changed.wait(waiting).unwrap_or_else(PoisonError::into_inner);
        }
        waiting.idle = false;
        let gathered =
            self.changed.wait_timeout_while(waiting, GATHERING, |waiting| !waiting.closed);
        let (mut waiting, _) = gathered.unwrap_or_else(PoisonError::into_inner);
        batch.clear();
        std::mem::swap(batch, &mut waiting.bytes);
        Some(std::mem::take(&mut waiting.lines))
    }
}

/// Makes writers of single lines.
struct Lines {
    queue: Arc<Queue>,
    places: Mutex<HashMap<Identifier, Bucket>>,
}

/// How many more lines of one place may be written.
struct Bucket {
    left: u32,
    since: Instant,
    /// Lines left out since the last one that was written.
    left_out: u64,
}

impl Bucket {
    fn new(now: Instant) -> Self {
        Self { left: BURST, since: now, left_out: 0 }
    }

    /// `None` if there may be no line now, else how many were left out before it.
    fn take(&mut self, now: Instant) -> Option<u64> {
        let pauses = now.saturating_duration_since(self.since).as_nanos() / PAUSE.as_nanos();
        let pauses = u32::try_from(pauses).unwrap_or(u32::MAX);
        if pauses >= BURST - self.left {
            (self.left, self.since) = (BURST, now);
        } else {
            self.left += pauses;
            self.since += PAUSE * pauses;
        }
        if self.left == 0 {
            self.left_out += 1;
            return None;
        }
        self.left -= 1;
        Some(std::mem::take(&mut self.left_out))
    }
}

impl<'a> MakeWriter<'a> for Lines {
    type Writer = Line<'a>;

    fn make_writer(&'a self) -> Line<'a> {
        Line { queue: &self.queue, left_out: Some(0) }
    }

    fn make_writer_for(&'a self, meta: &Metadata<'_>) -> Line<'a> {
        if *meta.level() > Level::WARN {
            return self.make_writer();
        }
        let now = Instant::now();
        let mut places = self.places.lock().unwrap_or_else(PoisonError::into_inner);
        let left_out = places.entry(meta.callsite()).or_insert_with(|| Bucket::new(now)).take(now);
        if left_out.is_none() {
            self.queue.repeated.fetch_add(1, Ordering::Relaxed);
        }
        Line { queue: &self.queue, left_out }
    }
}

/// Takes one line.
struct Line<'a> {
    queue: &'a Queue,
    /// How many lines like it were left out before it; `None` if it is left out itself.
    left_out: Option<u64>,
}

impl Write for Line<'_> {
    /// `line` is whole, as the formatter makes it.
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        if let Some(left_out) = self.left_out {
            let mut one = one_line(line);
            if left_out > 0 {
                one.extend_from_slice(
                    format!("    {left_out} more like this were left out\n").as_bytes(),
                );
            }
            self.queue.push(&one);
        }
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// A line that is no two, and not too long: what a client or an engine said may have line breaks.
/// Other control characters are escaped by the formatter.
fn one_line(line: &[u8]) -> Vec<u8> {
    let text = line.strip_suffix(b"\n").unwrap_or(line);
    let mut one = Vec::with_capacity(text.len().min(LONGEST) + 32);
    for &byte in text.iter().take(LONGEST) {
        match byte {
            b'\n' => one.extend_from_slice(b"\\n"),
            b'\r' => one.extend_from_slice(b"\\r"),
            byte => one.push(byte),
        }
    }
    if text.len() > LONGEST {
        one.extend_from_slice("…".as_bytes());
    }
    one.push(b'\n');
    one
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_place_has_a_burst_and_then_a_line_per_pause_that_tells_what_was_left_out() {
        let start = Instant::now();
        let mut bucket = Bucket::new(start);
        let written = (0..5 * BURST).filter(|_| bucket.take(start).is_some()).count();
        assert_eq!(written, BURST as usize);
        assert_eq!(bucket.take(start + PAUSE), Some(4 * u64::from(BURST)));
        assert_eq!(bucket.take(start + PAUSE), None);
        assert_eq!(bucket.take(start + PAUSE * 2), Some(1));
        // After a long silence all is as at the start.
        let later = start + PAUSE * 10 * BURST;
        assert_eq!((0..5 * BURST).filter(|_| bucket.take(later).is_some()).count(), BURST as usize);
    }

    #[test]
    fn foreign_text_makes_no_second_line_and_no_endless_one() {
        assert_eq!(one_line(b"a\nINFO b\r\n"), b"a\\nINFO b\\r\n");
        assert_eq!(one_line(b"plain\n"), b"plain\n");
        let long = one_line(&[b'x'; 2 * LONGEST]);
        assert!(long.len() < LONGEST + 8 && long.ends_with("…\n".as_bytes()), "{}", long.len());
    }

    /// Fails after `0` writes, whose bytes it notes.
    struct Sink(usize, Arc<Mutex<Vec<u8>>>);

    impl Write for Sink {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0 = self.0.checked_sub(1).ok_or(io::ErrorKind::BrokenPipe)?;
            self.1.lock().unwrap().extend_from_slice(bytes);
            Ok(bytes.len())
        }
        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn what_waits_at_the_end_is_written_together() {
        let written = Arc::default();
        let log = Log::to(Sink(1, Arc::clone(&written))).unwrap();
        (0..1000).for_each(|_| log.queue.push(b"line\n"));
        let counts = log.counts();
        drop(log);
        assert_eq!(*written.lock().unwrap(), b"line\n".repeat(1000));
        assert_eq!(counts(), LogCounts::default());
    }

    #[test]
    fn what_nobody_takes_is_counted() {
        let log = Log::to(Sink(0, Arc::default())).unwrap();
        let counts = log.counts();
        (0..3).for_each(|_| log.queue.push(b"line\n"));
        drop(log);
        assert_eq!(counts(), LogCounts { unwritten: 3, ..LogCounts::default() });
    }

    #[test]
    fn what_has_no_room_is_counted() {
        let queue = Queue::default();
        let line = vec![b'x'; QUEUE / 4];
        (0..6).for_each(|_| queue.push(&line));
        assert_eq!((queue.full.load(Ordering::Relaxed), queue.waiting().lines), (2, 4));
    }
}
