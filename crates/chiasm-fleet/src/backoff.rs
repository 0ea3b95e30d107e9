//! Growing pauses: before an engine that died is started again, and before a worker that fails is
//! tried again.

use std::time::Duration;

const FIRST: Duration = Duration::from_millis(500);
/// An engine that was ready for so long was fine: the next pause is the first one again.
const HEALTHY: Duration = Duration::from_secs(60);

/// Pauses that double, up to a longest one, until an engine has lived for a minute.
#[derive(Debug)]
pub(crate) struct Backoff {
    next: Duration,
    longest: Duration,
}

impl Backoff {
    pub(crate) fn new(longest: Duration) -> Self {
        Self { next: FIRST.min(longest), longest }
    }

    /// Returns the next pause. `healthy_for` is the time without failure before it; after a long
    /// one pauses start over.
    pub(crate) fn pause_after(&mut self, healthy_for: Duration) -> Duration {
        if healthy_for >= HEALTHY {
            self.next = FIRST.min(self.longest);
        }
        let pause = self.next;
        self.next = (pause * 2).min(self.longest);
        pause
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LONGEST: Duration = Duration::from_secs(60);

    #[test]
    fn pauses_double_up_to_the_longest() {
        let mut backoff = Backoff::new(LONGEST);
        let pauses: Vec<f64> =
            (0..9).map(|_| backoff.pause_after(Duration::ZERO).as_secs_f64()).collect();
        assert_eq!(pauses, [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0]);
        let mut backoff = Backoff::new(Duration::from_millis(100));
        assert!((0..3).all(|_| backoff.pause_after(Duration::ZERO) == Duration::from_millis(100)));
    }

    #[test]
    fn a_healthy_life_starts_over() {
        let mut backoff = Backoff::new(LONGEST);
        backoff.pause_after(Duration::ZERO);
        assert_eq!(backoff.pause_after(HEALTHY - Duration::from_millis(1)), 2 * FIRST);
        assert_eq!(backoff.pause_after(HEALTHY), FIRST);
    }
}
