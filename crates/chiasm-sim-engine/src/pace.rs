//! The time model of a simulated step.

use std::time::Duration;

/// The speed of the simulated model.
#[derive(Clone, Debug, PartialEq)]
pub struct Pace {
    /// The number of prompt tokens computed per second. Tokens from the prefix cache take no time.
    pub prefill_tokens_per_s: f64,
    /// The number of steps per second while tokens are generated: every running request gets one
    /// token per step.
    pub decode_tokens_per_s: f64,
    /// The milliseconds to encode one image whose embeddings are not cached.
    pub ms_per_image: f64,
    /// The factor by which everything is faster. `f64::INFINITY` means no waiting at all.
    pub speedup: f64,
}

impl Default for Pace {
    /// The speed of about a 7-billion-parameter model on one large GPU.
    fn default() -> Self {
        Self {
            prefill_tokens_per_s: 20_000.0,
            decode_tokens_per_s: 60.0,
            ms_per_image: 15.0,
            speedup: 1.0,
        }
    }
}

impl Pace {
    /// Returns a pace without any waiting.
    pub fn instant() -> Self {
        Self { speedup: f64::INFINITY, ..Self::default() }
    }

    /// Returns the duration of a step with this work.
    pub(crate) fn step(&self, work: &StepWork) -> Duration {
        let prefill = work.prefill_tokens as f64 / self.prefill_tokens_per_s;
        let decode = if work.decodes > 0 { 1.0 / self.decode_tokens_per_s } else { 0.0 };
        let images = work.images as f64 * self.ms_per_image / 1000.0;
        Duration::try_from_secs_f64((prefill + decode + images) / self.speedup)
            .unwrap_or(Duration::ZERO)
    }
}

/// The work of a step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct StepWork {
    /// The prompt tokens that are computed together, including generated ones after a preemption.
    pub(crate) prefill_tokens: usize,
    /// The number of requests that compute the token they generated last.
    pub(crate) decodes: usize,
    /// The number of images that are encoded.
    pub(crate) images: usize,
}

#[cfg(test)]
mod tests {
    use super::*;

    const WORK: StepWork = StepWork { prefill_tokens: 1000, decodes: 7, images: 2 };

    #[test]
    fn parts_of_a_step_add_up() {
        let pace = Pace {
            prefill_tokens_per_s: 10_000.0,
            decode_tokens_per_s: 100.0,
            ms_per_image: 20.0,
            speedup: 1.0,
        };
        assert_eq!(pace.step(&WORK), Duration::from_millis(100 + 10 + 40));
        assert_eq!(Pace { speedup: 10.0, ..pace }.step(&WORK), Duration::from_millis(15));
    }

    #[test]
    fn invalid_or_infinite_speed_does_not_wait() {
        assert_eq!(Pace::instant().step(&WORK), Duration::ZERO);
        assert_eq!(
            Pace { prefill_tokens_per_s: 0.0, ..Pace::default() }.step(&WORK),
            Duration::ZERO
        );
    }
}
