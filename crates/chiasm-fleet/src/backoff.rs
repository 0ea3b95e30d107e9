//! Exponential backoff: between starts of an engine that dies, and between probes of a worker that
//! fails.

use std::time::Duration;

const INITIAL_PAUSE: Duration = Duration::from_millis(500);
/// The time without failure after which pauses start over at [`INITIAL_PAUSE`].
const HEALTHY: Duration = Duration::from_secs(60);

/// Pauses that double up to a maximum, and start over after a healthy minute.
#[derive(Debug)]
pub(crate) struct Backoff {
    next: Duration,
    max_pause: Duration,
}

impl Backoff {
    pub(crate) fn new(max_pause: Duration) -> Self {
        Self { next: INITIAL_PAUSE.min(max_pause), max_pause }
    }

    /// Returns the next pause. `healthy_for` is the time without failure that preceded it; pauses
    /// start over if that was at least [`HEALTHY`].
    pub(crate) fn pause_after(&mut self, healthy_for: Duration) -> Duration {
        if healthy_for >= HEALTHY {
            self.next = INITIAL_PAUSE.min(self.max_pause);
        }
        let pause = self.next;
        self.next = (pause * 2).min(self.max_pause);
        pause
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAX_PAUSE: Duration = Duration::from_secs(60);

    #[test]
    fn pauses_double_up_to_the_maximum() {
        let mut backoff = Backoff::new(MAX_PAUSE);
        let pauses: Vec<f64> =
            (0..9).map(|_| backoff.pause_after(Duration::ZERO).as_secs_f64()).collect();
        assert_eq!(pauses, [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0]);
        let mut backoff = Backoff::new(Duration::from_millis(100));
        assert!((0..3).all(|_| backoff.pause_after(Duration::ZERO) == Duration::from_millis(100)));
    }

    #[test]
    fn healthy_minute_starts_over() {
        let mut backoff = Backoff::new(MAX_PAUSE);
        backoff.pause_after(Duration::ZERO);
        assert_eq!(backoff.pause_after(HEALTHY - Duration::from_millis(1)), 2 * INITIAL_PAUSE);
        assert_eq!(backoff.pause_after(HEALTHY), INITIAL_PAUSE);
    }
}
