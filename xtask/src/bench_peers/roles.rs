//! Turns what the program `door roles` measured into rows, with the targets that the project has
//! set itself.

use crate::bench_peers::load::Load;
use crate::bench_peers::measured::{
    self, DIFFERENT, Measurement, case_name, cases, counts_alike, lengths,
};
use crate::bench_peers::row::{Mandatory, OURS, Row, Target};

/// The bench's name in rows and files.
pub(crate) const BENCH: &str = "roles";
/// Our sides' names, and with how a request is computed those of cases, end so.
pub(crate) const WAYS: [&str; 2] = [AGGREGATED, SPLIT];
const AGGREGATED: &str = ", aggregated";
const SPLIT: &str = ", split";
/// How the names of the peer's sides begin.
pub(crate) const DYNAMO: &str = "Dynamo";
/// A frontend that does nothing but pass on what comes.
pub(crate) const NULL: &str = "null relay";

pub(crate) const CPU: &str = "CPU per request";
/// What a frontend spends more on a request that is split.
pub(crate) const ADDED: &str = "CPU added by the second hop";
/// From when one engine has a prompt computed until the other is asked for the answer.
pub(crate) const HOP: &str = "engine to engine p50";
pub(crate) const SLOW_HOP: &str = "engine to engine p99";

/// What is told of each side, with units, in the order in which the note shows it.
pub(crate) const METRICS: [(&str, &str); 6] = [
    (CPU, "µs"),
    ("requests per second", "requests/s"),
    ("latency p50", "ms"),
    ("latency p99", "ms"),
    ("engines", "cores"),
    ("load generator", "cores"),
];

/// Least that Dynamo's frontend spends on a split request, in times of ours.
const CPU_TARGET: f64 = 4.0;
/// Most that our frontend may take for the hop, in µs more than the null relay.
const HOP_TARGET: f64 = 100.0;

pub(crate) const MANDATORY: [Mandatory; 5] = [
    Mandatory { cases: &CASES, ends: &[SPLIT, AGGREGATED], lines: &[(CPU, DYNAMO)] },
    Mandatory { cases: &CASES, ends: &[""], lines: &[(ADDED, DYNAMO)] },
    Mandatory { cases: &["1k-token text, 1 client"], ends: &[""], lines: &[(HOP, NULL)] },
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

/// All rows of a run that began under some load.
pub(crate) fn rows(measurements: &[Measurement], rounds: u32, load: Option<Load>) -> Vec<Row> {
    let mut rows = vec![Row::rounds(BENCH, rounds, OURS)];
    rows.extend(load.map(|load| load.row(BENCH)));
    let dynamo = measurements
        .iter()
        .find_map(|it| Some(of_way(&it.side)?.0).filter(|name| name.starts_with(DYNAMO)));
    let dynamo = dynamo.unwrap_or(DYNAMO);
    for (case, clients) in cases(measurements) {
        let case = Case { measurements, case, clients, dynamo };
        rows.extend(WAYS.into_iter().flat_map(|way| case.of_way(way)));
        rows.extend(case.added());
        rows.extend(case.hop());
    }
    rows.extend(lengths(BENCH, measurements).into_iter().map(|row| match of_way(&row.peer_name) {
        Some((name, way)) => {
            Row { case: format!("{}{way}", row.case), peer_name: name.to_owned(), ..row }
        }
        None => row,
    }));
    rows
}

/// A side's name without its way, and the way.
fn of_way(side: &str) -> Option<(&str, &'static str)> {
    WAYS.into_iter().find_map(|way| Some((side.strip_suffix(way)?, way)))
}

/// What was measured of a case with some clients.
struct Case<'a> {
    measurements: &'a [Measurement],
    case: &'a str,
    clients: u32,
    /// The peer with its version.
    dynamo: &'a str,
}

impl Case<'_> {
    /// Of ours and of the peer's side, both of which split requests or do not.
    fn of_way(&self, way: &str) -> Vec<Row> {
        let [ours, theirs] = [OURS, self.dynamo].map(|name| format!("{name}{way}"));
        let name = format!("{}{way}", self.name());
        let row = |(metric, unit)| {
            let [ours, peer] = [self.value(&ours, metric)?, self.value(&theirs, metric)?]
                // The program tells it in ms.
                .map(|value| Some(if metric == CPU { 1e3 * value } else { value }));
            let row = row(&name, metric, unit, self.dynamo).numbers(ours, peer);
            Some(if metric == CPU { self.judged(row, way, [&ours_of(way), &theirs]) } else { row })
        };
        METRICS.into_iter().filter_map(row).collect()
    }

    /// A row of CPU time with its ratio, which was measured in pairs, and with its target.
    fn judged(&self, row: Row, way: &str, sides: [&str; 2]) -> Row {
        let Some(ratio) = self.value(sides[1], "CPU in times of ours") else { return row };
        let counted: Vec<bool> = sides
            .into_iter()
            .filter_map(|side| counts_alike(self.measurements, self.case, side))
            .collect();
        let equal = (!counted.is_empty()).then(|| counted.iter().all(|alike| *alike));
        let target = (way == SPLIT).then_some(Target::AtLeast(CPU_TARGET));
        Row { equal, ..row }.judged(Some(ratio), target)
    }

    /// What splitting costs each.
    fn added(&self) -> Option<Row> {
        let [ours, theirs] =
            [OURS, self.dynamo].map(|name| self.value(&format!("{name}{SPLIT}"), ADDED));
        let row = row(&self.name(), ADDED, "µs", self.dynamo).numbers(ours, theirs);
        (ours.is_some() || theirs.is_some()).then_some(row)
    }

    /// How long it takes in ours, which is told of requests that come one after the other.
    fn hop(&self) -> Vec<Row> {
        let ours = ours_of(SPLIT);
        let (Some(hop), Some(null)) = (self.value(&ours, HOP), self.value(NULL, HOP)) else {
            return Vec::new();
        };
        let ratio = hop / (null + HOP_TARGET);
        vec![
            self.null(HOP)
                .numbers(Some(hop), Some(null))
                .judged(Some(ratio), Some(Target::AtMost(1.0))),
            self.null(SLOW_HOP).numbers(self.value(&ours, SLOW_HOP), None),
        ]
    }

    fn null(&self, metric: &str) -> Row {
        row(&self.name(), metric, "µs", NULL)
    }

    fn name(&self) -> String {
        case_name(self.case, self.clients)
    }

    fn value(&self, side: &str, metric: &str) -> Option<f64> {
        measured::value(self.measurements, (self.case, Some(self.clients)), side, metric)
    }
}

/// The name of our side.
fn ours_of(way: &str) -> String {
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

    /// All that a run measures: a split request costs us half as much again, Dynamo's frontend six
    /// times what ours does.
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
        add("1k-token text", Some(1), NULL, HOP, 20.0);
        measurements
    }

    #[test]
    fn a_split_request_is_held_against_the_peers_and_the_hop_against_a_null_relay() {
        let rows = rows(&measurements(0.0), 7, None);
        let split = find(&rows, "1k-token text, 16 clients, split", CPU, DYNAMO);
        assert_eq!((split.ours, split.peer, split.ratio), (Some(300.0), Some(1_800.0), Some(6.0)));
        assert_eq!((split.target, split.ok, split.equal), (Some(4.0), Some(true), Some(true)));
        let whole = find(&rows, "1k-token text, 16 clients, aggregated", CPU, DYNAMO);
        assert_eq!((whole.ours, whole.target, whole.ok), (Some(200.0), None, None));
        let added = find(&rows, "1k-token text, 1 client", ADDED, "Dynamo 0.1");
        assert_eq!((added.ours, added.peer, added.target), (Some(100.0), Some(600.0), None));
        let hop = find(&rows, "1k-token text, 1 client", HOP, NULL);
        assert_eq!(
            (hop.ours, hop.peer, hop.ratio, hop.ok),
            (Some(90.0), Some(20.0), Some(0.75), Some(true))
        );
        assert_eq!(rows.iter().filter(|row| row.metric == HOP).count(), 1);
        assert_eq!(missing(&rows, &MANDATORY), [""; 0]);
    }

    #[test]
    fn prompts_of_another_length_reach_no_target() {
        let rows = rows(&measurements(1.0), 7, None);
        let split = find(&rows, "1k-token text, 1 client, split", CPU, DYNAMO);
        assert_eq!((split.ratio, split.ok, split.equal), (Some(6.0), Some(false), Some(false)));
        assert_eq!(find(&rows, "1k-token text, split", DIFFERENT, OURS).equal, Some(false));
    }

    #[test]
    fn a_run_that_lacks_the_hop_names_it() {
        let mut measurements = measurements(0.0);
        measurements.retain(|it| it.side != NULL);
        let missing = missing(&rows(&measurements, 7, None), &MANDATORY);
        assert_eq!(missing, ["1k-token text, 1 client, engine to engine p50, null relay"]);
    }
}
