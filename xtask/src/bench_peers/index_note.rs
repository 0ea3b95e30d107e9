//! Makes the page `docs/benchmarks/index.md` from its rows.

use crate::bench_peers::index::{
    DIFFERENT, HELD_BLOCKS, LOOKUPS, LOOKUPS_FROM_TOKENS, MEMORY, METRICS, PROMPT_BLOCKS,
    PROMPT_WORKERS,
};
use crate::bench_peers::load;
use crate::bench_peers::page::{Table, Targets, fill, missed, run_value};
use crate::bench_peers::row::{OURS, ROUNDS, Row};
use crate::error::Error;

const TARGETS: Targets = Targets {
    heads: "fleet | line | unit | against the best: | ours | theirs",
    cells: |row| {
        format!("{} | {} | {} | {}", row.case, row.metric, row.unit, short(&row.peer_name))
    },
    number,
    is_limit: |_| false,
    outputs: "other answers",
};
const MISSED: &str = "What was not reached, per block, prompt, or pair of a worker and a block:";

/// Makes the page.
pub(crate) fn write(rows: &[Row]) -> Result<String, Error> {
    let peers =
        rows.iter().find_map(|row| Some(row.peer_name.split_once(" (")?.1.trim_end_matches(')')));
    let missed =
        missed(rows, MISSED, |row| format!("{}, {}: {}", row.case, row.metric, profile(rows, row)));
    let fleets =
        rows.chunk_by(|a, b| a.case == b.case).filter(|case| case[0].case != "all").map(fleet);
    let values = [
        ("rounds", run_value(rows, ROUNDS)),
        ("peers", peers.unwrap_or("nobody").to_owned()),
        ("load", load::sentence(rows)),
        ("targets", TARGETS.table(rows) + &missed),
        ("fleets", fleets.collect::<Vec<_>>().join("\n\n")),
    ];
    fill(include_str!("templates/index.md"), &values)
}

/// Describes the cost of a missed metric on both sides: time per block or prompt, or bytes per
/// block.
fn profile(rows: &[Row], missed: &Row) -> String {
    let find = |metric: &str, peer: &str| {
        rows.iter()
            .find(|row| row.case == missed.case && row.metric == metric && row.peer_name == peer)
    };
    let [ours, theirs] = [missed.ours, missed.peer].map(|number| number.unwrap_or(f64::NAN));
    match missed.unit {
        "M blocks/s" => format!("{:.0} ns, theirs {:.0} ns", 1e3 / ours, 1e3 / theirs),
        "MB" => {
            let held = find(HELD_BLOCKS, OURS).and_then(|row| row.ours).unwrap_or(f64::NAN) / 1e6;
            format!("{:.0} bytes, theirs {:.0} bytes", ours / held, theirs / held)
        }
        _ => {
            let times = format!("{:.2} µs, theirs {:.2} µs", 1e3 / ours, 1e3 / theirs);
            let hashed =
                find(LOOKUPS, &missed.peer_name).filter(|_| missed.metric == LOOKUPS_FROM_TOKENS);
            let Some((our_hashed, their_hashed)) = hashed.and_then(|row| row.ours.zip(row.peer))
            else {
                return times;
            };
            let hashing = |all: f64, hashed: f64| (1e3 / all - 1e3 / hashed).max(0.0);
            let [ours, theirs] = [hashing(ours, our_hashed), hashing(theirs, their_hashed)];
            format!("{times}; of it hashing {ours:.2} µs, theirs {theirs:.2} µs")
        }
    }
}

/// Returns a section with the table of a fleet: a line per metric and a column per side.
fn fleet(case: &[Row]) -> String {
    let ours =
        |metric: &str| case.iter().find(|row| row.metric == metric && row.ours.is_some())?.ours;
    let answers = || case.iter().filter(|row| row.metric == DIFFERENT);
    let names: Vec<&str> = answers().map(|row| short(&row.peer_name)).collect();
    let mut table = Table::new(format_args!("| unit | **chiasm** | {} | ratio", names.join(" | ")));
    for metric in &METRICS {
        let rows: Vec<&Row> = case.iter().filter(|row| row.metric == metric.name).collect();
        let Some(first) = rows.first() else { continue };
        let peers = answers().map(|peer| {
            let theirs =
                rows.iter().find(|row| row.peer_name == peer.peer_name).and_then(|row| row.peer);
            theirs.map_or_else(String::new, |theirs| number(Some(theirs)))
        });
        let peers = peers.collect::<Vec<_>>().join(" | ");
        // The lowest ratio is the ratio to the best peer.
        let ratio = number(rows.iter().filter_map(|row| row.ratio).reduce(f64::min));
        table.row(format_args!(
            "{} | {} | {} | {peers} | {ratio}",
            metric.name,
            metric.unit,
            number(first.ours)
        ));
        if let Some(count) = ours("memory, own count").filter(|_| metric.name == MEMORY) {
            table.row(format_args!(
                "memory, own count | MB | {count:.2} |{}",
                " |".repeat(names.len())
            ));
        }
    }
    let answers = answers().map(|row| match (row.equal, row.ours, row.peer) {
        (Some(true), Some(compared), _) => format!("{compared} of {compared}"),
        (_, Some(compared), Some(different)) => {
            format!("**{} of {compared}**", compared - different)
        }
        _ => "**none**".to_owned(),
    });
    let table = table.rows([format!(
        "equal answers | prompts | | {} |",
        answers.collect::<Vec<_>>().join(" | ")
    )]);
    let [held, blocks, workers] =
        [HELD_BLOCKS, PROMPT_BLOCKS, PROMPT_WORKERS].map(|it| ours(it).unwrap_or_default());
    format!(
        "## {}\n\n{held:.0} blocks held, each by a worker; prompts of {blocks:.0} blocks, some of \
         which {workers:.1} workers hold, on average.\n\n{table}",
        case[0].case
    )
}

/// Returns a peer's name without its crate.
fn short(name: &str) -> &str {
    name.split(' ').next().unwrap_or(name)
}

fn number(number: Option<f64>) -> String {
    number.map_or_else(|| "not measured".to_owned(), |number| format!("{number:.2}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench_peers::index::rows;
    use crate::bench_peers::index::tests::measurements;

    #[test]
    fn page_shows_reached_or_missed_targets() {
        let note = write(&rows(&measurements(), 15, None)).unwrap();
        for line in [
            "Medians of 15 rounds against d 1.0.",
            "| 8 workers | events, from frames | M blocks/s | Tree | 3.00 | 1.00 | 3.00 | ≥ 3 | \
             yes |",
            "| 8 workers | memory | MB | Tree | 33.33 | 100.00 | 3.00 | ≥ 2 | yes |",
            "| 64 workers | events, from frames | M blocks/s | Tree | 3.00 | 1.00 | 3.00 | ≥ 3 | \
             **no: other answers** |",
            "- 64 workers, events, from frames: 333 ns, theirs 1000 ns",
            "- 64 workers, memory: 33 bytes, theirs 100 bytes",
            "- 64 workers, lookups, from tokens: 16.67 µs, theirs 50.00 µs; of it hashing 13.33 \
             µs, theirs 40.00 µs",
        ] {
            assert!(note.lines().any(|found| found == line), "{line}\nis not in\n{note}");
        }
    }

    #[test]
    fn fleet_table_has_empty_cells_for_unsupported_metrics() {
        let note = write(&rows(&measurements(), 15, None)).unwrap();
        for line in [
            "## 8 workers",
            "1000000 blocks held, each by a worker; prompts of 240 blocks, some of which 7.5 \
             workers hold, on average.",
            "| | unit | **chiasm** | Tree | Map | ratio |",
            "| events | M blocks/s | 6.00 | 2.00 | 1.00 | 3.00 |",
            "| events, from frames | M blocks/s | 3.00 | 1.00 | 0.50 | 3.00 |",
            "| events, from frames, 2 threads | M blocks/s | 6.00 |  | 1.00 | 6.00 |",
            "| lookup p50 beside events | µs | 2.00 | 6.00 | 12.00 | 3.00 |",
            "| memory, own count | MB | 30.00 | | | |",
            "| equal answers | prompts | | 4096 of 4096 | 4096 of 4096 | |",
            "| equal answers | prompts | | **4093 of 4096** | 4096 of 4096 | |",
        ] {
            assert!(note.lines().any(|found| found == line), "{line}\nis not in\n{note}");
        }
    }
}
