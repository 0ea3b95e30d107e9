//! The benchmark `roles`: engines that prefill and engines that decode.

use crate::bench_peers::page::{BY_METRIC, Grid, Table, decimals, number, sections, with_ratio};
use crate::bench_peers::row::Target::{AtLeast, AtMost};
use crate::bench_peers::row::{LENGTHS, OURS, Row};
use crate::bench_peers::runs;
use crate::bench_peers::spec::{Columns, Spec};

/// The ways in which engines compute a request, as the ends of the names of cases.
const WAYS: [&str; 2] = [", aggregated", ", split"];
/// The additional CPU time of a frontend for a split request.
const ADDED: &str = "CPU added by the second hop";

pub(crate) const SPEC: Spec = Spec {
    name: "roles",
    // A round takes a minute.
    min_rounds: 7,
    has_short_run: true,
    measure: runs::roles,
    target: |row, _| match &*row.metric {
        "CPU per request" if row.case.ends_with(WAYS[1]) => Some(AtLeast(4.0)),
        "engine to engine p50" => Some(AtMost(1.0)),
        _ => None,
    },
    is_optional: |_, _| false,
    template: include_str!("templates/roles.md"),
    columns: Columns { heads: "case | metric | against | ours, µs | theirs, µs", ..BY_METRIC },
    values: |rows| {
        let slow = rows.iter().find(|row| row.metric == "engine to engine p99");
        let slow = number(slow.and_then(|row| row.ours));
        vec![("slow_hop", slow), ("hop", hop(rows)), ("cases", cases(rows))]
    },
};

/// Returns the table of the additional CPU time of split requests, which may be negative.
fn hop(rows: &[Row]) -> String {
    let rows = || rows.iter().filter(|row| row.metric == ADDED);
    let dynamo = rows().next().map_or("Dynamo", |row| &row.peer_name);
    Table::new(format_args!("{ADDED}, µs | {OURS} | {dynamo}")).rows(rows().map(|row| {
        let [ours, peer] = [row.ours, row.peer].map(|it| decimals(it, 0, "–"));
        format!("{} | {ours} | {peer}", row.case)
    }))
}

/// Returns a section for each case: a line per metric and a column per side.
fn cases(rows: &[Row]) -> String {
    let cases = rows.iter().filter(|row| row.metric == ADDED).map(|row| &*row.case);
    sections(cases, |case| {
        let mut grid = Grid::new(WAYS.map(|way| format!("{OURS}{way}")));
        for row in rows.iter().filter(|row| row.metric != LENGTHS) {
            let Some(way) = row.case.strip_prefix(case).filter(|way| WAYS.contains(way)) else {
                continue;
            };
            let line = format!("{} | {}", row.metric, row.unit);
            grid.set(&line, &format!("{OURS}{way}"), number(row.ours));
            grid.set(&line, &format!("{}{way}", row.peer_name), with_ratio(row));
        }
        grid.table("| unit", "–")
    })
}
