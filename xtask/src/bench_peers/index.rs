//! The benchmark `index`: the prefix index.

use crate::bench_peers::page::{Grid, decimals, distinct, missed, sections};
use crate::bench_peers::row::Target::AtLeast;
use crate::bench_peers::row::{OURS, RUN, Row, Target};
use crate::bench_peers::runs;
use crate::bench_peers::spec::{Columns, Spec};

/// The metric of answers. In its row, `ours` is the number of compared prompts and `peer` the
/// number of different answers.
const DIFFERENT: &str = "different answers";
const LOOKUPS: &str = "lookups";
const LOOKUPS_FROM_TOKENS: &str = "lookups, from tokens";
const MEMORY: &str = "memory";
/// The number of pairs of a worker and a block.
const HELD_BLOCKS: &str = "held";
/// The peer of our lookups on several threads: the same on one thread.
const ONE_THREAD: &str = "one-thread";

/// The metrics with a minimum ratio to the best peer. Decoded events have none: every side has to
/// fetch them from memory, which takes too much of the time for such a ratio.
const BEST_PEER: [(&str, f64); 6] = [
    ("events, from frames", 3.0),
    ("events, from frames, 2 threads", 3.0),
    (LOOKUPS, 3.0),
    ("lookups, 2 threads", 3.0),
    (LOOKUPS_FROM_TOKENS, 3.0),
    (MEMORY, 2.0),
];
/// The minimum ratio of our rates to references of our own, by the reference's name: events with
/// the same hashes, perfect scaling, and lookups without events.
const OWN_REFERENCES: [(&str, f64); 3] = [("plain", 0.5), (ONE_THREAD, 0.85), ("no-events", 0.85)];

pub(crate) const SPEC: Spec = Spec {
    name: "index",
    min_rounds: 15,
    has_short_run: false,
    measure: runs::index,
    target,
    // The numbers of threads, and so the rows, depend on the machine's number of cores.
    is_optional: |row, _| row.peer_name == ONE_THREAD,
    template: include_str!("templates/index.md"),
    columns: Columns {
        heads: "fleet | line | unit | against the best: | ours | theirs",
        cells: |row| {
            format!("{} | {} | {} | {}", row.case, row.metric, row.unit, short(&row.peer_name))
        },
        number,
        outputs: "other answers",
    },
    values: |rows| {
        let peers = rows
            .iter()
            .find_map(|row| Some(row.peer_name.split_once(" (")?.1.trim_end_matches(')')));
        let missed = missed(rows, MISSED, |row| {
            format!("{}, {}: {}", row.case, row.metric, profile(rows, row))
        });
        vec![
            ("peers", peers.unwrap_or("nobody").to_owned()),
            ("missed", missed),
            ("fleets", fleets(rows)),
        ]
    },
};

/// The introduction of the list of missed targets.
const MISSED: &str =
    "Costs whose target was missed, per block, prompt, or pair of a worker and a block:";

fn target(row: &Row, rows: &[Row]) -> Option<Target> {
    if let Some((_, target)) = OWN_REFERENCES.iter().find(|(peer, _)| row.peer_name == *peer) {
        return Some(AtLeast(*target));
    }
    let (_, target) = BEST_PEER.iter().find(|(metric, _)| row.metric == *metric)?;
    // The lowest ratio is the ratio to the best peer.
    let others = rows.iter().filter(|it| it.case == row.case && it.metric == row.metric);
    let is_best = others.filter_map(|it| it.ratio).all(|ratio| row.ratio <= Some(ratio));
    is_best.then_some(AtLeast(*target))
}

/// Describes the cost of a missed metric on both sides: time per block or prompt, or bytes per
/// block.
fn profile(rows: &[Row], missed: &Row) -> String {
    let find = |metric: &str, peer: &str| {
        rows.iter()
            .find(|row| row.case == missed.case && row.metric == metric && row.peer_name == peer)
    };
    let [ours, theirs] = [missed.ours, missed.peer].map(|number| number.unwrap_or(f64::NAN));
    match &*missed.unit {
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

/// Returns a section for each fleet: a line per metric and a column per side.
fn fleets(rows: &[Row]) -> String {
    let cases = distinct(rows.iter().map(|row| &*row.case).filter(|case| *case != RUN));
    sections(cases, |case| {
        let rows = || rows.iter().filter(move |row| row.case == case);
        let ours = |metric: &str| rows().find(|row| row.metric == metric)?.ours;
        let peers = rows().filter(|row| row.metric == DIFFERENT);
        let sides =
            ["**chiasm**"].into_iter().chain(peers.clone().map(|row| short(&row.peer_name)));
        let mut grid = Grid::new(sides.chain(["ratio"]));
        let is_compared = |row: &&Row| row.peer_name.contains(" (") && row.metric != DIFFERENT;
        for row in rows().filter(is_compared) {
            let line = format!("{} | {}", row.metric, row.unit);
            grid.set(&line, "**chiasm**", number(row.ours));
            grid.set(&line, short(&row.peer_name), number(row.peer));
            let ratios = rows().filter(|it| it.metric == row.metric).filter_map(|it| it.ratio);
            grid.set(&line, "ratio", number(ratios.reduce(f64::min)));
            if row.metric == MEMORY {
                grid.set("memory, own count | MB", "**chiasm**", number(ours("memory, own count")));
            }
        }
        for row in peers {
            let equal = match (row.equal, row.ours, row.peer) {
                (Some(true), Some(compared), _) => format!("{compared} of {compared}"),
                (_, Some(compared), Some(different)) => {
                    format!("**{} of {compared}**", compared - different)
                }
                _ => "**none**".to_owned(),
            };
            grid.set("equal answers | prompts", short(&row.peer_name), equal);
        }
        let [held, blocks, workers] = [HELD_BLOCKS, "prompt blocks", "prompt workers"]
            .map(|metric| ours(metric).unwrap_or_default());
        format!(
            "The caches hold {held:.0} pairs of a worker and a block. On average prompts have \
             {blocks:.0} blocks, and {workers:.1} workers hold some of them.\n\n{}",
            grid.table("| unit", "")
        )
    })
}

/// Returns a peer's name without its crate.
fn short(name: &str) -> &str {
    name.split(' ').next().unwrap_or(name)
}

fn number(number: Option<f64>) -> String {
    decimals(number, 2, "not measured")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(metric: &str, unit: &str, peer: &str, [ours, theirs]: [f64; 2]) -> Row {
        let ratio = if unit == "MB" { theirs / ours } else { ours / theirs };
        let row = Row::new("8 workers", metric, unit, peer);
        Row { ours: Some(ours), peer: Some(theirs), ratio: Some(ratio), ..row }
    }

    #[test]
    fn target_is_set_on_best_peer_only() {
        let [tree, map] = [("Tree (d 1.0)", 1.0), ("Map (d 1.0)", 0.5)]
            .map(|(peer, theirs)| row("events, from frames", "M blocks/s", peer, [3.0, theirs]));
        let rows = [tree, map, row("events", "M blocks/s", "Tree (d 1.0)", [3.0, 1.0])];
        let targets = rows.each_ref().map(|row| target(row, &rows));
        assert_eq!(targets, [Some(AtLeast(3.0)), None, None]);
        assert_eq!(target(&row("frames, twice", "", "plain", [1.0, 4.0]), &[]), Some(AtLeast(0.5)));
    }

    #[test]
    fn missed_targets_are_described_by_cost() {
        let held = Row { ours: Some(1e6), ..Row::new("8 workers", HELD_BLOCKS, "", OURS) };
        let rows = [
            held,
            row("memory", "MB", "Tree (d 1.0)", [33.0, 100.0]),
            row("events, from frames", "M blocks/s", "Tree (d 1.0)", [3.0, 1.0]),
            row(LOOKUPS, "k prompts/s", "Tree (d 1.0)", [300.0, 100.0]),
            row(LOOKUPS_FROM_TOKENS, "k prompts/s", "Tree (d 1.0)", [60.0, 20.0]),
        ];
        let profiles = rows[1..].iter().map(|row| profile(&rows, row)).collect::<Vec<_>>();
        let expected = [
            "33 bytes, theirs 100 bytes",
            "333 ns, theirs 1000 ns",
            "3.33 µs, theirs 10.00 µs",
            "16.67 µs, theirs 50.00 µs; of it hashing 13.33 µs, theirs 40.00 µs",
        ];
        assert_eq!(profiles, expected);
    }
}
