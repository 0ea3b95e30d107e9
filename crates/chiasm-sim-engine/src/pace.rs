//! How long a simulated step takes.

use std::time::Duration;

/// Speed of the simulated model.
#[derive(Clone, Debug, PartialEq)]
pub struct Pace {
    /// Prompt tokens computed per second. Tokens found in the prefix cache cost nothing.
    pub prefill_tokens_per_s: f64,
    /// Steps per second while tokens are generated: every running request gets one token per step.
    pub decode_tokens_per_s: f64,
    /// Milliseconds to encode one image whose embeddings are not cached.
    pub ms_per_image: f64,
    /// Everything is this many times faster. `f64::INFINITY` means no waiting at all.
    pub speedup: f64,
}

impl Default for Pace {
    /// About a 7-billion-parameter model on one large GPU.
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
    /// No waiting at all.
    pub fn instant() -> Self {
        Self { speedup: f64::INFINITY, ..Self::default() }
    }

    /// Duration of a step that does this work.
    pub(crate) fn step(&self, work: &StepWork) -> Duration {
        let prefill = work.prefill_tokens as f64 / self.prefill_tokens_per_s;
        let decode = if work.decodes > 0 { 1.0 / self.decode_tokens_per_s } else { 0.0 };
        let images = work.images as f64 * self.ms_per_image / 1000.0;
        Duration::try_from_secs_f64((prefill + decode + images) / self.speedup)
            .unwrap_or(Duration::ZERO)
    }
}

/// What a step computes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct StepWork {
    /// Prompt tokens (and, after a preemption, generated ones) that are computed together.
    pub(crate) prefill_tokens: usize,
    /// Requests that compute the one token they generated last.
    pub(crate) decodes: usize,
    /// Images that go through the encoder.
    pub(crate) images: usize,
}

#[cfg(test)]
mod tests {
    use super::*;

    const WORK: StepWork = StepWork { prefill_tokens: 1000, decodes: 7, images: 2 };

    #[test]
    fn the_parts_of_a_step_add_up_and_decodes_share_one_pass() {
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
    fn infinite_speed_and_nonsense_do_not_wait() {
        assert_eq!(Pace::instant().step(&WORK), Duration::ZERO);
        assert_eq!(
            Pace { prefill_tokens_per_s: 0.0, ..Pace::default() }.step(&WORK),
            Duration::ZERO
        );
    }
}
