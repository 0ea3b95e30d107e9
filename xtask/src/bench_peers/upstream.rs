//! The benchmark `upstream`: routers in front of servers that are already running.

use crate::bench_peers::page::{BY_METRIC, Grid, distinct, number, run_value, sections};
use crate::bench_peers::row::Target::{AtLeast, AtMost};
use crate::bench_peers::row::{Goal, Row};
use crate::bench_peers::runs;
use crate::bench_peers::spec::{Columns, Spec};

/// The two ways in which Chiasm uses an upstream: the suffix of a case's name, and the side's name.
const WAYS: [(&str, &str); 2] = [(", http", "chiasm, http"), (", vllm+http", "chiasm, vllm+http")];
const CPU: &str = "CPU per request";
/// The share of prompt tokens that upstreams found in their caches.
const CACHED: &str = "cached prompt tokens";
const CACHE_AWARE: &str = "SMG cache_aware";
/// The beginning of the names of cases with shared images.
const SHARED: &str = "shared images, ";

const GOALS: [Goal; 4] = [
    Goal { case: "1k-token text", metric: CPU, peer: CACHE_AWARE, target: AtLeast(2.0) },
    Goal { case: "1k-token text", metric: CPU, peer: "Dynamo", target: AtLeast(5.0) },
    Goal { case: "1k-token text", metric: CPU, peer: "Envoy", target: AtMost(4.0) },
    Goal { case: "repeated image", metric: CPU, peer: CACHE_AWARE, target: AtLeast(2.0) },
];

pub(crate) const SPEC: Spec = Spec {
    name: "upstream",
    // A round takes a minute.
    min_rounds: 7,
    has_short_run: true,
    measure: runs::upstream,
    target: |row, _| Goal::find(&GOALS, row),
    is_optional: |_, _| false,
    template: include_str!("templates/upstream.md"),
    columns: Columns {
        heads: "case | against | ours, µs | theirs, µs",
        cells: |row| format!("{} | {}", row.case, row.peer_name),
        ..BY_METRIC
    },
    values: |rows| {
        vec![
            ("conversations", run_value(rows, "conversations")),
            ("shared", shared_images(rows)),
            ("cases", cases(rows)),
        ]
    },
};

/// Returns a section for each metric of cases with shared images: a line per side and a column per
/// case.
fn shared_images(rows: &[Row]) -> String {
    let shared = || rows.iter().filter(|row| row.case.starts_with(SHARED));
    let metrics = distinct(shared().map(|row| (&*row.metric, &*row.unit)));
    let tables = metrics.into_iter().map(|(metric, unit)| {
        let with_difference = |row: &Row, value: Option<f64>| {
            let is_smg = |it: &&Row| {
                it.case == row.case && it.metric == CACHED && it.peer_name.starts_with(CACHE_AWARE)
            };
            let smg = shared().find(is_smg).filter(|_| metric == CACHED).and_then(|it| it.peer);
            let difference = value.zip(smg).map(|(value, smg)| format!(" ({:+.1})", value - smg));
            number(value) + &difference.unwrap_or_default()
        };
        let mut grid = Grid::new([""; 0]);
        for (row, side, value) in sides(shared().filter(|row| row.metric == metric)) {
            let column = row.case.trim_start_matches(SHARED).trim_end_matches(way(row).0);
            grid.set(side, column, with_difference(row, value));
        }
        format!("### {metric}, {unit}\n\n{}", grid.table("", "–"))
    });
    tables.collect::<Vec<_>>().join("\n\n")
}

/// Returns a section for each other case: a line per side and a column per metric.
fn cases(rows: &[Row]) -> String {
    let cases = rows.iter().filter(|row| row.metric == CPU);
    sections(distinct(cases.filter_map(|row| row.case.strip_suffix(WAYS[0].0))), |case| {
        let mut grid = Grid::new([""; 0]);
        let rows = rows.iter().filter(|row| row.case.strip_suffix(way(row).0) == Some(case));
        for (row, side, value) in sides(rows.filter(|row| row.ours.is_some())) {
            grid.set(side, &format!("{}, {}", row.metric, row.unit), number(value));
        }
        grid.table("", "–")
    })
}

/// Returns the entry of [`WAYS`] that a row belongs to; empty texts if there is none.
fn way(row: &Row) -> (&'static str, &'static str) {
    WAYS.into_iter().find(|(way, _)| row.case.ends_with(way)).unwrap_or(("", ""))
}

/// Returns the sides of rows with their names and numbers, ours first.
fn sides<'a>(
    rows: impl Iterator<Item = &'a Row> + Clone,
) -> impl Iterator<Item = (&'a Row, &'a str, Option<f64>)> {
    let rows = rows.filter(|row| way(row) != ("", ""));
    let mut ours: Vec<&Row> = rows.clone().collect();
    ours.sort_by_key(|row| way(row).1);
    let ours = ours.into_iter().map(|row| (row, way(row).1, row.ours));
    ours.chain(rows.map(|row| (row, &*row.peer_name, row.peer)))
}
