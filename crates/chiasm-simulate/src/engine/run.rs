//! Many equal decode steps in one go.

use crate::virtual_time::{Nanos, nanos, seconds};

/// Decode steps of one batch, one after the other. Each takes a little longer than the one before,
/// as there is more context to read:
///
/// ```text
/// time(k) = k · first + growth · k (k − 1) / 2
/// ```
#[derive(Clone, Copy, Debug)]
pub(super) struct DecodeRun {
    pub(super) start: Nanos,
    /// Seconds of the first step.
    pub(super) first: f64,
    /// Seconds by which each step is longer than the one before, 0 or more.
    pub(super) growth: f64,
    /// Number of steps; fewer when something is delivered meanwhile.
    pub(super) steps: u64,
}

impl DecodeRun {
    /// The time at which so many steps are done.
    pub(super) fn end_of(&self, steps: u64) -> Nanos {
        let steps = steps as f64;
        self.start + nanos(steps * self.first + self.growth * steps * (steps - 1.0) / 2.0)
    }

    pub(super) fn end(&self) -> Nanos {
        self.end_of(self.steps)
    }

    /// Ends it with the step that is under way at `now`.
    pub(super) fn stop_after(&mut self, now: Nanos) {
        let elapsed = seconds(now.saturating_sub(self.start));
        // The positive root of time(k) = elapsed, then the whole number that is right after
        // rounding.
        let linear = self.first - self.growth / 2.0;
        let root =
            2.0 * elapsed / (linear + (linear * linear + 2.0 * self.growth * elapsed).sqrt());
        let mut steps = root.ceil() as u64;
        while steps > 0 && self.end_of(steps - 1) >= now {
            steps -= 1;
        }
        while self.end_of(steps) < now {
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
        fn it_ends_with_the_step_under_way(first in 1e-4..0.1, growth in 0.0..1e-5, share in 0.0..1.2) {
            let start = 1_000_000;
            let whole = DecodeRun { start, first, growth, steps: 300 };
            // Step by step, without the formula.
            let mut ends = vec![0.0];
            (0..300).for_each(|step| ends.push(ends[step] + first + growth * step as f64));
            for (steps, end) in ends.iter().enumerate() {
                prop_assert!(whole.end_of(steps as u64).abs_diff(start + nanos(*end)) < 1000);
            }
            let now = start + ((whole.end() - start) as f64 * share) as u64;
            let mut run = whole;
            run.stop_after(now);
            if share <= 1.0 {
                prop_assert!(run.end() >= now);
                prop_assert!(run.steps == 0 || run.end_of(run.steps - 1) < now);
            } else {
                prop_assert_eq!(run.steps, 300);
            }
        }
    }
}
