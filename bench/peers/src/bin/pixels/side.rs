//! The sides' interface, and the times that they measure.
//!
//! All times are CPU time of this process. Every side works on one thread, so CPU time is the time
//! of an idle machine. The wall clock would include the time of other programs, and more often in a
//! long stage than in a short one.

use std::collections::BTreeMap;
use std::error::Error;
use std::time::Duration;

use peers::clock::process_cpu;
use peers::numbers::median;
use serde::Deserialize;

/// A side that is set up for one case.
pub(crate) trait Side {
    /// Returns the name and version in rows.
    fn name(&self) -> String;

    /// Processes the file once, then runs the stages that the side has separately.
    fn round(&mut self) -> Result<Times, Box<dyn Error>>;

    /// Returns the bytes of the last round's tensor; `None` for a side without a tensor.
    fn tensor(&mut self) -> Result<Option<Vec<u8>>, Box<dyn Error>>;
}

/// A part of the way from the bytes of a file to the model's pixel tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Stage {
    /// File to tensor.
    Whole,
    /// File to RGB rows.
    Decode,
    /// RGB rows to the tensor, as the side does it.
    Process,
    /// RGB rows to RGB rows of another size, separately.
    Resize,
    /// RGB rows of the final size to the tensor, separately.
    Layout,
}

impl Stage {
    /// Returns the name in rows.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Whole => "whole",
            Self::Decode => "decode",
            Self::Process => "process",
            Self::Resize => "resize",
            Self::Layout => "layout",
        }
    }
}

/// The milliseconds of each stage that a side measures.
pub(crate) type Times = BTreeMap<Stage, f64>;

/// A running clock.
pub(crate) struct Clock(Duration);

impl Clock {
    pub(crate) fn start() -> Self {
        Self(process_cpu())
    }

    /// Returns the milliseconds since the start.
    pub(crate) fn read(&self) -> f64 {
        process_cpu().saturating_sub(self.0).as_secs_f64() * 1e3
    }
}

/// Returns the times of the stages on the whole way.
pub(crate) fn whole_times(decoded: f64, processed: f64, whole: f64) -> Times {
    let process = processed - decoded;
    Times::from([(Stage::Decode, decoded), (Stage::Process, process), (Stage::Whole, whole)])
}

/// Returns the median of each stage.
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
