//! The coordinator of a group: wakes idle engines when another one starts a wave.

use bytes::Bytes;
use chiasm_zmtp::{Event, Pull, XPub};

use crate::wire::coordinator::{READY, Report, encode_start, is_subscription};

/// The state of a group's waves. Does no I/O. It is created with a generation and dropped with it,
/// so an engine that reconnects finds it.
#[derive(Debug)]
struct Waves {
    /// The number of subscriptions until the group is formed.
    missing: usize,
    /// The number of the running wave, or of the next one.
    wave: i64,
    is_running: bool,
}

/// A message to all engines.
#[derive(Debug, PartialEq, Eq)]
enum Broadcast {
    /// The handshake can end.
    Ready,
    /// A wave starts.
    Start { wave: i64, started_by: Option<u32> },
}

impl Waves {
    /// Creates the state of a group whose engines have yet to start.
    fn forming(size: usize) -> Self {
        Self { missing: size, wave: 0, is_running: false }
    }

    /// Handles a subscription: one of the first, or that of an engine that has reconnected and may
    /// have missed the start of the running wave. An engine ignores a start that it knows.
    fn on_subscription(&mut self) -> Vec<Broadcast> {
        if self.missing > 0 {
            self.missing -= 1;
            return if self.missing == 0 { vec![Broadcast::Ready] } else { Vec::new() };
        }
        let start = Broadcast::Start { wave: self.wave, started_by: None };
        if self.is_running { vec![Broadcast::Ready, start] } else { vec![Broadcast::Ready] }
    }

    fn on_report(&mut self, report: Report) -> Option<Broadcast> {
        match report {
            Report::Started { rank, wave } => {
                let is_new = wave > self.wave || (wave == self.wave && !self.is_running);
                is_new.then(|| {
                    self.wave = wave;
                    self.is_running = true;
                    Broadcast::Start { wave, started_by: Some(rank) }
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
pub(super) async fn coordinate(size: usize, mut publisher: XPub, mut reports: Pull) {
    let mut waves = Waves::forming(size);
    loop {
        let broadcasts: Vec<Broadcast> = tokio::select! {
            event = publisher.next() => match event {
                Event::Message { frames, .. } if is_subscription(&frames) => {
                    let missing = waves.missing.saturating_sub(1);
                    tracing::debug!(size, missing, "an engine joined its group");
                    waves.on_subscription()
                }
                Event::Message { .. } | Event::Connected { .. } | Event::Disconnected { .. } => {
                    Vec::new()
                }
            },
            event = reports.next() => match event {
                Event::Message { frames, .. } => match Report::decode(&frames) {
                    Ok(Some(report)) => waves.on_report(report).into_iter().collect(),
                    Ok(None) => Vec::new(),
                    Err(error) => {
                        tracing::warn!(%error, "unreadable message to a group's coordinator");
                        Vec::new()
                    }
                },
                Event::Connected { .. } | Event::Disconnected { .. } => Vec::new(),
            },
        };
        for broadcast in broadcasts {
            match broadcast {
                Broadcast::Ready => publisher.send_all(&[Bytes::from_static(READY)]).await,
                Broadcast::Start { wave, started_by } => {
                    publisher.send_all(&encode_start(wave, started_by)).await;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn formed(size: usize) -> Waves {
        let mut waves = Waves::forming(size);
        for _ in 1..size {
            assert_eq!(waves.on_subscription(), []);
        }
        assert_eq!(waves.on_subscription(), [Broadcast::Ready]);
        waves
    }

    #[test]
    fn wave_is_announced_once() {
        let mut waves = formed(2);
        let started = |rank, wave| Report::Started { rank, wave };
        assert_eq!(
            waves.on_report(started(1, 0)),
            Some(Broadcast::Start { wave: 0, started_by: Some(1) })
        );
        // Rank 0 echoes the start after its first step.
        assert_eq!(waves.on_report(started(0, 0)), None);
        assert_eq!(waves.on_report(Report::Complete { wave: 0 }), None);
        // A stale start: sent before the wave ended, received after.
        assert_eq!(waves.on_report(started(1, 0)), None);
        assert_eq!(
            waves.on_report(started(0, 1)),
            Some(Broadcast::Start { wave: 1, started_by: Some(0) })
        );
        assert_eq!(waves.on_report(Report::Complete { wave: 0 }), None);
        assert_eq!(waves.on_report(started(1, 1)), None);
        assert_eq!(
            waves.on_report(started(1, 5)),
            Some(Broadcast::Start { wave: 5, started_by: Some(1) })
        );
    }

    #[test]
    fn reconnected_engine_learns_of_running_wave() {
        let mut waves = formed(2);
        assert_eq!(waves.on_subscription(), [Broadcast::Ready]);
        waves.on_report(Report::Started { rank: 0, wave: 7 });
        let start = Broadcast::Start { wave: 7, started_by: None };
        assert_eq!(waves.on_subscription(), [Broadcast::Ready, start]);
        waves.on_report(Report::Complete { wave: 7 });
        assert_eq!(waves.on_subscription(), [Broadcast::Ready]);
    }
}
