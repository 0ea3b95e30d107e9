//! What the notes of several benches are written with.

use std::fmt::Write;

use crate::bench_peers::door::{DIFFERENT, Metric};
use crate::bench_peers::row::Row;

/// Adds a piece.
pub(crate) fn push(text: &mut String, line: std::fmt::Arguments<'_>) {
    // Writing to a String can't fail.
    let _ = text.write_fmt(line);
}

/// Three digits, which are what a run with several processes can tell.
pub(crate) fn number(number: Option<f64>) -> String {
    match number {
        None => "–".to_owned(),
        Some(number) if number >= 100.0 => format!("{number:.0}"),
        Some(number) if number >= 10.0 => format!("{number:.1}"),
        Some(number) => format!("{number:.2}"),
    }
}

/// Whether a row has reached its target.
pub(crate) fn reached(row: &Row) -> &'static str {
    match row.ok {
        Some(true) => "yes",
        _ if row.equal == Some(false) => "**no: other prompts**",
        _ => "**no**",
    }
}

/// Those that these rows compare us with, in their order.
pub(crate) fn peers<'a>(rows: impl Iterator<Item = &'a Row>) -> Vec<&'a str> {
    let mut peers = Vec::new();
    for row in rows {
        if !peers.contains(&row.peer_name.as_str()) {
            peers.push(&row.peer_name);
        }
    }
    peers
}

/// The rows of a case: a line per metric, a column per side, the peers' with the ratio.
pub(crate) fn table<'a>(case: &[Row], metrics: impl Iterator<Item = &'a Metric>, text: &mut String) {
    let metrics: Vec<&Metric> = metrics.filter(|metric| case.iter().any(|row| row.metric == metric.name)).collect();
    let peers = peers(case.iter().filter(|row| metrics.iter().any(|metric| metric.name == row.metric)));
    push(text, format_args!("\n## {}\n\n| | unit | chiasm | {} |\n|---|---|---|", case[0].case, peers.join(" | ")));
    text.push_str(&"---|".repeat(peers.len()));
    text.push('\n');
    for Metric { name, unit, .. } in metrics {
        let ours = number(case.iter().find(|row| row.metric == *name).and_then(|row| row.ours));
        push(text, format_args!("| {name} | {unit} | {ours} |"));
        for peer in &peers {
            let row = case.iter().find(|row| row.metric == *name && row.peer_name == *peer);
            let ratio =
                row.and_then(|row| row.ratio).map_or(String::new(), |ratio| format!(" (× {})", number(Some(ratio))));
            push(text, format_args!(" {}{ratio} |", number(row.and_then(|row| row.peer))));
        }
        text.push('\n');
    }
}

/// How many prompts' lengths were compared.
pub(crate) fn lengths(rows: &[Row], text: &mut String) {
    text.push_str("\n## Prompts\n\n| case | against | compared | of another length |\n|---|---|---|---|\n");
    for row in rows.iter().filter(|row| row.metric == DIFFERENT) {
        let [compared, different] =
            [row.ours, row.peer].map(|count| count.map_or("–".to_owned(), |count| count.to_string()));
        push(text, format_args!("| {} | {} | {compared} | {different} |\n", row.case, row.peer_name));
    }
}
