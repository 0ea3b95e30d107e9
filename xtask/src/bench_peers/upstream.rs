//! Turns what the program `door routers` measured into rows, with the targets that the project has
//! set itself.

use crate::bench_peers::load::Load;
use crate::bench_peers::measured::{
    self, DIFFERENT, Measurement, case_name, cases, counts_alike, distinct, lengths,
};
use crate::bench_peers::row::{Mandatory, Row, Target};

/// The bench's name in rows and files.
pub(crate) const BENCH: &str = "upstream";
/// The ways in which Chiasm stands before a server, with which cases end, and the sides' names.
pub(crate) const WAYS: [(&str, &str); 2] =
    [(", http", "chiasm, http"), (", vllm+http", "chiasm, vllm+http")];
/// What others' CPU time is told in times of.
const TIMES: [&str; 2] = ["CPU in times of chiasm, http's", "CPU in times of chiasm, vllm+http's"];
/// The metric that tells how many conversations about shared images there were.
pub(crate) const CONVERSATIONS: &str = "conversations";
pub(crate) const CPU: &str = "CPU per request";
/// What an upstream's cache held of the prompts that it got.
pub(crate) const CACHED: &str = "cached prompt tokens";
/// No router: what a cache of this size could hold.
pub(crate) const ONE: &str = "one upstream with the memory of all";
/// How the names of the peers begin.
pub(crate) const CACHE_AWARE: &str = "SMG cache_aware";
const ROUND_ROBIN: &str = "SMG round_robin";
const QUIET: &str = "SMG quiet";
const DYNAMO: &str = "Dynamo";
pub(crate) const FLOORS: [&str; 2] = [ENVOY, NGINX];
const ENVOY: &str = "Envoy";
const NGINX: &str = "nginx";

/// What is told of a router that is asked, with units, in the order in which the note shows it.
pub(crate) const METRICS: [(&str, &str); 6] = [
    (CPU, "µs"),
    ("requests per second", "requests/s"),
    ("latency p50", "ms"),
    ("latency p99", "ms"),
    ("engines", "cores"),
    ("load generator", "cores"),
];
/// What is told of shared images.
pub(crate) const SHARED_METRICS: [(&str, &str); 4] = [
    (CACHED, "%"),
    ("requests at the busiest upstream", "%"),
    ("time to answer p50", "ms"),
    ("time to answer p90", "ms"),
];

/// The start of a case's name, the start of the peer's, and what the ratio has to reach or, for a
/// floor, may not exceed.
const TARGETS: [(&str, &str, f64); 4] = [
    ("1k-token text", CACHE_AWARE, 2.0),
    ("1k-token text", DYNAMO, 5.0),
    ("1k-token text", ENVOY, 4.0),
    ("repeated image", CACHE_AWARE, 2.0),
];

const ALL: [(&str, &str); 6] = [
    (CPU, CACHE_AWARE),
    (CPU, ROUND_ROBIN),
    (CPU, QUIET),
    (CPU, DYNAMO),
    (CPU, ENVOY),
    (CPU, NGINX),
];
const ARRIVED: [(&str, &str); 4] =
    [(DIFFERENT, CACHE_AWARE), (DIFFERENT, ROUND_ROBIN), (DIFFERENT, ENVOY), (DIFFERENT, NGINX)];
const FOUND: [(&str, &str); 4] =
    [(CACHED, CACHE_AWARE), (CACHED, ROUND_ROBIN), (CACHED, NGINX), (CACHED, ONE)];

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
        lines: &ALL,
    },
    Mandatory {
        cases: &[
            "1k-token text",
            "1k-token text, streamed",
            "repeated image, data URI",
            "distinct images, data URI",
        ],
        ends: &[""],
        lines: &ARRIVED,
    },
    Mandatory {
        cases: &[
            "shared images, conversations, 2 upstreams",
            "shared images, conversations, 4 upstreams",
            "shared images, single questions, 2 upstreams",
            "shared images, single questions, 4 upstreams",
        ],
        ends: &[WAYS[0].0, WAYS[1].0],
        lines: &FOUND,
    },
];

/// All rows of a run that began under some load.
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
        for ((way, ours), times) in WAYS.into_iter().zip(TIMES) {
            let compared = peers.iter().map(|peer| Compared {
                measurements,
                case,
                clients,
                way,
                ours,
                times,
                peer,
            });
            rows.extend(compared.flat_map(|it| it.rows()));
        }
    }
    rows.extend(lengths(BENCH, measurements).into_iter().filter(|row| !is_ours(&row.peer_name)));
    rows
}

fn is_ours(side: &str) -> bool {
    side.starts_with("chiasm")
}

/// One of our ways and a peer, in a case.
struct Compared<'a> {
    measurements: &'a [Measurement],
    case: &'a str,
    clients: u32,
    way: &'static str,
    ours: &'static str,
    times: &'static str,
    peer: &'a str,
}

impl Compared<'_> {
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
            // The program tells it in ms.
            let scale = if metric == CPU { 1e3 } else { 1.0 };
            let row = row(&self.name(is_shared), metric, unit, self.peer);
            let row = row.numbers(Some(scale * ours), Some(scale * peer));
            rows.push(if metric == CPU { self.judged(row) } else { row });
        }
        rows
    }

    /// A row of CPU time with its ratio, which was measured in pairs, and with its target.
    fn judged(&self, row: Row) -> Row {
        let Some(times) = self.value(self.peer, self.times) else { return row };
        let is_floor = FLOORS.iter().any(|floor| self.peer.starts_with(floor));
        let ratio = if is_floor { times.recip() } else { times };
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
        // The number of clients of shared images follows from that of the upstreams.
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
    use crate::bench_peers::row::complete;
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

    /// All that a run measures: sides spend what is said above, and ours find twice as much as
    /// others.
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
                    for (metric, (_, ours)) in TIMES.iter().zip(SIDES) {
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
                .chain([ONE]);
            for side in sides {
                let found = if is_ours(side) { 80.0 } else { 40.0 };
                add(
                    &format!("shared images, {kind}, {upstreams} upstreams"),
                    Some(32 * upstreams),
                    side,
                    CACHED,
                    found,
                );
            }
        }
        measurements
    }

    #[test]
    fn peers_are_to_be_beaten_and_a_floor_is_to_be_near() {
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
    fn a_run_that_lacks_a_comparison_names_it() {
        let mut measurements = measurements(0.0);
        complete(BENCH, &rows(&measurements, 7, 1_000, None), &MANDATORY).unwrap();
        measurements.retain(|it| it.side != ONE);
        let error = complete(BENCH, &rows(&measurements, 7, 1_000, None), &MANDATORY)
            .unwrap_err()
            .to_string();
        assert!(
            error.contains("shared images, conversations, 2 upstreams, http, cached prompt tokens, one upstream"),
            "{error}"
        );
    }

    #[test]
    fn requests_that_arrive_otherwise_reach_no_target() {
        let rows = rows(&measurements(1.0), 7, 1_000, None);
        let smg = find(&rows, "1k-token text, 16 clients, http", CPU, CACHE_AWARE);
        assert_eq!((smg.ratio, smg.ok, smg.equal), (Some(3.0), Some(false), Some(false)));
        assert_eq!(find(&rows, "1k-token text", DIFFERENT, NGINX).equal, Some(false));
    }
}
