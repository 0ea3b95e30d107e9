//! How far a download is: a bar on standard error if that is a terminal, else a line in the log now
//! and then.

use std::fs::File;
use std::io::{self, IsTerminal, Write};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::thread;
use std::time::Duration;

use chiasm_hub::Progress;

const ON_TERMINAL: Duration = Duration::from_millis(200);
const IN_LOG: Duration = Duration::from_secs(10);
/// How long its end waits for a terminal that is stuck.
const LAST_LINE: Duration = Duration::from_millis(500);
/// How much of the rate is that of the last moment.
const NEWEST: f64 = 0.1;
/// Characters of the bar itself, and of the model's name, at most.
const WIDTH: usize = 20;
const NAME: usize = 28;

/// Shows a download until it is dropped, from a thread of its own, as a terminal may be stuck.
pub(crate) struct DownloadBar {
    stop: Option<Sender<()>>,
    /// Nothing is sent: it ends with the thread.
    ended: Receiver<()>,
}

impl DownloadBar {
    pub(crate) fn show(name: String, progress: Arc<Progress>) -> Self {
        let (stop, stopped) = mpsc::channel();
        let (ending, ended) = mpsc::channel::<()>();
        let shows = move || {
            let _ending = ending;
            let stderr = io::stderr();
            // A descriptor of its own: the lock of `io::stderr` would be held for as long as its
            // reader is stuck.
            let own = stderr.is_terminal().then(|| stderr.as_fd().try_clone_to_owned());
            match own {
                Some(Ok(terminal)) => {
                    on_terminal(&name, &progress, &stopped, &mut File::from(terminal))
                }
                _ => in_log(&name, &progress, &stopped),
            }
        };
        if let Err(error) = thread::Builder::new().name("download-bar".to_owned()).spawn(shows) {
            tracing::debug!(%error, "the download is not shown");
        }
        Self { stop: Some(stop), ended }
    }
}

impl Drop for DownloadBar {
    fn drop(&mut self) {
        self.stop = None;
        let _ = self.ended.recv_timeout(LAST_LINE);
    }
}

fn in_log(name: &str, progress: &Progress, stopped: &Receiver<()>) {
    let mut rate = Rate::new(IN_LOG);
    while stopped.recv_timeout(IN_LOG) == Err(RecvTimeoutError::Timeout) {
        let (done, total) = (progress.done(), progress.total());
        if total > 0 {
            let (percent, rate) = (percent(done, total), rate.at(done));
            let text = format!("{} of {}, {}/s", bytes(done), bytes(total), bytes(rate));
            tracing::info!(model = name, percent, "downloading: {text}");
        }
    }
}

fn on_terminal(name: &str, progress: &Progress, stopped: &Receiver<()>, terminal: &mut File) {
    let mut rate = Rate::new(ON_TERMINAL);
    let mut is_shown = false;
    while stopped.recv_timeout(ON_TERMINAL) == Err(RecvTimeoutError::Timeout) {
        let (done, total) = (progress.done(), progress.total());
        if total > 0 {
            is_shown = true;
            // Back at the line's begin, so that a line of the log takes its place. Nobody can be
            // told that a terminal is gone.
            let _ = write!(terminal, "\r\x1b[K{}\r", bar(name, done, total, rate.at(done)));
        }
    }
    if is_shown {
        let _ = write!(terminal, "\r\x1b[K");
    }
}

/// Bytes per second, smoothed.
struct Rate {
    every: Duration,
    last: Option<u64>,
    smooth: Option<f64>,
}

impl Rate {
    fn new(every: Duration) -> Self {
        Self { every, last: None, smooth: None }
    }

    /// The rate, with what is done now. What was there before the first moment was not downloaded
    /// now.
    fn at(&mut self, done: u64) -> u64 {
        if let Some(last) = self.last {
            let newest = done.saturating_sub(last) as f64 / self.every.as_secs_f64();
            self.smooth =
                Some(self.smooth.map_or(newest, |smooth| smooth + NEWEST * (newest - smooth)));
        }
        self.last = Some(done);
        self.smooth.unwrap_or(0.0) as u64
    }
}

/// One line of 80 characters at most.
fn bar(name: &str, done: u64, total: u64, rate: u64) -> String {
    let name: String =
        name.chars().rev().take(NAME).collect::<Vec<_>>().into_iter().rev().collect();
    let percent = percent(done, total);
    let full = percent as usize * WIDTH / 100;
    let filled = format!("{}{}", "#".repeat(full), ".".repeat(WIDTH - full));
    format!("{name} [{filled}] {percent}% of {}, {}/s", bytes(total), bytes(rate))
}

fn percent(done: u64, total: u64) -> u64 {
    // A number of 64 bits times 100 needs more of them.
    (u128::from(done.min(total)) * 100 / u128::from(total.max(1))) as u64
}

fn bytes(count: u64) -> String {
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
    fn a_bar_fits_a_terminal_and_never_overflows() {
        let half = bar("Qwen/Qwen2.5-VL-7B-Instruct", 8_000_000_000, 16_000_000_000, 112_000_000);
        assert_eq!(
            half,
            "Qwen/Qwen2.5-VL-7B-Instruct [##########..........] 50% of 16.00 GB, 112.0 MB/s"
        );
        for (done, total) in [(0, 0), (5, 3), (u64::MAX, u64::MAX), (u64::MAX, 1)] {
            assert!(bar("", done, total, 0).contains("] "), "{done} of {total}");
        }
        assert_eq!(
            bar(&"n".repeat(90), 1, 3, 999).chars().count(),
            "x".repeat(28).len() + " [] 33% of 0.0 kB, 1.0 kB/s".len() + WIDTH
        );
    }

    #[test]
    fn the_rate_is_of_what_comes_now() {
        let mut rate = Rate::new(Duration::from_secs(1));
        assert_eq!(rate.at(5000), 0, "left of an earlier download");
        assert_eq!(rate.at(6000), 1000);
        assert_eq!(rate.at(6000), 900);
        assert_eq!(rate.at(0), 810, "begun anew");
    }
}
