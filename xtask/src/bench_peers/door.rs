//! Converts the results of the program `door` to rows, with the project's targets.

use crate::bench_peers::load::Load;
use crate::bench_peers::measured::{
    DIFFERENT, Measurement, Metric, case_name, cases, counts_alike, lengths, peers, value,
};
use crate::bench_peers::row::{Mandatory, OURS, Row, Target};
use crate::error::Error;

/// The name of the benchmark in rows and files, and of its program.
pub(crate) const BENCH: &str = "door";
/// The name of a `chiasm` of another commit.
pub(crate) const BASELINE: &str = "chiasm (baseline)";
/// The beginnings of the names of the peers.
pub(crate) const PEERS: [&str; 2] = [VLLM_RS, DYNAMO];
const VLLM_RS: &str = "vllm-rs";
const DYNAMO: &str = "Dynamo";
/// The metric of the number of engines of each `chiasm`.
pub(crate) const OUR_ENGINES: &str = "engines of chiasm";
/// The metric that has targets against peers.
pub(crate) const PER_CPU: &str = "requests per CPU second";
/// The metric of requests to the origin of an image.
pub(crate) const ORIGIN: &str = "origin requests per request";
/// The metric that replaces `PER_CPU` for long streamed answers.
pub(crate) const TOKENS_PER_CPU: &str = "output tokens per CPU second";
/// The metric of CPU time that is compared with the baseline.
const CPU: &str = "CPU per request";
/// The metric that replaces `CPU` for long streamed answers.
const TOKEN_CPU: &str = "CPU per output token";
/// Our CPU time as a part of the baseline's, measured in pairs of rounds.
const SHARE: &str = "our share of its CPU time";
/// The case of the mean over all cases.
const ALL_CASES: &str = "all cases, geometric mean";
/// The maximum of our CPU time as a multiple of the baseline's.
const BASELINE_TARGET: f64 = 1.03;

/// The cases that a run must contain, with their numbers of clients. Dynamo takes part in all but
/// the last.
const CASES: [(&str, &[u32]); 7] = [
    ("repeated image, data URI", &[1, 16, 64]),
    ("repeated image, URL", &[1, 16, 64]),
    ("distinct images, data URI", &[1, 16, 64]),
    ("1k-token text", &[1, 16, 64]),
    ("1k-token text, shared system prompt", &[1, 16, 64]),
    ("conversation", &[1, 16, 64]),
    (STREAMING, &[64]),
];
const STREAMING: &str = "streaming";

/// The metrics in the order of pages.
pub(crate) const METRICS: [Metric; 14] = [
    Metric { name: PER_CPU, unit: "requests/s", more_is_better: Some(true) },
    Metric { name: CPU, unit: "ms", more_is_better: Some(false) },
    Metric { name: "requests per second", unit: "requests/s", more_is_better: Some(true) },
    Metric { name: TOKENS_PER_CPU, unit: "tokens/s", more_is_better: Some(true) },
    Metric { name: TOKEN_CPU, unit: "µs", more_is_better: Some(false) },
    Metric { name: "output tokens per second", unit: "tokens/s", more_is_better: None },
    Metric { name: "events per output token", unit: "events", more_is_better: None },
    Metric { name: "engine to client p50", unit: "µs", more_is_better: Some(false) },
    Metric { name: "engine to client p99", unit: "µs", more_is_better: Some(false) },
    Metric { name: "latency p50", unit: "ms", more_is_better: Some(false) },
    Metric { name: "latency p99", unit: "ms", more_is_better: Some(false) },
    Metric { name: ORIGIN, unit: "requests", more_is_better: None },
    // Shows the bottleneck: on a saturated machine it is the busier of frontend and engines.
    Metric { name: "engines", unit: "cores", more_is_better: None },
    // The load generator has one thread.
    Metric { name: "load generator", unit: "cores", more_is_better: None },
];

/// The minimum ratios to peers: the beginning of the case's name, that of the peer's name, and the
/// ratio.
const TARGETS: [(&str, &str, f64); 7] = [
    ("repeated image", VLLM_RS, 8.0),
    ("repeated image", DYNAMO, 4.0),
    ("distinct images", VLLM_RS, 1.8),
    ("1k-token text", VLLM_RS, 1.3),
    ("1k-token text", DYNAMO, 3.0),
    ("conversation", VLLM_RS, 1.3),
    ("conversation", DYNAMO, 3.0),
];

pub(crate) const MANDATORY: [Mandatory; 3] = [
    Mandatory {
        cases: &[
            "repeated image, data URI",
            "repeated image, URL",
            "distinct images, data URI",
            "1k-token text",
            "1k-token text, shared system prompt",
            "conversation",
        ],
        ends: &[", 1 client", ", 16 clients", ", 64 clients"],
        lines: &[(PER_CPU, VLLM_RS), (PER_CPU, DYNAMO), ("load generator", VLLM_RS)],
    },
    Mandatory {
        cases: &["repeated image, data URI", "repeated image, URL", "distinct images, data URI"],
        ends: &[""],
        lines: &[(DIFFERENT, VLLM_RS)],
    },
    Mandatory {
        cases: &["1k-token text", "1k-token text, shared system prompt", "conversation"],
        ends: &[""],
        lines: &[(DIFFERENT, VLLM_RS), (DIFFERENT, DYNAMO)],
    },
];

/// Returns all rows of a run. `load` is the load at its start.
pub(crate) fn rows(
    measurements: &[Measurement],
    rounds: u32,
    engines: u32,
    load: Option<Load>,
) -> Vec<Row> {
    let engines =
        Row { ours: Some(f64::from(engines)), ..row("all", OUR_ENGINES, "engines", OURS) };
    let mut rows = vec![Row::rounds(BENCH, rounds, OURS), engines];
    rows.extend(load.map(|load| load.row(BENCH)));
    rows.extend(lengths(BENCH, measurements));
    let peers = peers(measurements);
    for (case, clients) in cases(measurements) {
        for peer in &peers {
            let peer_rows = METRICS
                .iter()
                .filter_map(|metric| compare(measurements, (case, clients), peer, metric));
            rows.extend(peer_rows);
        }
    }
    rows.extend(mean(&rows));
    rows
}

/// Returns the row of a metric if the peer was measured.
fn compare(
    measurements: &[Measurement],
    case: (&str, u32),
    peer: &str,
    metric: &Metric,
) -> Option<Row> {
    let (case, clients) = case;
    let value = |side, metric| value(measurements, (case, Some(clients)), side, metric);
    let Metric { name, unit, .. } = *metric;
    let theirs = value(peer, name)?;
    let row =
        row(&case_name(case, clients), name, unit, peer).numbers(value(OURS, name), Some(theirs));
    let row = Row { equal: counts_alike(measurements, case, peer), ..row };
    if peer == BASELINE && [CPU, TOKEN_CPU].contains(&name) {
        return Some(row.judged(value(peer, SHARE), Some(Target::AtMost(BASELINE_TARGET))));
    }
    let ratio = value(OURS, name).and_then(|ours| metric.ratio(ours, theirs));
    let is_target = |it: &&(&str, &str, f64)| {
        name == PER_CPU && case.starts_with(it.0) && peer.starts_with(it.1)
    };
    let target = TARGETS.iter().find(is_target).map(|it| Target::AtLeast(it.2));
    Some(row.judged(ratio, target))
}

/// Returns the row with the geometric mean of the ratios to a baseline, which varies less than each
/// ratio.
fn mean(rows: &[Row]) -> Option<Row> {
    let ratios: Vec<f64> = rows
        .iter()
        .filter(|row| row.peer_name == BASELINE && row.target.is_some())
        .filter_map(|row| row.ratio)
        .collect();
    let mean = (ratios.iter().map(|ratio| ratio.ln()).sum::<f64>() / ratios.len() as f64).exp();
    let row =
        row(ALL_CASES, CPU, "", BASELINE).judged(Some(mean), Some(Target::AtMost(BASELINE_TARGET)));
    (!ratios.is_empty()).then_some(row)
}

/// Checks that all mandatory comparisons with `others` were measured. `others` are beginnings of
/// names.
///
/// # Errors
/// `MissingRow` for the first missing comparison.
pub(crate) fn check_complete(rows: &[Row], others: &[&str]) -> Result<(), Error> {
    for (case, clients) in CASES {
        let [per_cpu, cpu] =
            if case == STREAMING { [TOKENS_PER_CPU, TOKEN_CPU] } else { [PER_CPU, CPU] };
        for (clients, other) in
            clients.iter().flat_map(|clients| others.iter().map(move |other| (*clients, *other)))
        {
            let case = case_name(case, clients);
            let metric = if other == BASELINE { cpu } else { per_cpu };
            let is_measured = |row: &Row| {
                row.case == case
                    && row.metric == metric
                    && row.peer_name.starts_with(other)
                    && [row.ours, row.peer, row.ratio]
                        .iter()
                        .all(|number| number.is_some_and(|number| number > 0.0))
            };
            let takes_part = other != DYNAMO || per_cpu == PER_CPU;
            if takes_part && !rows.iter().any(is_measured) {
                return Err(Error::MissingRow {
                    bench: BENCH,
                    case,
                    metric,
                    peer: other.to_owned(),
                });
            }
        }
    }
    Ok(())
}

fn row(case: &str, metric: &str, unit: &'static str, peer: &str) -> Row {
    Row::new(BENCH, case, metric, unit, peer)
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::bench_peers::row::tests::find;

    /// Returns measurements of two peers. vllm-rs takes ten times our CPU time. Dynamo takes twice
    /// our CPU time and does not report the length of prompts with images.
    pub(crate) fn measurements(different: f64) -> Vec<Measurement> {
        let mut measurements = Vec::new();
        let mut add = |case: &str, clients, side: &str, metric: &str, value| {
            measurements.push(Measurement::new(case, clients, side, metric, value));
        };
        let cases = ["repeated image, URL", "1k-token text"];
        for case in cases {
            for peer in ["vllm-rs 0.1", "Dynamo 0.2"] {
                if peer.starts_with("vllm") || case == cases[1] {
                    add(case, None, peer, "compared", 20.0);
                    add(case, None, peer, "different", different);
                }
            }
        }
        for case in cases {
            for clients in [1, 16] {
                for (side, cpu) in [("chiasm", 1.0), ("vllm-rs 0.1", 10.0), ("Dynamo 0.2", 2.0)] {
                    add(case, Some(clients), side, PER_CPU, 1e3 / cpu);
                    add(case, Some(clients), side, "CPU per request", cpu);
                    add(case, Some(clients), side, ORIGIN, 1.0);
                }
            }
        }
        measurements
    }

    /// Returns the measurements of a run with a baseline. Our side takes 10 % more CPU time by the
    /// medians and 1 % more by pairs.
    pub(crate) fn against_a_baseline() -> Vec<Measurement> {
        let mut measurements = Vec::new();
        for (case, clients) in CASES {
            let [per_cpu, cpu] =
                if case == STREAMING { [TOKENS_PER_CPU, TOKEN_CPU] } else { [PER_CPU, CPU] };
            for &clients in clients {
                for (side, metric, value) in [
                    (OURS, per_cpu, 10.0),
                    (OURS, cpu, 1.1),
                    (BASELINE, per_cpu, 11.0),
                    (BASELINE, cpu, 1.0),
                    (BASELINE, SHARE, 1.01),
                ] {
                    measurements.push(Measurement::new(case, Some(clients), side, metric, value));
                }
            }
        }
        measurements
    }

    #[test]
    fn baseline_is_compared_in_pairs() {
        let mut measurements = against_a_baseline();
        let rows_within = rows(&measurements, 7, 3, None);
        let cpu = find(&rows_within, "streaming, 64 clients", TOKEN_CPU, BASELINE);
        assert_eq!((cpu.ours, cpu.peer, cpu.ratio), (Some(1.1), Some(1.0), Some(1.01)));
        assert_eq!((cpu.target, cpu.ok, cpu.unit), (Some(1.03), Some(true), "µs"));
        measurements.iter_mut().filter(|it| it.metric == SHARE).for_each(|it| it.value = 1.04);
        let rows_over = rows(&measurements, 7, 3, None);
        assert_eq!(find(&rows_over, "1k-token text, 1 client", CPU, BASELINE).ok, Some(false));
        assert_eq!(rows_over.iter().filter(|row| row.target.is_some()).count(), 20);
        assert_eq!(
            (find(&rows_over, ALL_CASES, CPU, BASELINE).ratio, rows_over.last().unwrap().ok),
            (Some(1.04), Some(false))
        );
    }

    #[test]
    fn missing_comparison_is_named() {
        let mut measurements = against_a_baseline();
        check_complete(&rows(&measurements, 7, 3, None), &[BASELINE]).unwrap();
        let error = check_complete(&rows(&measurements, 7, 3, None), &["vllm-rs"]).unwrap_err();
        assert!(error.to_string().contains("vllm-rs"), "{error}");
        let mut without_pairs = against_a_baseline();
        without_pairs.retain(|it| it.case != STREAMING || it.metric != SHARE);
        let error = check_complete(&rows(&without_pairs, 7, 3, None), &[BASELINE]).unwrap_err();
        assert!(error.to_string().contains("'streaming, 64 clients'"), "{error}");
        measurements.retain(|it| it.case != STREAMING || it.side == OURS);
        let error = check_complete(&rows(&measurements, 7, 3, None), &[BASELINE]).unwrap_err();
        assert!(error.to_string().contains("'streaming, 64 clients'"), "{error}");
    }

    #[test]
    fn targets_depend_on_peer() {
        let rows = rows(&measurements(0.0), 7, 3, None);
        let vllm = find(&rows, "repeated image, URL, 1 client", PER_CPU, "vllm-rs");
        assert_eq!((vllm.ours, vllm.peer, vllm.ratio), (Some(1000.0), Some(100.0), Some(10.0)));
        assert_eq!((vllm.target, vllm.ok, vllm.equal), (Some(8.0), Some(true), Some(true)));
        let dynamo = find(&rows, "repeated image, URL, 16 clients", PER_CPU, "Dynamo");
        assert_eq!(
            (dynamo.ratio, dynamo.target, dynamo.ok, dynamo.equal),
            (Some(2.0), Some(4.0), Some(false), None)
        );
        let text = find(&rows, "1k-token text, 16 clients", PER_CPU, "Dynamo");
        assert_eq!((text.target, text.equal), (Some(3.0), Some(true)));
        let cpu = find(&rows, "1k-token text, 1 client", "CPU per request", "vllm-rs");
        assert_eq!((cpu.ratio, cpu.target), (Some(10.0), None));
        let origin = find(&rows, "repeated image, URL, 1 client", ORIGIN, "Dynamo");
        assert_eq!((origin.ours, origin.ratio), (Some(1.0), None));
    }

    #[test]
    fn different_prompt_lengths_reach_no_target() {
        let rows = rows(&measurements(3.0), 7, 3, None);
        let vllm = find(&rows, "1k-token text, 1 client", PER_CPU, "vllm-rs");
        assert_eq!((vllm.ratio, vllm.ok, vllm.equal), (Some(10.0), Some(false), Some(false)));
        let lengths = find(&rows, "1k-token text", DIFFERENT, "vllm-rs");
        assert_eq!(
            (lengths.ours, lengths.peer, lengths.equal),
            (Some(20.0), Some(3.0), Some(false))
        );
        assert!(!rows.iter().any(|row| row.metric == DIFFERENT
            && row.case.starts_with("rep")
            && row.peer_name.starts_with('D')));
    }
}
