//! The benchmark `pixels`: image preprocessing.

use crate::bench_peers::page::{Table, decimals, distinct, missed, sections};
use crate::bench_peers::row::Target::{AtLeast, AtMost};
use crate::bench_peers::row::{Goal, RUN, Row, Target};
use crate::bench_peers::runs;
use crate::bench_peers::spec::{Columns, Spec};

/// Decoding and one copy, a side that is a limit and not a peer.
const FLOOR: &str = "floor";
/// The share of a peer's values that differ from ours.
const DIFFERS: &str = "differing values";
const QWEN2: &str = "qwen2_vl 1920x1080.jpg u8";
const QWEN3: &str = "qwen3_vl 1920x1080.jpg u8";
const LLM_MULTIMODAL: &str = "llm-multimodal";

const GOALS: [Goal; 4] = [
    Goal { case: QWEN2, metric: "whole", peer: LLM_MULTIMODAL, target: AtLeast(2.5) },
    Goal { case: QWEN2, metric: "resize", peer: LLM_MULTIMODAL, target: AtLeast(5.0) },
    Goal { case: QWEN3, metric: "whole", peer: LLM_MULTIMODAL, target: AtLeast(1.8) },
    Goal { case: QWEN3, metric: "resize", peer: LLM_MULTIMODAL, target: AtLeast(5.0) },
];

pub(crate) const SPEC: Spec = Spec {
    name: "pixels",
    min_rounds: 15,
    has_short_run: false,
    measure: runs::pixels,
    target,
    is_optional: |_, _| false,
    template: include_str!("templates/pixels.md"),
    columns: Columns {
        heads: "case | stage | against | ours, ms | theirs, ms",
        cells: |row| format!("{} | {} | {}", row.case, row.metric, short(&row.peer_name)),
        number,
        outputs: "other bits",
    },
    values: |rows| {
        let ours = rows.iter().find(|row| row.metric == "rounds").map(|row| &*row.peer_name);
        let peers = distinct(cases(rows).map(|row| &*row.peer_name).filter(|peer| *peer != FLOOR));
        let missed = missed(rows, "The parts of the times whose target was missed:", |row| {
            let peer = short(&row.peer_name);
            format!("{}, {}, {peer}: {}", row.case, row.metric, profile(rows, row))
        });
        vec![
            ("ours", ours.unwrap_or_default().to_owned()),
            ("peers", peers.join("; ")),
            ("missed", missed),
            ("tables", tables(rows)),
        ]
    },
};

/// Returns the rows of cases, without those of the whole run.
fn cases(rows: &[Row]) -> impl Iterator<Item = &Row> + Clone {
    rows.iter().filter(|row| row.case != RUN)
}

/// Returns the target of a row. `transformers` has none: it decodes about as fast as we do, so even
/// the floor could not be four times as fast.
fn target(row: &Row, _: &[Row]) -> Option<Target> {
    let has_limit = row.peer_name == FLOOR && row.metric == "whole" && row.case.ends_with(" u8");
    Goal::find(&GOALS, row).or(has_limit.then_some(AtMost(1.2)))
}

/// Describes the parts of our time. For the whole preprocessing, also what could be gained if
/// everything except decoding cost nothing.
fn profile(rows: &[Row], missed: &Row) -> String {
    let mut case = rows.iter().filter(|row| row.case == missed.case);
    let ours =
        |metric: &str| case.clone().find(|row| row.metric == metric && row.ours.is_some())?.ours;
    if missed.metric != "whole" {
        let copy = case.find(|row| row.peer_name == FLOOR && row.metric == "process");
        let [ours, copy] = [missed.ours, copy.and_then(|row| row.peer)].map(number);
        return format!("{ours} ms; one copy of the tensor takes {copy} ms");
    }
    let (Some(decode), Some(process)) = (ours("decode"), ours("process")) else {
        return "not supported yet".to_owned();
    };
    let share = 100.0 * decode / (decode + process);
    let gain = missed.peer.map(|peer| match missed.peer_name.as_str() {
        FLOOR => format!("; the floor leaves {:.2} ms for the rest", (peer - decode).max(0.0)),
        _ => format!("; without the rest the ratio would be {:.2}", peer / decode),
    });
    let gain = gain.unwrap_or_default();
    format!("decoding takes {decode:.2} ms ({share:.0} %), the rest {process:.2} ms{gain}")
}

/// Returns a section for each model and format: for each picture a line per side.
fn tables(rows: &[Row]) -> String {
    let all: Vec<&Row> = cases(rows).collect();
    let by_case: Vec<&[&Row]> = all.chunk_by(|a, b| a.case == b.case).collect();
    let titles = distinct(by_case.iter().map(|case| title(case[0])));
    sections(titles.iter().map(String::as_str), |name| {
        let cases = by_case.iter().filter(|case| title(case[0]) == name);
        let lines = cases.flat_map(|case| lines(case));
        Table::new(
            "picture | side | decode | resize | layout | process | whole | ratio | same bits",
        )
        .rows(lines)
    })
}

/// Returns the lines of a case: our side, the floor, the peers.
fn lines(case: &[&Row]) -> Vec<String> {
    let picture = case[0].case.split(' ').nth(1).unwrap_or_default();
    let ours =
        |metric: &str| case.iter().find(|row| row.metric == metric && row.ours.is_some())?.ours;
    let our_line = match ours("whole") {
        Some(_) => line([picture, "**chiasm**"], ours, None, ""),
        None => format!("{picture} | **chiasm** | | | | | **not supported yet** | |"),
    };
    let mut peers: Vec<&[&Row]> = case.chunk_by(|a, b| a.peer_name == b.peer_name).collect();
    peers.sort_by_key(|rows| rows[0].peer_name != FLOOR);
    let peer_line = |rows: &[&Row]| {
        let row = |metric: &str| rows.iter().find(|row| row.metric == metric);
        let equal = match (rows[0].equal, row(DIFFERS).and_then(|row| row.peer)) {
            (_, Some(percent)) => format!("**no**: {percent} % differ"),
            (Some(true), None) => "yes".to_owned(),
            _ => String::new(),
        };
        let ratio = row("whole").and_then(|row| row.ratio);
        line(["", short(&rows[0].peer_name)], |metric| row(metric)?.peer, ratio, &equal)
    };
    [our_line].into_iter().chain(peers.into_iter().map(peer_line)).collect()
}

/// Returns the line of a side.
fn line(
    names: [&str; 2],
    time: impl Fn(&str) -> Option<f64>,
    ratio: Option<f64>,
    equal: &str,
) -> String {
    let times = ["decode", "resize", "layout", "process", "whole"].map(time);
    let numbers = times.into_iter().chain([ratio]).map(|number| decimals(number, 2, ""));
    format!("{} | {} | {equal}", names.join(" | "), numbers.collect::<Vec<_>>().join(" | "))
}

/// Returns the title of a row's table: model and format.
fn title(row: &Row) -> String {
    let words: Vec<&str> = row.case.splitn(3, ' ').collect();
    [words[0], words[words.len() - 1]].join(", ")
}

/// Returns a peer's name without its version; a name with "without" is kept whole.
fn short(name: &str) -> &str {
    if name.contains("without") { name } else { name.split(' ').next().unwrap_or(name) }
}

fn number(number: Option<f64>) -> String {
    decimals(number, 2, "not supported yet")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unsupported_case_has_no_time_of_ours() {
        let row = |peer: &str| Row {
            peer: Some(3.0),
            ..Row::new("llama4 512x512.jpg bf16", "whole", "ms", peer)
        };
        assert_eq!(
            tables(&[row("llm-multimodal 1.14.0")]).lines().skip(4).collect::<Vec<_>>(),
            [
                "| 512x512.jpg | **chiasm** | | | | | **not supported yet** | | |",
                "|  | llm-multimodal |  |  |  |  | 3.00 |  |  |",
            ]
        );
    }

    #[test]
    fn missed_targets_are_described_by_parts() {
        let row = |metric: &str, peer: &str, [ours, theirs]: [f64; 2]| Row {
            ours: Some(ours),
            peer: Some(theirs),
            ..Row::new(QWEN3, metric, "ms", peer)
        };
        let rows = [
            row("decode", "llm-multimodal 1.14.0", [10.0, 11.0]),
            row("process", FLOOR, [2.0, 1.0]),
            row("whole", "llm-multimodal 1.14.0", [12.0, 18.0]),
            row("whole", FLOOR, [12.0, 11.0]),
            row("resize", "llm-multimodal 1.14.0", [2.0, 8.0]),
        ];
        let decoding = "decoding takes 10.00 ms (83 %), the rest 2.00 ms; ";
        assert_eq!(
            profile(&rows, &rows[2]),
            format!("{decoding}without the rest the ratio would be 1.80")
        );
        assert_eq!(
            profile(&rows, &rows[3]),
            format!("{decoding}the floor leaves 1.00 ms for the rest")
        );
        assert_eq!(profile(&rows, &rows[4]), "2.00 ms; one copy of the tensor takes 1.00 ms");
    }
}
