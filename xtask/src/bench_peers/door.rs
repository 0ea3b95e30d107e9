//! Turns what the program `door` measured into rows, with the targets that the project has set itself.

use serde::Deserialize;

use crate::bench_peers::load::Load;
use crate::bench_peers::row::{Mandatory, Row, rounded};
use crate::error::Error;

/// The bench's name in rows and files, and its program's.
pub(crate) const BENCH: &str = "door";
/// Our side.
pub(crate) const OURS: &str = "chiasm";
/// A `chiasm` of another commit.
pub(crate) const BASELINE: &str = "chiasm (baseline)";
/// How the names of the others begin.
pub(crate) const PEERS: [&str; 2] = [VLLM_RS, DYNAMO];
const VLLM_RS: &str = "vllm-rs";
const DYNAMO: &str = "Dynamo";
/// The metric that tells how many rounds the medians are of.
pub(crate) const ROUNDS: &str = "rounds";
/// How many engines each `chiasm` stands before.
pub(crate) const OUR_ENGINES: &str = "engines of chiasm";
/// Prompts whose lengths were compared (ours), and those with another one (the peer's).
pub(crate) const DIFFERENT: &str = "prompts of another length";
/// The metric that has targets against peers.
pub(crate) const PER_CPU: &str = "requests per CPU second";
/// How often the origin of an image was asked for it.
pub(crate) const ORIGIN: &str = "origin requests per request";
/// The metric that takes the place of `PER_CPU` where answers are long and streamed.
pub(crate) const TOKENS_PER_CPU: &str = "output tokens per CPU second";
/// The metric of CPU time that is compared with the baseline's.
const CPU: &str = "CPU per request";
const TOKEN_CPU: &str = "CPU per output token";
/// Measured in pairs: our CPU time as a part of the baseline's.
const SHARE: &str = "our share of its CPU time";
/// The case that stands for all of them.
const ALL_CASES: &str = "all cases, geometric mean";
/// Most that our CPU time may be, in times of the baseline's.
const BASELINE_TARGET: f64 = 1.03;

/// What has to come out of a run, for each number of clients; Dynamo takes part in all but the last.
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

/// One side's result for one case.
#[derive(Debug, Deserialize)]
pub(crate) struct Measurement {
    pub(crate) case: String,
    /// Number of clients that asked at once; none for a value that does not depend on it.
    pub(crate) clients: Option<u32>,
    pub(crate) side: String,
    pub(crate) metric: String,
    pub(crate) value: f64,
}

/// How a metric becomes rows.
pub(crate) struct Metric {
    pub(crate) name: &'static str,
    pub(crate) unit: &'static str,
    /// None where neither is better.
    pub(crate) more_is_better: Option<bool>,
}

/// All metrics, in the order in which reports show them.
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
    // Who waited for whom: on a machine that is full, the busier of frontend and engines was waited for.
    Metric { name: "engines", unit: "cores", more_is_better: None },
    // One thread.
    Metric { name: "load generator", unit: "cores", more_is_better: None },
];

/// Ratios by which we want to beat peers: the start of a case's name, the start of the peer's, the ratio.
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
            "repeated image, data URI, 1 client",
            "repeated image, data URI, 16 clients",
            "repeated image, data URI, 64 clients",
            "repeated image, URL, 1 client",
            "repeated image, URL, 16 clients",
            "repeated image, URL, 64 clients",
            "distinct images, data URI, 1 client",
            "distinct images, data URI, 16 clients",
            "distinct images, data URI, 64 clients",
            "1k-token text, 1 client",
            "1k-token text, 16 clients",
            "1k-token text, 64 clients",
            "1k-token text, shared system prompt, 1 client",
            "1k-token text, shared system prompt, 16 clients",
            "1k-token text, shared system prompt, 64 clients",
            "conversation, 1 client",
            "conversation, 16 clients",
            "conversation, 64 clients",
        ],
        lines: &[(PER_CPU, VLLM_RS), (PER_CPU, DYNAMO), ("load generator", VLLM_RS)],
    },
    Mandatory {
        cases: &["repeated image, data URI", "repeated image, URL", "distinct images, data URI"],
        lines: &[(DIFFERENT, VLLM_RS)],
    },
    Mandatory {
        cases: &["1k-token text", "1k-token text, shared system prompt", "conversation"],
        lines: &[(DIFFERENT, VLLM_RS), (DIFFERENT, DYNAMO)],
    },
];

/// Parses the lines.
pub(crate) fn parse(lines: &[String]) -> Result<Vec<Measurement>, Error> {
    let what = "what door run printed";
    let parse = |line: &String| serde_json::from_str(line);
    lines.iter().map(parse).collect::<Result<_, _>>().map_err(|source| Error::Json { what: what.to_owned(), source })
}

/// All rows of a run that began under some load.
pub(crate) fn rows(measurements: &[Measurement], rounds: u32, engines: u32, load: Option<Load>) -> Vec<Row> {
    let (rounds, engines) = (Some(f64::from(rounds)), Some(f64::from(engines)));
    let mut rows = vec![
        Row { ours: rounds, peer: rounds, ..row("all", ROUNDS, "rounds", OURS) },
        Row { ours: engines, ..row("all", OUR_ENGINES, "engines", OURS) },
    ];
    rows.extend(load.map(|load| load.row(BENCH)));
    let value =
        |case: &str, clients: Option<u32>, side: &str, metric: &str| value(measurements, (case, clients), side, metric);
    let (mut cases, mut peers): (Vec<(&str, Option<u32>)>, Vec<&str>) = Default::default();
    for it in measurements {
        if !cases.contains(&(&it.case, it.clients)) {
            cases.push((&it.case, it.clients));
        }
        if it.side != OURS && !peers.contains(&&*it.side) {
            peers.push(&it.side);
        }
    }
    for (case, clients) in cases {
        for peer in &peers {
            let different = value(case, None, peer, "different");
            let equal = different.map(|different| different == 0.0);
            let Some(clients) = clients else {
                rows.extend(different.map(|different| Row {
                    ours: value(case, None, peer, "compared"),
                    peer: Some(different),
                    equal,
                    ..row(case, DIFFERENT, "prompts", peer)
                }));
                continue;
            };
            for Metric { name: metric, unit, more_is_better } in METRICS {
                let [ours, theirs] = [OURS, peer].map(|side| value(case, Some(clients), side, metric));
                if theirs.is_none() {
                    continue;
                }
                let cpu = row(&name(case, clients), metric, unit, peer);
                let cpu = Row { ours: ours.map(rounded), peer: theirs.map(rounded), equal, ..cpu };
                if *peer == BASELINE && [CPU, TOKEN_CPU].contains(&metric) {
                    let ratio = value(case, Some(clients), peer, SHARE);
                    let ok = ratio.is_some_and(|ratio| ratio <= BASELINE_TARGET) && equal != Some(false);
                    let target = Some(BASELINE_TARGET);
                    rows.push(Row { ratio: ratio.map(rounded), target, ok: Some(ok), ..cpu });
                    continue;
                }
                let ratio = ours.zip(theirs).zip(more_is_better);
                let ratio = ratio.map(|((ours, theirs), more)| if more { ours / theirs } else { theirs / ours });
                let target =
                    TARGETS.iter().find(|(c, p, _)| metric == PER_CPU && case.starts_with(c) && peer.starts_with(p));
                let target = target.map(|&(_, _, target)| target);
                let reached = |target: f64| ratio.is_some_and(|ratio| ratio >= target) && equal != Some(false);
                rows.push(Row { ratio: ratio.map(rounded), target, ok: target.map(reached), ..cpu });
            }
        }
    }
    rows.extend(mean(&rows));
    rows
}

/// What a baseline's ratios come to together, which scatters less than each of them.
fn mean(rows: &[Row]) -> Option<Row> {
    let ratios: Vec<f64> = rows
        .iter()
        .filter(|row| row.peer_name == BASELINE && row.target.is_some())
        .filter_map(|row| row.ratio)
        .collect();
    let mean = (ratios.iter().map(|ratio| ratio.ln()).sum::<f64>() / ratios.len() as f64).exp();
    let (target, ok) = (Some(BASELINE_TARGET), Some(mean <= BASELINE_TARGET));
    let ratio = Some(rounded(mean));
    (!ratios.is_empty()).then(|| Row { ratio, target, ok, ..row(ALL_CASES, CPU, "", BASELINE) })
}

/// Whether all that has to be compared with `others`, which are the beginnings of names, was.
///
/// # Errors
/// `MissingRow` for the first that was not.
pub(crate) fn complete(rows: &[Row], others: &[&str]) -> Result<(), Error> {
    for (case, clients) in CASES {
        let [per_cpu, cpu] = if case == STREAMING { [TOKENS_PER_CPU, TOKEN_CPU] } else { [PER_CPU, CPU] };
        for (clients, other) in clients.iter().flat_map(|clients| others.iter().map(move |other| (*clients, *other))) {
            let (case, metric) = (name(case, clients), if other == BASELINE { cpu } else { per_cpu });
            let is_there = |row: &Row| {
                row.case == case
                    && row.metric == metric
                    && row.peer_name.starts_with(other)
                    && [row.ours, row.peer, row.ratio].iter().all(|number| number.is_some_and(|number| number > 0.0))
            };
            let takes_part = other != DYNAMO || per_cpu == PER_CPU;
            if takes_part && !rows.iter().any(is_there) {
                return Err(Error::MissingRow { bench: BENCH, case, metric, peer: other.to_owned() });
            }
        }
    }
    Ok(())
}

/// What was measured of a side.
pub(crate) fn value(
    measurements: &[Measurement],
    (case, clients): (&str, Option<u32>),
    side: &str,
    metric: &str,
) -> Option<f64> {
    let is = |it: &&Measurement| (&*it.case, it.clients, &*it.side, &*it.metric) == (case, clients, side, metric);
    measurements.iter().find(is).map(|it| it.value)
}

/// The cases with the numbers of clients that asked at once, in their order.
pub(crate) fn cases(measurements: &[Measurement]) -> Vec<(&str, u32)> {
    let mut cases = Vec::new();
    for (case, clients) in measurements.iter().filter_map(|it| Some((&*it.case, it.clients?))) {
        if !cases.contains(&(case, clients)) {
            cases.push((case, clients));
        }
    }
    cases
}

/// A row for each case and side whose prompts' lengths were compared with the first side's.
pub(crate) fn lengths(bench: &'static str, measurements: &[Measurement]) -> Vec<Row> {
    let different = measurements.iter().filter(|it| it.metric == "different");
    let row = |it: &Measurement| Row {
        metric: DIFFERENT.to_owned(),
        unit: "prompts",
        ours: value(measurements, (&it.case, None), &it.side, "compared"),
        peer: Some(it.value),
        equal: Some(it.value == 0.0),
        ..Row::milliseconds(bench, &it.case, &it.side)
    };
    different.map(row).collect()
}

/// Whether a side counted the same tokens as the first; none where it counts others.
pub(crate) fn counts_alike(measurements: &[Measurement], case: &str, side: &str) -> Option<bool> {
    value(measurements, (case, None), side, "different").map(|different| different == 0.0)
}

/// A case's name with the number of clients.
pub(crate) fn name(case: &str, clients: u32) -> String {
    format!("{case}, {clients} client{}", if clients == 1 { "" } else { "s" })
}

fn row(case: &str, metric: &str, unit: &'static str, peer: &str) -> Row {
    Row { metric: metric.to_owned(), unit, ..Row::milliseconds(BENCH, case, peer) }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// Two peers: vllm-rs takes ten times our CPU time, Dynamo twice and does not say how long prompts with images are.
    pub(crate) fn measurements(different: f64) -> Vec<Measurement> {
        let mut measurements = Vec::new();
        let mut add = |case: &str, clients, side: &str, metric: &str, value| {
            let [case, side, metric] = [case, side, metric].map(str::to_owned);
            measurements.push(Measurement { case, clients, side, metric, value });
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

    /// All that a run with a baseline measures, a tenth dearer than it by the medians and a hundredth by pairs.
    pub(crate) fn against_a_baseline() -> Vec<Measurement> {
        let mut measurements = Vec::new();
        for (case, clients) in CASES {
            let [per_cpu, cpu] = if case == STREAMING { [TOKENS_PER_CPU, TOKEN_CPU] } else { [PER_CPU, CPU] };
            for &clients in clients {
                for (side, metric, value) in [
                    (OURS, per_cpu, 10.0),
                    (OURS, cpu, 1.1),
                    (BASELINE, per_cpu, 11.0),
                    (BASELINE, cpu, 1.0),
                    (BASELINE, SHARE, 1.01),
                ] {
                    let [case, side, metric] = [case, side, metric].map(str::to_owned);
                    measurements.push(Measurement { case, clients: Some(clients), side, metric, value });
                }
            }
        }
        measurements
    }

    #[test]
    fn a_baseline_is_compared_in_pairs_and_may_not_be_exceeded() {
        let mut measurements = against_a_baseline();
        let all = rows(&measurements, 7, 3, None);
        let cpu = find(&all, "streaming, 64 clients", TOKEN_CPU, BASELINE);
        assert_eq!((cpu.ours, cpu.peer, cpu.ratio), (Some(1.1), Some(1.0), Some(1.01)));
        assert_eq!((cpu.target, cpu.ok, cpu.unit), (Some(1.03), Some(true), "µs"));
        measurements.iter_mut().filter(|it| it.metric == SHARE).for_each(|it| it.value = 1.04);
        let all = rows(&measurements, 7, 3, None);
        assert_eq!(find(&all, "1k-token text, 1 client", CPU, BASELINE).ok, Some(false));
        assert_eq!(all.iter().filter(|row| row.target.is_some()).count(), 20);
        assert_eq!((find(&all, ALL_CASES, CPU, BASELINE).ratio, all.last().unwrap().ok), (Some(1.04), Some(false)));
    }

    #[test]
    fn a_run_that_lacks_a_comparison_names_it() {
        let mut measurements = against_a_baseline();
        complete(&rows(&measurements, 7, 3, None), &[BASELINE]).unwrap();
        let error = complete(&rows(&measurements, 7, 3, None), &["vllm-rs"]).unwrap_err();
        assert!(error.to_string().contains("vllm-rs"), "{error}");
        let mut without_pairs = against_a_baseline();
        without_pairs.retain(|it| it.case != STREAMING || it.metric != SHARE);
        let error = complete(&rows(&without_pairs, 7, 3, None), &[BASELINE]).unwrap_err();
        assert!(error.to_string().contains("'streaming, 64 clients'"), "{error}");
        measurements.retain(|it| it.case != STREAMING || it.side == OURS);
        let error = complete(&rows(&measurements, 7, 3, None), &[BASELINE]).unwrap_err();
        assert!(error.to_string().contains("'streaming, 64 clients'"), "{error}");
    }

    fn find<'a>(rows: &'a [Row], case: &str, metric: &str, peer: &str) -> &'a Row {
        rows.iter().find(|row| row.case == case && row.metric == metric && row.peer_name.starts_with(peer)).unwrap()
    }

    #[test]
    fn each_peer_has_a_target_of_its_own_for_each_number_of_clients() {
        let rows = rows(&measurements(0.0), 7, 3, None);
        let vllm = find(&rows, "repeated image, URL, 1 client", PER_CPU, "vllm-rs");
        assert_eq!((vllm.ours, vllm.peer, vllm.ratio), (Some(1000.0), Some(100.0), Some(10.0)));
        assert_eq!((vllm.target, vllm.ok, vllm.equal), (Some(8.0), Some(true), Some(true)));
        let dynamo = find(&rows, "repeated image, URL, 16 clients", PER_CPU, "Dynamo");
        assert_eq!((dynamo.ratio, dynamo.target, dynamo.ok, dynamo.equal), (Some(2.0), Some(4.0), Some(false), None));
        let text = find(&rows, "1k-token text, 16 clients", PER_CPU, "Dynamo");
        assert_eq!((text.target, text.equal), (Some(3.0), Some(true)));
        let cpu = find(&rows, "1k-token text, 1 client", "CPU per request", "vllm-rs");
        assert_eq!((cpu.ratio, cpu.target), (Some(10.0), None));
        let origin = find(&rows, "repeated image, URL, 1 client", ORIGIN, "Dynamo");
        assert_eq!((origin.ours, origin.ratio), (Some(1.0), None));
    }

    #[test]
    fn prompts_of_another_length_reach_no_target() {
        let rows = rows(&measurements(3.0), 7, 3, None);
        let vllm = find(&rows, "1k-token text, 1 client", PER_CPU, "vllm-rs");
        assert_eq!((vllm.ratio, vllm.ok, vllm.equal), (Some(10.0), Some(false), Some(false)));
        let lengths = find(&rows, "1k-token text", DIFFERENT, "vllm-rs");
        assert_eq!((lengths.ours, lengths.peer, lengths.equal), (Some(20.0), Some(3.0), Some(false)));
        assert!(
            !rows
                .iter()
                .any(|row| row.metric == DIFFERENT && row.case.starts_with("rep") && row.peer_name.starts_with('D'))
        );
    }
}
