//! Makes the page `docs/benchmarks/pixels.md` from its rows.

use crate::bench_peers::page::{Table, Targets, fill, missed, peers};
use crate::bench_peers::pixels::{DIFFERS, FLOOR};
use crate::bench_peers::row::{OURS, ROUNDS, Row};
use crate::error::Error;

const TARGETS: Targets = Targets {
    heads: "case | stage | against | ours, ms | theirs, ms",
    cells: |row| format!("{} | {} | {}", row.case, row.metric, short(&row.peer_name)),
    number,
    is_limit: |row| row.peer_name == FLOOR,
    outputs: "other bits",
};

/// Makes the page.
pub(crate) fn write(rows: &[Row]) -> Result<String, Error> {
    let run = rows.iter().find(|row| row.metric == ROUNDS);
    let against = peers(rows.iter().filter(|row| row.metric != ROUNDS && row.peer_name != FLOOR));
    let missed = missed(rows, "Where the time goes in what was not reached:", |row| {
        format!("{}, {}, {}: {}", row.case, row.metric, short(&row.peer_name), profile(rows, row))
    });
    let cases: Vec<&[Row]> =
        rows.chunk_by(|a, b| a.case == b.case).filter(|rows| rows[0].metric != ROUNDS).collect();
    let tables = cases.chunk_by(|a, b| section(&a[0]) == section(&b[0])).map(table);
    let values = [
        ("rounds", run.and_then(|row| row.ours).unwrap_or_default().to_string()),
        ("ours", run.map_or(OURS, |row| &row.peer_name).to_owned()),
        ("peers", against.join("; ")),
        ("targets", TARGETS.table(rows) + &missed),
        ("tables", tables.collect::<Vec<_>>().join("\n\n")),
    ];
    fill(include_str!("templates/pixels.md"), &values)
}

/// Describes the parts of our time. For the whole preprocessing, also what could be gained if
/// everything except decoding cost nothing.
fn profile(rows: &[Row], missed: &Row) -> String {
    let mut case = rows.iter().filter(|row| row.case == missed.case);
    let ours =
        |metric: &str| case.clone().find(|row| row.metric == metric && row.ours.is_some())?.ours;
    if missed.metric != "whole" {
        let copy = case
            .find(|row| row.peer_name == FLOOR && row.metric == "process")
            .and_then(|row| row.peer);
        return format!(
            "{} ms, where one copy of the tensor takes {} ms",
            number(missed.ours),
            number(copy)
        );
    }
    let (Some(decode), Some(process)) = (ours("decode"), ours("process")) else {
        return "not supported yet".to_owned();
    };
    let share = 100.0 * decode / (decode + process);
    let left = missed.peer.map(|peer| match missed.peer_name.as_str() {
        FLOOR => format!("; the floor leaves {:.2} ms for the rest", (peer - decode).max(0.0)),
        _ => format!("; with a rest of nothing the ratio would be {:.2}", peer / decode),
    });
    format!(
        "decoding takes {decode:.2} ms ({share:.0} %), the rest {process:.2} ms{}",
        left.unwrap_or_default()
    )
}

/// Returns a section with the table of all pictures of a model and format.
fn table(cases: &[&[Row]]) -> String {
    let mut lines = Vec::new();
    for case in cases {
        let [_, picture, _] = parts(&case[0]);
        let ours =
            |metric: &str| case.iter().find(|row| row.metric == metric && row.ours.is_some())?.ours;
        lines.push(match ours("whole") {
            Some(_) => line([picture, "**chiasm**"], ours, None, ""),
            None => format!("{picture} | **chiasm** | | | | | **not supported yet** | |"),
        });
        let mut peers: Vec<&[Row]> = case.chunk_by(|a, b| a.peer_name == b.peer_name).collect();
        peers.sort_by_key(|rows| rows[0].peer_name != FLOOR);
        lines.extend(peers.into_iter().map(|rows| {
            let row = |metric: &str| rows.iter().find(|row| row.metric == metric);
            let equal = match (rows[0].equal, row(DIFFERS).and_then(|row| row.peer)) {
                (_, Some(percent)) => format!("**no**: {percent} % differ"),
                (Some(true), None) => "yes".to_owned(),
                _ => String::new(),
            };
            let ratio = row("whole").and_then(|row| row.ratio);
            line(["", short(&rows[0].peer_name)], |metric| row(metric)?.peer, ratio, &equal)
        }));
    }
    let table = Table::new(
        "picture | side | decode | resize | layout | process | whole | ratio | same bits",
    );
    format!("## {}\n\n{}", section(&cases[0][0]).join(", "), table.rows(lines))
}

/// Returns the line of a side.
fn line(
    names: [&str; 2],
    time: impl Fn(&str) -> Option<f64>,
    ratio: Option<f64>,
    equal: &str,
) -> String {
    let number =
        |number: Option<f64>| number.map(|number| format!("{number:.2}")).unwrap_or_default();
    let times = ["decode", "resize", "layout", "process", "whole"].map(|stage| number(time(stage)));
    format!("{} | {} | {} | {equal}", names.join(" | "), times.join(" | "), number(ratio))
}

/// Returns the model, picture and format of a row's case.
fn parts(row: &Row) -> [&str; 3] {
    let mut words = row.case.splitn(3, ' ');
    [(); 3].map(|()| words.next().unwrap_or_default())
}

/// Returns the key of a row's table: model and format.
fn section(row: &Row) -> [&str; 2] {
    let [model, _, format] = parts(row);
    [model, format]
}

/// Returns a peer's name without its version; a name with "without" is kept whole.
fn short(name: &str) -> &str {
    if name.contains("without") { name } else { name.split(' ').next().unwrap_or(name) }
}

fn number(number: Option<f64>) -> String {
    number.map_or_else(|| "not supported yet".to_owned(), |number| format!("{number:.2}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench_peers::measured::parse;
    use crate::bench_peers::pixels::rows;

    const LINES: [&str; 9] = [
        r#"{"case":"qwen3_vl 1920x1080.jpg u8","side":"chiasm (avx2)","times":{"decode":10.0,"process":2.0,"whole":12.0,"resize":1.0},"differs":0,"refused":null}"#,
        r#"{"case":"qwen3_vl 1920x1080.jpg u8","side":"floor","times":{"decode":10.0,"process":1.0,"whole":11.0},"differs":null,"refused":null}"#,
        r#"{"case":"qwen3_vl 1920x1080.jpg u8","side":"llm-multimodal 1.14.0","times":{"decode":11.0,"process":7.0,"whole":18.0,"resize":8.0},"differs":0,"refused":null}"#,
        r#"{"case":"qwen3_vl 1920x1080.jpg u8","side":"transformers 5.19.0 (torch 2.13.0, Pillow 13.0.0)","times":{"decode":15.0,"process":45.0,"whole":60.0},"differs":0.5,"refused":null}"#,
        r#"{"case":"qwen2_vl 1920x1080.jpg u8","side":"chiasm (avx2)","times":{"decode":1.0,"process":2.0,"resize":2.0},"differs":0,"refused":null}"#,
        r#"{"case":"qwen2_vl 1920x1080.jpg u8","side":"floor","times":{"process":1.0},"differs":null,"refused":null}"#,
        r#"{"case":"qwen2_vl 1920x1080.jpg u8","side":"llm-multimodal 1.14.0","times":{"resize":8.0},"differs":0.5,"refused":null}"#,
        r#"{"case":"llama4 512x512.jpg bf16","side":"chiasm","times":{},"differs":null,"refused":"unknown"}"#,
        r#"{"case":"llama4 512x512.jpg bf16","side":"llm-multimodal 1.14.0","times":{"decode":1.0,"whole":3.0},"differs":null,"refused":null}"#,
    ];

    fn note() -> String {
        write(&rows(&parse("pixels", &LINES.map(str::to_owned)).unwrap(), 15)).unwrap()
    }

    #[test]
    fn page_shows_reached_or_missed_targets() {
        let note = note();
        for line in [
            "Medians of 15 rounds of chiasm (avx2) against llm-multimodal 1.14.0; transformers \
             5.19.0 (torch 2.13.0, Pillow 13.0.0).",
            "| qwen3_vl 1920x1080.jpg u8 | whole | floor | 12.00 | 11.00 | 1.09 | ≤ 1.2 | yes |",
            "| qwen3_vl 1920x1080.jpg u8 | whole | llm-multimodal | 12.00 | 18.00 | 1.50 | ≥ 1.8 | \
             **no** |",
            "| qwen3_vl 1920x1080.jpg u8 | resize | llm-multimodal | 1.00 | 8.00 | 8.00 | ≥ 5 | \
             yes |",
            "| qwen2_vl 1920x1080.jpg u8 | resize | llm-multimodal | 2.00 | 8.00 | 4.00 | ≥ 5 | \
             **no: other bits** |",
            "- qwen3_vl 1920x1080.jpg u8, whole, llm-multimodal: decoding takes 10.00 ms (83 %), \
             the rest 2.00 ms; with a rest of nothing the ratio would be 1.80",
            "- qwen2_vl 1920x1080.jpg u8, resize, llm-multimodal: 2.00 ms, where one copy of the \
             tensor takes 1.00 ms",
        ] {
            assert!(note.lines().any(|found| found == line), "{line}\nis not in\n{note}");
        }
    }

    #[test]
    fn table_has_line_per_side() {
        let note = note();
        for line in [
            "## qwen3_vl, u8",
            "| 1920x1080.jpg | **chiasm** | 10.00 | 1.00 |  | 2.00 | 12.00 |  |  |",
            "|  | floor |  |  |  | 1.00 | 11.00 | 1.09 |  |",
            "|  | llm-multimodal | 11.00 | 8.00 |  | 7.00 | 18.00 | 1.50 | yes |",
            "|  | transformers | 15.00 |  |  | 45.00 | 60.00 | 5.00 | **no**: 50 % differ |",
            "## llama4, bf16",
            "| 512x512.jpg | **chiasm** | | | | | **not supported yet** | | |",
            "|  | llm-multimodal | 1.00 |  |  |  | 3.00 |  |  |",
        ] {
            assert!(note.lines().any(|found| found == line), "{line}\nis not in\n{note}");
        }
    }
}
