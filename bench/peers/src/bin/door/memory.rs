//! The peak memory of a program with its processes.

use std::error::Error;
use std::fs;
use std::io::ErrorKind;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use crate::program::frontend_processes;

/// The minimum time between two readings.
const INTERVAL: Duration = Duration::from_millis(250);
/// The time between two readings as a multiple of the time that one takes: with hundreds of
/// processes a reading takes long, and the program shares the cores with it.
const PAUSE: u32 = 20;

/// An error that a thread returns.
type Failure = Box<dyn Error + Send + Sync>;

/// The peak of the memory of a program and its processes, without engines: the sum of proportional
/// set sizes, in which a page of several processes counts once. A thread reads it until
/// [`stop`](Self::stop).
pub(crate) struct PeakMemory {
    peak: Arc<AtomicU64>,
    stop: Sender<()>,
    thread: JoinHandle<Result<(), Failure>>,
}

impl PeakMemory {
    /// Starts to read the memory of the program with this id.
    pub(crate) fn start(program: u32) -> Self {
        let peak = Arc::new(AtomicU64::new(0));
        let (stop, stopped) = mpsc::channel();
        let highest = peak.clone();
        let thread = thread::spawn(move || {
            loop {
                let start = Instant::now();
                highest.fetch_max(proportional_bytes(program)?, Ordering::Relaxed);
                let pause = INTERVAL.max(start.elapsed() * PAUSE);
                match stopped.recv_timeout(pause) {
                    Err(RecvTimeoutError::Timeout) => {}
                    Ok(()) | Err(RecvTimeoutError::Disconnected) => return Ok(()),
                }
            }
        });
        Self { peak, stop, thread }
    }

    /// Returns the peak in bytes.
    ///
    /// # Errors
    /// The memory of a process can't be read.
    pub(crate) fn stop(self) -> Result<u64, Box<dyn Error>> {
        drop(self.stop);
        let ended = self.thread.join().map_err(|_| "the thread that reads memory panicked")?;
        ended.map_err(|error| error as Box<dyn Error>)?;
        Ok(self.peak.load(Ordering::Relaxed))
    }
}

/// Returns the proportional set size of a program and its processes in bytes.
fn proportional_bytes(program: u32) -> Result<u64, Failure> {
    let mut bytes = 0;
    for process in frontend_processes(program).map_err(|error| error.to_string())? {
        let path = format!("/proc/{process}/smaps_rollup");
        match fs::read_to_string(&path) {
            // Without memory there is no such line.
            Ok(text) => bytes += parse_pss(&text).unwrap_or_default(),
            Err(error) if error.kind() == ErrorKind::PermissionDenied => {
                return Err(format!("{path}: {error}").into());
            }
            // The process has just ended.
            Err(_) => {}
        }
    }
    Ok(bytes)
}

/// Returns the bytes in the line `Pss:` of a file `smaps_rollup`, which has KiB.
fn parse_pss(text: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix("Pss:"))?;
    Some(line.trim().strip_suffix(" kB")?.parse::<u64>().ok()? * 1024)
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use super::*;

    #[test]
    fn proportional_size_is_read_in_kib() {
        let text = "00400000-7ffe00000000 ---p 00000000 00:00 0  [rollup]\n\
                    Rss:                1412 kB\nPss:                 167 kB\n\
                    Pss_Dirty:            92 kB\n";
        assert_eq!(parse_pss(text), Some(167 * 1024));
        assert_eq!(parse_pss("Rss: 4 kB\n"), None);
    }

    #[test]
    fn peak_outlasts_its_memory() {
        let before = proportional_bytes(std::process::id()).unwrap();
        let memory = PeakMemory::start(std::process::id());
        let block = std::hint::black_box(vec![1_u8; 64 << 20]);
        let start = Instant::now();
        while memory.peak.load(Ordering::Relaxed) < before + (32 << 20) {
            assert!(start.elapsed() < Duration::from_secs(60));
            thread::sleep(INTERVAL);
        }
        drop(block);
        assert!(memory.stop().unwrap() >= before + (32 << 20));
    }
}
