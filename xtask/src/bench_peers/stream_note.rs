//! Writes `docs/benchmarks/stream.md` from its rows and nothing else.

use crate::bench_peers::door::{METRICS, ORIGIN};
use crate::bench_peers::load;
use crate::bench_peers::measured::distinct;
use crate::bench_peers::page::{BY_METRIC, Targets, fill, of_run, prompts, sides};
use crate::bench_peers::row::{ROUNDS, Row};
use crate::error::Error;

/// Rates are to be reached. Costs and delays have limits, which the ratio tells a part of.
const TARGETS: Targets =
    Targets { is_limit: |row| !row.metric.starts_with("output tokens"), ..BY_METRIC };

/// Returns the whole page.
pub(crate) fn write(rows: &[Row]) -> Result<String, Error> {
    let cases = distinct(rows.iter().map(|row| &row.case).filter(|case| case.contains(" stream")));
    let cases = cases.into_iter().map(|case| {
        let rows: Vec<Row> = rows.iter().filter(|row| row.case == *case).cloned().collect();
        // There are no images that an origin would be asked for.
        sides(&rows, METRICS.iter().filter(|metric| metric.name != ORIGIN))
    });
    let values = [
        ("rounds", of_run(rows, ROUNDS)),
        ("load", load::sentence(rows)),
        ("targets", TARGETS.table(rows)),
        ("cases", cases.collect::<Vec<_>>().join("\n\n")),
        ("prompts", prompts(rows)),
    ];
    fill(include_str!("templates/stream.md"), &values)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench_peers::stream::{rows, tests::measurements};

    #[test]
    fn the_note_tells_targets_and_each_case() {
        let text = write(&rows(&measurements(), 5, None)).unwrap();
        assert!(text.contains("Medians of 5 rounds"), "{text}");
        for line in [
            "| plain, 64 streams | output tokens per CPU second | Dynamo 0.2 | 100000 | 25000 | 4.00 | ≥ 5 | **no** |",
            "| plain, 512 streams | engine to client p99 | null relay | 100 | 50.0 | 2.00 | ≤ 2 | yes |",
            "| | unit | chiasm | vllm-rs 0.1 | Dynamo 0.2 | null relay | chiasm (baseline) |",
            "| CPU per output token | µs | 10.0 | 20.0 (× 2.00) | 40.0 (× 4.00) | 5.00 (× 0.50) | 15.0 (× 1.50) |",
        ] {
            assert!(text.contains(line), "{line}\n{text}");
        }
        assert_eq!(text.matches("\n## logprobs, ").count(), 3);
    }
}
