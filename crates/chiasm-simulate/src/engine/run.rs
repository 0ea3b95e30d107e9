//! Many decode steps of one batch, computed at once.

use crate::virtual_time::{Nanos, nanos, seconds};

/// A sequence of decode steps of one batch. Each takes a little longer than the previous step,
/// because there is more context to read:
///
/// ```text
/// time(k) = k · first + growth · k (k − 1) / 2
/// ```
#[derive(Clone, Copy, Debug)]
pub(super) struct DecodeRun {
    pub(super) start: Nanos,
    /// The duration of the first step, in seconds.
    pub(super) first: f64,
    /// The increase of the duration from step to step, in seconds, 0 or more.
    pub(super) growth: f64,
    /// The number of steps. Reduced if a request is delivered before the end.
    pub(super) steps: u64,
}

impl DecodeRun {
    /// Returns the end of this number of steps.
    pub(super) fn end_after(&self, steps: u64) -> Nanos {
        let steps = steps as f64;
        self.start + nanos(steps * self.first + self.growth * steps * (steps - 1.0) / 2.0)
    }

    /// Returns the end of all steps.
    pub(super) fn end(&self) -> Nanos {
        self.end_after(self.steps)
    }

    /// Shortens the run to end with the step that is running at `now`.
    pub(super) fn stop_after(&mut self, now: Nanos) {
        let elapsed = seconds(now.saturating_sub(self.start));
        // The positive root of time(k) = elapsed. The loops then correct rounding errors.
        let linear = self.first - self.growth / 2.0;
        let root =
            2.0 * elapsed / (linear + (linear * linear + 2.0 * self.growth * elapsed).sqrt());
        let mut steps = root.ceil() as u64;
        while steps > 0 && self.end_after(steps - 1) >= now {
            steps -= 1;
        }
        while self.end_after(steps) < now {
            steps += 1;
        }
        self.steps = self.steps.min(steps);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn stopped_run_ends_with_the_running_step(
            first in 1e-4..0.1,
            growth in 0.0..1e-5,
            fraction in 0.0..1.2,
        ) {
            let start = 1_000_000;
            let whole = DecodeRun { start, first, growth, steps: 300 };
            // Sums up the steps, without the formula.
            let mut ends = vec![0.0];
            (0..300).for_each(|step| ends.push(ends[step] + first + growth * step as f64));
            for (steps, end) in ends.iter().enumerate() {
                prop_assert!(whole.end_after(steps as u64).abs_diff(start + nanos(*end)) < 1000);
            }
            let now = start + ((whole.end() - start) as f64 * fraction) as u64;
            let mut run = whole;
            run.stop_after(now);
            if fraction <= 1.0 {
                prop_assert!(run.end() >= now);
                prop_assert!(run.steps == 0 || run.end_after(run.steps - 1) < now);
            } else {
                prop_assert_eq!(run.steps, 300);
            }
        }
    }
}
