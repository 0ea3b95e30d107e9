//! What a round measures: CPU time of this process, stage by stage.
//!
//! Every side works on one thread, so that CPU time is the time of a machine that does nothing
//! else. The clock on the wall would count what other programs took as well, and more often in a
//! long stage than in a short one.

use std::collections::BTreeMap;
use std::time::Duration;

use peers::numbers::median;
use rustix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};

/// A part of the way from the bytes of a file to the model's pixel tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Stage {
    /// File to RGB rows.
    Decode,
    /// RGB rows to RGB rows of another size, by itself.
    Resize,
    /// RGB rows of the final size to the tensor, by itself.
    Layout,
    /// RGB rows to the tensor: all that comes after decoding, as the side does it.
    Process,
    /// File to tensor.
    Whole,
}

/// Milliseconds of each stage that a side can tell apart.
pub(crate) type Times = BTreeMap<Stage, f64>;

/// A running clock.
pub(crate) struct Clock(Duration);

impl Clock {
    pub(crate) fn start() -> Self {
        Self(now())
    }

    /// Milliseconds of CPU time since the start.
    pub(crate) fn read(&self) -> f64 {
        now().saturating_sub(self.0).as_secs_f64() * 1e3
    }
}

fn now() -> Duration {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    // Neither is negative: it is time spent.
    Duration::new(time.tv_sec.unsigned_abs(), time.tv_nsec.unsigned_abs() as u32)
}

/// The median over the rounds, of every stage.
pub(crate) fn medians(rounds: &[Times]) -> Times {
    let mut stages: BTreeMap<Stage, Vec<f64>> = BTreeMap::new();
    for (&stage, &time) in rounds.iter().flatten() {
        stages.entry(stage).or_default().push(time);
    }
    stages.into_iter().map(|(stage, times)| (stage, median(times))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_stage_has_its_own_median() {
        let round = |decode, whole| Times::from([(Stage::Decode, decode), (Stage::Whole, whole)]);
        let medians = medians(&[round(3.0, 9.0), round(1.0, 7.0), round(2.0, 100.0)]);
        assert_eq!(medians, Times::from([(Stage::Decode, 2.0), (Stage::Whole, 9.0)]));
    }
}
