//! Makes the page `docs/benchmarks/serve.md` from its rows.

use crate::bench_peers::load;
use crate::bench_peers::page::{BY_METRIC, fill, prompts, run_value, sides};
use crate::bench_peers::row::{ROUNDS, Row};
use crate::bench_peers::serve::{METRICS, RATE};
use crate::error::Error;

/// Makes the page.
pub(crate) fn write(rows: &[Row]) -> Result<String, Error> {
    let cases = rows
        .chunk_by(|a, b| a.case == b.case)
        .filter(|case| case.iter().any(|row| row.metric == RATE));
    let cases: Vec<String> = cases.map(|case| sides(case, METRICS.iter())).collect();
    let values = [
        ("rounds", run_value(rows, ROUNDS)),
        ("load", load::sentence(rows)),
        ("targets", BY_METRIC.table(rows)),
        ("cases", cases.join("\n\n")),
        ("prompts", prompts(rows)),
    ];
    fill(include_str!("templates/serve.md"), &values)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench_peers::serve::{rows, tests::measurements};

    #[test]
    fn page_shows_targets_sides_prompts() {
        let text = write(&rows(&measurements(0.0), 5, None)).unwrap();
        for line in [
            "5 rounds.",
            "| vLLM's defaults | requests per second | engines alone | 40.0 | 40.0 | 0.95 | ≥ 0.9 \
             | yes |",
            "| 8192 tokens per step | TTFT p90 | vllm serve 0.1 | 10.0 | 40.0 | 4.00 | ≥ 3 | yes |",
            "| | unit | chiasm | vllm serve 0.1 | vllm-rs 0.1 | engines alone |",
            "| frontend's CPU per request | ms | 10.0 | 40.0 (× 4.00) | 20.0 (× 2.00) | – |",
            "| vLLM's defaults | vllm-rs 0.1 | 480 | 0 |",
        ] {
            assert!(text.contains(&format!("{line}\n")), "{line}\n{text}");
        }
    }

    #[test]
    fn different_prompt_lengths_are_shown() {
        let text = write(&rows(&measurements(2.0), 5, None)).unwrap();
        assert!(text.contains("**no: other prompts**"), "{text}");
    }
}
