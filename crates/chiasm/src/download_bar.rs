//! The progress of a download: a bar if standard error is a terminal, otherwise a log line at
//! intervals.

use std::fs::File;
use std::io::{self, IsTerminal, Write};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::thread;
use std::time::Duration;

use chiasm_hub::Progress;

/// The interval between two updates of the bar.
const BAR_INTERVAL: Duration = Duration::from_millis(200);
/// The interval between two log lines.
const LOG_INTERVAL: Duration = Duration::from_secs(10);
/// The time that dropping the bar waits for a blocked terminal.
const CLOSE_TIMEOUT: Duration = Duration::from_millis(500);
/// The weight of the newest interval in the smoothed rate.
const NEWEST_WEIGHT: f64 = 0.1;
/// The number of characters between the bar's brackets.
const BAR_CHARS: usize = 20;
/// The maximum number of characters of the model's name.
const MAX_NAME_CHARS: usize = 28;

/// A display of a download that lasts until it is dropped. It runs on a thread of its own, as
/// writes to a terminal may block.
pub(crate) struct DownloadBar {
    stop: Option<Sender<()>>,
    /// Disconnected when the thread ends; carries no messages.
    ended: Receiver<()>,
}

impl DownloadBar {
    /// Starts to show the download of the model `name`.
    pub(crate) fn show(name: String, progress: Arc<Progress>) -> Self {
        let (stop, stopped) = mpsc::channel();
        let (ending, ended) = mpsc::channel::<()>();
        let show = move || {
            let _ending = ending;
            let stderr = io::stderr();
            // A descriptor of its own: a blocked write would hold the lock of `io::stderr`.
            let own = stderr.is_terminal().then(|| stderr.as_fd().try_clone_to_owned());
            match own {
                Some(Ok(terminal)) => {
                    show_on_terminal(&name, &progress, &stopped, &mut File::from(terminal))
                }
                _ => show_in_log(&name, &progress, &stopped),
            }
        };
        if let Err(error) = thread::Builder::new().name("download-bar".to_owned()).spawn(show) {
            tracing::debug!(%error, "can't show the progress of the download");
        }
        Self { stop: Some(stop), ended }
    }
}

impl Drop for DownloadBar {
    fn drop(&mut self) {
        self.stop = None;
        let _ = self.ended.recv_timeout(CLOSE_TIMEOUT);
    }
}

fn show_in_log(name: &str, progress: &Progress, stopped: &Receiver<()>) {
    let mut rate = Rate::new(LOG_INTERVAL);
    while stopped.recv_timeout(LOG_INTERVAL) == Err(RecvTimeoutError::Timeout) {
        let done = progress.done();
        let total = progress.total();
        if total > 0 {
            let percent = percent(done, total);
            let rate = format_bytes(rate.update(done));
            let text = format!("{} of {}, {rate}/s", format_bytes(done), format_bytes(total));
            tracing::info!(model = name, percent, "downloading: {text}");
        }
    }
}

fn show_on_terminal(name: &str, progress: &Progress, stopped: &Receiver<()>, terminal: &mut File) {
    let mut rate = Rate::new(BAR_INTERVAL);
    let mut is_shown = false;
    while stopped.recv_timeout(BAR_INTERVAL) == Err(RecvTimeoutError::Timeout) {
        let done = progress.done();
        let total = progress.total();
        if total > 0 {
            is_shown = true;
            let line = bar_line(name, done, total, rate.update(done));
            // The cursor returns to the line's start, so that a log line overwrites the bar. A
            // write error means that the terminal is gone.
            let _ = write!(terminal, "\r\x1b[K{line}\r");
        }
    }
    if is_shown {
        let _ = write!(terminal, "\r\x1b[K");
    }
}

/// A smoothed download rate.
struct Rate {
    /// The interval between two updates.
    interval: Duration,
    last_done: Option<u64>,
    /// Bytes per second.
    smoothed: Option<f64>,
}

impl Rate {
    fn new(interval: Duration) -> Self {
        Self { interval, last_done: None, smoothed: None }
    }

    /// Records the `done` bytes and returns the rate in bytes per second. The first call only sets
    /// the baseline: an earlier download may have left bytes.
    fn update(&mut self, done: u64) -> u64 {
        if let Some(last) = self.last_done {
            let newest = done.saturating_sub(last) as f64 / self.interval.as_secs_f64();
            let smoothed = self.smoothed.map_or(newest, |old| old + NEWEST_WEIGHT * (newest - old));
            self.smoothed = Some(smoothed);
        }
        self.last_done = Some(done);
        self.smoothed.unwrap_or(0.0) as u64
    }
}

/// Formats the bar as one line of at most 80 characters.
fn bar_line(name: &str, done: u64, total: u64, rate: u64) -> String {
    let name: String =
        name.chars().rev().take(MAX_NAME_CHARS).collect::<Vec<_>>().into_iter().rev().collect();
    let percent = percent(done, total);
    let filled = percent as usize * BAR_CHARS / 100;
    let bar = format!("{}{}", "#".repeat(filled), ".".repeat(BAR_CHARS - filled));
    format!("{name} [{bar}] {percent}% of {}, {}/s", format_bytes(total), format_bytes(rate))
}

fn percent(done: u64, total: u64) -> u64 {
    // The product can exceed 64 bits.
    (u128::from(done.min(total)) * 100 / u128::from(total.max(1))) as u64
}

fn format_bytes(count: u64) -> String {
    match count {
        0..1_000_000 => format!("{:.1} kB", count as f64 / 1e3),
        1_000_000..1_000_000_000 => format!("{:.1} MB", count as f64 / 1e6),
        _ => format!("{:.2} GB", count as f64 / 1e9),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bar_line_fits_terminal_without_overflow() {
        let model = "Qwen/Qwen2.5-VL-7B-Instruct";
        let half = bar_line(model, 8_000_000_000, 16_000_000_000, 112_000_000);
        assert_eq!(
            half,
            "Qwen/Qwen2.5-VL-7B-Instruct [##########..........] 50% of 16.00 GB, 112.0 MB/s"
        );
        for (done, total) in [(0, 0), (5, 3), (u64::MAX, u64::MAX), (u64::MAX, 1)] {
            assert!(bar_line("", done, total, 0).contains("] "), "{done} of {total}");
        }
        assert_eq!(
            bar_line(&"n".repeat(90), 1, 3, 999).chars().count(),
            "x".repeat(28).len() + " [] 33% of 0.0 kB, 1.0 kB/s".len() + BAR_CHARS
        );
    }

    #[test]
    fn rate_is_smoothed_without_earlier_bytes() {
        let mut rate = Rate::new(Duration::from_secs(1));
        assert_eq!(rate.update(5000), 0, "left by an earlier download");
        assert_eq!(rate.update(6000), 1000);
        assert_eq!(rate.update(6000), 900);
        assert_eq!(rate.update(0), 810, "restarted");
    }
}
