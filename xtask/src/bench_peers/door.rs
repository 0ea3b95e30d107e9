//! From what the program `door` measured to rows, with the targets that the project has set itself.

use serde::Deserialize;

use crate::bench_peers::load::Load;
use crate::bench_peers::row::{Mandatory, Row, rounded};
use crate::error::Error;

/// The bench's name in rows and files, and its program's.
pub(crate) const BENCH: &str = "door";
/// Our side.
pub(crate) const OURS: &str = "chiasm";
/// The metric that tells how many rounds the medians are of.
pub(crate) const ROUNDS: &str = "rounds";
/// Prompts whose lengths were compared (ours), and those with another one (the peer's).
pub(crate) const DIFFERENT: &str = "prompts of another length";
/// What has targets.
pub(crate) const PER_CPU: &str = "requests per CPU second";
/// How often the origin of an image was asked for it.
pub(crate) const ORIGIN: &str = "origin requests per request";
/// How busy the clients were, which have one thread.
pub(crate) const GENERATOR: &str = "load generator";

/// One side's result for one case.
#[derive(Debug, Deserialize)]
pub(crate) struct Measurement {
    case: String,
    /// None for what does not depend on it.
    clients: Option<u32>,
    side: String,
    metric: String,
    value: f64,
}

/// How a metric becomes rows.
pub(crate) struct Metric {
    pub(crate) name: &'static str,
    pub(crate) unit: &'static str,
    /// None where neither is better.
    more_is_better: Option<bool>,
}

/// In the order in which they are told.
pub(crate) const METRICS: [Metric; 7] = [
    Metric { name: PER_CPU, unit: "requests/s", more_is_better: Some(true) },
    Metric { name: "CPU per request", unit: "ms", more_is_better: Some(false) },
    Metric { name: "requests per second", unit: "requests/s", more_is_better: Some(true) },
    Metric { name: "latency p50", unit: "ms", more_is_better: Some(false) },
    Metric { name: "latency p99", unit: "ms", more_is_better: Some(false) },
    Metric { name: ORIGIN, unit: "requests", more_is_better: None },
    Metric { name: GENERATOR, unit: "cores", more_is_better: None },
];

/// By how much we want to beat a peer: the start of a case's name, the start of the peer's, the ratio.
const TARGETS: [(&str, &str, f64); 5] = [
    ("repeated image", VLLM_RS, 8.0),
    ("repeated image", DYNAMO, 4.0),
    ("distinct images", VLLM_RS, 1.8),
    ("1k-token text", VLLM_RS, 1.3),
    ("1k-token text", DYNAMO, 3.0),
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
        ],
        lines: &[(PER_CPU, VLLM_RS), (PER_CPU, DYNAMO), (GENERATOR, VLLM_RS)],
    },
    Mandatory {
        cases: &["repeated image, data URI", "repeated image, URL", "distinct images, data URI"],
        lines: &[(DIFFERENT, VLLM_RS)],
    },
    Mandatory {
        cases: &["1k-token text", "1k-token text, shared system prompt"],
        lines: &[(DIFFERENT, VLLM_RS), (DIFFERENT, DYNAMO)],
    },
];

const VLLM_RS: &str = "vllm-rs";
const DYNAMO: &str = "Dynamo";

/// Parses the lines.
pub(crate) fn parse(lines: &[String]) -> Result<Vec<Measurement>, Error> {
    let what = "what door run printed";
    let parse = |line: &String| serde_json::from_str(line);
    lines.iter().map(parse).collect::<Result<_, _>>().map_err(|source| Error::Json { what: what.to_owned(), source })
}

/// All rows of a run that began under some load.
pub(crate) fn rows(measurements: &[Measurement], rounds: u32, load: Option<Load>) -> Vec<Row> {
    let rounds = Some(f64::from(rounds));
    let mut rows = vec![Row { ours: rounds, peer: rounds, ..row("all", ROUNDS, "rounds", OURS) }];
    rows.extend(load.map(|load| load.row(BENCH)));
    let value = |case: &str, clients: Option<u32>, side: &str, metric: &str| {
        let it = measurements
            .iter()
            .find(|it| (&*it.case, it.clients, &*it.side, &*it.metric) == (case, clients, side, metric));
        it.map(|it| it.value)
    };
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
            let name = format!("{case}, {clients} client{}", if clients == 1 { "" } else { "s" });
            for Metric { name: metric, unit, more_is_better } in METRICS {
                let [ours, theirs] = [OURS, peer].map(|side| value(case, Some(clients), side, metric));
                let ratio = ours.zip(theirs).zip(more_is_better);
                let ratio = ratio.map(|((ours, theirs), more)| if more { ours / theirs } else { theirs / ours });
                let target =
                    TARGETS.iter().find(|(c, p, _)| metric == PER_CPU && case.starts_with(c) && peer.starts_with(p));
                let target = target.map(|&(_, _, target)| target);
                let reached = |target: f64| ratio.is_some_and(|ratio| ratio >= target) && equal != Some(false);
                rows.push(Row {
                    ours: ours.map(rounded),
                    peer: theirs.map(rounded),
                    ratio: ratio.map(rounded),
                    target,
                    ok: target.map(reached),
                    equal,
                    ..row(&name, metric, unit, peer)
                });
            }
        }
    }
    rows
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

    fn find<'a>(rows: &'a [Row], case: &str, metric: &str, peer: &str) -> &'a Row {
        rows.iter().find(|row| row.case == case && row.metric == metric && row.peer_name.starts_with(peer)).unwrap()
    }

    #[test]
    fn each_peer_has_a_target_of_its_own_for_each_number_of_clients() {
        let rows = rows(&measurements(0.0), 7, None);
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
        let rows = rows(&measurements(3.0), 7, None);
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
