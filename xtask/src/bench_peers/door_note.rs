//! Makes the page `docs/benchmarks/door.md` from its rows.

use crate::bench_peers::door::{BASELINE, METRICS, ORIGIN, OUR_ENGINES, PER_CPU, TOKENS_PER_CPU};
use crate::bench_peers::load;
use crate::bench_peers::page::{
    BY_METRIC, Table, Targets, fill, number, peers, prompts, reached, run_value, sides,
};
use crate::bench_peers::row::{ROUNDS, Row};
use crate::error::Error;

const TARGETS: Targets = Targets {
    heads: "case | against | ours | theirs",
    cells: |row| format!("{} | {}", row.case, row.peer_name),
    ..BY_METRIC
};

/// Makes the page.
pub(crate) fn write(rows: &[Row]) -> Result<String, Error> {
    let peers = peers(rows.iter().filter(|row| is_rate(row)));
    let engines = rows.iter().find(|row| row.metric == OUR_ENGINES).and_then(|row| row.ours);
    let cases = rows.chunk_by(|a, b| a.case == b.case).filter(|case| case.iter().any(is_rate)).map(
        |case| {
            // Requests to an origin are only relevant for images from URLs.
            sides(
                case,
                METRICS
                    .iter()
                    .filter(|metric| metric.name != ORIGIN || case[0].case.contains("URL")),
            )
        },
    );
    let values = [
        ("rounds", run_value(rows, ROUNDS)),
        ("peers", peers.join(" and ")),
        ("load", load::sentence(rows)),
        (
            "engines",
            engines
                .map(|engines| format!(" Engines before chiasm: {engines}."))
                .unwrap_or_default(),
        ),
        ("targets", TARGETS.table(rows.iter().filter(|row| row.peer_name != BASELINE))),
        (
            "baseline",
            if peers.contains(&BASELINE) {
                format!("\n\n{}", baseline(rows))
            } else {
                String::new()
            },
        ),
        ("prompts", prompts(rows)),
        ("cases", cases.collect::<Vec<_>>().join("\n\n")),
    ];
    fill(include_str!("templates/door.md"), &values)
}

/// Returns the section that compares CPU times with another commit.
pub(crate) fn baseline(rows: &[Row]) -> String {
    let table = Table::new("case | unit | ours | baseline | ratio | target | reached");
    let table = table.rows(rows.iter().filter(|row| row.peer_name == BASELINE).filter_map(|row| {
        let Row { case, unit, target: Some(target), .. } = row else { return None };
        let [ours, peer] = [row.ours, row.peer].map(number);
        let ratio = row.ratio.map_or("–".to_owned(), |ratio| format!("{ratio:.3}"));
        let reached = reached(row, BY_METRIC.outputs);
        Some(format!("{case} | {unit} | {ours} | {peer} | {ratio} | ≤ {target} | {reached}"))
    }));
    format!("## CPU time of the frontend against another commit's\n\n{table}")
}

fn is_rate(row: &Row) -> bool {
    [PER_CPU, TOKENS_PER_CPU].contains(&row.metric.as_str())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench_peers::door;

    #[test]
    fn page_shows_targets_lengths_metrics() {
        let text = write(&door::rows(&door::tests::measurements(0.0), 7, 3, None)).unwrap();
        assert!(
            text.contains(
                "Medians of 7 rounds, latencies of all rounds together, against vllm-rs \
                           0.1 and Dynamo 0.2."
            ),
            "{text}"
        );
        assert!(
            text.contains(
                "| repeated image, URL, 1 client | vllm-rs 0.1 | 1000 | 100 | 10.0 | ≥ 8 | yes |"
            ),
            "{text}"
        );
        assert!(
            text.contains(
                "| 1k-token text, 16 clients | Dynamo 0.2 | 1000 | 500 | 2.00 | ≥ 3 | **no** |"
            ),
            "{text}"
        );
        assert!(text.contains("| 1k-token text | Dynamo 0.2 | 20 | 0 |"), "{text}");
        assert!(
            text.contains(
                "## 1k-token text, 1 client\n\n| | unit | chiasm | vllm-rs 0.1 | Dynamo 0.2 \
                 |\n|---|---|---|---|---|\n"
            ),
            "{text}"
        );
        assert!(
            text.contains("| CPU per request | ms | 1.00 | 10.0 (× 10.0) | 2.00 (× 2.00) |"),
            "{text}"
        );
        assert_eq!(
            text.matches("| origin requests per request | requests | 1.00 | 1.00 | 1.00 |").count(),
            2
        );
    }

    #[test]
    fn baseline_has_its_own_table() {
        let rows = door::rows(&door::tests::against_a_baseline(), 7, 3, None);
        let table = baseline(&rows);
        assert!(
            table.contains("| streaming, 64 clients | µs | 1.10 | 1.00 | 1.010 | ≤ 1.03 | yes |"),
            "{table}"
        );
        let text = write(&rows).unwrap();
        assert!(text.contains(&table) && text.contains("Engines before chiasm: 3."), "{text}");
        assert!(!text.contains("≥ 1.03"), "{text}");
    }

    #[test]
    fn different_prompt_lengths_are_shown() {
        let text = write(&door::rows(&door::tests::measurements(2.0), 7, 3, None)).unwrap();
        assert!(text.contains("**no: other prompts**"), "{text}");
    }
}
