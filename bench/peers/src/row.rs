//! The rows that the programs print, one JSON object per line. `xtask` adds targets.

use std::error::Error;

use serde::Serialize;

/// The name of our side.
pub const OURS: &str = "chiasm";

/// A comparison of our side with a peer. Numbers that were not measured are NaN here and null in
/// JSON.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    /// The name of the case, such as `1k-token text, 16 clients`; `all` for numbers of the run.
    pub case: String,
    /// The name of the metric.
    pub metric: &'static str,
    /// The unit of both numbers.
    pub unit: &'static str,
    /// The number of our side.
    pub ours: f64,
    /// The peer's name and version.
    pub peer_name: String,
    /// The number of the peer.
    pub peer: f64,
    /// The factor by which our side is better. For a limit, our number as a multiple of it.
    pub ratio: f64,
    /// `true` if both sides have the same output; `None` if there is nothing to compare.
    pub equal: Option<bool>,
}

/// A metric of both sides.
#[derive(Clone, Copy, Debug)]
pub struct Metric {
    /// The name in rows.
    pub name: &'static str,
    /// The unit in rows.
    pub unit: &'static str,
    /// `None` if neither direction is better.
    pub more_is_better: Option<bool>,
}

/// Returns a metric of which more is better.
pub const fn more(name: &'static str, unit: &'static str) -> Metric {
    Metric { name, unit, more_is_better: Some(true) }
}

/// Returns a metric of which less is better.
pub const fn less(name: &'static str, unit: &'static str) -> Metric {
    Metric { name, unit, more_is_better: Some(false) }
}

/// Returns a metric of which neither more nor less is better.
pub const fn neutral(name: &'static str, unit: &'static str) -> Metric {
    Metric { name, unit, more_is_better: None }
}

impl Metric {
    /// Creates a row with the factor by which our side is better.
    pub fn row(&self, case: &str, peer_name: &str, ours: f64, peer: f64) -> Row {
        let ratio = match self.more_is_better {
            None => f64::NAN,
            Some(true) => ours / peer,
            Some(false) => peer / ours,
        };
        Row {
            case: case.to_owned(),
            metric: self.name,
            unit: self.unit,
            ours,
            peer_name: peer_name.to_owned(),
            peer,
            ratio,
            equal: None,
        }
    }
}

impl Row {
    /// Creates a row with a number of the whole run, such as the number of rounds.
    pub fn for_run(metric: &'static str, number: usize, peer_name: &str) -> Self {
        let number = number as f64;
        neutral(metric, metric).row("all", peer_name, number, number)
    }

    /// Prints the row.
    ///
    /// # Errors
    /// The row can't be written as JSON, which does not happen.
    pub fn print(&self) -> Result<(), Box<dyn Error>> {
        println!("{}", serde_json::to_string(self)?);
        Ok(())
    }
}
