//! The properties of a benchmark.

use std::path::PathBuf;

use crate::bench_peers::row::{Row, Target};
use crate::dist::Profile;
use crate::error::Error;
use crate::setup::Setup;

/// A benchmark.
pub(crate) struct Spec {
    /// The name in commands, rows and files.
    pub(crate) name: &'static str,
    /// The minimum number of rounds for a meaningful result on a shared machine. Wall-clock times
    /// of several processes vary more than the CPU time of one process.
    pub(crate) min_rounds: u32,
    /// `true` if a run of one round tests that the benchmark works.
    pub(crate) has_short_run: bool,
    /// Runs the measuring program and returns its rows.
    pub(crate) measure: fn(&Setup, rounds: u32, &Sides) -> Result<Vec<Row>, Error>,
    /// Returns the target of a row, given all rows.
    pub(crate) target: fn(&Row, &[Row]) -> Option<Target>,
    /// Returns `true` if a row of the last page need not be among these rows.
    pub(crate) is_optional: fn(&Row, &[Row]) -> bool,
    /// The page with placeholders for values.
    pub(crate) template: &'static str,
    /// The columns of the table of targets.
    pub(crate) columns: Columns,
    /// Returns the values of the placeholders that only this page has.
    pub(crate) values: fn(&[Row]) -> Vec<(&'static str, String)>,
}

/// The columns of a page's table of targets.
pub(crate) struct Columns {
    /// The heads of the first cells and of the numbers of both sides.
    pub(crate) heads: &'static str,
    /// Returns the first cells of a row.
    pub(crate) cells: fn(&Row) -> String,
    /// Formats a number.
    pub(crate) number: fn(Option<f64>) -> String,
    /// The text for outputs that are not equal.
    pub(crate) outputs: &'static str,
}

/// The frontends to measure in `door` and `stream`, our number of engines, and, for all benchmarks,
/// the cargo profile.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Sides {
    /// A `chiasm` of another commit.
    pub(crate) baseline: Option<PathBuf>,
    /// Measures the peers even if there is a baseline.
    pub(crate) with_peers: bool,
    /// The number of simulated engines of each `chiasm`, in cases in which engines do not wait.
    pub(crate) engines: u32,
    /// The cargo profile of `chiasm` and of examples.
    pub(crate) profile: Profile,
}

impl Default for Sides {
    fn default() -> Self {
        // With small requests one engine is busier than our frontend, which would wait for it. Two
        // cores are enough for three engines.
        Self { baseline: None, with_peers: false, engines: 3, profile: Profile::Dist }
    }
}

impl Sides {
    pub(crate) fn has_peers(&self) -> bool {
        self.with_peers || self.baseline.is_none()
    }
}
