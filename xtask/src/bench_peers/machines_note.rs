//! Makes the page `docs/benchmarks/machines.md` from its rows.

use crate::bench_peers::load;
use crate::bench_peers::machines::{
    ADDED, DYNAMO, EXTRA_BYTES, LATENCY, LINKS, LOCAL, LOCAL_THEN_TCP, METRICS, RETURNED_BYTES,
    TENSORS, TRANSFER, has_shaped_link,
};
use crate::bench_peers::page::{BY_METRIC, Table, Targets, fill, number, prompts, run_value};
use crate::bench_peers::row::{ROUNDS, Row};
use crate::error::Error;

const TARGETS: Targets = Targets {
    is_limit: |row| !row.peer_name.starts_with(DYNAMO) && row.peer_name != TENSORS,
    ..BY_METRIC
};
const NOT_SHAPED: &str =
    "Shaped link: not measured, as it needs root and `ip` and `tc` of iproute2.\n\n";

/// Makes the page.
pub(crate) fn write(rows: &[Row]) -> Result<String, Error> {
    let cases = rows.iter().filter(|row| row.metric == LATENCY && row.peer_name == LOCAL);
    let cases =
        cases.filter_map(|row| row.case.strip_suffix(LINKS[0])).map(|case| table(rows, case));
    let values = [
        ("rounds", run_value(rows, ROUNDS)),
        ("load", load::sentence(rows)),
        ("shaped", if has_shaped_link(rows) { "" } else { NOT_SHAPED }.to_owned()),
        ("targets", TARGETS.table(rows)),
        ("new_image", new_image(rows)),
        ("cases", cases.collect::<Vec<_>>().join("\n\n")),
        ("prompts", prompts(rows)),
    ];
    fill(include_str!("templates/machines.md"), &values)
}

/// Returns the table of new images: bytes sent, latency, and the references for the latency.
fn new_image(rows: &[Row]) -> String {
    let line = |what: &str, unit: &str, value: &dyn Fn(&Row) -> Option<f64>| {
        let values = LINKS
            .map(|link| number(rows.iter().filter(|row| row.case.ends_with(link)).find_map(value)));
        format!("{what} | {unit} | {}", values.join(" | "))
    };
    let lines = [
        line(EXTRA_BYTES, "bytes", &|row| row.ours.filter(|_| row.metric == EXTRA_BYTES)),
        line(RETURNED_BYTES, "bytes", &|row| row.ours.filter(|_| row.metric == RETURNED_BYTES)),
        line(LATENCY, "ms", &|row| {
            row.ours.filter(|_| row.peer_name == LOCAL_THEN_TCP && row.metric != TRANSFER)
        }),
        line("bare TCP: transfer of the tensors' bytes", "ms", &|row| {
            row.peer.filter(|_| row.metric == TRANSFER)
        }),
        line(LOCAL_THEN_TCP, "ms", &|row| {
            row.peer.filter(|_| row.peer_name == LOCAL_THEN_TCP && row.metric != TRANSFER)
        }),
        line("that in times of the latency", "", &|row| {
            row.ratio.filter(|_| row.peer_name == LOCAL_THEN_TCP)
        }),
        line("latency p50 beside a frontend that sends tensors", "ms", &|row| {
            row.ours.filter(|_| row.peer_name == TENSORS)
        }),
        line("latency p50 of that one", "ms", &|row| row.peer.filter(|_| row.peer_name == TENSORS)),
        line("that in times of the one before", "", &|row| {
            row.ratio.filter(|_| row.peer_name == TENSORS)
        }),
    ];
    Table::new("| unit | agent, loopback | agent, shaped link").rows(lines)
}

/// Returns a section with the table of a case: a line per metric and a column per side.
fn table(rows: &[Row], case: &str) -> String {
    let [loopback, shaped] = LINKS.map(|link| format!("{case}{link}"));
    let find = |case: &str, metric: &str, peer: &str| {
        rows.iter()
            .find(|row| row.case == case && row.metric == metric && row.peer_name.starts_with(peer))
    };
    let dynamo = find(&loopback, LATENCY, DYNAMO).map_or(DYNAMO, |row| &row.peer_name);
    let table = Table::new(format_args!(
        "| unit | {LOCAL} | agent, loopback | agent, shaped link | {dynamo}"
    ));
    let lines = METRICS.iter().filter_map(|(metric, unit)| {
        let row = find(&loopback, metric, LOCAL)?;
        let shaped = find(&shaped, metric, LOCAL).and_then(|row| row.ours);
        let dynamo = find(&loopback, metric, DYNAMO).and_then(|row| row.peer);
        let numbers = [row.peer, row.ours, shaped, dynamo].map(number);
        Some(format!("{metric} | {unit} | {}", numbers.join(" | ")))
    });
    let added = find(&loopback, ADDED, "").map(|row| {
        let shaped = find(&shaped, ADDED, "").and_then(|row| row.ours);
        format!("{ADDED} | µs | – | {} | {} | –", number(row.ours), number(shaped))
    });
    format!("## {}\n\n{}", case.trim_end_matches(", "), table.rows(lines.chain(added)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench_peers::machines::{rows, tests::measurements};

    #[test]
    fn page_shows_targets_with_all_cases() {
        let text = write(&rows(&measurements(&LINKS), 7, None)).unwrap();
        for line in [
            "| 1k-token text, 1 client, loopback | CPU per request | local engine | 1.50 | 1.00 | \
             1.50 | ≤ 1.6 | yes |",
            "| 1k-token text, 1 client, shaped link | CPU per request | Dynamo 0.1 | 1.50 | 4.50 | \
             3.00 | ≥ 4 | **no** |",
            "| 1k-token text, 1 client, loopback | added p50 | null gRPC echo | 300 | 50.0 | 2.00 \
             | ≤ 1 | **no** |",
            "| bytes from the agent | bytes | 5000 | 5000 |",
            "| local engine, then bare TCP | ms | 6.00 | 6.00 |",
            "| | unit | local engine | agent, loopback | agent, shaped link | Dynamo 0.1 |",
            "| CPU per output token | µs | 1.00 | 1.50 | 1.50 | 4.50 |",
            "| distinct images, data URI, 1 client, shaped link | latency p50 | tensors in place \
             of files | 10.0 | 19.0 | 1.90 | ≥ 1.8 | yes |",
            "| latency p50 of that one | ms | 19.0 | 19.0 |",
        ] {
            assert!(text.contains(line), "{line}\n{text}");
        }
        assert!(!text.contains("not measured"));
    }

    #[test]
    fn missing_link_is_named() {
        let text = write(&rows(&measurements(&LINKS[..1]), 7, None)).unwrap();
        assert!(text.contains("Shaped link: not measured"), "{text}");
        assert!(text.contains("| CPU per request | ms | 1.00 | 1.50 | – | 4.50 |"), "{text}");
    }
}
