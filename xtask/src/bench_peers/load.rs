//! What else the machine does while something is measured.

use std::{fs, thread};

use crate::bench_peers::row::Row;

/// The metric of it; `ours` is the load, `peer` the number of cores.
const METRIC: &str = "load before";

/// What the machine does besides.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Load {
    /// Processes that ran or wanted to, on average over a minute.
    pub(crate) processes: f64,
    pub(crate) cores: f64,
}

impl Load {
    /// None where the system does not say.
    pub(crate) fn now() -> Option<Self> {
        let processes =
            fs::read_to_string("/proc/loadavg").ok()?.split(' ').next()?.parse().ok()?;
        let cores = thread::available_parallelism().ok()?.get() as f64;
        Some(Self { processes, cores })
    }

    /// Its row.
    pub(crate) fn row(self, bench: &'static str) -> Row {
        let row = Row::new(bench, "all", METRIC, "processes", "cores");
        row.numbers(Some(self.processes), Some(self.cores))
    }
}

/// What the rows say of it, to follow another sentence; nothing if they don't.
pub(crate) fn sentence(rows: &[Row]) -> String {
    rows.iter().find(|row| row.metric == METRIC).map_or_else(String::new, |row| {
        let [processes, cores] = [row.ours, row.peer].map(Option::unwrap_or_default);
        format!(" Before, {processes} processes wanted the machine's {cores} cores.")
    })
}
