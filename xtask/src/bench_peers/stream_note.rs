//! Makes the page `docs/benchmarks/stream.md` from its rows.

use crate::bench_peers::door::{METRICS, ORIGIN};
use crate::bench_peers::load;
use crate::bench_peers::measured::distinct;
use crate::bench_peers::page::{BY_METRIC, Targets, fill, prompts, run_value, sides};
use crate::bench_peers::row::{ROUNDS, Row};
use crate::error::Error;

/// The table of targets. Targets of rates are minima; those of costs and delays are maxima.
const TARGETS: Targets =
    Targets { is_limit: |row| !row.metric.starts_with("output tokens"), ..BY_METRIC };

/// Makes the page.
pub(crate) fn write(rows: &[Row]) -> Result<String, Error> {
    let cases = distinct(rows.iter().map(|row| &row.case).filter(|case| case.contains(" stream")));
    let cases = cases.into_iter().map(|case| {
        let rows: Vec<Row> = rows.iter().filter(|row| row.case == *case).cloned().collect();
        // Streams have no images, so there are no requests to an origin.
        sides(&rows, METRICS.iter().filter(|metric| metric.name != ORIGIN))
    });
    let values = [
        ("rounds", run_value(rows, ROUNDS)),
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
    fn page_shows_targets_with_all_cases() {
        let text = write(&rows(&measurements(), 5, None)).unwrap();
        assert!(text.contains("Medians of 5 rounds"), "{text}");
        for line in [
            "| plain, 64 streams | output tokens per CPU second | Dynamo 0.2 | 100000 | 25000 | \
             4.00 | ≥ 5 | **no** |",
            "| plain, 512 streams | engine to client p99 | null relay | 100 | 50.0 | 2.00 | ≤ 2 | \
             yes |",
            "| | unit | chiasm | vllm-rs 0.1 | Dynamo 0.2 | null relay | chiasm (baseline) |",
            "| CPU per output token | µs | 10.0 | 20.0 (× 2.00) | 40.0 (× 4.00) | 5.00 (× 0.50) | \
             15.0 (× 1.50) |",
        ] {
            assert!(text.contains(line), "{line}\n{text}");
        }
        assert_eq!(text.matches("\n## logprobs, ").count(), 3);
    }
}
