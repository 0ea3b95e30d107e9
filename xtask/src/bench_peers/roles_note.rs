//! Makes the page `docs/benchmarks/roles.md` from its rows.

use crate::bench_peers::load;
use crate::bench_peers::page::{BY_METRIC, Table, Targets, fill, number, prompts, run_value};
use crate::bench_peers::roles::{ADDED, CPU, DYNAMO, METRICS, NULL_RELAY, SLOW_HOP, WAYS};
use crate::bench_peers::row::{OURS, ROUNDS, Row};
use crate::error::Error;

const TARGETS: Targets = Targets {
    heads: "case | metric | against | ours, µs | theirs, µs",
    is_limit: |row| row.peer_name == NULL_RELAY,
    ..BY_METRIC
};

/// Makes the page.
pub(crate) fn write(rows: &[Row]) -> Result<String, Error> {
    let slow = rows.iter().find(|row| row.metric == SLOW_HOP);
    let slow = slow.map(|slow| format!(" Of 100 hops one took {} µs or more.", number(slow.ours)));
    let cases = rows.iter().filter(|row| row.metric == ADDED).map(|row| table(rows, &row.case));
    let values = [
        ("rounds", run_value(rows, ROUNDS)),
        ("load", load::sentence(rows)),
        ("targets", TARGETS.table(rows)),
        ("slow_hop", slow.unwrap_or_default()),
        ("hop", hop(rows)),
        ("cases", cases.collect::<Vec<_>>().join("\n\n")),
        ("prompts", prompts(rows)),
    ];
    fill(include_str!("templates/roles.md"), &values)
}

/// Returns the table of the additional CPU time of split requests, which may be negative.
fn hop(rows: &[Row]) -> String {
    let signed = |value: Option<f64>| value.map_or("–".to_owned(), |value| format!("{value:.0}"));
    let lines = rows.iter().filter(|row| row.metric == ADDED);
    let lines =
        lines.map(|row| format!("{} | {} | {}", row.case, signed(row.ours), signed(row.peer)));
    Table::new(format_args!("{ADDED}, µs | {OURS} | {}", dynamo(rows))).rows(lines)
}

/// Returns a section with the table of a case: a line per metric and a column per side.
fn table(rows: &[Row], case: &str) -> String {
    let sides = [OURS, dynamo(rows)].map(|name| WAYS.map(|way| format!("{name}{way}")).join(" | "));
    let table = Table::new(format_args!("| unit | {}", sides.join(" | ")));
    let lines = METRICS.iter().filter_map(|(metric, unit)| {
        let find = |way| {
            rows.iter()
                .find(|row| row.metric == *metric && row.case.strip_suffix(way) == Some(case))
        };
        let (Some(aggregated), Some(split)) = (find(WAYS[0]), find(WAYS[1])) else { return None };
        let [a, b, c, d] = [aggregated.ours, split.ours, aggregated.peer, split.peer].map(number);
        let ratios = [aggregated, split].map(|row| {
            let ratio = row.ratio.filter(|_| *metric == CPU);
            ratio.map(|ratio| format!(" (× {})", number(Some(ratio)))).unwrap_or_default()
        });
        Some(format!("{metric} | {unit} | {a} | {b} | {c}{} | {d}{}", ratios[0], ratios[1]))
    });
    format!("## {case}\n\n{}", table.rows(lines))
}

/// Returns the peer's name with its version.
fn dynamo(rows: &[Row]) -> &str {
    rows.iter().find(|row| row.metric == ADDED).map_or(DYNAMO, |row| &row.peer_name)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench_peers::roles::{rows, tests::measurements};

    #[test]
    fn page_shows_targets_hop_sides() {
        let text = write(&rows(&measurements(0.0), 7, None)).unwrap();
        for line in [
            "Medians of 7 rounds, latencies of all rounds together.",
            "| 1k-token text, 16 clients, split | CPU per request | Dynamo 0.1 | 300 | 1800 | 6.00 \
             | ≥ 4 | yes |",
            "| 1k-token text, 1 client | engine to engine p50 | null relay | 90.0 | 20.0 | 0.75 | \
             ≤ 1 | yes |",
            "The ratio of *engine to engine* is to the null relay's time and 100 µs. Of 100 hops \
             one took 300 µs or more.",
            "| CPU added by the second hop, µs | chiasm | Dynamo 0.1 |",
            "| 1k-token text, 64 tokens streamed, 64 clients | 100 | 600 |",
            "| | unit | chiasm, aggregated | chiasm, split | Dynamo 0.1, aggregated | Dynamo 0.1, \
             split |",
            "| CPU per request | µs | 200 | 300 | 1200 (× 6.00) | 1800 (× 6.00) |",
            "| 1k-token text, split | chiasm | 20 | 0 |",
        ] {
            assert!(text.contains(&format!("{line}\n")), "{line}\n{text}");
        }
        assert_eq!(text.matches("\n## 1k-token text").count(), 4);
    }

    #[test]
    fn different_prompt_lengths_are_shown() {
        let text = write(&rows(&measurements(2.0), 7, None)).unwrap();
        assert!(text.contains("**no: other prompts**"), "{text}");
    }
}
