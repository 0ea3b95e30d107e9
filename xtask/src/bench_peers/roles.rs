//! Converts the results of the program `door roles` to rows, with the project's targets.

use crate::bench_peers::load::Load;
use crate::bench_peers::measured::{
    self, DIFFERENT, Measurement, case_name, cases, counts_alike, lengths,
};
use crate::bench_peers::row::{Mandatory, OURS, Row, Target};

/// The name of the benchmark in rows and files.
pub(crate) const BENCH: &str = "roles";
/// The ways in which engines compute a request, as the ends of names of sides and cases.
pub(crate) const WAYS: [&str; 2] = [AGGREGATED, SPLIT];
const AGGREGATED: &str = ", aggregated";
const SPLIT: &str = ", split";
/// The beginning of the names of the peer's sides.
pub(crate) const DYNAMO: &str = "Dynamo";
/// The name of a frontend that only relays.
pub(crate) const NULL_RELAY: &str = "null relay";

pub(crate) const CPU: &str = "CPU per request";
/// The metric of the additional CPU time of a frontend for a split request.
pub(crate) const ADDED: &str = "CPU added by the second hop";
/// The metric of the time from the end of prefill on one engine to the request to the other engine.
pub(crate) const HOP: &str = "engine to engine p50";
/// The 99th percentile of [`HOP`].
pub(crate) const SLOW_HOP: &str = "engine to engine p99";

/// The metrics of each side with units, in the order of the page.
pub(crate) const METRICS: [(&str, &str); 6] = [
    (CPU, "µs"),
    ("requests per second", "requests/s"),
    ("latency p50", "ms"),
    ("latency p99", "ms"),
    ("engines", "cores"),
    ("load generator", "cores"),
];

/// The minimum CPU time of Dynamo's frontend for a split request, as a multiple of ours.
const CPU_TARGET: f64 = 4.0;
/// The maximum time in µs of our frontend for the hop, in addition to the null relay's.
const HOP_LIMIT_US: f64 = 100.0;

pub(crate) const MANDATORY: [Mandatory; 5] = [
    Mandatory { cases: &CASES, ends: &[SPLIT, AGGREGATED], lines: &[(CPU, DYNAMO)] },
    Mandatory { cases: &CASES, ends: &[""], lines: &[(ADDED, DYNAMO)] },
    Mandatory { cases: &["1k-token text, 1 client"], ends: &[""], lines: &[(HOP, NULL_RELAY)] },
    Mandatory {
        cases: &["1k-token text", "1k-token text, 64 tokens streamed"],
        ends: &[SPLIT],
        lines: &[(DIFFERENT, OURS), (DIFFERENT, DYNAMO)],
    },
    Mandatory {
        cases: &["1k-token text", "1k-token text, 64 tokens streamed"],
        ends: &[AGGREGATED],
        lines: &[(DIFFERENT, DYNAMO)],
    },
];
const CASES: [&str; 4] = [
    "1k-token text, 1 client",
    "1k-token text, 16 clients",
    "1k-token text, 32 clients",
    "1k-token text, 64 tokens streamed, 64 clients",
];

/// Returns all rows of a run. `load` is the load at its start.
pub(crate) fn rows(measurements: &[Measurement], rounds: u32, load: Option<Load>) -> Vec<Row> {
    let mut rows = vec![Row::rounds(BENCH, rounds, OURS)];
    rows.extend(load.map(|load| load.row(BENCH)));
    let dynamo = measurements
        .iter()
        .find_map(|it| Some(split_way(&it.side)?.0).filter(|name| name.starts_with(DYNAMO)));
    let dynamo = dynamo.unwrap_or(DYNAMO);
    for (case, clients) in cases(measurements) {
        let case = Case { measurements, case, clients, dynamo };
        rows.extend(WAYS.into_iter().flat_map(|way| case.way_rows(way)));
        rows.extend(case.added());
        rows.extend(case.hop());
    }
    rows.extend(lengths(BENCH, measurements).into_iter().map(|row| {
        match split_way(&row.peer_name) {
            Some((name, way)) => {
                Row { case: format!("{}{way}", row.case), peer_name: name.to_owned(), ..row }
            }
            None => row,
        }
    }));
    rows
}

/// Splits the name of a side into the name without the way, and the way.
fn split_way(side: &str) -> Option<(&str, &'static str)> {
    WAYS.into_iter().find_map(|way| Some((side.strip_suffix(way)?, way)))
}

/// The measurements of a case with a number of clients.
struct Case<'a> {
    measurements: &'a [Measurement],
    case: &'a str,
    clients: u32,
    /// The peer with its version.
    dynamo: &'a str,
}

impl Case<'_> {
    /// Returns the rows of our side and the peer's side with the same way.
    fn way_rows(&self, way: &str) -> Vec<Row> {
        let [ours, theirs] = [OURS, self.dynamo].map(|name| format!("{name}{way}"));
        let name = format!("{}{way}", self.name());
        let row = |(metric, unit)| {
            let [ours, peer] = [self.value(&ours, metric)?, self.value(&theirs, metric)?]
                // The program reports CPU time in ms.
                .map(|value| Some(if metric == CPU { 1e3 * value } else { value }));
            let row = row(&name, metric, unit, self.dynamo).numbers(ours, peer);
            Some(if metric == CPU { self.judged(row, way, [&our_side(way), &theirs]) } else { row })
        };
        METRICS.into_iter().filter_map(row).collect()
    }

    /// Adds the ratio, which was measured in pairs, and the target to a row of CPU time.
    fn judged(&self, row: Row, way: &str, sides: [&str; 2]) -> Row {
        let Some(ratio) = self.value(sides[1], "CPU in times of ours") else { return row };
        let are_alike: Vec<bool> = sides
            .into_iter()
            .filter_map(|side| counts_alike(self.measurements, self.case, side))
            .collect();
        let equal = (!are_alike.is_empty()).then(|| are_alike.iter().all(|is_alike| *is_alike));
        let target = (way == SPLIT).then_some(Target::AtLeast(CPU_TARGET));
        Row { equal, ..row }.judged(Some(ratio), target)
    }

    /// Returns the row of the additional CPU time of split requests.
    fn added(&self) -> Option<Row> {
        let [ours, theirs] =
            [OURS, self.dynamo].map(|name| self.value(&format!("{name}{SPLIT}"), ADDED));
        let row = row(&self.name(), ADDED, "µs", self.dynamo).numbers(ours, theirs);
        (ours.is_some() || theirs.is_some()).then_some(row)
    }

    /// Returns the rows of the hop, which the program measures only for sequential requests.
    fn hop(&self) -> Vec<Row> {
        let ours = our_side(SPLIT);
        let (Some(hop), Some(null)) = (self.value(&ours, HOP), self.value(NULL_RELAY, HOP)) else {
            return Vec::new();
        };
        let ratio = hop / (null + HOP_LIMIT_US);
        vec![
            self.hop_row(HOP)
                .numbers(Some(hop), Some(null))
                .judged(Some(ratio), Some(Target::AtMost(1.0))),
            self.hop_row(SLOW_HOP).numbers(self.value(&ours, SLOW_HOP), None),
        ]
    }

    fn hop_row(&self, metric: &str) -> Row {
        row(&self.name(), metric, "µs", NULL_RELAY)
    }

    fn name(&self) -> String {
        case_name(self.case, self.clients)
    }

    fn value(&self, side: &str, metric: &str) -> Option<f64> {
        measured::value(self.measurements, (self.case, Some(self.clients)), side, metric)
    }
}

/// Returns the name of our side with this way.
fn our_side(way: &str) -> String {
    format!("{OURS}{way}")
}

fn row(case: &str, metric: &str, unit: &'static str, peer: &str) -> Row {
    Row::new(BENCH, case, metric, unit, peer)
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::bench_peers::row::missing;
    use crate::bench_peers::row::tests::find;

    /// Returns the measurements of a run. A split request costs us 1.5 times as much as one that is
    /// not split. Dynamo's frontend takes six times our CPU time.
    pub(crate) fn measurements(different: f64) -> Vec<Measurement> {
        let mut measurements = Vec::new();
        let mut add = |case: &str, clients, side: &str, metric: &str, value| {
            measurements.push(Measurement::new(case, clients, side, metric, value));
        };
        let sides = [
            ("chiasm", AGGREGATED, 0.2),
            ("chiasm", SPLIT, 0.3),
            ("Dynamo 0.1", AGGREGATED, 1.2),
            ("Dynamo 0.1", SPLIT, 1.8),
        ];
        let cases: [(&str, &[u32]); 2] =
            [("1k-token text", &[1, 16, 32]), ("1k-token text, 64 tokens streamed", &[64])];
        for (case, clients) in cases {
            for (name, way, cpu) in sides {
                let side = format!("{name}{way}");
                if side != "chiasm, aggregated" {
                    add(case, None, &side, "compared", 20.0);
                    add(case, None, &side, "different", different);
                }
                for &clients in clients {
                    add(case, Some(clients), &side, CPU, cpu);
                    add(case, Some(clients), &side, "latency p50", 10.0 * cpu);
                    if name != OURS {
                        add(case, Some(clients), &side, "CPU in times of ours", 6.0);
                    }
                    if way == SPLIT {
                        add(case, Some(clients), &side, ADDED, 1e3 * cpu / 3.0);
                    }
                }
            }
        }
        add("1k-token text", Some(1), "chiasm, split", HOP, 90.0);
        add("1k-token text", Some(1), "chiasm, split", SLOW_HOP, 300.0);
        add("1k-token text", Some(1), NULL_RELAY, HOP, 20.0);
        measurements
    }

    #[test]
    fn split_request_is_compared_with_peer() {
        let rows = rows(&measurements(0.0), 7, None);
        let split = find(&rows, "1k-token text, 16 clients, split", CPU, DYNAMO);
        assert_eq!((split.ours, split.peer, split.ratio), (Some(300.0), Some(1_800.0), Some(6.0)));
        assert_eq!((split.target, split.ok, split.equal), (Some(4.0), Some(true), Some(true)));
        let whole = find(&rows, "1k-token text, 16 clients, aggregated", CPU, DYNAMO);
        assert_eq!((whole.ours, whole.target, whole.ok), (Some(200.0), None, None));
        let added = find(&rows, "1k-token text, 1 client", ADDED, "Dynamo 0.1");
        assert_eq!((added.ours, added.peer, added.target), (Some(100.0), Some(600.0), None));
        let hop = find(&rows, "1k-token text, 1 client", HOP, NULL_RELAY);
        assert_eq!(
            (hop.ours, hop.peer, hop.ratio, hop.ok),
            (Some(90.0), Some(20.0), Some(0.75), Some(true))
        );
        assert_eq!(rows.iter().filter(|row| row.metric == HOP).count(), 1);
        assert_eq!(missing(&rows, &MANDATORY), [""; 0]);
    }

    #[test]
    fn different_prompt_lengths_reach_no_target() {
        let rows = rows(&measurements(1.0), 7, None);
        let split = find(&rows, "1k-token text, 1 client, split", CPU, DYNAMO);
        assert_eq!((split.ratio, split.ok, split.equal), (Some(6.0), Some(false), Some(false)));
        assert_eq!(find(&rows, "1k-token text, split", DIFFERENT, OURS).equal, Some(false));
    }

    #[test]
    fn missing_hop_is_named() {
        let mut measurements = measurements(0.0);
        measurements.retain(|it| it.side != NULL_RELAY);
        let missing = missing(&rows(&measurements, 7, None), &MANDATORY);
        assert_eq!(missing, ["1k-token text, 1 client, engine to engine p50, null relay"]);
    }
}
