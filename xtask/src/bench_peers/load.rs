//! The load of the machine before a measurement.

use std::{fs, thread};

use crate::bench_peers::row::Row;

/// The metric of the load. In its row, `ours` is the load and `peer` the number of cores.
const METRIC: &str = "load before";

/// The load of the machine.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Load {
    /// The average number of running or runnable processes over a minute.
    pub(crate) processes: f64,
    pub(crate) cores: f64,
}

impl Load {
    /// Reads the current load; `None` if the system does not report it.
    pub(crate) fn now() -> Option<Self> {
        let processes =
            fs::read_to_string("/proc/loadavg").ok()?.split(' ').next()?.parse().ok()?;
        let cores = thread::available_parallelism().ok()?.get() as f64;
        Some(Self { processes, cores })
    }

    /// Creates the row of the load.
    pub(crate) fn row(self, bench: &'static str) -> Row {
        let row = Row::new(bench, "all", METRIC, "processes", "cores");
        row.numbers(Some(self.processes), Some(self.cores))
    }
}

/// Returns a sentence about the load with a space in front; empty if the rows have no load.
pub(crate) fn sentence(rows: &[Row]) -> String {
    rows.iter().find(|row| row.metric == METRIC).map_or_else(String::new, |row| {
        let [processes, cores] = [row.ours, row.peer].map(Option::unwrap_or_default);
        format!(" Before, {processes} processes wanted the machine's {cores} cores.")
    })
}
