//! `docs/benchmarks/pixels.md`, made of the rows and nothing else.

use crate::bench_peers::page::push;
use crate::bench_peers::pixels::{DIFFERS, FLOOR, ROUNDS};
use crate::bench_peers::row::Row;

const HEAD: &str = "\
# Pixels: from a file's bytes to the model's tensor

Written by `cargo xtask bench-peers pixels`; to change it, run that again. The same numbers as rows: [pixels.json](pixels.json).
";

const HOW: &str = "\
Each side works on one thread, and its times are CPU time of its process, so that what else the machine does counts little.
In each round every side goes once from the same file to its tensor, in an order that turns round each time; one round
before warms up and compares the tensors. Only ratios of one run mean something.

| column | is |
|---|---|
| decode | file to RGB rows |
| process | RGB rows to tensor: all that comes after, as the side does it |
| whole | file to tensor, and the decoded image put away |
| resize, layout | by themselves, on an image that is ready, for raw patches that need a resize |
| ratio | of `whole`: how many times faster we are; in the line of the floor, how many times slower |
| same bits | whether the whole tensor is ours, bit for bit; else how many of its values are not |

- **chiasm** resizes and lays out in bands of lines that stay in the CPU's cache, so that its process is not the sum of the
  two. As when it serves, it decodes into memory that its thread keeps and writes into a buffer that the caller owns.
- **floor** is what cannot be saved: our decoding alone, and as `process` one copy of the tensor into a buffer that is used
  again. The target for raw patches is a limit above it; `transformers` decodes as fast as we do, so a ratio to it says little.
- **llm-multimodal**, on which vLLM's Rust frontend and Dynamo build, through its public interface: its own 8-bit form for
  u8, its wire form for normalised values.
- **transformers**: Pillow, then the model's image processor: told not to rescale and normalise for u8, as it comes for f32,
  its f32 rounded for bf16.

u8 are raw patches, for engines that normalise on their device; f32 is what transformers returns unasked; bf16 is what vLLM
hands other models.

The pictures are formulas that look to a codec as photographs do (`bench/peers/make_pictures.py`): JPEG of quality 90 with
4:2:0 sampling, and PNG. The settings are those that the models' repositories publish (`bench/peers/models`).
";

/// The whole text.
pub(crate) fn write(rows: &[Row]) -> String {
    let mut text = String::from(HEAD);
    push(&mut text, format_args!("\n{}\n{HOW}", sides(rows)));
    targets(rows, &mut text);
    let cases: Vec<&[Row]> = rows.chunk_by(|a, b| a.case == b.case).filter(|rows| rows[0].metric != ROUNDS).collect();
    for cases in cases.chunk_by(|a, b| section(&a[0]) == section(&b[0])) {
        table(cases, &mut text);
    }
    text
}

/// How many rounds, and against whom.
fn sides(rows: &[Row]) -> String {
    let (ours, rounds) = (rows.iter().find(|row| row.metric == ROUNDS))
        .map_or(("chiasm", 0.0), |row| (row.peer_name.as_str(), row.ours.unwrap_or_default()));
    let mut names: Vec<&str> = Vec::new();
    for row in rows.iter().filter(|row| row.metric != ROUNDS && row.peer_name != FLOOR) {
        if !names.contains(&row.peer_name.as_str()) {
            names.push(&row.peer_name);
        }
    }
    format!("Medians of {rounds} rounds of {ours} against {}.\n", names.join("; "))
}

fn targets(rows: &[Row], text: &mut String) {
    text.push_str("\n## Targets\n\n| case | stage | against | ours, ms | theirs, ms | ratio | target | reached |\n");
    text.push_str("|---|---|---|---|---|---|---|---|\n");
    let aimed: Vec<(&Row, f64)> = rows.iter().filter_map(|row| Some((row, row.target?))).collect();
    for (row, target) in &aimed {
        let sign = if row.peer_name == FLOOR { "≤" } else { "≥" };
        let reached = match row.ok {
            Some(true) => "yes",
            _ if row.equal == Some(false) => "**no: other bits**",
            _ => "**no**",
        };
        push(
            text,
            format_args!(
                "| {} | {} | {} | {} | {} | {} | {sign} {target} | {reached} |\n",
                row.case,
                row.metric,
                short(&row.peer_name),
                number(row.ours),
                number(row.peer),
                number(row.ratio),
            ),
        );
    }
    let missed: Vec<&Row> = aimed.iter().map(|(row, _)| *row).filter(|row| row.ok == Some(false)).collect();
    if missed.is_empty() {
        return;
    }
    text.push_str("\nWhere the time goes in what was not reached:\n\n");
    for row in missed {
        push(text, format_args!("- {}, {}, {}: {}\n", row.case, row.metric, short(&row.peer_name), profile(rows, row)));
    }
}

/// Says what took our time, and for the whole way, what would be left to gain if all but decoding cost nothing.
fn profile(rows: &[Row], missed: &Row) -> String {
    let mut case = rows.iter().filter(|row| row.case == missed.case);
    let ours = |metric: &str| case.clone().find(|row| row.metric == metric && row.ours.is_some())?.ours;
    if missed.metric != "whole" {
        let copy = case.find(|row| row.peer_name == FLOOR && row.metric == "process").and_then(|row| row.peer);
        return format!("{} ms, where one copy of the tensor takes {} ms", number(missed.ours), number(copy));
    }
    let (Some(decode), Some(process)) = (ours("decode"), ours("process")) else {
        return "not supported yet".to_owned();
    };
    let share = 100.0 * decode / (decode + process);
    let mut text = format!("decoding takes {decode:.2} ms ({share:.0} %), the rest {process:.2} ms");
    if let Some(peer) = missed.peer {
        if missed.peer_name == FLOOR {
            push(&mut text, format_args!("; the floor leaves {:.2} ms for the rest", (peer - decode).max(0.0)));
        } else {
            push(&mut text, format_args!("; with a rest of nothing the ratio would be {:.2}", peer / decode));
        }
    }
    text
}

/// All pictures of one model and format.
fn table(cases: &[&[Row]], text: &mut String) {
    let [model, format] = section(&cases[0][0]);
    push(text, format_args!("\n## {model}, {format}\n\n"));
    text.push_str("| picture | side | decode | resize | layout | process | whole | ratio | same bits |\n");
    text.push_str("|---|---|---|---|---|---|---|---|---|\n");
    for case in cases {
        let picture = parts(&case[0])[1];
        let ours = |metric: &str| case.iter().find(|row| row.metric == metric && row.ours.is_some())?.ours;
        match ours("whole") {
            Some(_) => line(text, [picture, "**chiasm**"], ours, None, ""),
            None => push(text, format_args!("| {picture} | **chiasm** | | | | | **not supported yet** | | |\n")),
        }
        let mut peers: Vec<&[Row]> = case.chunk_by(|a, b| a.peer_name == b.peer_name).collect();
        peers.sort_by_key(|rows| rows[0].peer_name != FLOOR);
        for rows in peers {
            let row = |metric: &str| rows.iter().find(|row| row.metric == metric);
            let equal = match (rows[0].equal, row(DIFFERS).and_then(|row| row.peer)) {
                (_, Some(percent)) => format!("**no**: {percent} % differ"),
                (Some(true), None) => "yes".to_owned(),
                _ => String::new(),
            };
            let ratio = row("whole").and_then(|row| row.ratio);
            line(text, ["", short(&rows[0].peer_name)], |metric| row(metric)?.peer, ratio, &equal);
        }
    }
}

fn line(text: &mut String, names: [&str; 2], time: impl Fn(&str) -> Option<f64>, ratio: Option<f64>, equal: &str) {
    let [picture, side] = names;
    push(text, format_args!("| {picture} | {side} |"));
    for stage in ["decode", "resize", "layout", "process", "whole"] {
        push(text, format_args!(" {} |", time(stage).map(|time| format!("{time:.2}")).unwrap_or_default()));
    }
    push(text, format_args!(" {} | {equal} |\n", ratio.map(|ratio| format!("{ratio:.2}")).unwrap_or_default()));
}

/// Model, picture and format of a row's case.
fn parts(row: &Row) -> [&str; 3] {
    let mut words = row.case.splitn(3, ' ');
    [(); 3].map(|()| words.next().unwrap_or_default())
}

/// What shares a table: model and format.
fn section(row: &Row) -> [&str; 2] {
    let [model, _, format] = parts(row);
    [model, format]
}

/// A peer's name without its version, but with what it lacks.
fn short(name: &str) -> &str {
    if name.contains("without") { name } else { name.split(' ').next().unwrap_or(name) }
}

fn number(number: Option<f64>) -> String {
    number.map_or_else(|| "not supported yet".to_owned(), |number| format!("{number:.2}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench_peers::pixels::{parse, rows};

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
        write(&rows(&parse(&LINES.map(str::to_owned)).unwrap(), 15))
    }

    #[test]
    fn targets_say_whether_they_are_reached_and_why_not() {
        let note = note();
        for line in [
            "Medians of 15 rounds of chiasm (avx2) against llm-multimodal 1.14.0; transformers 5.19.0 (torch 2.13.0, Pillow 13.0.0).",
            "| qwen3_vl 1920x1080.jpg u8 | whole | floor | 12.00 | 11.00 | 1.09 | ≤ 1.2 | yes |",
            "| qwen3_vl 1920x1080.jpg u8 | whole | llm-multimodal | 12.00 | 18.00 | 1.50 | ≥ 1.8 | **no** |",
            "| qwen3_vl 1920x1080.jpg u8 | resize | llm-multimodal | 1.00 | 8.00 | 8.00 | ≥ 5 | yes |",
            "| qwen2_vl 1920x1080.jpg u8 | resize | llm-multimodal | 2.00 | 8.00 | 4.00 | ≥ 5 | **no: other bits** |",
            "- qwen3_vl 1920x1080.jpg u8, whole, llm-multimodal: decoding takes 10.00 ms (83 %), the rest 2.00 ms; \
             with a rest of nothing the ratio would be 1.80",
            "- qwen2_vl 1920x1080.jpg u8, resize, llm-multimodal: 2.00 ms, where one copy of the tensor takes 1.00 ms",
        ] {
            assert!(note.lines().any(|found| found == line), "{line}\nis not in\n{note}");
        }
    }

    #[test]
    fn every_side_has_its_line_and_what_is_missing_shows() {
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
