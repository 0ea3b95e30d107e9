//! The coordinator of a group: wakes idle engines when another one starts a wave.

use std::time::{SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use chiasm_zmtp::{Event, Pull, XPub};

use crate::wire::coordinator::{READY, Report, encode_start, is_subscription};

/// The state of a group's waves. Does no I/O.
///
/// It can be lost: a coordinator that starts anew wakes all engines, in a wave whose number is
/// larger than any that they have seen. Engines without work then compute one empty step.
#[derive(Debug)]
struct Waves {
    /// The number of engines in the group.
    size: usize,
    /// The number of subscriptions until the group is formed.
    missing: usize,
    /// The number of the running wave, or of the next one.
    wave: i64,
    is_running: bool,
}

/// A message to all engines.
#[derive(Debug, PartialEq, Eq)]
enum Answer {
    /// The handshake can end.
    Ready,
    /// A wave starts.
    Start { wave: i64, started_by: Option<u32> },
}

impl Waves {
    /// Creates the state of a group whose engines have yet to start.
    fn forming(size: usize) -> Self {
        Self { size, missing: size, wave: 0, is_running: false }
    }

    /// Handles a subscription at a time in seconds since the epoch, which gives the number of a new
    /// wave if engines reconnect: it is larger than the numbers that count from 0, and than that of
    /// an earlier reconnection.
    fn on_subscription(&mut self, now: i64) -> Vec<Answer> {
        match self.missing {
            0 => {
                self.wave = self.wave.max(now);
                self.is_running = true;
                vec![Answer::Ready, Answer::Start { wave: self.wave, started_by: None }]
            }
            missing => {
                self.missing = missing - 1;
                if self.missing == 0 { vec![Answer::Ready] } else { Vec::new() }
            }
        }
    }

    fn on_report(&mut self, report: Report) -> Option<Answer> {
        match report {
            Report::Started { rank, wave } => {
                let is_news = wave > self.wave || (wave == self.wave && !self.is_running);
                is_news.then(|| {
                    self.wave = wave;
                    self.is_running = true;
                    Answer::Start { wave, started_by: Some(rank) }
                })
            }
            Report::Complete { wave } => {
                if wave >= self.wave {
                    self.wave = wave.saturating_add(1);
                    self.is_running = false;
                }
                None
            }
        }
    }
}

/// Coordinates the engines of a group over bound sockets, until it is dropped.
pub(super) async fn coordinate(size: usize, mut engines: XPub, mut reports: Pull) {
    let mut waves = Waves::forming(size);
    loop {
        let answers: Vec<Answer> = tokio::select! {
            event = engines.next() => match event {
                Event::Message { frames, .. } if is_subscription(&frames) => {
                    let missing = waves.missing.saturating_sub(1);
                    tracing::debug!(size = waves.size, missing, "an engine joined its group");
                    waves.on_subscription(unix_seconds())
                }
                Event::Message { .. } | Event::Connected { .. } | Event::Disconnected { .. } => {
                    Vec::new()
                }
            },
            event = reports.next() => match event {
                Event::Message { frames, .. } => match Report::decode(&frames) {
                    Ok(report) => report.and_then(|report| waves.on_report(report)).into_iter().collect(),
                    Err(error) => {
                        tracing::warn!(%error, "unreadable message to a group's coordinator");
                        Vec::new()
                    }
                },
                Event::Connected { .. } | Event::Disconnected { .. } => Vec::new(),
            },
        };
        for answer in answers {
            match answer {
                Answer::Ready => engines.send_all(&[Bytes::from_static(READY)]).await,
                Answer::Start { wave, started_by } => {
                    engines.send_all(&encode_start(wave, started_by)).await;
                }
            }
        }
    }
}

fn unix_seconds() -> i64 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |since| i64::try_from(since.as_secs()).unwrap_or(i64::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: i64 = 1_795_802_785;

    fn formed(size: usize) -> Waves {
        let mut waves = Waves::forming(size);
        for _ in 1..size {
            assert_eq!(waves.on_subscription(NOW), []);
        }
        assert_eq!(waves.on_subscription(NOW), [Answer::Ready]);
        waves
    }

    #[test]
    fn wave_is_announced_once() {
        let mut waves = formed(2);
        let started = |rank, wave| Report::Started { rank, wave };
        assert_eq!(
            waves.on_report(started(1, 0)),
            Some(Answer::Start { wave: 0, started_by: Some(1) })
        );
        // Rank 0 repeats what it was told.
        assert_eq!(waves.on_report(started(0, 0)), None);
        assert_eq!(waves.on_report(Report::Complete { wave: 0 }), None);
        // Of a start that crossed the end of its wave.
        assert_eq!(waves.on_report(started(1, 0)), None);
        assert_eq!(
            waves.on_report(started(0, 1)),
            Some(Answer::Start { wave: 1, started_by: Some(0) })
        );
        assert_eq!(waves.on_report(Report::Complete { wave: 0 }), None);
        assert_eq!(waves.on_report(started(1, 1)), None);
        assert_eq!(
            waves.on_report(started(1, 5)),
            Some(Answer::Start { wave: 5, started_by: Some(1) })
        );
    }

    /// After each restart of the coordinator, the wave is newer than all that engines have seen.
    #[test]
    fn reconnection_starts_newer_wave() {
        let mut waves = formed(2);
        waves.on_report(Report::Started { rank: 0, wave: 7 });
        let start = Answer::Start { wave: NOW, started_by: None };
        assert_eq!(waves.on_subscription(NOW), [Answer::Ready, start]);
        waves.on_report(Report::Complete { wave: NOW });
        let start = Answer::Start { wave: NOW + 1, started_by: None };
        assert_eq!(waves.on_subscription(NOW), [Answer::Ready, start]);
        // The state was lost, and the clock has gone on.
        let mut waves = formed(2);
        let start = Answer::Start { wave: NOW + 2, started_by: None };
        assert_eq!(waves.on_subscription(NOW + 2), [Answer::Ready, start]);
    }
}
