//! How long to wait before a server that failed is asked again.

use std::time::Duration;

const FIRST: Duration = Duration::from_millis(200);
const LONGEST: Duration = Duration::from_secs(5);

/// Pauses that double up to a longest one. Half of each is left to chance, so that many frontends
/// that lost one server do not return to it all at once.
#[derive(Debug)]
pub(crate) struct Backoff {
    next: Duration,
}

impl Backoff {
    pub(crate) fn new() -> Self {
        Self { next: FIRST }
    }

    /// The pause after a failure before which the server was fine for `fine`: the first pause
    /// again, once that was longer than the longest one.
    pub(crate) fn pause_after(&mut self, fine: Duration) -> Duration {
        if fine >= LONGEST {
            self.next = FIRST;
        }
        let pause = self.next;
        self.next = (pause * 2).min(LONGEST);
        pause.mul_f64(rand::random_range(0.5..=1.0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_double_up_to_the_longest_and_start_over_after_a_good_while() {
        let mut backoff = Backoff::new();
        for most in [0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0] {
            let pause = backoff.pause_after(Duration::from_secs(1)).as_secs_f64();
            assert!((most * 0.499..=most * 1.001).contains(&pause), "{pause} of {most}");
        }
        assert!(backoff.pause_after(LONGEST) <= FIRST);
    }
}
