//! The benchmark `processor`: vLLM's processor.

use crate::bench_peers::page::{BY_METRIC, Table, decimals, number, run_value};
use crate::bench_peers::row::Target::{AtLeast, AtMost};
use crate::bench_peers::row::{OURS, RUN, Row, Target};
use crate::bench_peers::runs;
use crate::bench_peers::spec::{Columns, Spec};

/// The beginning of the name of a side that makes items and no prompts.
const ALONE: &str = "decoding and processing alone";
/// The beginning of the name of a side that makes no tensors: enough for a router, not for an
/// engine. It is shown without a target.
const NO_TENSORS: &str = "render without tensors";
/// The number of processes that make items.
const HELPERS: &str = "helpers";
const FILE: &str = "file";
/// The metric of equality. In its row, `ours` is the number of compared prompts or items and `peer`
/// the number of those that differ.
const DIFFERENT: &str = "others";
const CPU: &str = "CPU per request";
const RATE: &str = "items per second";
const CALL: &str = "one call";

/// The minimum rate of each helper as a part of the rate of one process alone.
const HELPER_TARGET: f64 = 0.8;

pub(crate) const SPEC: Spec = Spec {
    name: "processor",
    min_rounds: 9,
    has_short_run: true,
    measure: runs::processor,
    target,
    is_optional: |_, _| false,
    template: include_str!("templates/processor.md"),
    columns: Columns {
        heads: "case | | against | ours | theirs",
        cells,
        outputs: "other outputs",
        ..BY_METRIC
    },
    values: |rows| {
        vec![
            ("helpers", run_value(rows, HELPERS)),
            ("inputs", inputs(rows)),
            ("equality", equality(rows)),
            ("requests", comparisons(rows, &[CPU, "latency p50"])),
            ("items", comparisons(rows, &[RATE, "CPU per item", CALL])),
            ("clips", comparisons(rows, &["clips per second of CPU time", "clips per second"])),
        ]
    },
};

fn target(row: &Row, rows: &[Row]) -> Option<Target> {
    match (&*row.metric, &*row.case) {
        (CPU, _) if row.peer_name.starts_with(NO_TENSORS) => None,
        (CPU, case) if case.ends_with("theirs new") => Some(AtLeast(20.0)),
        (CPU, case) if case.ends_with("theirs repeated too") => Some(AtLeast(3.0)),
        (RATE, _) => {
            let is_helpers = |row: &&Row| row.case == RUN && row.metric == HELPERS;
            let helpers = rows.iter().find(is_helpers)?.ours?;
            Some(AtLeast(HELPER_TARGET * helpers))
        }
        (CALL, "new image") => Some(AtMost(1.1)),
        _ => None,
    }
}

/// Returns the cells of case, metric with unit, and peer.
fn cells(Row { case, metric, unit, peer_name, .. }: &Row) -> String {
    format!("{case} | {metric}, {unit} | {peer_name}")
}

fn inputs(rows: &[Row]) -> String {
    let is_input = |row: &&Row| {
        row.metric == FILE || row.peer_name == OURS && row.case != RUN && row.peer.is_none()
    };
    Table::new("| |").rows(rows.iter().filter(is_input).map(|row| {
        let Row { case, metric, unit, ours, peer_name, .. } = row;
        let maker = if metric == FILE { format!(", by {peer_name}") } else { String::new() };
        format!("{case} | {metric}{maker} | {} {unit}", number(*ours))
    }))
}

fn equality(rows: &[Row]) -> String {
    let rows = rows.iter().filter(|row| row.metric == DIFFERENT);
    Table::new("item | against | compared | different").rows(rows.map(|row| {
        let [compared, different] = [row.ours, row.peer].map(|it| decimals(it, 0, "–"));
        let kind =
            if row.peer_name.starts_with(ALONE) { "sums of tensors" } else { "lengths of prompts" };
        format!("{}, {kind} | {} | {compared} | {different}", row.case, row.peer_name)
    }))
}

fn comparisons(rows: &[Row], metrics: &[&str]) -> String {
    let rows = rows.iter().filter(|row| metrics.contains(&&*row.metric));
    Table::new("case | | against | ours | theirs | ratio").rows(rows.map(|row| {
        let numbers = [row.ours, row.peer, row.ratio].map(number);
        format!("{} | {}", cells(row), numbers.join(" | "))
    }))
}
