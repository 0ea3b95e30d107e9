//! Converts the results of the program `serve` to rows, with the project's targets.

use crate::bench_peers::load::Load;
use crate::bench_peers::measured::{
    DIFFERENT, Measurement, Metric, counts_alike, distinct, lengths, value,
};
use crate::bench_peers::row::{Mandatory, OURS, Row, Target};

/// The name of the benchmark in rows and files, and of its program.
pub(crate) const BENCH: &str = "serve";
/// Engines without a frontend, which are a limit and not a peer.
pub(crate) const CEILING: &str = "engines alone";
const VLLM_SERVE: &str = "vllm serve";
const VLLM_RS: &str = "vllm-rs";
/// The cases, each with the flags of all its engines.
pub(crate) const CASES: [(&str, &[&str]); 2] =
    [("vLLM's defaults", &[]), ("8192 tokens per step", &["--max-num-batched-tokens", "8192"])];
pub(crate) const RATE: &str = "requests per second";
const TTFT_P50: &str = "TTFT p50";
const TTFT_P90: &str = "TTFT p90";
/// Our rate as a part of the other side's, measured in pairs of rounds.
const RATE_SHARE: &str = "our part of its requests per second";

/// The metrics in the order of pages.
pub(crate) const METRICS: [Metric; 7] = [
    Metric { name: RATE, unit: "requests/s", more_is_better: Some(true) },
    Metric { name: TTFT_P50, unit: "ms", more_is_better: Some(false) },
    Metric { name: TTFT_P90, unit: "ms", more_is_better: Some(false) },
    Metric { name: "cached prompt tokens", unit: "%", more_is_better: None },
    Metric { name: "frontend's CPU per request", unit: "ms", more_is_better: Some(false) },
    Metric { name: "engines' CPU per request", unit: "ms", more_is_better: Some(false) },
    Metric { name: "CPU of the other sides", unit: "cores", more_is_better: None },
];

/// The minimum ratios: metric, the beginning of the peer's name, and the ratio.
const TARGETS: [(&str, &str, f64); 3] =
    [(RATE, CEILING, 0.9), (TTFT_P50, VLLM_SERVE, 3.0), (TTFT_P90, VLLM_SERVE, 3.0)];

pub(crate) const MANDATORY: [Mandatory; 1] = [Mandatory {
    cases: &[CASES[0].0, CASES[1].0],
    ends: &[""],
    lines: &[
        (RATE, CEILING),
        (RATE, VLLM_SERVE),
        (RATE, VLLM_RS),
        (TTFT_P50, CEILING),
        (TTFT_P50, VLLM_SERVE),
        (TTFT_P50, VLLM_RS),
        (TTFT_P90, CEILING),
        (TTFT_P90, VLLM_SERVE),
        (TTFT_P90, VLLM_RS),
        (DIFFERENT, VLLM_SERVE),
        (DIFFERENT, VLLM_RS),
    ],
}];

/// Returns all rows of a run. `load` is the load at its start.
pub(crate) fn rows(measurements: &[Measurement], rounds: u32, load: Option<Load>) -> Vec<Row> {
    let mut rows = vec![Row::rounds(BENCH, rounds, OURS)];
    rows.extend(load.map(|load| load.row(BENCH)));
    let lengths = lengths(BENCH, measurements);
    let theirs = measurements.iter().filter(|it| it.side != OURS);
    for (case, side) in distinct(theirs.map(|it| (&*it.case, &*it.side))) {
        rows.extend(METRICS.iter().filter_map(|metric| compare(measurements, case, side, metric)));
        rows.extend(
            lengths.iter().filter(|row| row.case == case && row.peer_name == side).cloned(),
        );
    }
    rows
}

/// Returns the row of a metric if both sides were measured.
fn compare(measurements: &[Measurement], case: &str, side: &str, metric: &Metric) -> Option<Row> {
    let value = |side, metric| value(measurements, (case, None), side, metric);
    let Metric { name, unit, .. } = *metric;
    let (ours, peer) = value(OURS, name).zip(value(side, name))?;
    // The rates are compared in pairs, because the load of the machine differs between rounds.
    let ratio = if name == RATE { value(side, RATE_SHARE) } else { metric.ratio(ours, peer) };
    let target = TARGETS.iter().find(|(target, peer, _)| *target == name && side.starts_with(peer));
    let row = row(case, name, unit, side).numbers(Some(ours), Some(peer));
    let row = Row { equal: counts_alike(measurements, case, side), ..row };
    Some(row.judged(ratio, target.map(|it| Target::AtLeast(it.2))))
}

fn row(case: &str, metric: &str, unit: &'static str, peer: &str) -> Row {
    Row::new(BENCH, case, metric, unit, peer)
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::bench_peers::row::{self, missing};

    /// Returns the measurements of a run. The engines alone are as fast as with us, vllm-rs takes
    /// twice the time, `vllm serve` four times.
    pub(crate) fn measurements(different: f64) -> Vec<Measurement> {
        let mut measurements = Vec::new();
        let sides = [(OURS, 1.0), ("vllm serve 0.1", 4.0), ("vllm-rs 0.1", 2.0), (CEILING, 1.0)];
        for ((case, _), (side, time)) in
            CASES.iter().flat_map(|case| sides.map(|side| (case, side)))
        {
            let mut values: Vec<(&str, f64)> =
                METRICS.iter().map(|metric| (metric.name, 10.0 * time)).collect();
            values[0].1 = 40.0 / time;
            if side == CEILING {
                values.retain(|(metric, _)| !metric.starts_with("frontend"));
            }
            if side != OURS {
                values.push((RATE_SHARE, 0.95 * time));
            }
            if side.starts_with("vllm") {
                values.extend([("compared", 480.0), ("different", different)]);
            }
            let new = |(metric, value)| Measurement::new(case, None, side, metric, value);
            measurements.extend(values.into_iter().map(new));
        }
        measurements
    }

    fn find<'a>(rows: &'a [Row], metric: &str, peer: &str) -> &'a Row {
        row::tests::find(rows, CASES[0].0, metric, peer)
    }

    #[test]
    fn ceiling_limits_rate_while_vllm_serve_limits_ttft() {
        let rows = rows(&measurements(0.0), 5, None);
        let ceiling = find(&rows, RATE, CEILING);
        assert_eq!(
            (ceiling.ours, ceiling.peer, ceiling.ratio),
            (Some(40.0), Some(40.0), Some(0.95))
        );
        assert_eq!((ceiling.target, ceiling.ok, ceiling.equal), (Some(0.9), Some(true), None));
        for metric in [TTFT_P50, TTFT_P90] {
            let vllm = find(&rows, metric, VLLM_SERVE);
            assert_eq!(
                (vllm.ratio, vllm.target, vllm.ok, vllm.equal),
                (Some(4.0), Some(3.0), Some(true), Some(true))
            );
            assert_eq!(find(&rows, metric, VLLM_RS).target, None);
        }
        assert!(
            !rows.iter().any(|row| row.peer_name == CEILING && row.metric.starts_with("frontend"))
        );
        assert_eq!(missing(&rows, &MANDATORY), [""; 0]);
    }

    #[test]
    fn different_prompt_lengths_reach_no_target() {
        let rows = rows(&measurements(1.0), 5, None);
        assert_eq!(find(&rows, TTFT_P50, VLLM_SERVE).ok, Some(false));
        assert_eq!(find(&rows, DIFFERENT, VLLM_SERVE).equal, Some(false));
        assert_eq!(find(&rows, RATE, CEILING).ok, Some(true));
    }
}
