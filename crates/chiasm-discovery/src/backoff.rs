//! Backoff before a failed server is tried again.

use std::time::Duration;

const MIN_PAUSE: Duration = Duration::from_millis(200);
const MAX_PAUSE: Duration = Duration::from_secs(5);

/// An exponential backoff with jitter. Half of each pause is random, so that many frontends that
/// lost one server do not reconnect at the same time.
#[derive(Debug)]
pub(crate) struct Backoff {
    next: Duration,
}

impl Backoff {
    pub(crate) fn new() -> Self {
        Self { next: MIN_PAUSE }
    }

    /// Returns the pause after a failure. `uptime` is the time for which the server worked before
    /// the failure; at least [`MAX_PAUSE`] of it resets the backoff.
    pub(crate) fn pause_after(&mut self, uptime: Duration) -> Duration {
        if uptime >= MAX_PAUSE {
            self.next = MIN_PAUSE;
        }
        let pause = self.next;
        self.next = (pause * 2).min(MAX_PAUSE);
        pause.mul_f64(rand::random_range(0.5..=1.0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_double_until_uptime_resets_them() {
        let mut backoff = Backoff::new();
        for longest in [0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0] {
            let pause = backoff.pause_after(Duration::from_secs(1)).as_secs_f64();
            assert!((longest * 0.499..=longest * 1.001).contains(&pause), "{pause} of {longest}");
        }
        assert!(backoff.pause_after(MAX_PAUSE) <= MIN_PAUSE);
    }
}
