//! The benchmark `video`: videos that are planned from their containers.

use crate::bench_peers::page::{BY_METRIC, Table, decimals, number, run_value};
use crate::bench_peers::row::Target::{AtLeast, AtMost};
use crate::bench_peers::row::{OURS, Row, Target};
use crate::bench_peers::spec::Spec;
use crate::bench_peers::{captions, runs};

/// The `peer_name` of rows that compare with a limit.
const LIMIT: &str = "limit";
const FILE: &str = "file";
const CAPTIONS: &str = "captions";

/// The minimum factors by which we are better, by case. They apply to CPU and wall-clock time.
const TARGETS: [(&str, f64); 6] = [
    ("10 min", 5.0),
    ("60 s", 1.5),
    ("60 s, GOP of 60", 1.8),
    ("60 s, 8 frames", 4.0),
    ("4 s of 360p", 1.0),
    (CAPTIONS, 2.0),
];

pub(crate) const SPEC: Spec = Spec {
    name: "video",
    min_rounds: 5,
    has_short_run: true,
    measure: |setup, rounds, sides| {
        let mut rows = runs::video(setup, rounds, sides)?;
        rows.extend(captions::run(setup, rounds, sides)?);
        Ok(rows)
    },
    target,
    is_optional: |_, _| false,
    template: include_str!("templates/video.md"),
    columns: BY_METRIC,
    values: |rows| {
        vec![
            ("helpers", run_value(rows, "helpers")),
            ("files", files(rows)),
            ("videos", comparisons(rows)),
            ("servers", captions::part(rows)),
        ]
    },
};

fn target(row: &Row, _: &[Row]) -> Option<Target> {
    match &*row.peer_name {
        OURS => None,
        LIMIT => Some(AtMost(1.0)),
        _ if row.metric == FILE => None,
        _ if row.case == captions::CASE => captions::target(row),
        _ => TARGETS.iter().find(|(case, _)| row.case == *case).map(|it| AtLeast(it.1)),
    }
}

fn files(rows: &[Row]) -> String {
    let rows = rows.iter().filter(|row| row.metric == FILE);
    Table::new("clip | size, MB").rows(rows.map(|row| {
        let size = row.ours.map(|kilobytes| kilobytes / 1e3);
        format!("{} | {}", row.case, decimals(size, 2, "–"))
    }))
}

fn comparisons(rows: &[Row]) -> String {
    // Servers have a part of their own.
    let rows = rows.iter().filter(|row| row.ratio.is_some() && row.case != captions::CASE);
    Table::new("case | | against | ours | theirs | ratio").rows(rows.map(|row| {
        let Row { case, metric, unit, peer_name, .. } = row;
        let numbers = [row.ours, row.peer, row.ratio].map(number);
        format!("{case} | {metric}, {unit} | {peer_name} | {}", numbers.join(" | "))
    }))
}
