//! Converts the results of the program `door routers` to rows, with the project's targets.

use crate::bench_peers::load::Load;
use crate::bench_peers::measured::{
    self, DIFFERENT, Measurement, case_name, cases, counts_alike, distinct, lengths,
};
use crate::bench_peers::row::{Mandatory, Row, Target};

/// The name of the benchmark in rows and files.
pub(crate) const BENCH: &str = "upstream";
/// The kinds of upstream that Chiasm uses: the ends of names of cases, and the names of sides.
pub(crate) const WAYS: [(&str, &str); 2] =
    [(", http", "chiasm, http"), (", vllm+http", "chiasm, vllm+http")];
/// The metrics of a peer's CPU time as a multiple of ours, measured in pairs; one per way.
const CPU_MULTIPLES: [&str; 2] =
    ["CPU in times of chiasm, http's", "CPU in times of chiasm, vllm+http's"];
/// The metric of the number of conversations about shared images.
pub(crate) const CONVERSATIONS: &str = "conversations";
pub(crate) const CPU: &str = "CPU per request";
/// The metric of the share of prompt tokens that upstreams found in their caches.
pub(crate) const CACHED: &str = "cached prompt tokens";
/// The name of the side without a router, the limit for a cache of the same total size.
pub(crate) const COMBINED_UPSTREAM: &str = "one upstream with the memory of all";
/// The beginnings of the names of the peers.
pub(crate) const CACHE_AWARE: &str = "SMG cache_aware";
const ROUND_ROBIN: &str = "SMG round_robin";
const QUIET: &str = "SMG quiet";
const DYNAMO: &str = "Dynamo";
/// The peers that are limits.
pub(crate) const FLOORS: [&str; 2] = [ENVOY, NGINX];
const ENVOY: &str = "Envoy";
const NGINX: &str = "nginx";

/// The metrics of a router with units, in the order of the page.
pub(crate) const METRICS: [(&str, &str); 6] = [
    (CPU, "µs"),
    ("requests per second", "requests/s"),
    ("latency p50", "ms"),
    ("latency p99", "ms"),
    ("engines", "cores"),
    ("load generator", "cores"),
];
/// The metrics of cases with shared images.
pub(crate) const SHARED_METRICS: [(&str, &str); 4] = [
    (CACHED, "%"),
    ("requests at the busiest upstream", "%"),
    ("time to answer p50", "ms"),
    ("time to answer p90", "ms"),
];

/// The beginning of a case's name, that of a peer's name, and the minimum ratio or, for a floor,
/// the maximum ratio.
const TARGETS: [(&str, &str, f64); 4] = [
    ("1k-token text", CACHE_AWARE, 2.0),
    ("1k-token text", DYNAMO, 5.0),
    ("1k-token text", ENVOY, 4.0),
    ("repeated image", CACHE_AWARE, 2.0),
];

/// The mandatory comparisons of CPU time.
const CPU_LINES: [(&str, &str); 6] = [
    (CPU, CACHE_AWARE),
    (CPU, ROUND_ROBIN),
    (CPU, QUIET),
    (CPU, DYNAMO),
    (CPU, ENVOY),
    (CPU, NGINX),
];
/// The mandatory comparisons of prompt lengths.
const LENGTH_LINES: [(&str, &str); 4] =
    [(DIFFERENT, CACHE_AWARE), (DIFFERENT, ROUND_ROBIN), (DIFFERENT, ENVOY), (DIFFERENT, NGINX)];
/// The mandatory comparisons of cached tokens.
const CACHE_LINES: [(&str, &str); 4] =
    [(CACHED, CACHE_AWARE), (CACHED, ROUND_ROBIN), (CACHED, NGINX), (CACHED, COMBINED_UPSTREAM)];

pub(crate) const MANDATORY: [Mandatory; 3] = [
    Mandatory {
        cases: &[
            "1k-token text, 1 client",
            "1k-token text, 16 clients",
            "1k-token text, 64 clients",
            "1k-token text, streamed, 16 clients",
            "1k-token text, streamed, 64 clients",
            "repeated image, data URI, 1 client",
            "repeated image, data URI, 16 clients",
            "distinct images, data URI, 1 client",
            "distinct images, data URI, 16 clients",
        ],
        ends: &[WAYS[0].0, WAYS[1].0],
        lines: &CPU_LINES,
    },
    Mandatory {
        cases: &[
            "1k-token text",
            "1k-token text, streamed",
            "repeated image, data URI",
            "distinct images, data URI",
        ],
        ends: &[""],
        lines: &LENGTH_LINES,
    },
    Mandatory {
        cases: &[
            "shared images, conversations, 2 upstreams",
            "shared images, conversations, 4 upstreams",
            "shared images, single questions, 2 upstreams",
            "shared images, single questions, 4 upstreams",
        ],
        ends: &[WAYS[0].0, WAYS[1].0],
        lines: &CACHE_LINES,
    },
];

/// Returns all rows of a run. `load` is the load at its start.
pub(crate) fn rows(
    measurements: &[Measurement],
    rounds: u32,
    conversations: u32,
    load: Option<Load>,
) -> Vec<Row> {
    let conversations = Some(f64::from(conversations));
    let mut rows = vec![
        Row::rounds(BENCH, rounds, "all"),
        row("all", CONVERSATIONS, "conversations", "all").numbers(conversations, conversations),
    ];
    rows.extend(load.map(|load| load.row(BENCH)));
    let peers = distinct(measurements.iter().map(|it| &*it.side).filter(|side| !is_ours(side)));
    for (case, clients) in cases(measurements) {
        for ((way, ours), cpu_multiple) in WAYS.into_iter().zip(CPU_MULTIPLES) {
            let comparisons = peers.iter().map(|peer| Comparison {
                measurements,
                case,
                clients,
                way,
                ours,
                cpu_multiple,
                peer,
            });
            rows.extend(comparisons.flat_map(|it| it.rows()));
        }
    }
    rows.extend(lengths(BENCH, measurements).into_iter().filter(|row| !is_ours(&row.peer_name)));
    rows
}

fn is_ours(side: &str) -> bool {
    side.starts_with("chiasm")
}

/// A comparison of one of our sides with a peer in a case.
struct Comparison<'a> {
    measurements: &'a [Measurement],
    case: &'a str,
    clients: u32,
    way: &'static str,
    ours: &'static str,
    /// The entry of [`CPU_MULTIPLES`] for our side.
    cpu_multiple: &'static str,
    peer: &'a str,
}

impl Comparison<'_> {
    fn rows(&self) -> Vec<Row> {
        let is_shared = self.case.starts_with("shared");
        let metrics = if is_shared { &SHARED_METRICS[..] } else { &METRICS };
        let mut rows = Vec::new();
        for &(metric, unit) in metrics {
            let (Some(ours), Some(peer)) =
                (self.value(self.ours, metric), self.value(self.peer, metric))
            else {
                continue;
            };
            // The program reports CPU time in ms.
            let scale = if metric == CPU { 1e3 } else { 1.0 };
            let row = row(&self.name(is_shared), metric, unit, self.peer);
            let row = row.numbers(Some(scale * ours), Some(scale * peer));
            rows.push(if metric == CPU { self.judged(row) } else { row });
        }
        rows
    }

    /// Adds the ratio, which was measured in pairs, and the target to a row of CPU time.
    fn judged(&self, row: Row) -> Row {
        let Some(multiple) = self.value(self.peer, self.cpu_multiple) else { return row };
        let is_floor = FLOORS.iter().any(|floor| self.peer.starts_with(floor));
        let ratio = if is_floor { multiple.recip() } else { multiple };
        let is_target = |(case, peer, _): &&(&str, &str, f64)| {
            self.case.starts_with(case) && self.peer.starts_with(peer)
        };
        let target = TARGETS.iter().find(is_target).map(|it| it.2);
        let target = target.map(if is_floor { Target::AtMost } else { Target::AtLeast });
        let equal = counts_alike(self.measurements, self.case, self.peer);
        Row { equal, ..row }.judged(Some(ratio), target)
    }

    fn value(&self, side: &str, metric: &str) -> Option<f64> {
        measured::value(self.measurements, (self.case, Some(self.clients)), side, metric)
    }

    fn name(&self, is_shared: bool) -> String {
        // With shared images the number of clients follows from the number of upstreams.
        let case =
            if is_shared { self.case.to_owned() } else { case_name(self.case, self.clients) };
        case + self.way
    }
}

fn row(case: &str, metric: &str, unit: &'static str, peer: &str) -> Row {
    Row::new(BENCH, case, metric, unit, peer)
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::bench_peers::row::check_complete;
    use crate::bench_peers::row::tests::find;

    const SIDES: [(&str, f64); 8] = [
        ("chiasm, http", 0.1),
        ("chiasm, vllm+http", 0.4),
        ("SMG cache_aware 0.1", 0.3),
        ("SMG round_robin 0.1", 0.25),
        ("SMG quiet 0.1", 0.2),
        ("Envoy 0.2", 0.05),
        ("nginx 0.3", 0.04),
        ("Dynamo 0.4", 2.0),
    ];

    /// Returns the measurements of a run: the CPU times of `SIDES`, and twice as many cached tokens
    /// for our sides as for others.
    pub(crate) fn measurements(different: f64) -> Vec<Measurement> {
        let mut measurements = Vec::new();
        let mut add = |case: &str, clients, side: &str, metric: &str, value| {
            measurements.push(Measurement::new(case, clients, side, metric, value));
        };
        let cases: [(&str, &[u32]); 4] = [
            ("1k-token text", &[1, 16, 64]),
            ("1k-token text, streamed", &[16, 64]),
            ("repeated image, data URI", &[1, 16]),
            ("distinct images, data URI", &[1, 16]),
        ];
        for (case, clients) in cases {
            for (side, cpu) in SIDES {
                if !is_ours(side) && !side.starts_with(DYNAMO) {
                    add(case, None, side, "compared", 20.0);
                    add(case, None, side, "different", different);
                }
                for &clients in clients {
                    add(case, Some(clients), side, CPU, cpu);
                    add(case, Some(clients), side, "latency p50", 10.0 * cpu);
                    for (metric, (_, ours)) in CPU_MULTIPLES.iter().zip(SIDES) {
                        add(case, Some(clients), side, metric, cpu / ours);
                    }
                }
            }
        }
        let kinds = ["conversations", "single questions"];
        for (kind, upstreams) in
            kinds.into_iter().flat_map(|kind| [2, 4].map(|upstreams| (kind, upstreams)))
        {
            let sides = SIDES
                .iter()
                .map(|(side, _)| *side)
                .filter(|side| !["D", "E", QUIET].iter().any(|other| side.starts_with(other)))
                .chain([COMBINED_UPSTREAM]);
            for side in sides {
                let cached = if is_ours(side) { 80.0 } else { 40.0 };
                add(
                    &format!("shared images, {kind}, {upstreams} upstreams"),
                    Some(32 * upstreams),
                    side,
                    CACHED,
                    cached,
                );
            }
        }
        measurements
    }

    #[test]
    fn peers_have_minimum_while_floor_has_maximum() {
        let rows = rows(&measurements(0.0), 7, 1_000, None);
        let smg = find(&rows, "1k-token text, 16 clients, http", CPU, CACHE_AWARE);
        assert_eq!((smg.ours, smg.peer, smg.ratio), (Some(100.0), Some(300.0), Some(3.0)));
        assert_eq!((smg.target, smg.ok, smg.equal), (Some(2.0), Some(true), Some(true)));
        let smg = find(&rows, "repeated image, data URI, 1 client, vllm+http", CPU, CACHE_AWARE);
        assert_eq!((smg.ratio, smg.target, smg.ok), (Some(0.75), Some(2.0), Some(false)));
        let envoy = find(&rows, "1k-token text, streamed, 64 clients, http", CPU, ENVOY);
        assert_eq!((envoy.ratio, envoy.target, envoy.ok), (Some(2.0), Some(4.0), Some(true)));
        let envoy = find(&rows, "1k-token text, 1 client, vllm+http", CPU, ENVOY);
        assert_eq!((envoy.ratio, envoy.ok), (Some(8.0), Some(false)));
        let dynamo = find(&rows, "1k-token text, 1 client, vllm+http", CPU, DYNAMO);
        assert_eq!(
            (dynamo.ratio, dynamo.target, dynamo.ok, dynamo.equal),
            (Some(5.0), Some(5.0), Some(true), None)
        );
        for (case, peer) in
            [("distinct images, data URI, 1 client, http", CACHE_AWARE), (&*smg.case, NGINX)]
        {
            assert_eq!(find(&rows, case, CPU, peer).target, None);
        }
        let shared = find(
            &rows,
            "shared images, single questions, 4 upstreams, vllm+http",
            CACHED,
            CACHE_AWARE,
        );
        assert_eq!((shared.ours, shared.peer, shared.unit), (Some(80.0), Some(40.0), "%"));
    }

    #[test]
    fn missing_comparison_is_named() {
        let mut measurements = measurements(0.0);
        check_complete(BENCH, &rows(&measurements, 7, 1_000, None), &MANDATORY).unwrap();
        measurements.retain(|it| it.side != COMBINED_UPSTREAM);
        let error = check_complete(BENCH, &rows(&measurements, 7, 1_000, None), &MANDATORY)
            .unwrap_err()
            .to_string();
        assert!(
            error.contains(
                "shared images, conversations, 2 upstreams, http, cached prompt tokens, \
                 one upstream"
            ),
            "{error}"
        );
    }

    #[test]
    fn different_prompt_lengths_reach_no_target() {
        let rows = rows(&measurements(1.0), 7, 1_000, None);
        let smg = find(&rows, "1k-token text, 16 clients, http", CPU, CACHE_AWARE);
        assert_eq!((smg.ratio, smg.ok, smg.equal), (Some(3.0), Some(false), Some(false)));
        assert_eq!(find(&rows, "1k-token text", DIFFERENT, NGINX).equal, Some(false));
    }
}
